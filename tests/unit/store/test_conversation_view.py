"""A conversation as one object, and as a file to take away."""

from __future__ import annotations

import orjson
import pytest

from app.errors import NotFound
from app.store.conversations import NewMessage
from app.store.export import file_name
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
        ("cancelled", "abort"),
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


def test_markdown_is_the_newest_branch():
    """The file says what it leaves out."""
    chats = Chats()
    old = chats.turn(asked="one", answered="1")
    chats.turn(asked="two", answered="2")
    answer_ids = chats.begin("conv_1", "zwei", parent=old, choices=2)
    chats.finish(answer_ids, "II", "ii", status="interrupted")
    assert chats.export("markdown").decode() == (
        "# one\n\n*3 more on other branches, which the JSON export has.*\n\n## User\n\none\n\n"
        "## Assistant\n\n1\n\n## User\n\nzwei\n\n## Assistant\n\nII\n\n*(interrupted)*\n"
    )


def test_markdown_of_parts_and_calls():
    """Text parts are text, others are named, calls are shown."""
    chats = Chats()
    parts = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    sent = orjson.dumps({"role": "user", "content": parts})
    body = orjson.dumps({"role": "assistant", "content": None, "tool_calls": [CALL]})
    chats.turn(asked=NewMessage("msg_1", "user", "what?", sent), answered="", body=body)
    text = chats.export("markdown").decode()
    assert 'what?\n\n*(image_url)*\n\n## Assistant\n\nCalls `f`:\n\n```json\n{"x":1}\n```\n' in text


def test_json_export_is_the_view():
    """All of it, text as it is."""
    chats = Chats()
    chats.turn(asked="a\0b😀\u202e", answered="\u200f")
    whole = chats.view()
    assert orjson.loads(chats.export("json")) == whole
    assert chats.export("json") == orjson.dumps(whole, option=orjson.OPT_INDENT_2)
    assert "😀".encode() in chats.export("json")


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("Plain words, really?", "Plain-words-really.json"),
        ("../../etc/passwd", "etc-passwd.json"),
        ('a"b\r\nSet-Cookie: x', "a-b-Set-Cookie-x.json"),
        ("你好", "conv_1.json"),
        ("x" * 200, "x" * 60 + ".json"),
    ],
)
def test_file_name_is_safe(title: str, name: str):
    """Letters, digits and dashes, whatever the title is."""
    assert file_name({"id": "conv_1", "title": title}, "json") == name


def test_times_are_seconds():
    """As in OpenAI's objects."""
    chats = Chats()
    chats.turn()
    whole = chats.view()
    assert whole["created_at"] == whole["messages"][0]["created_at"] == NOW_US // 1_000_000
