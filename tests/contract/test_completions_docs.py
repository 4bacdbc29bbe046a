"""docs/completions.md and the schema of its request name the parameters that the server takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.api.schema.completions import CHAT_ONLY, OWN, SHARED, parse_completion
from app.api.schema.parameters import PARAMETERS
from app.errors import UnsupportedParameter
from scripts.api_document.document import BODIES

PAGE = (Path(__file__).parents[2] / "docs/completions.md").read_text("utf-8")


def test_the_page_lists_the_parameters_of_a_conversation():
    """In the order of the code, and no other."""
    (section,) = re.findall(r"Those of a conversation and its template are 400: (.*?)\.\n", PAGE, re.DOTALL)
    assert tuple(re.findall(r"`(\w+)`", section)) == CHAT_ONLY


def test_the_page_and_the_schema_have_every_parameter():
    """Those that a chat request has, and those of its own."""
    assert set(BODIES["CompletionRequest"]["properties"]) == {*SHARED, *OWN}
    for name in set(OWN) - {"prompt"}:
        assert f"| `{name}` |" in PAGE


@pytest.mark.parametrize("name", sorted(set(PARAMETERS) - {*SHARED, *OWN}))
def test_every_other_parameter_of_a_chat_request_is_refused_by_name(name: str):
    """With the reason that a chat request has, or because it is one of a chat."""
    with pytest.raises(UnsupportedParameter) as refusal:
        parse_completion({"model": "scripted", "prompt": "a", name: "no such value"}, "local")
    assert refusal.value.param == name
