"""What becomes of a request's answers, as it is stored."""

from __future__ import annotations

import asyncio
import dataclasses
from array import array
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from app.core import ChatRequest, Counts, Delta, Prompt, Usage
from app.journal.entry import NO_IDS, JournalEntry, Outcome, finished_answer
from app.journal.history import History, LoadedTurn
from app.store.database import Database
from app.stream.token_stream import SHUTDOWN, STORAGE, SUSPENDED, TokenStream
from app.stream.transcript import ChoiceMessage
from tests.support.generations import TERMS, conversing


async def entry(cancelled: str | None = None, counts: dict[int, Counts] | None = None) -> JournalEntry:
    """The entry of a request that is not stored."""
    stream = cast("TokenStream", SimpleNamespace(cancelled=cancelled, error=None))
    request = ChatRequest("chatcmpl-1", "local", "llama", {}, 0)
    reserved: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    prompt = Prompt([1, 2], 10, None)
    return JournalEntry(LoadedTurn(request), prompt, stream, counts or {}, reserved=reserved, terms=TERMS)


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
        (SUSPENDED, Outcome.CANCELLED, "interrupted"),
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
    stream = cast("TokenStream", SimpleNamespace(cancelled=None, error=None))
    waiting = JournalEntry(
        request,
        Prompt([1], 1, None),
        stream,
        {},
        reserved=reserved,
        terms=TERMS,
        commit_now=lambda: asked.append("now"),
    )
    reserved.set_result(7)
    await waiting.committed()
    await waiting.committed()
    assert (waiting.request_seq, asked) == (7, ["now"])


async def test_a_settlement_counts_once():
    """It may be committed twice; the first says how the request ended."""
    settled = await entry()
    settled.finish_as("stop")
    assert settled.mark_settled()
    assert not settled.mark_settled()
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
    assert one._ids(0) == NO_IDS


async def test_choice_of_which_nothing_was_released_has_the_prompt_and_no_answer():
    """The prompt is that of any choice that has begun."""
    begun = await entry(counts={1: Counts(10, 7, 4, 2)})
    assert begun.released_counts(0) == Counts(10, 0, 4, 0)
    assert (await entry()).released_counts(0) == Counts()


async def test_request_that_is_not_stored_has_no_answers_to_store():
    """Nor ids of them."""
    answered = await entry()
    assert answered.answer_rows({}, "complete") == []


async def stored(prompt: Prompt, **fields: Any) -> JournalEntry:
    """The entry of a request that begins or continues a conversation."""
    stream = cast("TokenStream", SimpleNamespace(cancelled=None, error=None))
    request = conversing(**fields)
    turn = await History(cast("Database", None)).load(request)
    loaded = dataclasses.replace(turn, run_seqs=range(40, 40 + len(request.past)))
    reserved: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    return JournalEntry(loaded, prompt, stream, {}, reserved=reserved, terms=TERMS)


async def test_ids_of_an_answer_are_stored_after_those_of_the_turns_before():
    """Its own part of the prompt, from the last run on that the prompt begins with."""
    answered = await stored(Prompt([1, 2, 3, 4, 5], 10, None, past_runs=2), past=[[1], [2, 3], [9]])
    deltas = [Delta(0, "text", "a", (6,), Counts(5, 1)), Delta(0, "text", "b", (7, 8), Counts(5, 3))]
    for delta in deltas:
        answered.generated(delta)
        answered.released(delta)
    answered.generated(Delta(0, "text", "held back", (9,), Counts(5, 4)))
    answered.end(Outcome.DONE)
    (finished,) = answered.answer_rows({0: ChoiceMessage({"content": "ab"}, "stop")}, "complete")
    assert (finished.text, finished.base_seq) == ("ab", 41)
    assert list(array("I", finished.prompt_ids)) == [4, 5]
    assert list(array("I", finished.answer_ids)) == [6, 7, 8]


async def test_ids_that_no_turn_could_begin_with_are_not_stored():
    """Those of images are placeholders, beyond what an id can be."""
    answered = await stored(Prompt([1, 1 << 40], 10, None))
    answered.released(Delta(0, "text", "a", (6,), Counts(5, 1)))
    answered.end(Outcome.DONE)
    (finished,) = answered.answer_rows({}, "complete")
    assert (finished.prompt_ids, finished.answer_ids, finished.text) == (b"", b"", "")


def test_message_that_is_only_text_is_stored_as_text():
    """One with tool calls is stored whole."""
    plain = ChoiceMessage({"role": "assistant", "content": "hi"}, "stop")
    calls = ChoiceMessage(
        {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1"}]}, "tool_calls"
    )
    assert finished_answer("msg_1", plain, "complete").body is None
    whole = finished_answer("msg_1", calls, "complete")
    assert (orjson.loads(whole.body), whole.text) == (calls.message, "")
