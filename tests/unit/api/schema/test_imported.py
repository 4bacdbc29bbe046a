"""The body that imports a conversation: what it may hold, and what becomes of its tree."""

from __future__ import annotations

import time
from typing import Any

import orjson
import pytest

from app.api.schema.imported import parse_import
from app.errors import BadRequest

NOW_S = int(time.time())


def message(role: str = "user", content: Any = "hello", **more: Any) -> dict[str, Any]:
    """A message of the body."""
    return {"role": role, "content": content, **more}


def parents(*messages: dict[str, Any]) -> list[int | None]:
    """The index of the message above each."""
    return [m.parent_index for m in parse_import({"messages": list(messages)}, "ann").messages]


def test_messages_without_parents_follow_each_other():
    """A plain list of messages, as every API has it."""
    assert parents(message(), message("assistant"), message()) == [None, 0, 1]


def test_parents_make_the_tree():
    """By the ids in the body; null is the top."""
    assert parents(
        message(id="a", parent_id=None),
        message("assistant", id="b", parent_id="a"),
        message("assistant", id="c", parent_id="a"),
        message(id="d", parent_id=None),
    ) == [None, 0, 0, None]


def test_ids_are_new():
    """Nobody can name a message or a conversation that another has."""
    made = parse_import({"id": "conv_1", "messages": [message(id="msg_1")]}, "ann")
    assert made.id != "conv_1"
    assert made.messages[0].message.id != "msg_1"
    assert made.owner == "ann"


@pytest.mark.parametrize(
    ("title", "shown"),
    [("A\n  title", "A title"), (None, "hello"), (" \t", "hello"), ("دردشة", "دردشة"), ("<b>", "<b>")],
)
def test_title_is_the_one_given_or_the_first_question(title: str | None, shown: str):
    """On one line, whatever the language."""
    assert parse_import({"title": title, "messages": [message()]}, "ann").title == shown


def test_what_a_message_has_beside_its_text_is_kept():
    """Parts, calls, names and reasoning."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    sent = [
        message(
            content=[{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
        ),
        message("assistant", None, tool_calls=[call], reasoning_content="hm"),
        message("tool", "42", tool_call_id="c1"),
    ]
    kept = [orjson.loads(m.message.body or b"") for m in parse_import({"messages": sent}, "ann").messages]
    assert kept == sent


def test_status_and_time_are_kept():
    """An answer that was being generated is interrupted; no message is of the future."""
    first, second = parse_import(
        {
            "messages": [
                message(created_at=1_700_000_000),
                message("assistant", created_at=NOW_S + 10**6, status="in_progress", finish_reason="stop"),
            ]
        },
        "ann",
    ).messages
    assert (first.created_at_us, first.status) == (1_700_000_000_000_000, "complete")
    assert second.created_at_us < (NOW_S + 1000) * 1_000_000
    assert (second.status, second.finish_reason) == ("interrupted", "stop")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [message()] * 10_001}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"content": "hello"}]}, "messages[0].role"),
        ({"messages": [message("root")]}, "messages[0].role"),
        ({"messages": [message(), message(content=7)]}, "messages[1].content"),
        ({"messages": [message(content=[{"type": "video_url"}])]}, "messages[0].content[0]"),
        ({"messages": [message(parent_id="b"), message(id="b")]}, "messages[0].parent_id"),
        ({"messages": [message(id="a", parent_id="a")]}, "messages[0].parent_id"),
        ({"messages": [message(id="a"), message(id="a")]}, "messages[1].id"),
        ({"messages": [message(id=["a"])]}, "messages[0].id"),
        ({"messages": [message(status="lost")]}, "messages[0].status"),
        ({"messages": [message(created_at=-1)]}, "messages[0].created_at"),
        ({"messages": [message(created_at=True)]}, "messages[0].created_at"),
        ({"messages": [message(finish_reason="bored")]}, "messages[0].finish_reason"),
        ({"messages": [message(extra=1)]}, "messages[0].extra"),
        ({"messages": [message()], "title": "x" * 201}, "title"),
        ({"messages": [message()], "owner": "bob"}, "owner"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(body: dict[str, Any], param: str):
    """The error says which message it is."""
    with pytest.raises(BadRequest) as refused:
        parse_import(body, "ann")
    assert refused.value.param == param
