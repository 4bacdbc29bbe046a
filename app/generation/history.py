"""History: the conversation that a request continues is claimed for its turn, and loaded.

One turn of a conversation is answered at a time. A second turn is refused, not queued, because its client has
not seen the answer that it would continue.
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
from app.store import suspensions
from app.store.conversations import Branch, NewMessage, NewTurn, branch
from app.store.database import Database

TITLE_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class LoadedTurn:
    """A request with its conversation's messages in front.

    `stored_turn` is what is to be stored of it; None where nothing is. `run_seqs` are the seqs of the
    answers whose ids stand in the request's `past`, in its order. `strikes` is how many turns of its
    conversation safety has blocked. `from_store` are the messages that come from the store: whether each
    is an answer of this server.
    """

    request: ChatRequest
    stored_turn: NewTurn | None = None
    run_seqs: Sequence[int] = ()
    strikes: int = 0
    from_store: Sequence[bool] = ()
    stored_bytes: int = 0
    """The size of those."""

    @property
    def num_bytes(self) -> int:
        """The size of the request and of what it continues."""
        return self.request.placement.body_bytes + self.stored_bytes


class History:
    """The conversations of the store, as requests continue them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._busy: set[tuple[str, str]] = set()

    @contextlib.contextmanager
    def claim(self, request: ChatRequest) -> Iterator[None]:
        """Keep the request's conversation to itself. Raises Conflict while another turn has it."""
        conversation_id = request.conversation_id
        if conversation_id is None:
            yield
            return
        claimed = (request.owner, conversation_id)  # another's claim must neither hinder nor be seen
        if claimed in self._busy:
            raise Conflict(
                f"Another turn of conversation {conversation_id} is being answered; wait for its end,"
                " or stop it.",
                code="conversation_busy",
                param="conversation_id",
            )
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
            return LoadedTurn(request, _turn(request, None))
        conversation_id, parent_id = request.conversation_id, request.parent_id

        def load(connection: sqlite3.Connection) -> Branch:
            _check_not_suspended(connection, request.owner, conversation_id)
            return branch(connection, request.owner, conversation_id, parent_id)

        past = await self._database.read(load)
        messages = [*past.messages, *request.body["messages"]]
        if not messages or messages[-1]["role"] == "assistant":
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
        return LoadedTurn(with_history, turn, runs, past.strikes, past.answered, past.num_bytes)


def _check_not_suspended(connection: sqlite3.Connection, owner: str, conversation_id: str) -> None:
    """Raise Conflict where a stop of the server has suspended an answer of the conversation."""
    suspended = suspensions.of_conversation(connection, owner, conversation_id)
    if suspended:
        raise Conflict(
            f"Another turn of conversation {conversation_id} goes on when its stream {suspended[-1]} is asked"
            " for, as the server was restarted; ask for it, or stop it.",
            code="conversation_busy",
            param="conversation_id",
        )


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
        title=_title(messages),
        is_new=past is None,
        parent_seq=None if past is None else past.parent_seq,
        messages=[_message(message) for message in messages],
        answer_ids=[request.message_id, *(new_message_id() for _ in range(request.n - 1))],
        created_at_us=request.created_at_unix_s * 1_000_000,
    )


def _message(message: Mapping[str, Any]) -> NewMessage:
    role, text = message["role"], content_text(message.get("content"))
    stored = kept(message, role, text)
    stored.pop("reasoning_content", None)  # the engine reads it with this request, and nobody again
    plain = isinstance(stored["content"], str) and stored.keys() <= {"role", "content"}
    return NewMessage(new_message_id(), role, text, None if plain else orjson.dumps(stored))


def _title(messages: Sequence[Mapping[str, Any]]) -> str:
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
