"""A suspended answer: what is kept of it, who goes on with it, and what ends it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from app.core import ChatRequest, Counts, IdempotencyKey, Placement, RawPrompt, Usage
from app.errors import BadRequest, Draining, EngineFailed, Overloaded, ServingError, UnknownModel
from app.journal.entry import Progress
from app.journal.history import History, LoadedTurn
from app.journal.reconcile import reconcile
from app.resume.continue_answer import ContinuedStart
from app.resume.snapshot import NotReadable, pack, unpack
from app.resume.suspensions import Suspensions
from app.store import events, suspensions
from app.store.events import StoredStream
from app.store.suspensions import StoredSuspension
from app.stream.ring import Done, ExtraChunk, Failed, Finished, Opened
from app.stream.token_stream import DELETED, SHUTDOWN, SUSPENDED, TokenStream
from tests.support.generations import (
    TERMS,
    Generations,
    HoldingScreen,
    NotedLease,
    asked,
    controls,
    conversing,
    generations,
    refuse_writes,
    running,
    text_of,
)
from tests.support.sse_client import until

TIMEOUT_S = 600.0


class Clock:
    """Seconds, as a test sets them."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        """The time set."""
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    """The clock of what is suspended."""
    return Clock()


@pytest.fixture
async def world(tmp_path: Path, clock: Clock) -> AsyncIterator[Generations]:
    """A pipeline, and what stands around it."""
    async with generations(tmp_path, suspend_timeout_s=TIMEOUT_S, clock_s=clock) as made:
        yield made


async def suspended(world: Generations, **options: Any) -> TokenStream:
    """A stream that was suspended behind its first word."""
    stream, serving = await running(world, **options)
    stream.cancel(SUSPENDED)
    await serving
    await world.suspensions.drained()
    assert stream.suspended
    return stream


def as_new(world: Generations) -> None:
    """The engine of the next process: it has said nothing."""
    engine = world.engine
    engine._counts, engine._finished = {}, set()


# A stop


async def test_a_suspended_stream_has_no_end(world: Generations):
    """What it released stays, its readers are cut, its row is open; its lease is settled."""
    lease = NotedLease()
    stream, serving = await running(world, lease=lease)
    reader = stream.attach()
    cuts: list[str] = []

    class Sink:
        def ready(self) -> bool:
            return True

        def write(self, *frames: bytes) -> None:
            del frames

        async def caught_up(self) -> None:
            pass

        def abort(self) -> None:
            cuts.append("cut")

    reading = asyncio.create_task(reader.follow(Sink(), b""))
    await asyncio.sleep(0)
    stream.cancel(SUSPENDED)
    await serving
    await world.suspensions.drained()
    await reading
    assert cuts == ["cut"]
    assert (text_of(stream), controls(stream, Finished), controls(stream, Done)) == ("word", [], [])
    row = await world.row()
    assert row is not None
    assert (row["state"], row["completion_tokens"], row["withheld_tokens"]) == ("reserved", 1, 0)
    assert len(lease.settled) == 1
    assert world.traffic.of(stream.request.model).finishes == {"suspended": 1}
    assert await reconcile(world.database) == 0
    assert len(world.suspensions) == 1
    with pytest.raises(Draining):
        await stream.ended()
    with pytest.raises(Draining):
        stream.attach()


async def test_what_is_held_back_is_kept_and_not_released(world: Generations):
    """Its ids go to the next process; the bill has it as withheld."""
    world.check.screen = HoldingScreen()
    stream, serving = await running(world)
    world.engine.say("held", tokens=2)
    await until(lambda: world.admission.ticket.tokens == [1, 3])
    world.engine.late_tokens = 1
    stream.cancel(SUSPENDED)
    await serving
    await world.suspensions.drained()
    assert text_of(stream) == "word"
    row = await world.row()
    assert row is not None
    assert (row["completion_tokens"], row["withheld_tokens"]) == (4, 3)
    loaded = await world.suspensions.load("local", "chatcmpl-1")
    assert loaded is not None
    assert loaded[1] is not None
    assert [list(run) for run in loaded[1].progress.token_ids] == [[7, 7, 7, 7]]
    assert loaded[1].progress.released[0].completion_tokens == 1


async def test_a_request_without_a_token_is_suspended_once_its_status_line_is_out(world: Generations):
    """It begins in the next process, in its stream."""
    stream = world.stream(asked())
    serving = world.begin(stream)
    await until(lambda: not stream.status_unsent and world.engine.generated)
    stream.cancel(SUSPENDED)
    await serving
    resumed, serving = await world.continue_()
    as_new(world)
    world.engine.say("word")
    world.engine.finish()
    await serving
    assert [type(event) for event in resumed.in_ring()[1]] == [Opened, Finished, Done]
    assert text_of(resumed) == "word"


async def test_a_request_without_a_status_line_is_refused(world: Generations):
    """Waiting for room, or for the verdict on its prompt: it is told to come again, and nothing is kept."""
    world.admission.waits = asyncio.get_running_loop().create_future()
    waiting = world.stream(asked())
    serving = world.begin(waiting)
    await world.admission.entered.wait()
    waiting.cancel(SUSPENDED)
    await serving
    assert (waiting.refused, type(waiting.error)) == (True, Draining)
    world.admission.waits = None
    world.check.undecided_until = asyncio.get_running_loop().create_future()
    judged = world.stream(dataclasses.replace(asked(), request_id="chatcmpl-2"))
    serving = world.begin(judged)
    await until(lambda: world.engine.generated)
    judged.cancel(SUSPENDED)
    await serving
    assert (judged.refused, type(judged.error)) == (True, Draining)
    assert await world.count("suspended") == 0


async def test_a_stream_that_cannot_be_written_ends_truthfully(world: Generations):
    """It is settled as soon as that can be written."""
    stream, serving = await running(world)
    await refuse_writes(world.database)
    stream.cancel(SUSPENDED)
    await serving
    await world.suspensions.drained()
    assert not stream.suspended
    assert [failed.body["error"]["code"] for failed in controls(stream, Failed)] == ["draining"]
    await refuse_writes(world.database, refused=False)
    await world.journal._settle_left()
    row = await world.row()
    assert row is not None
    assert (row["state"], row["outcome"]) == ("settled", "draining")


async def test_an_answer_that_had_ended_is_not_suspended(world: Generations):
    """Its last token was there when the server stopped."""
    stream, serving = await running(world)
    world.engine.finish("stop")
    stream.cancel(SUSPENDED)
    await serving
    assert (stream.done, stream.suspended) == (True, False)
    row = await world.row()
    assert row is not None
    assert row["outcome"] == "stop"


# The next process


async def test_an_answer_goes_on_with_one_bill(world: Generations):
    """The engine hands over all of it again; the prompt is what it was when it was first computed."""
    await suspended(world)
    stream, serving = await world.continue_()
    as_new(world)
    for word in ("wo", "rd", " by", " word"):
        world.engine.say(word, tokens=0 if word == "wo" else 1)
    world.engine.finish()
    await serving
    assert text_of(stream) == "word by word"
    row = await world.row()
    assert row is not None
    assert (row["state"], row["outcome"], row["completion_tokens"], row["cached_tokens"]) == (
        "settled",
        "stop",
        3,
        4,
    )
    assert world.suspensions.num_continued == 1
    assert await world.count("suspended") == 0
    assert not world.balance.differs


async def test_a_stored_answer_is_that_of_its_turn(world: Generations):
    """Its message is complete, and the next turn finds it."""
    await suspended(world, request=conversing())
    history = History(world.database)
    turn = dataclasses.replace(conversing("next"), new_conversation=False, message_id="msg_2")
    with pytest.raises(ServingError) as busy:
        await history.load(turn)
    assert busy.value.code == "conversation_busy"
    message = "Conversation conv_1 has a suspended response chatcmpl-1; resume or cancel it."
    assert busy.value.message == message
    _, serving = await world.continue_()
    as_new(world)
    world.engine.say("word")
    world.engine.finish()
    await serving
    loaded = await history.load(turn)
    assert [message["content"] for message in loaded.request.body["messages"]] == ["hello", "word", "next"]


async def test_an_engine_that_says_something_else_ends_the_answer(world: Generations):
    """What was sent stays; the end is an error that says how far it goes."""
    await suspended(world)
    stream, serving = await world.continue_()
    as_new(world)
    world.engine.say("other")
    world.engine.finish()
    await serving
    (failed,) = controls(stream, Failed)
    assert failed.body["error"]["code"] == "interrupted"
    assert text_of(stream) == "word"
    row = await world.row()
    assert row is not None
    assert (row["state"], row["outcome"], row["completion_tokens"]) == ("settled", "interrupted", 1)


@pytest.mark.parametrize("error", [Overloaded("full", retry_after_s=1), None])
async def test_a_server_without_room_leaves_it_suspended(world: Generations, error: ServingError | None):
    """So do readers that leave while it waits."""
    await suspended(world)
    world.admission.precheck_error = error
    stream, serving = await world.continue_()
    if error is None:
        stream.cancel("disconnect")
    await serving
    assert stream.suspended
    assert "chatcmpl-1" in world.suspensions
    assert await world.count("suspended") == 1


async def test_an_engine_without_room_leaves_it_suspended(world: Generations):
    """It was taken up by then, and is suspended once more."""
    await suspended(world)
    stream, serving = await world.continue_()
    as_new(world)
    world.engine.fail(Overloaded("full", retry_after_s=1))
    await serving
    await world.suspensions.drained()
    assert stream.suspended
    assert (len(world.suspensions), await world.count("suspended")) == (1, 1)


async def test_what_cannot_go_on_is_settled(world: Generations):
    """The model is not served any more: its error stands in the event, its bill is what was released."""
    await suspended(world)

    def check_model(name: str) -> None:
        raise UnknownModel(f"The model {name!r} is not served here.")

    stream, serving = await world.continue_(check_model=check_model)
    await serving
    (failed,) = controls(stream, Failed)
    assert failed.body["error"]["code"] == "interrupted"
    assert "not served" in failed.body["error"]["message"]
    assert failed.body["error"]["usage"]["completion_tokens"] == 1
    row = await world.row()
    assert row is not None
    assert (row["state"], row["completion_tokens"]) == ("settled", 1)


@pytest.mark.parametrize("reason", ["cancelled", DELETED])
async def test_a_stream_that_is_stopped_while_it_waits_ends_as_a_live_one(world: Generations, reason: str):
    """Each open choice is stopped where it was, and the counts follow: it is no error."""
    await suspended(world, request=asked(n=2, include_usage=True))
    stream, serving = await world.continue_()
    stream.cancel(reason)
    await serving
    ends = [(end.choice, end.finish_reason) for end in controls(stream, Finished)]
    assert (text_of(stream), ends) == ("word", [(0, "abort"), (1, "abort")])
    assert [chunk.value["completion_tokens"] for chunk in controls(stream, ExtraChunk)] == [1]
    assert (stream.error, controls(stream, Failed), len(controls(stream, Done))) == (None, [], 1)
    row = await world.row()
    assert row is not None
    assert (row["state"], row["outcome"], row["completion_tokens"]) == ("settled", "abort", 1)
    assert await world.count("suspended") == 0


async def test_a_stop_of_the_server_while_it_waits_is_an_error(world: Generations):
    """As nothing is suspended there, nobody can have the rest."""
    await suspended(world)
    stream, serving = await world.continue_()
    stream.cancel(SHUTDOWN)
    await serving
    assert [failed.body["error"]["code"] for failed in controls(stream, Failed)] == ["interrupted"]


async def test_an_answer_in_one_piece_that_nobody_fetches_costs_its_prompt_alone(
    world: Generations, clock: Clock
):
    """Its text is deleted, so nobody gets later what was not billed."""
    await suspended(world, unseen=True)
    clock.now_s += TIMEOUT_S
    assert await world.suspensions.expire() == 1
    row = await world.row()
    assert row is not None
    assert (row["completion_tokens"], row["withheld_tokens"]) == (1, 1)
    assert await world.count("events") == 0


async def test_an_engine_that_fails_ends_it_as_any_answer(world: Generations):
    """Exactly once."""
    await suspended(world)
    stream, serving = await world.continue_()
    as_new(world)
    world.engine.fail(EngineFailed("died"))
    await serving
    assert [failed.body["error"]["code"] for failed in controls(stream, Failed)] == ["engine_failed"]
    row = await world.row()
    assert row is not None
    assert (row["outcome"], row["completion_tokens"], row["withheld_tokens"]) == ("engine_failed", 1, 0)


async def test_what_the_prompt_check_would_refuse_now_goes_on(world: Generations):
    """It was let pass before, and a part of its answer is out."""
    await suspended(world)
    world.check.refusal = BadRequest("refused today")
    stream, serving = await world.continue_()
    as_new(world)
    world.engine.say("word")
    world.engine.finish()
    await serving
    assert stream.error is None


async def test_checkpoints_never_fall_while_it_is_handed_over_again(world: Generations):
    """A kill then settles at what was billed before."""
    await suspended(world)
    stream, serving = await world.continue_()
    as_new(world)
    world.engine.say("wo", tokens=0)
    await until(lambda: len(world.admission.ticket.tokens) > 1)
    await world.committed()
    await world.journal._checkpoint()
    row = await world.row()
    assert row is not None
    assert (row["completion_tokens"], row["prompt_tokens"], row["cached_tokens"]) == (1, 10, 4)
    assert await reconcile(world.database) == 1
    world.engine.say("rd")
    world.engine.finish()
    await serving
    assert stream.done


# Those that nobody asks for


async def test_what_nobody_asks_for_is_settled_after_its_time(world: Generations, clock: Clock):
    """At what was released; its prompt is deleted, and others hear of the bill."""
    await suspended(world, request=conversing())
    told: list[tuple[Any, ...]] = []
    live: set[str] = set()
    waiting = Suspensions(
        world.database,
        world.journal,
        world.pipeline._log,
        TIMEOUT_S,
        is_live=live.__contains__,
        on_settled=lambda *settled: told.append(settled),
        clock_s=clock,
    )
    await waiting.open()
    clock.now_s += TIMEOUT_S - 1
    assert await waiting.expire() == 0
    clock.now_s += 1
    live.add("chatcmpl-1")
    assert await waiting.expire() == 0
    live.clear()
    world.database.text_deleted.clear()
    assert await waiting.expire() == 1
    assert (len(waiting), waiting.num_expired, waiting._touched_s) == (0, 1, {})
    row = await world.row()
    assert row is not None
    assert (row["state"], row["outcome"], row["cost_micro_usd"]) == ("settled", "interrupted", 18)
    assert [settled[2:] for settled in told] == [("chatcmpl-1", 18)]
    assert await world.count("suspended") == 0
    assert world.database.text_deleted.is_set()
    statuses = await world.database.read(
        lambda c: c.execute("SELECT text, status FROM messages WHERE role = 'assistant'").fetchall()
    )
    assert statuses == [("word", "interrupted")]


async def test_what_a_process_suspends_is_not_settled_by_it(world: Generations, clock: Clock):
    """However long it has run: its time begins when it is suspended, and the next process is asked."""
    clock.now_s += 2 * TIMEOUT_S
    await suspended(world)
    assert await world.suspensions.expire() == 0
    assert await world.count("suspended") == 1


async def test_what_is_asked_for_in_vain_can_be_asked_for_again(world: Generations, clock: Clock):
    """The server was full just before its time was over."""
    await suspended(world)
    clock.now_s += TIMEOUT_S - 1
    world.admission.precheck_error = Overloaded("full", retry_after_s=1)
    world.suspensions.extend_deadline("chatcmpl-1")
    stream, serving = await world.continue_()
    await serving
    assert stream.suspended
    clock.now_s += TIMEOUT_S - 1
    assert await world.suspensions.expire() == 0
    clock.now_s += 1
    assert await world.suspensions.expire() == 1


async def test_a_store_that_cannot_be_written_settles_later(world: Generations, clock: Clock):
    """Nothing is forgotten."""
    await suspended(world)
    clock.now_s += TIMEOUT_S
    await refuse_writes(world.database)
    with pytest.raises(ServingError):
        await world.suspensions.expire()
    assert len(world.suspensions) == 1
    await refuse_writes(world.database, refused=False)
    assert await world.suspensions.expire() == 1


async def test_a_deleted_conversation_ends_its_suspended_answers(world: Generations):
    """They are settled as cancelled."""
    await suspended(world, request=conversing())
    await world.suspensions.settle_conversation("other", "conv_1")
    assert len(world.suspensions) == 1
    await world.suspensions.settle_conversation("local", "conv_1")
    assert len(world.suspensions) == 0
    row = await world.row()
    assert row is not None
    assert (row["state"], row["outcome"]) == ("settled", "abort")


async def test_what_was_settled_elsewhere_is_left_alone(world: Generations):
    """A row is billed once."""
    await suspended(world)
    await world.database.write(
        lambda c: c.execute("UPDATE requests SET state = 'settled', outcome = 'stop'").rowcount
    )
    await world.suspensions.settle(["chatcmpl-1"])
    row = await world.row()
    assert row is not None
    assert row["outcome"] == "stop"


# As it is stored


def stored(request: ChatRequest, turn: LoadedTurn, progress: Progress, **fields: Any) -> StoredSuspension:
    """A suspension as it comes back from the store."""
    suspension = pack(7, "key_1", turn, progress, fields.pop("safety", {}))
    facts = (
        7,
        request.request_id,
        request.owner,
        request.model,
        0,
        "reserved",
        None,
        Usage(),
        False,
        b"",
        [],
    )
    values: Mapping[str, Any] = {
        "suspension": suspension,
        "stream": StoredStream(*facts),
        "terms": TERMS,
        "idempotency": None,
        "answer_ids": [],
    }
    return StoredSuspension(**{**values, **fields})


@pytest.mark.parametrize("token_ids", [None, [5, 6]])
def test_a_request_comes_back_as_it_was(token_ids: Sequence[int] | None):
    """All of it: body, past, raw prompt, placement, key; and how far it was answered."""
    body = {"messages": [{"role": "user", "content": "a \ud800 surrogate"}], "seed": 1 << 80}
    request = dataclasses.replace(
        conversing(n=2, max_tokens=9, logprobs=True, idempotency=IdempotencyKey("k", b"f")),
        body=body,
        past=[[1, 2], [3]],
        raw=RawPrompt("text", token_ids, "preface"),
        caller_names={"max_tokens": "n_predict"},
        placement=Placement("salt", 20, 0.0, {"x-model": "small"}, length_capped=True),
    )
    turn = LoadedTurn(request, run_seqs=[4, 5], strikes=1, from_store=[False, True])
    progress = Progress([[1, 2, 3], []], {0: Counts(9, 3, 1, 2)}, {0: Counts(9, 2)})
    back = unpack(
        stored(
            request, turn, progress, idempotency=("k", b"f"), answer_ids=["msg_1", "msg_2"], safety={"a": 1}
        )
    )
    assert [list(run) for run in back.turn.request.past] == [[1, 2], [3]]
    raw = back.turn.request.raw
    assert raw is not None
    assert (raw.text, raw.preface) == ("text", "preface")
    assert (raw.token_ids and list(raw.token_ids)) == token_ids
    assert dataclasses.replace(back.turn.request, past=request.past, raw=request.raw) == request
    assert (back.turn.run_seqs, back.turn.strikes, back.turn.from_store) == ([4, 5], 1, [False, True])
    assert (back.turn.stored_turn, back.turn.answer_ids) == (None, ["msg_1", "msg_2"])
    assert [list(run) for run in back.progress.token_ids] == [[1, 2, 3], []]
    assert (back.progress.counts, back.progress.released) == (progress.counts, progress.released)
    assert (back.key_id, back.safety, back.terms) == ("key_1", {"a": 1}, TERMS)


def test_a_name_in_the_store_does_not_change_with_the_source():
    """An earlier version wrote the caller's names of parameters as `spelled`, and may read this."""
    names = {"max_tokens": "n_predict"}
    request = dataclasses.replace(asked(), caller_names=names)
    packed = json.loads(pack(7, None, LoadedTurn(request), Progress(), {}).request)
    assert packed["request"]["spelled"] == names
    assert "caller_names" not in packed["request"]


