"""Conversations that were held elsewhere: their messages are kept as a tree, without requests or bills."""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from app.store.conversation_list import listed
from app.store.conversations import NewMessage, Status


class ImportedMessage(NamedTuple):
    """A message, and the index of the one above it; None at the top."""

    message: NewMessage
    parent_index: int | None
    created_at_us: int
    status: Status
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class ImportedConversation:
    """A conversation as it was handed in; every message stands below an earlier one, or at the top.

    Its messages are marked, so that safety reads them as it reads what a caller sends.
    """

    id: str
    owner: str
    title: str
    model: str
    created_at_us: int
    messages: Sequence[ImportedMessage]


def add(connection: sqlite3.Connection, conversation: ImportedConversation) -> dict[str, Any]:
    """Store a conversation; returns it as listed."""
    at_us = conversation.created_at_us
    conversation_seq = connection.execute(
        "INSERT INTO conversations (id, owner, title, model, created_at_us, updated_at_us)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        (conversation.id, conversation.owner, conversation.title, conversation.model, at_us, at_us),
    ).lastrowid
    seqs = array("q")
    for imported in conversation.messages:
        m, above = imported.message, imported.parent_index
        values = (m.id, conversation_seq, None if above is None else seqs[above], m.role, m.text, m.body)
        seq = connection.execute(
            "INSERT INTO messages (id, conversation_seq, parent_seq, role, text, body, created_at_us, status,"
            " finish_reason, imported) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 1)",
            (*values, imported.created_at_us, imported.status, imported.finish_reason),
        ).lastrowid
        assert seq is not None
        seqs.append(seq)
    return listed(connection, conversation.owner, conversation.id)
