"""What the kill test's clients understand of a stream."""

from __future__ import annotations

import json
from typing import Any

from scripts.crash.engine_clients import Reply


def receive(*events: dict[str, Any] | str) -> Reply:
    """A stream of these chunks, with ids from 1 on."""
    reply = Reply("asked")
    for number, event in enumerate(events, 1):
        reply.add(number, event if isinstance(event, str) else json.dumps(event))
    return reply


def chunk(index: int = 0, tokens: int = 1, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    """A chunk with the tokens of its choice so far."""
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return {"choices": [choice], "usage": {"completion_tokens": tokens}}


def test_each_kind_of_text_is_a_track_of_its_own() -> None:
    """Answer, reasoning and calls of each choice."""
    call = {"index": 0, "function": {"arguments": '{"a":'}}
    reply = receive(
        chunk(reasoning_content="hm"),
        chunk(content="a"),
        chunk(content="b", reasoning_content=None),
        chunk(1, content="c"),
        chunk(1, tool_calls=[call]),
    )
    assert reply.text == {"0": "ab", "0 reasoning": "hm", "1": "c", "1.0": '{"a":'}
    assert reply.characters == 10


def test_tokens_are_those_of_all_choices() -> None:
    """Each event has the count of its own choice, the last one that of all."""
    reply = receive(
        chunk(0, 5, content="a"),
        chunk(1, 7, content="b"),
        chunk(0, 6, finish="length"),
        {"choices": [], "usage": {"completion_tokens": 13}},
        "[DONE]",
    )
    assert reply.tokens == 13
    assert reply.usage == {"completion_tokens": 13}
    assert reply.finish == {0: "length"}
    assert reply.done


def test_what_comes_at_once_was_held_back() -> None:
    """Twenty tokens in one piece."""
    assert receive(chunk(0, 20, content="all at once")).burst_tokens == 20


def test_an_error_ends_a_stream_with_its_counts() -> None:
    """The usage of what was billed is in the error."""
    error = {"error": {"code": "interrupted", "usage": {"completion_tokens": 3}}}
    reply = receive(chunk(0, 4, content="a"), error, "[DONE]")
    assert (reply.error, reply.done, reply.error_usage) == ("interrupted", True, {"completion_tokens": 3})
