"""Turns of conversations for tests, written as the journal writes them."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from app.core import Usage
from app.store import conversations
from app.store.conversations import Branch, FinishedAnswer, NewMessage, NewTurn, Status
from app.store.export import FORMATS, VIEW, document
from app.store.ledger import Settlement, settle
from tests.support.ledgers import empty_store, reserved

NOW_US = 1_790_000_000_000_000
USAGE = Usage(prompt_tokens=10, completion_tokens=5, cached_tokens=4, reasoning_tokens=1)


@dataclass
class Chats:
    """A store, and turns in it under readable ids."""

    c: sqlite3.Connection = field(default_factory=empty_store)
    owner: str = "local"
    _numbers: Any = field(default_factory=itertools.count)

    def begin(
        self,
        conversation_id: str = "conv_1",
        *said: str | NewMessage,
        parent: str | None = None,
        title: str | None = None,
        choices: int = 1,
        model: str = "llama",
    ) -> list[str]:
        """Ask; returns the ids of the answers, which are in progress."""
        known = self.c.execute("SELECT 1 FROM conversations WHERE id = ?", (conversation_id,)).fetchone()
        past = conversations.branch(self.c, self.owner, conversation_id, parent) if known else None
        number = next(self._numbers)
        messages = [
            m if isinstance(m, NewMessage) else NewMessage(f"msg_{number}_{i}", "user", m)
            for i, m in enumerate(said)
        ]
        turn = NewTurn(
            conversation_id=conversation_id,
            owner=self.owner,
            model=model,
            title=title or (messages[0].text if messages else ""),
            is_new=past is None,
            parent_seq=past.parent_seq if past else None,
            messages=messages,
            answer_ids=[f"msg_answer_{number}_{choice}" for choice in range(choices)],
            created_at_us=NOW_US + number * 1_000_000,
        )
        conversation_seq = conversations.ensure(self.c, turn)
        request_seq = reserved(self.c, owner=self.owner, model=model)
        self.c.execute(
            "UPDATE requests SET conversation_seq = ? WHERE seq = ?", (conversation_seq, request_seq)
        )
        conversations.add_turn(self.c, turn, conversation_seq, request_seq)
        return list(turn.answer_ids)

    def finish(
        self,
        answer_ids: Sequence[str],
        *texts: str,
        status: Status = "complete",
        body: bytes | None = None,
        prompt_ids: bytes = b"",
        ids: bytes = b"",
        base_seq: int | None = None,
    ) -> None:
        """Answer, and settle the request."""
        finish_reason = "stop" if status == "complete" else "abort"
        answers = [
            FinishedAnswer(answer_id, text, body, status, finish_reason, ids, prompt_ids, base_seq)
            for answer_id, text in zip(answer_ids, texts, strict=True)
        ]
        total_tokens = USAGE.prompt_tokens + USAGE.completion_tokens
        conversations.finish_answers(self.c, answers, NOW_US, total_tokens)
        (request_seq,) = self.c.execute(
            "SELECT request_seq FROM messages WHERE id = ?", (answer_ids[0],)
        ).fetchone()
        settle(self.c, Settlement(request_seq, USAGE, finish_reason, NOW_US))

    def turn(
        self,
        conversation_id: str = "conv_1",
        asked: str | NewMessage = "hello",
        answered: str = "hi",
        parent: str | None = None,
        **answer: Any,
    ) -> str:
        """Ask and answer; returns the answer's id."""
        answer_ids = self.begin(conversation_id, asked, parent=parent)
        self.finish(answer_ids, answered, **answer)
        return answer_ids[0]

    def branch(self, parent: str | None = None, conversation_id: str = "conv_1") -> Branch:
        """What the next turn would continue."""
        return conversations.branch(self.c, self.owner, conversation_id, parent)

    def heard(self, parent: str | None = None, conversation_id: str = "conv_1") -> list[str]:
        """The contents of that branch."""
        return [m["content"] for m in self.branch(parent, conversation_id).messages]

    def view(self, conversation_id: str = "conv_1", owner: str | None = None) -> dict[str, Any]:
        """The conversation as it is shown."""
        shown: dict[str, Any] = orjson.loads(self.export("view", conversation_id, owner))
        return shown

    def export(self, form: str, conversation_id: str = "conv_1", owner: str | None = None) -> bytes:
        """The conversation in one of the formats, or as `view`."""
        layout = VIEW if form == "view" else FORMATS[form]
        return b"".join(document(self.c, owner or self.owner, conversation_id, layout))

    def parent_of(self, message_id: str) -> str | None:
        """The id of a message's parent."""
        row = self.c.execute(
            "SELECT p.id FROM messages AS m JOIN messages AS p ON p.seq = m.parent_seq WHERE m.id = ?",
            (message_id,),
        ).fetchone()
        return None if row is None else row[0]

    def seq(self, message_id: str) -> int:
        """A message's seq."""
        seq: int = self.c.execute("SELECT seq FROM messages WHERE id = ?", (message_id,)).fetchone()[0]
        return seq
