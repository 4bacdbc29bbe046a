"""One prompt in the engine: what its answer waits for, where it is stopped, what becomes of failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.core import Key, KeyTerms
from app.errors import (
    Cancelled,
    ContentFiltered,
    Draining,
    EngineFailed,
    StorageUnavailable,
)
from app.metering.budgets import Allowance, Budgets
from app.metering.limits import Limiter
from app.resume.skip_released import OutputMismatch
from app.safety.verdict import ScreenFailed
from app.stream.ring import ExtraChunk, Failed
from app.stream.token_stream import SHUTDOWN, STORAGE
from tests.support.generations import (
    MODEL,
    Generations,
    HoldingScreen,
    NotedLease,
    answer_of,
    asked,
    busy_writer,
    controls,
    conversing,
    generations,
    refuse_writes,
    running,
    text_of,
)
from tests.support.sse_client import until


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Generations]:
    """A pipeline, and what stands around it."""
    async with generations(tmp_path) as made:
        yield made


async def allowance_of(world: Generations, micro_usd: int) -> Allowance | None:
    """What a key with that budget may spend on a request."""
    key = Key("key_1", "local", KeyTerms("k", budget_micro_usd=micro_usd), 0)
    return await Budgets(world.database, Limiter()).check(key, "chatcmpl-1")


# What the first release waits for


async def test_nothing_is_released_before_the_reservation_is_committed(world: Generations):
    """The status line is out; the token waits for the store."""
    stream = world.stream(asked())
    with busy_writer(world.database):
        serving = world.begin(stream)
        world.engine.say("a")
        world.engine.finish()
        await until(lambda: world.admission.ticket.tokens)
        assert (stream.status_unsent, text_of(stream)) == (False, "")
    await serving
    assert text_of(stream) == "a"


async def test_nothing_goes_out_before_the_prompt_is_judged(world: Generations):
    """The engine reads the prompt meanwhile."""
    world.check.undecided_until = asyncio.get_running_loop().create_future()
    stream = world.stream(asked())
    serving = world.begin(stream)
    world.engine.say("a")
    world.engine.finish()
    await until(lambda: world.admission.ticket.tokens)
    assert (stream.status_unsent, stream.last_id) == (True, 0)
    world.check.undecided_until.set_result(None)
    await serving
    assert text_of(stream) == "a"


@pytest.mark.parametrize(
    ("error", "status"), [(ContentFiltered("no", {}), "blocked"), (ScreenFailed(), "failed")]
)
async def test_late_refusal_of_a_prompt_is_a_status_and_releases_nothing(world: Generations, error, status):
    """The engine is stopped and read to its end; what it made is withheld and not billed."""
    world.check.undecided_until = asyncio.get_running_loop().create_future()
    world.engine.late_tokens = 2
    stream = world.stream(conversing())
    serving = world.begin(stream)
    world.engine.say("a")
    await until(lambda: world.admission.ticket.tokens)
    world.check.undecided_until.set_exception(error)
    await serving
    assert (stream.refused, stream.error) == (True, error)
    assert stream.last_id == 0
    assert world.engine.aborted
    row = await world.row()
    assert (row["outcome"], row["completion_tokens"], row["withheld_tokens"]) == (error.code, 3, 3)
    assert row["cost_micro_usd"] == 8  # the prompt, which was read
    answer = await world.database.read(
        lambda c: c.execute("SELECT status, text FROM messages WHERE id = 'msg_1'").fetchone()
    )
    assert answer == (status, "")
    assert not world.balance.differs


async def test_reservation_that_fails_unforeseen_ends_the_stream_before_any_text(world: Generations):
    """The status line is out, so an event says it; the engine is stopped and read to its end."""
    await refuse_writes(world.database)
    stream = world.stream(asked())
    serving = world.begin(stream)
    world.engine.say("a")
    await serving
    assert not stream.refused
    assert isinstance(stream.error, StorageUnavailable)
    assert text_of(stream) == ""
    assert [event.body["error"]["code"] for event in controls(stream, Failed)] == ["storage_unavailable"]
    assert world.engine.aborted
    assert world.journal.num_unsettled == 0


# Stopped early


async def test_stopped_answer_keeps_what_was_released(world: Generations):
    """The reader stopped it: a finish reason of its own, and the whole bill."""
    stream, serving = await running(world, request=conversing())
    stream.cancel("cancelled")
    await serving
    assert (text_of(stream), answer_of(stream).finish_reason) == ("word", "abort")
    assert (stream.error, stream.done) == (None, True)
    assert world.engine.aborted == ["chatcmpl-1"]
    row = await world.row()
    assert (row["outcome"], row["completion_tokens"]) == ("abort", 1)


@pytest.mark.parametrize(("reason", "error"), [(SHUTDOWN, Draining), (STORAGE, StorageUnavailable)])
async def test_answer_that_the_server_stops_says_so(world: Generations, reason, error):
    """An error follows what was released; it is billed all the same."""
    stream, serving = await running(world)
    stream.cancel(reason)
    await serving
    assert (type(stream.error), text_of(stream)) == (error, "word")
    assert (await world.row())["completion_tokens"] == 1


async def test_harmful_answer_ends_where_it_is(tmp_path: Path):
    """What is held, and what the engine still makes, reaches nobody, and nobody pays for it."""
    async with generations(tmp_path) as world:
        world.check.screen = HoldingScreen()
        world.check.moderation = {"message": "halted"}
        world.engine.late_tokens = 2
        for word in ("fine", "held back", "harm"):
            world.engine.say(word)
        stream = await world.serve(conversing())
        assert (text_of(stream), answer_of(stream).finish_reason) == ("fine", "content_filter")
        chunks = controls(stream, ExtraChunk)
        assert [chunk.field for chunk in chunks] == ["moderation"]
        row = await world.row()
        assert (row["completion_tokens"], row["withheld_tokens"]) == (5, 4)
        assert row["cost_micro_usd"] == 8 + 10
        assert world.check.withheld_tokens == 4
        assert not world.balance.differs


async def test_budget_ends_the_answer_at_the_token_that_reached_it(world: Generations):
    """Later tokens are withheld and not billed; an extra chunk says why, the finish reason is `length`."""
    world.engine.late_tokens = 3
    for _ in range(5):
        world.engine.say("x")
    stream = await world.serve(asked(), allowance=await allowance_of(world, 28))
    assert (text_of(stream), answer_of(stream).finish_reason) == ("xx", "length")
    (chunk,) = controls(stream, ExtraChunk)
    assert (chunk.field, chunk.value["code"]) == ("budget", "insufficient_quota")
    row = await world.row()
    assert (row["cost_micro_usd"], row["completion_tokens"], row["withheld_tokens"]) == (28, 8, 6)
    assert row["outcome"] == "length"


async def test_budget_that_is_not_reached_changes_nothing(world: Generations):
    """A micro-dollar is left."""
    world.engine.say("x")
    world.engine.say("x")
    world.engine.finish()
    stream = await world.serve(asked(), allowance=await allowance_of(world, 29))
    assert (text_of(stream), answer_of(stream).finish_reason) == ("xx", "stop")
    assert controls(stream, ExtraChunk) == []


async def test_budget_reached_with_the_last_token_leaves_a_whole_answer(world: Generations):
    """It had ended by itself, so nothing is said of the budget."""
    world.engine.finish(text="x")
    stream = await world.serve(asked(), allowance=await allowance_of(world, 1))
    assert (text_of(stream), answer_of(stream).finish_reason) == ("x", "stop")
    assert controls(stream, ExtraChunk) == []
    assert (await world.row())["outcome"] == "stop"


async def test_tokens_a_minute_end_the_answer_where_they_are_used_up(world: Generations):
    """By what the engine made."""
    for _ in range(4):
        world.engine.say("x")
    stream = await world.serve(asked(), lease=NotedLease(limit=2))
    assert (text_of(stream), answer_of(stream).finish_reason) == ("xx", "length")
    (chunk,) = controls(stream, ExtraChunk)
    assert (chunk.field, chunk.value["code"]) == ("budget", "rate_limit_exceeded")


# Failures


async def test_engine_that_fails_keeps_what_was_harmless(world: Generations):
    """What was held for lack of its end is released, then the error."""
    world.check.screen = HoldingScreen()
    stream, serving = await running(world)
    world.engine.say("held")
    world.engine.fail(EngineFailed("gone"))
    await serving
    assert text_of(stream) == "wordheld"
    assert [event.body["error"]["code"] for event in controls(stream, Failed)] == ["engine_failed"]
    row = await world.row()
    assert (row["outcome"], row["completion_tokens"], row["withheld_tokens"]) == ("engine_failed", 2, 0)


async def test_engine_that_fails_before_the_first_token_releases_nothing(world: Generations):
    """There is no screen yet whose text could be released."""
    world.engine.fail(EngineFailed("gone"))
    stream = await world.serve(asked())
    assert isinstance(stream.error, EngineFailed)
    assert text_of(stream) == ""
    assert (await world.row())["cost_micro_usd"] == 0


async def test_tokens_that_a_failed_engine_had_handed_over_are_no_difference(world: Generations):
    """They were never read, so they are not billed, and no alarm is raised."""
    world.engine.lost_tokens = 2
    world.engine.say("a")
    world.engine.fail(EngineFailed("gone"))
    await world.serve(asked())
    await world.row()
    await until(lambda: world.balance.of(MODEL).unread_tokens == 2)
    assert not world.balance.differs


async def test_tokens_that_nobody_counted_are_a_difference(world: Generations):
    """The ids that the engine handed over are more than it billed."""
    world.engine.lost_tokens = 2
    world.engine.say("a")
    world.engine.finish()
    await world.serve(asked())
    assert world.balance.differs


async def test_screen_that_breaks_releases_nothing_more(world: Generations):
    """The engine is stopped, and read to its end for the bill."""
    world.check.screen = HoldingScreen(ScreenFailed())
    world.engine.late_tokens = 2
    stream, serving = await running(world)
    world.engine.say("held")
    world.engine.say("broken")
    await serving
    assert isinstance(stream.error, ScreenFailed)
    assert text_of(stream) == "word"
    row = await world.row()
    assert (row["completion_tokens"], row["withheld_tokens"]) == (5, 4)
    assert not world.balance.differs


async def test_answer_that_diverges_stops_the_engine(world: Generations):
    """The room in the engine is given back, so it generates nothing more."""
    world.check.screen = HoldingScreen(OutputMismatch())
    stream, serving = await running(world)
    world.engine.say("broken")
    await serving
    assert isinstance(stream.error, OutputMismatch)
    assert text_of(stream) == "word"
    assert world.engine.aborted == ["chatcmpl-1"]


async def test_engine_that_fails_while_it_is_stopped_changes_nothing(world: Generations):
    """The answer ends for the reason that it had."""
    stream, serving = await running(world, allowance=await allowance_of(world, 28))
    world.engine.say("x")
    world.engine.fail(EngineFailed("gone"))
    await serving
    assert (stream.error, answer_of(stream).finish_reason) == (None, "length")


async def test_verdict_that_comes_after_the_end_opens_nothing(world: Generations):
    """The engine failed while the prompt was still being judged: the refusal is a status."""
    world.check.undecided_until = asyncio.get_running_loop().create_future()
    stream = world.stream(asked())
    serving = world.begin(stream)
    world.engine.fail(EngineFailed("gone"))
    await serving
    world.check.undecided_until.set_result(None)
    opening = [task for task in asyncio.all_tasks() if task.get_name().startswith("verdict-")]
    await asyncio.gather(*opening, return_exceptions=True)
    assert (stream.refused, stream.last_id) == (True, 0)


async def test_late_refusal_stops_the_engine_before_its_first_token(world: Generations):
    """A long prompt is not read to its end for nothing."""
    world.check.undecided_until = asyncio.get_running_loop().create_future()
    stream = world.stream(asked())
    serving = world.begin(stream)
    await until(lambda: world.engine.generated)
    world.check.undecided_until.set_exception(ContentFiltered("no", {}))
    await until(lambda: world.engine.aborted)
    await serving
    assert isinstance(stream.error, ContentFiltered)
    assert (await world.row())["cost_micro_usd"] == 8


async def test_cancelled_before_its_verdict_it_is_refused(world: Generations):
    """There was no status line yet."""
    world.check.undecided_until = asyncio.get_running_loop().create_future()
    stream = world.stream(asked())
    serving = world.begin(stream)
    await until(lambda: world.engine.generated)
    stream.cancel("cancelled")
    world.check.undecided_until.set_result(None)
    await serving
    assert (stream.refused, type(stream.error)) == (True, Cancelled)
