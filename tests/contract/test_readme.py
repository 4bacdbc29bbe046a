"""The README is short and its links lead somewhere; the architecture names every room."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text("utf-8")
SCREEN_LINES = 55
"""Lines of the source before the first list of links: about a screen when it is shown."""


def test_the_links_come_within_a_screen() -> None:
    """A visitor sees what it is, two commands, the demonstration and the figures without a long way."""
    before = README.split("## Read on")[0]
    assert len([line for line in before.splitlines() if line.strip()]) <= SCREEN_LINES


def test_links_lead_somewhere() -> None:
    """Every relative link and picture of the README names a file."""
    links = re.findall(r"\]\((?!https?://)([^)#]+)", README) + re.findall(r'(?:srcset|src)="([^"]+)"', README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_module_of_the_top_level_is_in_the_architecture() -> None:
    """A new module or package of app/ gets its row in the table of rooms."""
    there = {
        f"app/{path.name}{'/' * path.is_dir()}"
        for path in (ROOT / "app").iterdir()
        if not path.name.startswith("__") and (path.suffix == ".py" or (path / "__init__.py").exists())
    }
    rooms = set(re.findall(r"^\| `(app/[^`]+)` \|", ARCHITECTURE, re.MULTILINE))
    assert there == rooms
