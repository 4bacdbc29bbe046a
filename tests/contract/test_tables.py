"""The tables of error codes and parameters are complete, and docs/ shows them as they are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest
from openai.types.chat import completion_create_params

from app import errors
from app.api.http.auth import PROXY_HEADERS
from app.api.schema import messages
from app.api.schema.parameters import (
    MAX_MESSAGES,
    MAX_REQUEST_CALLS,
    MAX_REQUEST_PARTS,
    PARAMETERS,
    check,
)
from app.engine.sglang.platform import prepare_process
from app.errors import CODES, ServingError, UnsupportedParameter
from app.messages import MAX_ID_CHARS, MAX_NAME_CHARS, MAX_PARTS, MAX_TOOL_CALLS
from scripts.support.generated_docs import ROOT, TABLES, generated
from tests.support.servers import Serve


def error_classes() -> list[type[ServingError]]:
    """The whole tree of errors."""
    return [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, ServingError)]


def codes_in(path: Path) -> Iterator[str]:
    """Every literal `code=` in a module."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "code":
            assert isinstance(node.value, ast.Constant | ast.Name), f"{path}:{node.value.lineno}"
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                yield node.value.value


def test_every_code_is_in_the_table_and_used():
    """The table of codes has each code that app/ raises, and no other."""
    raised = {code for path in (ROOT / "app").rglob("*.py") for code in codes_in(path)}
    defaults = {c.default_code for c in error_classes() if c is not ServingError}
    assert raised | defaults == set(CODES)


def test_default_codes_have_their_class_s_status():
    """An error class and the table agree on the status that goes with its code."""
    for error in error_classes():
        assert CODES[error.default_code].status == error.status, error


@pytest.mark.parametrize("path", TABLES)
def test_docs_are_as_generated(path: str):
    """The generated part of the file is what scripts/docs would write now."""
    text = (ROOT / path).read_text("utf-8")
    assert text == generated(path, text)


@pytest.mark.sglang
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")
def test_every_sglang_field_is_decided():
    """The table has every field of the pinned SGLang's request, and the engine gets no other."""
    prepare_process()
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    fields = set(ChatCompletionRequest.model_fields)
    assert fields - set(PARAMETERS) == set()
    to_engine = {name for name, p in PARAMETERS.items() if p.to_engine}
    assert to_engine - fields == set()


def test_every_openai_parameter_is_decided():
    """The table has every parameter of the pinned OpenAI SDK."""
    known = set(get_type_hints(completion_create_params.CompletionCreateParamsBase)) | {"stream"}
    assert known - set(PARAMETERS) == set()


def test_what_only_this_server_has_is_explained():
    """docs/parameters.md says in words what each honoured parameter does that OpenAI's SDK does not name."""
    openai = set(get_type_hints(completion_create_params.CompletionCreateParamsBase)) | {"stream"}
    text = (ROOT / "docs/parameters.md").read_text("utf-8")
    rows = re.findall(r"^\| (`[^|]+`) \| ", text[: text.index("<!-- ")], re.MULTILINE)
    explained = {name.strip("`") for row in rows for name in row.split(", ")}
    assert explained == {name for name in PARAMETERS if PARAMETERS[name].treatment == "honoured"} - openai


def rows_below(page: str, head: str) -> dict[str, str]:
    """The rows of the table with this head, by their first cell."""
    table = (ROOT / page).read_text("utf-8").partition(f"{head}\n|---|---|\n")[2].partition("\n\n")[0]
    return dict(line.strip("| ").split(" | ", 1) for line in table.splitlines())


def test_api_docs_name_every_key_of_a_message_that_is_dropped():
    """docs/api.md has each key that is accepted and dropped, and no other."""
    rows = rows_below("docs/api.md", "| where | keys that are dropped |")
    documented = {where: set(re.findall(r"`(\w+)`", keys)) for where, keys in rows.items()}
    assert documented == {
        "any message": messages.ACCEPTED,
        "an assistant's message": messages.ACCEPTED_OF_ASSISTANT,
        "a part": messages.ACCEPTED_OF_PART,
        "an `image_url`": messages.ACCEPTED_OF_IMAGE,
        "a tool call": messages.ACCEPTED_OF_CALL,
        "a function of a tool call": messages.ACCEPTED_OF_FUNCTION,
    }


def test_api_docs_have_the_bounds_of_messages():
    """docs/api.md has the bounds that messages are checked against."""
    assert rows_below("docs/api.md", "| what | at most |") == {
        "messages of a request": f"{MAX_MESSAGES:,}",
        "parts of a message": f"{MAX_PARTS:,}",
        "parts of all messages together": f"{MAX_REQUEST_PARTS:,}",
        "tool calls of a message": f"{MAX_TOOL_CALLS:,}",
        "tool calls of all messages together": f"{MAX_REQUEST_CALLS:,}",
        "characters of a name": f"{MAX_NAME_CHARS:,}",
        "characters of an id": f"{MAX_ID_CHARS:,}",
    }


def test_key_docs_name_every_header_by_which_a_proxy_is_known():
    """docs/keys.md has each header that shows a proxy in open mode, and no other."""
    signs = rows_below("docs/keys.md", "| refused in open mode | known by |")
    assert set(re.findall(r"`([a-z*-]+)`", signs["what a proxy or a tunnel passed on"])) == set(
        PROXY_HEADERS.split()
    )


async def test_api_docs_name_every_route(serve: Serve):
    """docs/api.md has each route that the server has, and no other."""
    served = await serve()
    routes = {(method, route.path) for route in served.starlette.routes for method in route.methods}
    text = (ROOT / "docs/api.md").read_text("utf-8")
    cells = re.findall(r"^\| (`[A-Z]+ /.+?`) \|", text, re.MULTILINE)
    documented = [tuple(name.strip("`").split()) for cell in cells for name in cell.split("<br>")]
    assert len(documented) == len(set(documented))
    assert set(documented) == {(method, path) for method, path in routes if method != "HEAD"}


def test_a_refusal_passes_only_what_asks_for_nothing():
    """A refused parameter passes with its neutral values, by type too, and with no other."""
    assert check("use_beam_search", False) is False  # a parameter's value
    for value in ("no", 0, True):
        with pytest.raises(UnsupportedParameter, match="use_beam_search"):
            check("use_beam_search", value)
    assert check("modalities", ["text"]) == ["text"]
    assert not {"use_beam_search", "modalities"} & {name for name, p in PARAMETERS.items() if p.to_engine}
    with pytest.raises(UnsupportedParameter):
        check("modalities", ["text", "audio"])
