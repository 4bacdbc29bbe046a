"""The table of all settings: for `tokenring settings`, and as Markdown for the documentation."""

import json
import sys
from collections.abc import Mapping

from app.cli import tables
from app.settings import Setting, table

HEAD = ("| setting | default | what it does |", "|---|---|---|")
GROUPS: Mapping[str, str] = {
    "host": "Address, data and keys",
    "trusted_proxies": "Proxies, and people who sign in",
    "model": "The model",
    "remote_url": "A model in other servers",
    "small_model": "A second model",
    "tp": "The engine",
    "resume_grace_s": "Streams",
    "body_timeout_s": "Requests and connections",
    "drain_timeout_s": "Stop and restart",
    "max_body_bytes": "Sizes and numbers",
    "max_queued_requests": "A full server",
    "grammar_check_s": "Grammars and shared caches",
    "max_reads_per_s": "Reads, and memory for streams",
    "safety": "Safety",
    "log_level": "Logs",
}
"""Headings of the groups, each by the first setting of its group."""


def text(*, markdown_only: bool) -> str:
    """The table of settings: formatted if standard output is a terminal, else Markdown."""
    if markdown_only or not sys.stdout.isatty():
        return markdown().rstrip("\n")
    rows = [
        (s.name, str(s.default), f"{s.help} ({', '.join(s.choices)})" if s.choices else s.help)
        for s in table()
    ]
    return tables.text(("setting", "default", "what it does"), rows)


def json_text() -> str:
    """The settings as one JSON object."""
    data = [
        {
            "name": s.name,
            "flag": s.flag,
            "variable": s.env,
            "type": s.kind.__name__,
            "choices": list(s.choices) or None,
            "default": s.default if isinstance(s.default, int | float | str | None) else str(s.default),
            "help": s.help,
        }
        for s in table()
    ]
    return json.dumps({"object": "list", "data": data})


def row(setting: Setting) -> str:
    """A setting's row: name, default, meaning."""
    default = "" if setting.default == "" else f"`{setting.default}`"
    choices = f" ({', '.join(f'`{c}`' for c in setting.choices)})" if setting.choices else ""
    return f"| `{setting.name}` | {default} | {setting.help}{choices} |"


def markdown() -> str:
    """The rows of all settings, under the headings of their groups."""
    lines: list[str] = []
    for setting in table():
        if setting.name in GROUPS:
            lines += ["", f"### {GROUPS[setting.name]}", "", *HEAD]
        lines.append(row(setting))
    return "\n".join(lines).lstrip("\n") + "\n"
