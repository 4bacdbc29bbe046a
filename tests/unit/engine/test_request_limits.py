"""The tokens that an answer may have, and content that a text model cannot read."""

from typing import Any

import pytest

from app.core import ChatRequest, ModelCard
from app.engine.request_limits import answer_budget, check_text_only
from app.errors import BadRequest, ContextOverflow

MODEL = ModelCard("model", 100, 6400, 99, frozenset())


def request(messages: list[dict[str, Any]]) -> ChatRequest:
    """A request with these messages."""
    return ChatRequest(request_id="r", owner="o", model="m", body={"messages": messages}, created_at_unix_s=0)


def test_without_max_tokens_the_answer_has_what_the_context_leaves() -> None:
    """With it, as many as were asked for."""
    assert answer_budget(40, None, MODEL) == 60
    assert answer_budget(40, 60, MODEL) == 60
    assert answer_budget(40, 1, MODEL) == 1


def test_too_much_is_refused_with_the_number_over() -> None:
    """The message says what to shorten."""
    with pytest.raises(ContextOverflow, match=r"take 40 and max_tokens asks for 61 more: 1 too many") as over:
        answer_budget(40, 61, MODEL)
    assert "lower max_tokens" in over.value.message
    with pytest.raises(ContextOverflow, match=r"take 100: 1 too many") as full:
        answer_budget(100, None, MODEL)
    assert "max_tokens" not in full.value.message


def test_content_other_than_text_is_refused_by_its_place() -> None:
    """Text in either form passes."""
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    text = {"type": "text", "text": "hi"}
    messages = [{"role": "user", "content": "hi"}, {"role": "user", "content": [text, image]}]
    check_text_only(request(messages[:1]))
    with pytest.raises(BadRequest, match="remove the image_url part") as refused:
        check_text_only(request(messages))
    assert refused.value.param == "messages[1].content[1]"
