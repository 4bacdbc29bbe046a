"""What outlives the process: reservations, checkpoints, settlements, and what a dead process left."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app.core import Counts, Delta, IdempotencyKey, Prompt
from app.errors import EngineFailed, NotFound, StorageUnavailable
from app.journal import entry as entry_module
from app.journal import journal as journal_module
from app.journal import reconcile as reconcile_module
from app.journal import retention as retention_module
from app.journal import settlement
from app.journal.entry import JournalEntry, Outcome
from app.journal.history import LoadedTurn
from app.journal.journal import CHECKPOINT_BATCH, Journal
from app.journal.reconcile import reconcile
from app.journal.retention import MAX_OUTAGE_S, SWEEP_S, Retention
from app.store import conversations, events, ledger
from app.store.usage import differences
from app.stream.ring import Ring
from app.stream.token_stream import DELETED, STORAGE, TokenStream
from tests.support.generations import (
    MODEL,
    TERMS,
    Generations,
    asked,
    busy_writer,
    conversing,
    generations,
    refuse_writes,
)
from tests.support.sse_client import until


class Clock:
    """Monotonic time as a test sets it; the time of day stands still."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.today_ns = 1_790_000_000_000_000_000

    def monotonic(self) -> float:
        """The time set."""
        return self.now_s

    def time_ns(self) -> int:
        """The day."""
        return self.today_ns


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Generations]:
    """A journal over a new store."""
    async with generations(tmp_path) as made:
        yield made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The journal's clock, and that of what it writes."""
    clock = Clock()
    for module in (entry_module, journal_module, reconcile_module, retention_module, settlement):
        monkeypatch.setattr(module, "time", clock)
    return clock


PROMPT = Prompt(range(10), 100, None)


class Running:
    """One reserved request that is being answered."""

    def __init__(self, world: Generations, stream: TokenStream, entry: JournalEntry) -> None:
        self.world = world
        self.stream = stream
        self.entry = entry
        self.counts: dict[int, Counts] = {}

    def say(self, text: str) -> None:
        """Release a text of one token."""
        counts = self.counts.get(0, Counts(10, 0))
        counts = self.counts[0] = counts._replace(completion_tokens=counts.completion_tokens + 1)
        delta = Delta(0, "text", text, (7,), counts)
        self.entry.released(delta)
        self.entry.add_emitted(1)
        self.stream.append(delta)

    def finish(self) -> None:
        """The only choice ends by itself."""
        self.entry.end(Outcome.DONE)
        self.entry.read_to_end()
        self.stream.append(Delta(0, "text", "", (), self.counts[0], "stop"))


async def reserved(world: Generations, request: Any = None, **made: Any) -> Running:
    """A request whose reservation is committed and whose stream is open."""
    request = request or asked()
    stream = made.pop("stream", None) or world.stream(request)
    counts: dict[int, Counts] = {}
    turn = await world.history.load(request)
    entry = await world.journal.reserve(turn, PROMPT, stream, counts)
    await entry.committed()
    stream.open(request.n)
    running = Running(world, stream, entry)
    running.counts = counts
    return running


async def stored_text(world: Generations) -> tuple[str, str]:
    """The status and the text of the stored answer."""
    query = "SELECT status, text FROM messages WHERE id = 'msg_1'"
    answer: tuple[str, str] = await world.database.read(lambda c: c.execute(query).fetchone())
    return answer


async def slices(world: Generations) -> list[bytes]:
    """The stored events of the only request."""
    return await world.database.read(lambda c: events.segments(c, 1))


async def books_balance(world: Generations) -> bool:
    """Whether no request is open, and rows and daily sums say the same."""
    await world.committed()
    return await world.database.read(lambda c: not ledger.unsettled_requests(c) and not differences(c))


# Reserving


async def test_reservation_has_what_it_takes_to_answer_for_the_request(world: Generations):
    """The price of its day, the most it may take, its key; no word of it."""
    key = IdempotencyKey("idem", b"fingerprint")
    await reserved(world, asked("secret words", n=2, idempotency=key))
    row = await world.row()
    assert (row["state"], row["max_tokens"], row["prompt_tokens"]) == ("reserved", 200, 10)
    assert (row["input_micro_usd_per_1k"], row["output_micro_usd_per_1k"]) == (1000, 10000)
    assert (row["idempotency_key"], row["fingerprint"]) == ("idem", b"fingerprint")
    assert b"secret" not in row["stream"]