@pytest.mark.parametrize("request_json", [b"{}", b"not JSON", b'{"version": 99}'])
async def test_what_another_version_wrote_is_settled(world: Generations, request_json: bytes):
    """It is logged without its text, and found as a stream without a request."""
    await suspended(world)

    def overwrite(c: Any) -> None:
        c.execute("UPDATE suspended SET request = ?", (request_json,))

    await world.database.write(overwrite)
    loaded = await world.suspensions.load("local", "chatcmpl-1")
    assert loaded is not None
    assert loaded[1] is None
    assert [line["event"] for line in world.log][-1] == "suspended_unreadable"
    request = asked()
    turn = LoadedTurn(request)
    broken = stored(request, turn, Progress())
    with pytest.raises(NotReadable):
        unpack(broken._replace(suspension=broken.suspension._replace(request=request_json)))


async def test_another_owner_finds_nothing(world: Generations):
    """Nor does anybody after it was deleted."""
    await suspended(world)
    assert await world.suspensions.load("other", "chatcmpl-1") is None
    await world.database.write(lambda c: events.erase(c, 1))
    assert await world.suspensions.load("local", "chatcmpl-1") is None
    assert await world.database.read(suspensions.ids) == {}


def test_what_stays_suspended_is_said_by_its_error():
    """A caller's own stop ends it, whatever the error."""
    start = ContinuedStart(
        unpack(stored(asked(), LoadedTurn(asked()), Progress())),
        *[None] * 3,  # type: ignore[arg-type]
    )

    class Stream:
        cancelled: str | None = None

    stream: Any = Stream()
    assert start.should_suspend(stream, Overloaded("full", retry_after_s=1))
    assert not start.should_suspend(stream, BadRequest("no"))
    for reason, stays in (("cancelled", False), ("disconnect", True), (SUSPENDED, True)):
        stream.cancelled = reason
        assert start.should_suspend(stream, BadRequest("no")) is stays


def test_an_ordinary_request_is_packed_by_the_fast_encoder(monkeypatch: pytest.MonkeyPatch):
    """A server that stops packs all its streams between two turns of the loop."""
    monkeypatch.setattr("app.resume.snapshot.json.dumps", None)
    progress = Progress([[1]], {0: Counts(9, 1)}, {0: Counts(9, 1)})
    assert pack(1, None, LoadedTurn(conversing()), progress, {}).token_ids
