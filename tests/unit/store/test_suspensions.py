"""What is kept of suspended requests, and for how long."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

import pytest

from app.core import Usage
from app.store import events, ledger, suspensions
from app.store.conversations import NewMessage, NewTurn, add_turn, ensure
from app.store.ledger import Settlement
from app.store.purge import _wipe
from app.store.suspensions import Suspension
from tests.support.ledgers import at, empty_store, reserved


@pytest.fixture
def c() -> sqlite3.Connection:
    """An empty store."""
    return empty_store()


@pytest.fixture
def seq(c: sqlite3.Connection) -> int:
    """An open request."""
    return reserved(c, request_id="chatcmpl-1", idempotency_key="k", fingerprint=b"f")


def suspended(c: sqlite3.Connection, seq: int) -> Suspension:
    """Suspend a request."""
    suspension = Suspension(seq, "key_1", b'{"body": "a question"}', b"\x01\x00\x00\x00")
    assert suspensions.add(c, suspension)
    return suspension


def test_a_suspended_request_is_found_with_all_that_it_takes(c: sqlite3.Connection, seq: int):
    """Its stream, the terms of its bill and its key; for its owner alone."""
    suspension = suspended(c, seq)
    events.append(c, seq, 1, b"segment")
    stored = suspensions.load(c, "chatcmpl-1", "local")
    assert stored is not None
    assert stored.suspension == suspension
    assert stored.stream.segments == [b"segment"]
    assert stored.terms == ledger.terms_of(c, seq)
    assert (stored.idempotency, stored.answer_ids) == (("k", b"f"), [])
    assert suspensions.load(c, "chatcmpl-1", "other") is None
    assert suspensions.load(c, "chatcmpl-2", "local") is None
    assert suspensions.ids(c) == {"chatcmpl-1": seq}
    assert events.find_by_key(c, "local", "k") == ("chatcmpl-1", b"f")


def test_an_open_request_is_suspended_or_left_by_a_crash(c: sqlite3.Connection, seq: int):
    """What is suspended is not settled at the start."""
    assert [request.seq for request in ledger.unsettled_requests(c)] == [seq]
    suspended(c, seq)
    assert ledger.unsettled_requests(c) == []
    assert ledger.unsettled_request(c, seq) is not None


def test_a_request_is_taken_up_once(c: sqlite3.Connection, seq: int):
    """It is open as before; nothing is left of what was kept for it."""
    suspended(c, seq)
    assert suspensions.take(c, seq)
    assert not suspensions.take(c, seq)
    assert suspensions.load(c, "chatcmpl-1", "local") is None
    assert events.find_by_key(c, "local", "k") is None
    assert [request.seq for request in ledger.unsettled_requests(c)] == [seq]


def test_what_has_ended_or_was_deleted_is_not_suspended(c: sqlite3.Connection, seq: int):
    """Neither a settled request, nor one whose owner has had it deleted."""
    suspension = Suspension(seq, None, b"{}", b"")
    events.erase(c, seq)
    assert not suspensions.add(c, suspension)
    assert ledger.settle(c, Settlement(seq, Usage(), "stop", at("2026-11-20")))
    assert not suspensions.add(c, suspension)
    assert ledger.unsettled_request(c, seq) is None


@pytest.mark.parametrize("delete", [events.erase, events.forget])
def test_a_deleted_stream_takes_its_prompt_with_it(
    c: sqlite3.Connection, seq: int, delete: Callable[[sqlite3.Connection, int], None]
):
    """Its row stays open, to be settled."""
    suspended(c, seq)
    delete(c, seq)
    assert suspensions.ids(c) == {}
    assert ledger.unsettled_request(c, seq) is not None


def test_a_conversation_knows_its_suspended_answers(c: sqlite3.Connection):
    """They go with it when it is purged."""
    turn = NewTurn(
        "conv_1", "local", "llama", "", True, None, [NewMessage("msg_1", "user", "hi")], ["msg_2", "msg_3"], 0
    )
    conversation_seq = ensure(c, turn)
    seq = reserved(c, request_id="chatcmpl-1")
    c.execute("UPDATE requests SET conversation_seq = ?", (conversation_seq,))
    add_turn(c, turn, conversation_seq, seq)
    suspended(c, seq)
    assert suspensions.of_conversation(c, "local", "conv_1") == ["chatcmpl-1"]
    assert suspensions.of_conversation(c, "other", "conv_1") == []
    stored = suspensions.load(c, "chatcmpl-1", "local")
    assert stored is not None
    assert stored.answer_ids == ["msg_2", "msg_3"]
    assert _wipe(c, conversation_seq)
    assert suspensions.ids(c) == {}
