"""The table of settings: each has one row, under the heading of its group."""

from __future__ import annotations

import re

from app.cli.settings_table import GROUPS, HEAD, markdown
from app.settings import table


def test_every_setting_has_one_row_under_a_heading() -> None:
    """In the order of the table, with the first group before the first setting."""
    assert markdown().startswith("### ")
    assert re.findall(r"^\| `(\w+)` \|", markdown(), re.MULTILINE) == [setting.name for setting in table()]


def test_every_group_begins() -> None:
    """A heading whose first setting is renamed would be lost."""
    assert re.findall(r"^### (.+)$", markdown(), re.MULTILINE) == list(GROUPS.values())
    assert markdown().count(HEAD[0]) == len(GROUPS)