async def test_messages_of_the_turn_are_committed_with_the_reservation(world: Generations):
    """The question, and an answer in progress; a reservation that fails leaves neither."""
    await reserved(world, conversing("a question"))
    assert await stored_text(world) == ("in_progress", "")
    assert await world.count("messages") == 2


async def test_conversation_that_was_deleted_meanwhile_takes_no_turn(world: Generations):
    """The reservation is refused as a whole, and nothing is owed."""
    first = await reserved(world, conversing())
    first.say("a")
    first.finish()
    await world.journal.settle(first.entry, "stop")
    first.stream.close()
    later = asked("more", conversation_id="conv_1", message_id="msg_2")
    turn = await world.history.load(later)
    await world.database.write(lambda c: c.execute("DELETE FROM conversations"))
    entry = await world.journal.reserve(turn, PROMPT, world.stream(later), {})
    with pytest.raises(NotFound):
        await entry.committed()
    await world.journal.settle(entry, "not_found")
    assert world.journal.num_unsettled == 0
    assert await world.count("requests") == 1


async def test_reservation_lingers_for_at_most_half_the_time_that_the_last_ones_were_needed_after(
    world: Generations, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    """It is to be committed by then, and to share its commit; the time grows slowly and falls at once."""
    lingered: list[float] = []
    submit = world.database.submit

    def noted(unit: Any, *, linger_s: float = 0.0) -> asyncio.Future[Any]:
        lingered.append(linger_s)
        return submit(unit)

    monkeypatch.setattr(world.database, "submit", noted)
    for number, lead_s in enumerate((0.016, 0.016, 0.001, 8.0, 0.0)):
        stream = world.stream(asked())
        request = stream.request.with_placement(cache_salt=str(number))
        entry = await world.journal.reserve(LoadedTurn(request), PROMPT, stream, {})
        clock.now_s += lead_s
        if number == 0:
            await entry.committed()
        else:
            world.journal._commit_now(clock.now_s - lead_s)
    assert lingered == pytest.approx([0.0, 0.001, 0.001875, 0.0005, 0.02])


# SettleUnit


async def test_settlement_lingers_for_a_hundredth_of_its_request_at_most(
    world: Generations, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    """The end of the stream waits with it: what a client feels of it is bounded, and so is the time."""
    lingered: list[float] = []
    submit = world.database.submit

    def noted(unit: Any, *, linger_s: float = 0.0) -> asyncio.Future[Any]:
        lingered.append(linger_s)
        return submit(unit)

    for number, lasted_s in enumerate((0.5, 60.0)):
        running = await reserved(world, dataclasses.replace(asked(), request_id=f"chatcmpl-{number}"))
        await running.entry.committed()
        running.say("a")
        running.finish()
        clock.now_s += lasted_s
        with monkeypatch.context() as patched:
            patched.setattr(world.database, "submit", noted)
            await world.journal.settle(running.entry, "stop")
        running.stream.close()
    assert lingered == pytest.approx([0.005, 0.02])


async def test_settlement_is_written_once_and_reported_once(tmp_path: Path):
    """Whoever asks again; the budgets hear of it with the owner, the day and the cost."""
    reported: list[tuple[str, int, str, int]] = []
    async with generations(tmp_path, on_settled=lambda *settled: reported.append(settled)) as world:
        running = await reserved(world)
        running.say("a")
        running.finish()
        await world.journal.settle(running.entry, "stop")
        world.journal.settle_later(running.entry, "cancelled")
        running.stream.close()
        await world.journal.aclose()
        row = await world.row()
        assert (row["outcome"], row["cost_micro_usd"]) == ("stop", 20)
        assert reported == [("local", row["day"], "chatcmpl-1", 20)]
        assert world.traffic.of(MODEL).cost_micro_usd == 20
        assert world.traffic.of(MODEL).usage.completion_tokens == 1
        assert await books_balance(world)


async def test_answer_and_events_are_stored_with_the_settlement(world: Generations):
    """The end of the stream among them, though it is told only after the commit."""
    running = await reserved(world, conversing())
    running.say("Hello")
    running.finish()
    await world.journal.settle(running.entry, "stop")
    assert not running.stream.done
    assert await stored_text(world) == ("complete", "Hello")
    (piece,) = await slices(world)
    restored = Ring.restore([piece], 1 << 20)
    assert [type(event).__name__ for event in restored.contents()[1]] == ["Opened", "Finished", "Done"]


async def test_checkpoints_give_way_to_the_whole(world: Generations):
    """One slice has it all."""
    running = await reserved(world)
    for text in ("one ", "two "):
        running.say(text)
        await world.journal._checkpoint()
    assert len(await slices(world)) == 2
    running.finish()
    await world.journal.settle(running.entry, "stop")
    assert len(await slices(world)) == 1


async def test_answer_whose_beginning_has_left_memory_is_stored_whole(world: Generations):
    """The checkpoints have what the ring has lost."""
    request = conversing()
    stream = world.stream(request)
    stream._ring = Ring(4096)
    stream._text_only = stream._ring.text_only
    running = await reserved(world, request, stream=stream)
    text = "".join(f"word {number:05} " for number in range(600))
    for word in text.split(" ")[:-1]:
        running.say(word + " ")
        if stream.last_id % 20 == 0:
            await world.journal._checkpoint()
    running.finish()
    assert running.stream.dump(0)[0] > 1
    await world.journal.settle(running.entry, "stop")
    assert await stored_text(world) == ("complete", text)


async def test_settlement_that_could_not_be_written_is_tried_again(world: Generations):
    """By the background task, once the stream has ended; the age of the oldest is known meanwhile."""
    running = await reserved(world)
    running.say("a")
    await refuse_writes(world.database)
    with pytest.raises(StorageUnavailable):
        await world.journal.settle(running.entry, "stop")
    running.stream.close()
    with pytest.raises(StorageUnavailable):
        await world.journal._settle_left()
    assert world.journal.num_unsettled == 1
    await refuse_writes(world.database, refused=False)
    await world.journal._settle_left()
    assert (world.journal.num_unsettled, (await world.row())["state"]) == (0, "settled")


async def test_settlement_is_not_tried_again_before_its_stream_has_ended(world: Generations):
    """What it is to say of the end is not known yet."""
    running = await reserved(world)
    await refuse_writes(world.database)
    with pytest.raises(StorageUnavailable):
        await world.journal.settle(running.entry, "stop")
    await refuse_writes(world.database, refused=False)
    await world.journal._settle_left()
    assert (world.journal.num_unsettled, (await world.row())["state"]) == (1, "reserved")


async def test_settlement_that_nobody_waits_for_is_kept_while_nothing_can_be_written(world: Generations):
    """And tried again."""
    running = await reserved(world)
    running.stream.fail(EngineFailed("gone"))
    await refuse_writes(world.database)
    world.journal.settle_later(running.entry, "engine_failed")
    await until(lambda: world.database.failing)
    assert (world.journal.num_unsettled, world.log) == (1, [])
    await refuse_writes(world.database, refused=False)
    await world.journal._settle_left()
    assert (world.journal.num_unsettled, (await world.row())["state"]) == (0, "settled")


async def test_settlement_that_was_committed_twice_counts_once(world: Generations):
    """The background task tried it while the first was still being written."""
    running = await reserved(world)
    running.say("a")
    running.stream.fail(EngineFailed("gone"))
    with busy_writer(world.database):
        world.journal.settle_later(running.entry, "engine_failed")
        again = asyncio.create_task(world.journal._settle_left())
        await until(lambda: world.database.queue_depth == 3)
    await again
    assert world.traffic.of(MODEL).cost_micro_usd == 20
    assert world.balance.of(MODEL).ledger_tokens == 1
    assert await books_balance(world)


async def test_age_of_the_oldest_settlement_that_waits(world: Generations, clock: Clock):
    """None waits: no age."""
    running = await reserved(world)
    assert world.journal.unsettled_age_s == 0
    await refuse_writes(world.database)
    with pytest.raises(StorageUnavailable):
        await world.journal.settle(running.entry, "stop")
    clock.now_s += 7
    assert world.journal.unsettled_age_s == 7
    assert world.journal.checkpoint_age_s == pytest.approx(clock.now_s - world.journal._written_at_s)


async def test_settlement_waits_for_its_reservation(world: Generations):
    """Nobody waits for either: the request failed while its reservation was queued."""
    stream = world.stream(asked())
    with busy_writer(world.database):
        entry = await world.journal.reserve(LoadedTurn(asked()), PROMPT, stream, {})
        stream.fail(EngineFailed("gone"))
        world.journal.settle_later(entry, "engine_failed")
        assert world.journal.num_unsettled == 0
    row = await world.row()
    assert (row["state"], row["outcome"]) == ("settled", "engine_failed")
    assert await books_balance(world)


async def test_reservation_that_failed_is_not_settled(world: Generations):
    """There is no row."""
    await refuse_writes(world.database)
    stream = world.stream(asked())
    entry = await world.journal.reserve(LoadedTurn(asked()), PROMPT, stream, {})
    world.journal.settle_later(entry, "abort")
    with pytest.raises(StorageUnavailable):
        await entry.committed()
    await refuse_writes(world.database, refused=False)
    assert world.journal.num_unsettled == 0
    assert await world.row() is None


async def test_request_that_leaves_while_its_reservation_is_waited_for_is_settled(world: Generations):
    """It may be committed yet."""
    world.database.failing = True
    stream = world.stream(asked())
    with busy_writer(world.database):
        waiting = asyncio.create_task(world.journal.reserve(LoadedTurn(asked()), PROMPT, stream, {}))
        await until(lambda: world.database.queue_depth == 2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await world.committed()
    assert (await world.row())["state"] == "settled"


async def test_faulty_settlement_is_left_to_the_next_start(
    world: Generations, monkeypatch: pytest.MonkeyPatch
):
    """It must not hold up the others for ever; the log names it, without what was in it."""
    running = await reserved(world, conversing())
    running.say("a secret")

    def broken(*_arguments: object) -> None:
        raise ValueError("a secret")

    monkeypatch.setattr(conversations, "finish_answers", broken)
    world.journal.settle_later(running.entry, "stop")
    await until(lambda: world.log)
    assert (world.log[0]["event"], world.journal.num_unsettled) == ("settlement_broke", 0)
    assert "a secret" not in repr(world.log)
    assert (await world.row())["state"] == "reserved"
    monkeypatch.undo()
    assert await reconcile(world.database) == 1
    assert (await world.row())["state"] == "settled"


async def test_faulty_settlement_does_not_hold_up_those_after_it(
    world: Generations, monkeypatch: pytest.MonkeyPatch
):
    """Both could not be written at first."""
    broken = await reserved(world, conversing())
    await refuse_writes(world.database)
    with pytest.raises(StorageUnavailable):
        await world.journal.settle(broken.entry, "stop")
    broken.stream.close()
    await refuse_writes(world.database, refused=False)

    def faulty(*_arguments: object) -> None:
        raise ValueError

    monkeypatch.setattr(conversations, "finish_answers", faulty)
    await world.journal._settle_left()
    assert world.journal.num_unsettled == 0
    assert [line["event"] for line in world.log] == ["settlement_broke"]


async def test_settlement_after_the_store_was_closed_is_left_to_the_next_start(world: Generations):
    """Nothing raises."""
    running = await reserved(world)
    await world.database.aclose()
    world.journal.settle_later(running.entry, "stop")
    await until(lambda: world.journal.num_unsettled == 1)


async def test_failed_request_lets_its_idempotency_key_be_used_again(world: Generations):
    """Its caller was told to send it again; one that was answered keeps its key."""
    key = IdempotencyKey("idem", b"fingerprint")
    running = await reserved(world, asked(idempotency=key))
    running.stream.fail(EngineFailed("gone"))
    await world.journal.settle(running.entry, "engine_failed")
    assert (await world.row())["idempotency_key"] is None


async def test_answered_request_keeps_its_idempotency_key(world: Generations):
    """A repetition finds its stream."""
    key = IdempotencyKey("idem", b"fingerprint")
    running = await reserved(world, asked(idempotency=key))
    running.say("a")
    running.finish()
    await world.journal.settle(running.entry, "stop")
    assert (await world.row())["idempotency_key"] == "idem"


async def test_answer_deleted_before_its_settlement_leaves_no_text(world: Generations):
    """Not what was checkpointed either; its owner is billed all the same."""
    running = await reserved(world, conversing())
    running.say("a secret")
    await world.journal._checkpoint()
    running.stream.cancel(DELETED)
    await world.journal.settle(running.entry, "abort")
    assert await slices(world) == []
    assert await stored_text(world) == ("deleted", "")
    assert (await world.row())["cost_micro_usd"] == 20
    assert world.database.text_deleted.is_set()


# Checkpoints


async def test_checkpoint_has_what_was_released_since_the_last(world: Generations):
    """Counts and events together; a stream that said nothing costs nothing."""
    running = await reserved(world)
    await world.journal._checkpoint()
    assert len(await slices(world)) == 1  # that it was opened
    commits = world.database.num_commits
    await world.journal._checkpoint()
    assert world.database.num_commits == commits
    running.say("a")
    await world.journal._checkpoint()
    assert len(await slices(world)) == 2
    row = await world.row()
    assert (row["state"], row["completion_tokens"]) == ("reserved", 1)


async def test_stream_that_is_not_reserved_yet_is_not_checkpointed(world: Generations):
    """It has no row to hang on."""
    stream = world.stream(asked())
    with busy_writer(world.database):
        await world.journal.reserve(LoadedTurn(asked()), PROMPT, stream, {})
        stream.open(1)
        await asyncio.wait_for(world.journal._checkpoint(), 5)
    assert await slices(world) == []


async def test_other_tasks_run_while_very_many_streams_are_looked_at(world: Generations):
    """Tokens do not wait for all of them."""
    for _ in range(CHECKPOINT_BATCH):
        stream = world.stream(asked())
        world.journal._live.add(
            JournalEntry(LoadedTurn(asked()), PROMPT, stream, {}, reserved=_never(), terms=TERMS)
        )
    turns: list[int] = []
    looking = asyncio.create_task(world.journal._checkpoint())
    while not looking.done():
        turns.append(len(turns))
        await asyncio.sleep(0)
    assert len(turns) > 1


def _never() -> asyncio.Future[int]:
    return asyncio.get_running_loop().create_future()


async def test_events_of_a_settled_stream_are_not_checkpointed_again(world: Generations):
    """It is no longer live."""
    running = await reserved(world)
    running.say("a")
    running.finish()
    await world.journal.settle(running.entry, "stop")
    running.say("late")
    await world.journal._checkpoint()
    assert len(await slices(world)) == 1


async def test_streams_end_when_nothing_could_be_written_for_too_long(world: Generations, clock: Clock):
    """Until then they go on; the log says how long it has lasted."""
    running = await reserved(world)
    world.journal._written_at_s = clock.now_s
    clock.now_s += 9.9
    world.journal._not_written(StorageUnavailable("full"))
    assert running.stream.cancelled is None
    clock.now_s += 0.1
    world.journal._not_written(StorageUnavailable("full"))
    assert running.stream.cancelled == STORAGE
    assert [line["stuck_s"] for line in world.log] == [9.9, 10.0]


async def test_background_task_continues_whatever_breaks(world: Generations, monkeypatch: pytest.MonkeyPatch):
    """A defect is logged without its message; what is due is written at the next tick."""
    world.journal._checkpoint_s = 0.001
    running = await reserved(world)
    checkpoint, broken = Journal._checkpoint, [True]

    async def at_first_broken(journal: Journal) -> None:
        if broken:
            broken.clear()
            raise ValueError("a secret")
        await checkpoint(journal)

    monkeypatch.setattr(Journal, "_checkpoint", at_first_broken)
    world.journal.start()
    running.say("a")
    await until(lambda: running.entry.saved_id == running.stream.last_id)
    assert [line["event"] for line in world.log] == ["checkpoint_broke"]
    assert "a secret" not in repr(world.log)


async def test_background_task_finds_out_that_the_store_takes_something_again(world: Generations):
    """Though no stream has anything to write."""
    world.journal._checkpoint_s = 0.001
    await refuse_writes(world.database)
    world.database.failing = True
    world.journal.start()
    await until(lambda: world.log)
    assert world.log[0]["event"] == "not_written"
    await refuse_writes(world.database, refused=False)
    await until(lambda: not world.database.failing)


async def test_events_that_nobody_stored_are_forgotten_after_their_retention(
    world: Generations, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    """However many there are; the counts stay."""
    monkeypatch.setattr(events, "LIMIT", 1)
    running = await reserved(world)
    running.say("a")
    running.finish()
    await world.journal.settle(running.entry, "stop")
    await world.retention.sweep()
    assert len(await slices(world)) == 1
    assert not world.database.text_deleted.is_set()
    clock.now_s += 60.0
    clock.today_ns += 60_000_001_000
    await world.retention.sweep()
    assert await slices(world) == []
    assert world.database.text_deleted.is_set()
    assert (await world.row())["completion_tokens"] == 1


async def test_a_server_that_takes_no_requests_forgets_an_hour_later(world: Generations, clock: Clock):
    """By the clock, though nothing is ever asked of it."""
    retention = Retention(world.database, 60.0, lambda: False)
    running = await reserved(world)
    running.say("a")
    running.finish()
    await world.journal.settle(running.entry, "stop")
    for after_s, left in ((60 + MAX_OUTAGE_S, 1), (1, 0)):
        clock.today_ns += int(after_s * 1e9)
        clock.now_s += SWEEP_S
        await retention.sweep()
        assert len(await slices(world)) == left


async def test_sweep_comes_every_few_seconds(world: Generations, monkeypatch: pytest.MonkeyPatch):
    """At the first tick, and no sooner than SWEEP_S later."""
    sweeps: list[float] = []
    now_s = [1000.0]

    class Stepping(Clock):
        def monotonic(self) -> float:
            now_s[0] += 0.5
            return now_s[0]

    def has_unstored(_connection: sqlite3.Connection, _until_us: int) -> bool:
        sweeps.append(now_s[0])
        return False

    monkeypatch.setattr(events, "has_unstored", has_unstored)
    monkeypatch.setattr(retention_module, "time", Stepping())
    world.journal._checkpoint_s = 0.0001
    world.journal.start()
    await until(lambda: len(sweeps) >= 3)
    await world.journal.aclose()
    assert all(later - sooner >= SWEEP_S for sooner, later in itertools.pairwise(sweeps))


# What a dead process left


async def test_what_a_dead_process_left_open_is_settled_at_its_checkpoint(world: Generations):
    """What was written is billed, and what was heard is the answer; its key may be used again."""
    running = await reserved(world, conversing(idempotency=IdempotencyKey("idem", b"f")))
    running.say("heard ")
    await world.journal._checkpoint()
    running.say("lost")
    assert await reconcile(world.database) == 1
    row = await world.row()
    assert (row["state"], row["outcome"], row["reconciled"]) == ("settled", "interrupted", 1)
    assert (row["completion_tokens"], row["idempotency_key"]) == (1, None)
    assert await stored_text(world) == ("interrupted", "heard ")
    assert await books_balance(world)
    assert await reconcile(world.database) == 0


async def test_answer_in_one_piece_that_dies_with_its_process_is_withheld_and_gone(world: Generations):
    """Nobody had received anything of it."""
    running = await reserved(world)
    running.stream.unseen = True
    running.say("lost")
    await world.journal._checkpoint()
    assert await reconcile(world.database) == 1
    row = await world.row()
    assert (row["completion_tokens"], row["withheld_tokens"]) == (1, 1)
    assert await slices(world) == []
    assert await books_balance(world)


async def test_what_was_deleted_before_the_process_died_stays_deleted(world: Generations):
    """What was checkpointed after it goes too."""
    running = await reserved(world, conversing())
    await world.database.write(lambda c: events.erase(c, 1))
    running.say("a secret")
    await world.journal._checkpoint()
    await reconcile(world.database)
    assert await slices(world) == []
    assert (await stored_text(world))[1] == ""


async def test_damaged_events_do_not_keep_the_server_from_starting(world: Generations):
    """The answer is empty; a replay says that they are damaged."""
    running = await reserved(world, conversing())
    running.say("heard")
    await world.journal._checkpoint()

    def damage(c: sqlite3.Connection) -> None:
        c.execute("UPDATE events SET slice = x'01020304050607'")

    await world.database.write(damage)
    assert await reconcile(world.database) == 1
    assert await stored_text(world) == ("interrupted", "")


async def test_close_waits_for_settlements_that_are_being_written(world: Generations):
    """Nothing is left to the next start."""
    running = await reserved(world)
    running.stream.fail(EngineFailed("gone"))
    world.journal.start()
    with busy_writer(world.database):
        world.journal.settle_later(running.entry, "engine_failed")
        closing = asyncio.create_task(world.journal.aclose())
        await until(lambda: world.database.queue_depth == 2)
        assert not closing.done()
    await closing
    assert (world.journal.num_unsettled, (await world.row())["state"]) == (0, "settled")


async def test_second_close_does_nothing(tmp_path: Path):
    """The first tries what is left once more."""
    async with generations(tmp_path) as world:
        running = await reserved(world)
        await refuse_writes(world.database)
        with pytest.raises(StorageUnavailable):
            await world.journal.settle(running.entry, "stop")
        running.stream.close()
        await refuse_writes(world.database, refused=False)
        world.journal.start()
        await world.journal.aclose()
        await world.journal.aclose()
        assert (await world.row())["state"] == "settled"
