"""Writes the settings table of README.md from app/settings.py: `python -m scripts.support.settings_table`."""

import re
from pathlib import Path

from app.cli import settings_table

README = Path(__file__).resolve().parents[2] / "README.md"
MARKED = re.compile(r"(?<=<!-- settings:begin -->\n).*?(?=<!-- settings:end -->)", re.DOTALL)


def with_table(text: str) -> str:
    """`text` with the table of the settings as they are now between its markers."""
    found, count = MARKED.subn(lambda _: settings_table.markdown(), text)
    if count != 1:
        raise ValueError(f"{count} pairs of settings:begin and settings:end, expected one")
    return found


def main() -> None:
    """Rewrite README.md in place."""
    README.write_text(with_table(README.read_text()))


if __name__ == "__main__":
    main()
