"""Imported conversations in the store."""

from __future__ import annotations

from typing import Any

from app.api.schema.imported import parse_import
from app.store import imported
from app.store.indexing import index
from tests.support.conversing import Chats

TREE = [
    {"role": "user", "content": "one", "id": "a", "parent_id": None},
    {"role": "assistant", "content": "1", "id": "b", "parent_id": "a"},
    {"role": "assistant", "content": "uno", "id": "c", "parent_id": "a"},
    {"role": "user", "content": "two", "id": "d", "parent_id": "c"},
    {"role": "assistant", "content": "dos", "id": "e", "parent_id": "d", "status": "cancelled"},
]


def added(chats: Chats, messages: list[dict[str, Any]]) -> str:
    """The id of an imported conversation."""
    entry = imported.add(chats.c, parse_import({"title": "t", "messages": messages}, chats.owner))
    conversation_id: str = entry["id"]
    return conversation_id


def shape(chats: Chats, conversation_id: str) -> list[tuple[Any, ...]]:
    """Each message's words, status, and the index of the one above."""
    messages = chats.view(conversation_id)["messages"]
    places = {m["id"]: i for i, m in enumerate(messages)}
    return [(m["role"], m["content"], m["status"], places.get(m["parent_id"])) for m in messages]


def test_an_export_comes_back_as_it_was():
    """Messages, branches, status and times; imported anew it is the same again."""
    chats = Chats()
    first = added(chats, TREE)
    again = added(chats, chats.view(first)["messages"])
    assert shape(chats, first) == [
        ("user", "one", "complete", None),
        ("assistant", "1", "complete", 0),
        ("assistant", "uno", "complete", 0),
        ("user", "two", "complete", 2),
        ("assistant", "dos", "cancelled", 3),
    ]
    assert shape(chats, again) == shape(chats, first)
    assert not {m["id"] for m in chats.view(first)["messages"]} & {
        m["id"] for m in chats.view(again)["messages"]
    }


def test_there_is_no_bill():
    """No usage, no row in the ledger, no tokens."""
    chats = Chats()
    shown = chats.view(added(chats, TREE))
    assert {m["usage"] for m in shown["messages"]} == {None}
    assert not any("request_id" in m for m in shown["messages"])
    assert shown["total_tokens"] == 0
    assert chats.c.execute("SELECT count(*) FROM requests").fetchone() == (0,)


def test_the_next_turn_continues_the_newest_branch():
    """Or the one that is named."""
    chats = Chats()
    conversation_id = added(chats, TREE)
    assert chats.heard(conversation_id=conversation_id) == ["one", "uno", "two", "dos"]
    answer = chats.view(conversation_id)["messages"][1]["id"]
    chats.turn(conversation_id, asked="three", answered="3", parent=answer)
    assert chats.heard(conversation_id=conversation_id) == ["one", "1", "three", "3"]


def test_its_messages_are_unjudged():
    """Safety is told which messages nobody has read yet."""
    chats = Chats()
    conversation_id = added(chats, TREE)
    chats.turn(conversation_id, asked="three", answered="3")
    assert chats.branch(conversation_id=conversation_id).answered == [None] * 4 + [False, True]


def test_it_is_found():
    """By its title and by its words."""
    chats = Chats()
    conversation_id = added(chats, TREE)
    index(chats.c)
    rows = chats.c.execute("SELECT count(*) FROM search").fetchone()
    assert rows == (len(TREE) + 1,)
    assert conversation_id
