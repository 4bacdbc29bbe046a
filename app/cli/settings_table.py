"""The table of all settings: for `tokenring settings`, and as Markdown for the documentation."""

import sys

from app.cli import tables
from app.settings import table


def text(*, markdown_only: bool) -> str:
    """The table of settings: formatted if standard output is a terminal, else Markdown."""
    if markdown_only or not sys.stdout.isatty():
        return markdown().rstrip("\n")
    rows = [
        (s.name, str(s.default), f"{s.help} ({', '.join(s.choices)})" if s.choices else s.help)
        for s in table()
    ]
    return tables.text(("setting", "default", "what it does"), rows)


def markdown() -> str:
    """One row for each setting: name, default, meaning."""
    rows = ["| setting | default | what it does |", "|---|---|---|"]
    for s in table():
        default = "" if s.default == "" else f"`{s.default}`"
        choices = f" ({', '.join(f'`{c}`' for c in s.choices)})" if s.choices else ""
        rows.append(f"| `{s.name}` | {default} | {s.help}{choices} |")
    return "\n".join(rows) + "\n"
