"""Pages that speak of one thing say the same of it, and their commands can be pasted."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md")
    if path.parent.name != "log"
)
NUMBERS = {"two": 2, "three": 3, "four": 4}
"""Words for numbers of conditions."""


def text_of(page: str) -> str:
    """A page, with its lines joined to one."""
    return " ".join((ROOT / page).read_text("utf-8").split())


def test_the_comparison_denies_nothing_that_has_a_page() -> None:
    """What outlives the engine and the server is told with a link to its page."""
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|", (DOCS / "why.md").read_text("utf-8"), re.MULTILINE))
    assert "reliability.md" in rows["streams survive the death of the engine"]
    assert "resume.md" in rows["resume after a restart of the server"]


@pytest.mark.parametrize("page", PAGES)
def test_open_mode_has_as_many_conditions_everywhere_as_its_section_lists(page: str) -> None:
    """docs/keys.md lists them."""
    section = (DOCS / "keys.md").read_text("utf-8").partition("## Without keys: open mode\n")[2]
    listed = len(re.findall(r"^\d\. ", section.partition("\n## ")[0], re.MULTILINE))
    text = text_of(page)
    numbers = [
        match[1]
        for match in re.finditer(r"(\w+) conditions\b", text)
        if re.search(r"open.mode", text[max(0, match.start() - 100) : match.end() + 100], re.IGNORECASE)
    ]
    assert {NUMBERS[word.lower()] for word in numbers} <= {listed}


def test_the_layers_of_the_architecture_are_those_that_are_enforced() -> None:
    """The block of docs/architecture.md has the layers of pyproject.toml, in their order."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (enforced,) = (contract["layers"] for contract in contracts if contract["id"] == "layers")
    section = (DOCS / "architecture.md").read_text("utf-8").partition("\n## Layers\n")[2]
    lines = section.split("```")[1].splitlines()[1:]
    shown = [{room.strip() for room in line.split("   ")[0].split("|")} for line in lines]
    assert shown == [{room.strip("() ") for room in layer.split("|")} for layer in enforced]


@pytest.mark.parametrize("page", PAGES)
def test_the_n_grams_refuse_nothing(page: str) -> None:
    """They have no say in a refusal (app/safety/policies/policy.py)."""
    assert re.findall(r"n-grams (?:refuse|block)\b(?! nothing)[^.]*", text_of(page)) == []


@pytest.mark.parametrize("page", PAGES)
def test_what_is_cloned_is_named(page: str) -> None:
    """A command with an ellipsis for an address cannot be pasted."""
    assert re.findall(r"^.*git clone [^\n]*….*$", (ROOT / page).read_text("utf-8"), re.MULTILINE) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_script_that_a_page_names_exists(page: str) -> None:
    """In text and in commands."""
    named = set(
        re.findall(r"(?<![\w./-])scripts/[\w-]+(?:/[\w/-]+(?:\.\w+)?)?", (ROOT / page).read_text("utf-8"))
    )
    assert {name for name in named if not (ROOT / name).exists()} == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_example_takes_the_key_of_the_terminal(page: str) -> None:
    """None has a key of its own, which a server with keys would refuse."""
    examples = re.findall(
        r"^```(?:python|js)\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    for example in examples:
        assert re.findall(r"\bapi_?[kK]ey\W+[\"'].*", example) == []
        if re.search(r"\bapi_?[kK]ey\b|\bhttpx\.stream\b", example):
            assert re.search(r"environ\.get\([\"']KEY[\"']|process\.env\.KEY", example)
