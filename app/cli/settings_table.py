"""The table of all settings, as Markdown: for `tokenring settings --markdown` and the documentation."""

from app.settings import table


def markdown() -> str:
    """One row for each setting: name, default, meaning."""
    rows = ["| setting | default | what it does |", "|---|---|---|"]
    for s in table():
        default = "" if s.default == "" else f"`{s.default}`"
        choices = f" ({', '.join(f'`{c}`' for c in s.choices)})" if s.choices else ""
        rows.append(f"| `{s.name}` | {default} | {s.help}{choices} |")
    return "\n".join(rows) + "\n"
