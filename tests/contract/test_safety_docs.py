"""docs/safety.md: its policy file is one, its table has every category, its help is where it says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from app.safety.categories import ALL, LOCKED
from app.safety.policies.policy_file import PolicyFile, Rule, parse

TEXT = (Path(__file__).resolve().parents[2] / "docs/safety.md").read_text("utf-8")


def example() -> PolicyFile:
    """The policy file that the document shows."""
    [text] = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    return parse(tomllib.loads(text))


def test_the_example_is_a_policy():
    """It is taken as it stands, and says what its comments say."""
    file = example()
    assert file.rules["S1"] == Rule()
    assert file.rules["S6"] == Rule("flag")
    assert file.rules["S11"] == Rule("block", 0.02, 0.1)
    assert file.alignment.version == "school-3"
    assert "{help_lines}" in file.messages["S11"]


def test_every_category_is_described():
    """By code, name and title, and those that are locked are said to be."""
    for category in ALL:
        locked = "; **cannot be loosened**" if category.code in LOCKED else ""
        assert f"| `{category.code}` | `{category.name}` | {category.title}{locked} |" in TEXT
