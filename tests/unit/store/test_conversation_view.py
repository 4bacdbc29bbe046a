"""A conversation as one object, and as a file to take away."""

from __future__ import annotations

import orjson
import pytest

from app.errors import NotFound
from app.store.conversations import NewMessage
from tests.support.conversing import NOW_US, Chats

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}


def test_view_has_every_branch_with_its_parents():
    """All messages, oldest first, each below the one it answers."""
    chats = Chats()
    first = chats.turn(asked="one", answered="1")
    again = chats.begin("conv_1", parent=chats.parent_of(first))
    chats.finish(again, "uno", status="cancelled")
    messages = chats.view()["messages"]
    question = messages[0]["id"]
    assert [(m["role"], m["content"], m["parent_id"]) for m in messages] == [
        ("user", "one", None),
        ("assistant", "1", question),
        ("assistant", "uno", question),
    ]
    assert [(m["status"], m["finish_reason"]) for m in messages[1:]] == [
        ("complete", "stop"),
        ("cancelled", "stop"),
    ]


def test_answer_has_the_usage_of_its_request():
    """In OpenAI's shape, on the first answer of a request only, and on no question."""
    chats = Chats()
    chats.finish(chats.begin("conv_1", "one", choices=2), "a", "b")
    question, answer, other = chats.view()["messages"]
    assert answer["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    assert question["usage"] is None
    assert other["usage"] is None
    assert answer["request_id"] == other["request_id"]
    assert (answer["choice"], other["choice"]) == (0, 1)
    assert "request_id" not in question


def test_answer_names_the_model_that_wrote_it():
    """Each its own, whatever the conversation is asked next; a question has none."""
    chats = Chats()
    for model in ("small", "large"):
        chats.finish(chats.begin("conv_1", "hello", model=model), "hi")
    assert [message.get("model") for message in chats.view()["messages"]] == [None, "small", None, "large"]


def test_message_is_shown_as_it_was_sent():
    """Parts stay parts; what else a message had stands beside its content."""
    chats = Chats()
    sent = {"role": "user", "content": [{"type": "text", "text": "what?"}], "name": "Ada"}
    body = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"}
    chats.turn(
        asked=NewMessage("msg_parts", "user", "what?", orjson.dumps(sent)),
        answered="",
        body=orjson.dumps(body),
    )
    question, answer = chats.view()["messages"]
    assert question.items() >= sent.items()
    assert answer.items() >= body.items()


def test_answer_in_progress_has_neither_text_nor_usage():
    """What it will be is not known yet."""
    chats = Chats()
    chats.begin("conv_1", "one")
    answer = chats.view()["messages"][-1]
    assert (answer["content"], answer["status"], answer["usage"]) == ("", "in_progress", None)


def test_foreign_conversation_is_not_found():
    """Nobody sees another owner's."""
    chats = Chats()
    chats.turn()
    with pytest.raises(NotFound):
        chats.view(owner="other")


def test_times_are_seconds():
    """As in OpenAI's objects."""
    chats = Chats()
    chats.turn()
    whole = chats.view()
    assert whole["created_at"] == whole["messages"][0]["created_at"] == NOW_US // 1_000_000
