"""Turns that safety blocked: kept in the tree, counted as strikes, read by no model."""

from __future__ import annotations

import dataclasses

import pytest

from app.errors import NotFound
from app.store import conversations
from app.store.conversations import NewMessage, NewTurn
from tests.support.conversing import NOW_US, Chats


def refused(chats: Chats, parent_seq: int | None, number: int = 1) -> NewTurn:
    """A turn that was refused before it had a request."""
    return NewTurn(
        conversation_id="conv_1",
        owner="local",
        model="llama",
        title="",
        is_new=False,
        parent_seq=parent_seq,
        messages=[NewMessage(f"msg_refused_{number}", "user", "what was refused")],
        answer_ids=[f"msg_none_{number}"],
        created_at_us=NOW_US,
    )


@pytest.mark.parametrize("released", ["", "what was released"])
def test_a_blocked_turn_is_left_out(released: str):
    """With what it was to answer, whatever of its answer had been released."""
    chats = Chats()
    last = chats.turn(asked="one", answered="1")
    chats.turn(asked="two", answered=released, status="blocked")
    assert chats.heard() == ["one", "1"]
    assert chats.branch().last_id == last


def test_a_turn_below_a_blocked_one_does_not_read_it():
    """It is left out of the midst of a branch too."""
    chats = Chats()
    chats.turn(asked="one", answered="1")
    blocked = chats.turn(asked="two", answered="released", status="blocked")
    chats.turn(asked="three", answered="3", parent=blocked)
    assert chats.heard() == ["one", "1", "three", "3"]


def test_its_ids_begin_no_prompt():
    """The next prompt begins with the ids of what is read."""
    chats = Chats()
    chats.turn(asked="one", answered="1", prompt_ids=b"1234", ids=b"5678")
    chats.turn(asked="two", answered="released", status="blocked", prompt_ids=b"abcd")
    assert [ids for _, ids in chats.branch().runs] == [b"12345678"]


def test_strikes_are_blocked_turns():
    """However many choices each had, on whichever branch."""
    chats = Chats()
    first = chats.turn(asked="one", answered="1")
    assert chats.branch().strikes == 0
    chats.finish(chats.begin("conv_1", "two", choices=3), "", "", "", status="blocked")
    chats.turn(asked="three", answered="", parent=first, status="blocked")
    assert chats.branch().strikes == 2
    assert chats.branch(first).strikes == 2


def test_a_refused_turn_is_kept_without_a_request():
    """As blocked; the conversation goes on above it."""
    chats = Chats()
    last = chats.turn(asked="one", answered="1")
    conversations.add_blocked_turn(chats.c, refused(chats, chats.seq(last)))
    assert chats.parent_of("msg_none_1") == "msg_refused_1"
    assert chats.parent_of("msg_refused_1") == last
    assert chats.heard() == ["one", "1"]
    assert chats.branch().strikes == 1


def test_a_refused_beginning_is_not_kept():
    """Its client was never told of a conversation."""
    chats = Chats()
    turn = dataclasses.replace(refused(chats, None), is_new=True)
    conversations.add_blocked_turn(chats.c, turn)
    assert chats.c.execute("SELECT count(*) FROM conversations").fetchone() == (0,)


def test_a_refused_turn_of_a_deleted_conversation_is_not_found():
    """Whoever deleted it meanwhile."""
    chats = Chats()
    with pytest.raises(NotFound):
        conversations.add_blocked_turn(chats.c, refused(chats, None))
