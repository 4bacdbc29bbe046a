"""What becomes of a request's answers, as it is stored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.core import ChatRequest, Counts, Delta, Prompt
from app.generation.history import Asked
from app.generation.journal_entry import Entry, Ids
from app.store.ledger import Usage
from app.stream.token_stream import SHUTDOWN, STORAGE, TokenStream


def entry(cancelled: str | None = None, counts: dict[int, Counts] | None = None) -> Entry:
    """The entry of a request that is not stored."""
    stream = cast("TokenStream", SimpleNamespace(cancelled=cancelled))
    request = ChatRequest("chatcmpl-1", "local", "llama", {}, 0)
    return Entry(Asked(request), Prompt([1, 2], 10, None), stream, cast("Any", counts or {}))


@pytest.mark.parametrize(
    ("cancelled", "read_whole", "ended_by_itself", "status"),
    [
        (None, True, True, "complete"),
        (None, True, False, "failed"),
        (None, False, False, "failed"),
        ("cancelled", True, False, "cancelled"),
        ("disconnect", True, False, "cancelled"),
        (SHUTDOWN, True, False, "interrupted"),
        (STORAGE, False, False, "interrupted"),
        # The client left, or the server stopped, when the last token had come.
        ("disconnect", True, True, "complete"),
        (SHUTDOWN, True, True, "complete"),
    ],
)
def test_status_says_how_the_answer_ended(cancelled, read_whole, ended_by_itself, status):
    """Whoever was stopped is told so; what had ended by itself is whole."""
    one = entry(cancelled)
    one.read_whole, one.ended_by_itself = read_whole, ended_by_itself
    assert one.status() == status


def test_prompt_counts_once():
    """Choices share their prompt; what each generated is added up."""
    counts = {0: Counts(10, 5, 4, 1), 1: Counts(10, 7, 4, 2)}
    one = entry(counts=counts)
    for choice, its in counts.items():
        one.released(Delta(choice, "text", "said", (1,), its))
    assert one.usage() == Usage(10, 12, 4, 3, 0)


def test_what_is_held_back_is_withheld():
    """Tokens count as withheld until they are released."""
    one = entry(counts={0: Counts(10, 5), 1: Counts(10, 7)})
    one.released(Delta(0, "text", "said", (1,), Counts(10, 4)))
    assert one.usage() == Usage(10, 12, withheld_tokens=8)


def test_an_attempt_that_is_given_up_is_withheld():
    """What it generated stays in the counts, and is billed to no one."""
    counts = {0: Counts(10, 5)}
    one = entry(counts=counts)
    one.begin_anew(counts)
    counts[0] = Counts(12, 3)
    one.released(Delta(0, "text", "said", (1,), Counts(12, 3)))
    assert one.usage() == Usage(12, 8, withheld_tokens=5)


def test_a_blocked_turn_keeps_no_ids():
    """Whoever left meanwhile; no later turn begins with what was blocked."""
    one = entry("cancelled")
    one.blocked = True
    assert one.status() == "blocked"
    assert one._ids(0) == Ids()
