"""The conversation that a request belongs to: claimed for one turn, and loaded.

One turn of a conversation is answered at a time. A second turn is refused, not queued, because its client has
not seen the answer that it would follow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import sqlite3
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from app.core import ChatRequest
from app.errors import BadRequest, Conflict
from app.messages import content_text, kept
from app.safety.session.session import PastTurns
from app.store import suspensions
from app.store.conversations import Branch, NewMessage, NewTurn, branch
from app.store.database import Database

TITLE_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class LoadedTurn:
    """A request with its conversation's messages in front."""

    request: ChatRequest
    stored_turn: NewTurn | None = None
    """The part that is yet to be stored; None where nothing is."""
    answer_ids: Sequence[str] = ()
    """Ids of the messages that are to hold the answer, one a choice; none where it is not stored."""
    run_seqs: Sequence[int] = ()
    """The seqs of the answers whose ids stand in the request's `past`, in its order."""
    strikes: int = 0
    """Turns of the conversation that safety has blocked."""
    from_store: Sequence[bool | None] = ()
    """For each message from the store, True if it is an answer of this server, None if it was imported."""
    stored_bytes: int = 0
    """The size of the messages from the store."""

    @property
    def past(self) -> PastTurns:
        """The conversation as safety is to know it."""
        num_bytes = self.request.placement.body_bytes + self.stored_bytes
        return PastTurns(self.strikes, self.from_store, num_bytes)


class History:
    """The conversations of the store, as requests continue them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._busy: set[tuple[str, str]] = set()

    @contextlib.contextmanager
    def claim(self, request: ChatRequest) -> Iterator[None]:
        """Keep the request's conversation to itself. Raises Conflict while another turn of it is answered."""
        conversation_id = request.conversation_id
        if conversation_id is None:
            yield
            return
        claimed = (request.owner, conversation_id)  # another owner's claim must neither hinder nor be seen
        if claimed in self._busy:
            raise _busy(conversation_id, "is answering another turn; wait for its end, or cancel it")
        self._busy.add(claimed)
        try:
            yield
        finally:
            self._busy.discard(claimed)

    async def load(self, request: ChatRequest) -> LoadedTurn:
        """The request with its conversation's messages in front. Raises NotFound, StorageUnavailable."""
        if request.conversation_id is None:
            return LoadedTurn(request)
        if request.new_conversation:
            turn = _turn(request, None)
            return LoadedTurn(request, turn, turn.answer_ids)
        conversation_id, parent_id = request.conversation_id, request.parent_id

        def load(connection: sqlite3.Connection) -> Branch:
            if suspended := suspensions.of_conversation(connection, request.owner, conversation_id):
                reason = f"has a suspended response {suspended[-1]}; resume or cancel it"
                raise _busy(conversation_id, reason)
            return branch(connection, request.owner, conversation_id, parent_id)

        past = await self._database.read(load)
        messages = [*past.messages, *request.body["messages"]]
        is_answered = not messages or messages[-1]["role"] == "assistant"
        if is_answered and not (messages and request.body.get("continue_final_message")):
            raise BadRequest(
                "There is nothing to answer: send new messages, or name a message of the user as parent_id.",
                param="messages",
            )
        with_history = dataclasses.replace(
            request,
            body={**request.body, "messages": messages},
            past=[_ids(run) for _, run in past.runs],
        )
        runs = [seq for seq, _ in past.runs]
        turn = _turn(request, past)
        return LoadedTurn(
            with_history, turn, turn.answer_ids, runs, past.strikes, past.answered, past.num_bytes
        )


def _busy(conversation_id: str, reason: str) -> Conflict:
    message = f"Conversation {conversation_id} {reason}."
    return Conflict(message, code="conversation_busy", param="conversation_id")


def new_conversation_id() -> str:
    """A fresh id."""
    return f"conv_{secrets.token_hex(14)}"


def new_message_id() -> str:
    """A fresh id."""
    return f"msg_{secrets.token_hex(14)}"


def _turn(request: ChatRequest, past: Branch | None) -> NewTurn:
    assert request.conversation_id is not None
    assert request.message_id is not None
    messages: Sequence[Mapping[str, Any]] = request.body["messages"]
    return NewTurn(
        conversation_id=request.conversation_id,
        owner=request.owner,
        model=request.model,
        title=title_of(messages),
        is_new=past is None,
        parent_seq=None if past is None else past.parent_seq,
        messages=[stored_message(message) for message in messages],
        answer_ids=[request.message_id, *(new_message_id() for _ in range(request.n - 1))],
        created_at_us=request.created_at_unix_s * 1_000_000,
    )


def stored_message(message: Mapping[str, Any], *, with_reasoning: bool = False) -> NewMessage:
    """A message under a fresh id, as it is stored; a request's without reasoning, which is for it only."""
    role, text = message["role"], content_text(message.get("content"))
    stored = kept(message, role, text)
    if not with_reasoning:
        stored.pop("reasoning_content", None)
    plain = isinstance(stored["content"], str) and stored.keys() <= {"role", "content"}
    return NewMessage(new_message_id(), role, text, None if plain else orjson.dumps(stored))


def title_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """The beginning of what the user said first."""
    user_texts = (content_text(m.get("content")) for m in messages if m["role"] == "user")
    words = " ".join(next(user_texts, "").split())
    if len(words) > TITLE_CHARACTERS:
        words = words[: TITLE_CHARACTERS - 1].rstrip() + "…"
    return words or "Untitled"


def _ids(run: bytes) -> array[int]:
    ids = array("I")
    ids.frombytes(run)
    return ids
