"""A conversation is claimed for its turn, and stands in front of what the turn says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import orjson
import pytest

from app.core import ChatRequest
from app.errors import BadRequest, Conflict, NotFound
from app.journal.history import TITLE_CHARACTERS, History, new_conversation_id, new_message_id
from app.store import conversations, ledger
from app.store.database import Database


def asked(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    """A request to be stored."""
    body = {"messages": list(messages)}
    place = {"conversation_id": "conv_1", "message_id": "msg_a", "new_conversation": True} | fields
    return ChatRequest("chatcmpl-1", "local", "llama", body, 1_790_000_000, **place)


def user(content: Any, **more: Any) -> dict[str, Any]:
    """A message of the user's."""
    return {"role": "user", "content": content, **more}


@pytest.fixture
async def database(tmp_path: Path):
    """An open store."""
    store = Database(tmp_path)
    await store.open()
    yield store
    await store.aclose()


async def answered(database: Database, history: History, request: ChatRequest, text: str) -> None:
    """Store the turn of a request, answered with `text`, whose ids are 7 and 8 after 1, 2, 3."""
    turn = (await history.load(request)).stored_turn
    reservation = ledger.Reservation(
        request.request_id, "local", "llama", 1_790_000_000_000_000, 10, 3, ledger.Price(), b"{}"
    )

    def unit(c) -> None:
        conversation_seq = conversations.ensure(c, turn)
        conversations.add_turn(c, turn, conversation_seq, ledger.reserve(c, reservation, conversation_seq))
        ids = [number.to_bytes(4, "little") for number in (7, 8, 1, 2, 3)]
        done = conversations.FinishedAnswer(
            "msg_a", text, None, "complete", "stop", b"".join(ids[:2]), b"".join(ids[2:]), None
        )
        conversations.finish_answers(c, [done], 1_790_000_000_000_001, 5)

    await database.write(unit)


async def test_second_turn_at_once_is_refused(database: Database):
    """A claimed conversation is busy for everyone, and free once the turn is over."""
    history = History(database)
    with history.claim(asked()), pytest.raises(Conflict) as refused, history.claim(asked()):
        pass
    assert refused.value.code == "conversation_busy"
    with history.claim(asked()):
        pass


async def test_another_owner_neither_hinders_nor_sees_a_turn(database: Database):
    """Who names a conversation of someone else's is told that there is none, busy or not."""
    history = History(database)
    theirs = dataclasses.replace(asked(user("hi"), new_conversation=False), owner="someone")
    with history.claim(asked()), history.claim(theirs), pytest.raises(NotFound):
        await history.load(theirs)


async def test_unstored_requests_claim_nothing(database: Database):
    """Requests without a conversation run side by side, and stay as they are."""
    history = History(database)
    request = asked(user("hi"), conversation_id=None, message_id=None, new_conversation=False)
    with history.claim(request), history.claim(request):
        loaded = await history.load(request)
    assert loaded.request is request
    assert loaded.stored_turn is None


async def test_history_stands_before_the_new_messages(database: Database):
    """The next turn is rendered from the whole branch, with the ids of what was said."""
    history = History(database)
    await answered(database, history, asked(user("one")), "two")
    loaded = await history.load(asked(user("three"), new_conversation=False))
    said = [(m["role"], m["content"]) for m in loaded.request.body["messages"]]
    assert said == [("user", "one"), ("assistant", "two"), ("user", "three")]
    assert [list(run) for run in loaded.request.past] == [[1, 2, 3, 7, 8]]
    assert len(loaded.run_seqs) == 1
    assert [m.text for m in loaded.stored_turn.messages] == ["three"]


async def test_nothing_to_answer_is_refused(database: Database):
    """Without new messages an answer cannot be answered."""
    history = History(database)
    await answered(database, history, asked(user("one")), "two")
    with pytest.raises(BadRequest, match="nothing to answer"):
        await history.load(asked(new_conversation=False))


async def test_an_answer_can_be_continued(database: Database):
    """With `continue_final_message` the model continues it, and its ids are those it was generated as."""
    history = History(database)
    await answered(database, history, asked(user("one")), "two")
    request = asked(new_conversation=False)
    body = {**request.body, "continue_final_message": True}
    loaded = await history.load(dataclasses.replace(request, body=body))
    assert [m["content"] for m in loaded.request.body["messages"]] == ["one", "two"]
    assert [list(run) for run in loaded.request.past] == [[1, 2, 3, 7, 8]]
    assert loaded.stored_turn.messages == []


async def test_unknown_conversation_is_not_found(database: Database):
    """An id that is not the caller's has no history."""
    with pytest.raises(NotFound) as missing:
        await History(database).load(asked(user("x"), new_conversation=False))
    assert missing.value.code == "conversation_not_found"


async def test_message_that_is_more_than_text_is_kept_whole(database: Database):
    """Content parts and extra fields stand in the body; the text is what can be read of them."""
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    message = user(parts, name="Ann")
    turn = (await History(database).load(asked(message))).stored_turn
    assert turn.messages[0].text == "look"
    assert orjson.loads(turn.messages[0].body) == message
    assert (await History(database).load(asked(user("plain")))).stored_turn.messages[0].body is None


async def test_reasoning_that_was_sent_back_is_read_once_and_not_stored(database: Database):
    """The engine reads it with its request; the store has the rest of the message."""
    message = {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}
    loaded = await History(database).load(asked(user("one"), message, user("two")))
    assert loaded.request.body["messages"][1] == message
    assert [(m.text, m.body) for m in loaded.stored_turn.messages] == [
        ("one", None),
        ("Yes.", None),
        ("two", None),
    ]


@pytest.mark.parametrize(
    ("messages", "title"),
    [
        ([user("  What is \n this? ")], "What is this?"),
        ([{"role": "system", "content": "s"}, user("hi")], "hi"),
        ([user([{"type": "image_url", "image_url": {"url": "data:,"}}])], "Untitled"),
        ([user("x" * 200)], "x" * (TITLE_CHARACTERS - 1) + "…"),
    ],
)
async def test_title_is_the_beginning_of_what_was_asked(database: Database, messages, title):
    """White space is folded, a long title cut, an empty one named."""
    assert (await History(database).load(asked(*messages))).stored_turn.title == title


def test_new_ids_are_of_their_kind_and_never_the_same():
    """Nobody can guess another's."""
    conversations_made = {new_conversation_id() for _ in range(100)}
    messages_made = {new_message_id() for _ in range(100)}
    assert (len(conversations_made), len(messages_made)) == (100, 100)
    assert all(i.startswith("conv_") and len(i) == 33 for i in conversations_made)
    assert all(i.startswith("msg_") and len(i) == 32 for i in messages_made)
