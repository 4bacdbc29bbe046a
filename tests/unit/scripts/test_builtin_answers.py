"""What the built-in model is taught to answer is true of this version: routes, commands, settings, files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.cli.main import parser
from app.settings import table
from scripts.api_document.document import OPERATIONS
from scripts.training.builtin_model.corpus.intents import load_wordings

ROOT = Path(__file__).parents[3]
INTENTS = load_wordings().intents
ANSWERS = [answer for intent in INTENTS for answer in intent.answers]
CODE = [span for answer in ANSWERS for span in re.findall(r"`([^`]+)`", answer)]
SETTINGS = {setting.name for setting in table()}
FLAGS = {setting.flag for setting in table()} | {"--help", "--name"}
METHODS = "GET|POST|DELETE|PATCH|PUT"
FILE_ROUTE = re.compile(rf"(?:({METHODS}) )?(/[a-z][\w/{{}}-]*)(?:\?.*)?")
NAMES_A_SETTING = re.compile(r"[a-z]+(?:_[a-z]+)*_(?:s|bytes|tokens|streams|path|dir|id|days)")
PARAMETERS = {"conversation_id", "parent_id", "last_event_id", "max_tokens", "cached_tokens"}
"""Names that end as those of settings do, and belong to requests and answers."""
MADE_BY_THE_USER = {"tokenring.toml"}
IN_THE_CONTAINER = {"/data", "/v1", "/api"}
"""A folder of the container, and the beginnings of routes."""


def routes() -> set[tuple[str, str]]:
    """The methods and paths that the server answers, each name in braces as `{id}`."""
    return {(method, re.sub(r"\{\w+\}", "{id}", path)) for method, path, *_ in OPERATIONS}


def routes_named() -> Iterator[tuple[str | None, str]]:
    """The routes that answers name, with their method where they tell it."""
    for span in CODE:
        if (match := FILE_ROUTE.fullmatch(span)) and match[2] not in IN_THE_CONTAINER:
            yield match[1], match[2]
    for path in re.findall(r"127\.0\.0\.1:8000(/[\w/]*)", " ".join(ANSWERS)):
        if path not in IN_THE_CONTAINER:
            yield None, path


def test_the_search_finds_what_is_known_to_be_there() -> None:
    """Else the tests below would hold of nothing."""
    assert ("GET", "/api/models") in set(routes_named())
    assert "tokenring doctor" in CODE


def test_every_route_is_one_of_the_server() -> None:
    """With its method, where the answer tells one."""
    served = routes()
    paths = {path for _, path in served}
    wrong = [r for r in routes_named() if (r not in served if r[0] else r[1] not in paths)]
    assert wrong == []


def commands() -> Iterator[list[str]]:
    """The commands of `tokenring` that answers name, as words."""
    for span in CODE:
        if match := re.match(r"(?:tokenring|python -m app) (.+)", span):
            yield shlex.split(match[1])


@pytest.mark.parametrize("words", [*commands()], ids=" ".join)
def test_every_command_is_one_of_the_command_line(words: list[str]) -> None:
    """Its verbs exist. What is missing after them, as a name, is for the reader to add."""
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(
            [*(word for word in words if not word.startswith("-") and word.islower()), "--help"]
        )
    assert ended.value.code == 0


def test_every_flag_is_one_of_the_command_line() -> None:
    """Those of `serve` are the settings'."""
    named = {flag for span in CODE if "curl" not in span for flag in re.findall(r"(?<![\w-])--[a-z-]+", span)}
    assert named - FLAGS == set()


def test_every_setting_is_one_of_the_table() -> None:
    """Variables too."""
    named = {span for span in CODE if NAMES_A_SETTING.fullmatch(span)} - PARAMETERS
    assert named - SETTINGS == set()
    variables = {v for answer in ANSWERS for v in re.findall(r"TOKENRING_[A-Z_]+", answer)} - {"TOKENRING_"}
    assert variables <= {setting.env for setting in table()}


def test_every_file_is_in_the_checkout() -> None:
    """Scripts, pages and modules; what users make themselves aside."""
    files = {
        word
        for span in CODE
        for word in span.split()[:1]
        if re.fullmatch(r"(?:scripts|docs|app|\.ci)/[\w./]+|[\w.]+\.(?:md|toml|py)", word)
    }
    assert {name for name in files - MADE_BY_THE_USER if not (ROOT / name).exists()} == set()
