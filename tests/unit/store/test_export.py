"""A conversation to take away: as JSON all of it, as Markdown its newest branch."""

from __future__ import annotations

import orjson
import pytest

from app.store.conversations import NewMessage
from app.store.export import file_name
from tests.support.conversing import Chats

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}


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
    assert chats.export("json") == orjson.dumps(whole)
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
