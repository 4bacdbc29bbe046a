"""What becomes of a request's answers, as it is stored."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from app.core import ChatRequest, Counts, Delta, Prompt, Usage
from app.generation.history import LoadedTurn
from app.generation.journal_entry import Ids, JournalEntry, Outcome
from app.stream.token_stream import SHUTDOWN, STORAGE, TokenStream


async def entry(cancelled: str | None = None, counts: dict[int, Counts] | None = None) -> JournalEntry:
    """The entry of a request that is not stored."""
    stream = cast("TokenStream", SimpleNamespace(cancelled=cancelled))
    request = ChatRequest("chatcmpl-1", "local", "llama", {}, 0)
    reserved: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    prompt = Prompt([1, 2], 10, None)
    return JournalEntry(LoadedTurn(request), prompt, stream, counts or {}, reserved=reserved)


@pytest.mark.parametrize(
    ("cancelled", "outcome", "status"),
    [
        (None, Outcome.DONE, "complete"),
        (None, Outcome.BUDGET, "complete"),
        (None, Outcome.CANCELLED, "failed"),
        (None, Outcome.FAILED, "failed"),
        ("cancelled", Outcome.CANCELLED, "cancelled"),
        ("disconnect", Outcome.CANCELLED, "cancelled"),
        (SHUTDOWN, Outcome.CANCELLED, "interrupted"),
        (STORAGE, Outcome.FAILED, "interrupted"),
        # The client left, or the server stopped, when the last token had come.
        ("disconnect", Outcome.DONE, "complete"),
        (SHUTDOWN, Outcome.DONE, "complete"),
        (SHUTDOWN, Outcome.HALTED, "blocked"),
    ],
)
async def test_status_says_how_the_answer_ended(cancelled, outcome, status):
    """A stopped answer says by whom; what had ended by itself is whole."""
    stopped = await entry(cancelled)
    stopped.end(outcome)
    assert stopped.status() == status


async def test_a_reservation_is_waited_for_once():
    """It is asked for, and its row is kept."""
    asked: list[str] = []
    request = LoadedTurn(ChatRequest("chatcmpl-1", "local", "llama", {}, 0))
    reserved: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stream = cast("TokenStream", SimpleNamespace(cancelled=None))
    waiting = JournalEntry(
        request,
        Prompt([1], 1, None),
        stream,
        {},
        reserved=reserved,
        need=lambda: asked.append("now"),
    )
    reserved.set_result(7)
    await waiting.committed()
    await waiting.committed()
    assert (waiting.request_seq, asked) == (7, ["now"])


async def test_a_settlement_counts_once():
    """It may be committed twice; the first says how the request ended."""
    settled = await entry()
    settled.finish_as("stop")
    assert settled.settle()
    assert not settled.settle()
    settled.finish_as("cancelled")
    assert settled.finish == "stop"


async def test_prompt_counts_once():
    """Choices share their prompt; what each generated is added up."""
    counts = {0: Counts(10, 5, 4, 1), 1: Counts(10, 7, 4, 2)}
    one = await entry(counts=counts)
    for choice, its in counts.items():
        one.released(Delta(choice, "text", "said", (1,), its))
    assert one.usage() == Usage(10, 12, 4, 3, 0)


async def test_what_is_held_back_is_withheld():
    """Tokens count as withheld until they are released."""
    one = await entry(counts={0: Counts(10, 5), 1: Counts(10, 7)})
    one.released(Delta(0, "text", "said", (1,), Counts(10, 4)))
    assert one.usage() == Usage(10, 12, withheld_tokens=8)


async def test_a_blocked_turn_keeps_no_ids():
    """Whoever left meanwhile; no later turn begins with what was blocked."""
    one = await entry("cancelled")
    one.end(Outcome.HALTED)
    assert one.status() == "blocked"
    assert one._ids(0) == Ids()
