"""What becomes of a request's answers, as it is stored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.core import ChatRequest, Counts, Prompt
from app.entry import Entry
from app.history import Asked
from app.store.ledger import Usage
from app.stream import SHUTDOWN, STORAGE, TokenStream


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
    assert entry(counts=counts).usage() == Usage(10, 12, 4, 3, 0)
