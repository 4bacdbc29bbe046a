"""One request's whole way: what is refused, what is released, what is billed, on every way out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app.core import Health, Prompt
from app.errors import (
    BadRequest,
    Cancelled,
    Conflict,
    ContentFiltered,
    ContextOverflow,
    Draining,
    EngineFailed,
    EngineNotReady,
    InternalError,
    NotFound,
    Overloaded,
    SafetyUnavailable,
    ServingError,
    StorageUnavailable,
)
from app.safety import moderation
from app.safety.session.session import SafetySession
from app.store import events
from app.stream.ring import Done, ExtraChunk, Failed, Finished, Opened
from app.stream.token_stream import ABANDONED, DELETED, SHUTDOWN, STORAGE
from tests.support.generations import (
    MODEL,
    Generations,
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


async def refused(world: Generations, error: type[Exception], **options: Any) -> Generations:
    """Serve a request that ends before its status line, in that error."""
    stream = await world.serve(options.pop("request", asked()), **options)
    assert stream.refused
    assert type(stream.error) is error
    assert controls(stream, Opened) == []
    return world


# The whole way


async def test_answer_is_released_billed_and_counted(world: Generations):
    """One answer of three tokens to ten, four of which were cached: 6 + 2 + 30 micro-dollars."""
    for word in ("How ", "are ", "you?"):
        world.engine.say(word)
    world.engine.finish()
    lease = NotedLease()
    stream = await world.serve(asked(include_usage=True), lease=lease)
    assert text_of(stream) == "How are you?"
    kinds = [type(event) for event in stream.in_ring()[1]]
    assert kinds == [Opened, Finished, ExtraChunk, Done]
    row = await world.row()
    assert row is not None
    assert (row["state"], row["outcome"], row["cost_micro_usd"]) == ("settled", "stop", 38)
    assert (row["prompt_tokens"], row["completion_tokens"], row["withheld_tokens"]) == (10, 3, 0)
    assert (lease.corrected, lease.withdrawn) == ([10], False)
    assert lease.settled[0][0].completion_tokens == 3
    assert world.traffic.of(MODEL).finishes == {"stop": 1}
    assert world.traffic.of(MODEL).cost_micro_usd == 38
    assert not world.balance.differs
    assert world.admission.ticket.released
    assert world.check.closed


async def test_request_leaves_one_line_without_text_in_the_log(world: Generations):
    """Its id, its counts and how it ended."""
    world.engine.say("words that are nobody's business")
    world.engine.finish()
    await world.serve(asked("secret question"))
    (line,) = world.log
    assert (line["event"], line["request_id"], line["completion_tokens"]) == ("request", "chatcmpl-1", 1)
    assert "business" not in repr(world.log)
    assert "secret" not in repr(world.log)


async def test_every_choice_ends_by_itself(world: Generations):
    """The stream goes on until the last of them; their tokens are billed together, the prompt once."""
    world.engine._counts = {}
    request = asked(n=2)
    serving = world.begin(stream := world.stream(request))
    await until(lambda: world.engine.generated)
    world.engine.say("a", 0)
    world.engine.finish("stop", 0)
    world.engine.say("b", 1)
    world.engine.say("c", 1)
    world.engine.finish("length", 1)
    await serving
    assert (text_of(stream, 0), text_of(stream, 1)) == ("a", "bc")
    row = await world.row()
    assert (row["outcome"], row["prompt_tokens"], row["completion_tokens"]) == ("length,stop", 10, 3)


async def test_the_operators_own_words_cost_nobody_anything(world: Generations):
    """They are taken from the prompt, and from the cached tokens, which they are the first of."""
    world.engine.prompt = Prompt(range(10), 100, None, unbilled_tokens=3)
    world.engine.say("a")
    world.engine.finish()
    lease = NotedLease()
    await world.serve(asked(), lease=lease)
    row = await world.row()
    assert (row["prompt_tokens"], row["cached_tokens"]) == (7, 1)
    assert lease.corrected == [7]


# Refusals: a status, and no event


async def test_engine_that_is_not_ready_refuses_before_anything_is_done(world: Generations):
    """Nothing is rendered or reserved, and the key may send its request again."""
    world.engine.health_now = Health.STARTING
    lease = NotedLease()
    await refused(world, EngineNotReady, lease=lease)
    assert world.engine.rendered == []
    assert await world.row() is None
    assert lease.withdrawn
    assert world.traffic.of(MODEL).finishes == {"engine_not_ready": 1}


async def test_full_server_refuses_before_anything_is_rendered(world: Generations):
    """Admission is asked first."""
    world.admission.precheck_error = Overloaded("full", retry_after_s=1)
    await refused(world, Overloaded)
    assert world.engine.rendered == []


async def test_blocked_prompt_is_neither_rendered_nor_billed(world: Generations):
    """A refusal of the first look costs nothing."""
    world.check.refusal = ContentFiltered("no", {})
    await refused(world, ContentFiltered)
    assert world.engine.rendered == []
    assert await world.row() is None


async def test_second_turn_of_a_conversation_is_refused_until_the_first_has_ended(world: Generations):
    """The claim is given back on every way out."""
    serving = world.begin(world.stream(conversing()))
    await until(lambda: world.engine.generated)
    await refused(world, Conflict, request=conversing())
    world.engine.say("a")
    world.engine.finish()
    await serving
    with world.history.claim(conversing()):
        assert await world.count("messages") == 2


async def test_unknown_conversation_is_not_found(world: Generations):
    """Before anything is rendered."""
    await refused(world, NotFound, request=conversing(new_conversation=False))
    assert world.engine.rendered == []


async def test_prompt_that_the_model_cannot_read_is_refused(world: Generations):
    """Nothing waits for room."""
    world.engine.render_errors = [BadRequest("no")]
    await refused(world, BadRequest)
    assert not world.admission.entered.is_set()


async def test_length_that_the_server_shortened_gives_way_to_the_context(world: Generations):
    """The room that is left is less than the shortened answer may take: it is rendered without a length."""
    world.engine.render_errors = [ContextOverflow("too long")]
    world.engine.say("a")
    world.engine.finish()
    stream = await world.serve(asked(max_tokens=5).with_placement(length_capped=True))
    assert text_of(stream) == "a"
    assert [request.max_tokens for request in world.engine.rendered] == [5, None]


async def test_length_that_the_caller_asked_for_is_kept(world: Generations):
    """Too much is refused."""
    world.engine.render_errors = [ContextOverflow("too long")]
    await refused(world, ContextOverflow, request=asked(max_tokens=5))
    assert len(world.engine.rendered) == 1


async def test_prompt_that_is_too_long_without_a_length_is_refused(world: Generations):
    """The second rendering says so."""
    world.engine.render_errors = [ContextOverflow("too long"), ContextOverflow("too long")]
    await refused(world, ContextOverflow, request=asked(max_tokens=5).with_placement(length_capped=True))


async def test_reservation_that_fails_is_a_status_while_the_store_is_known_to_fail(world: Generations):
    """Nothing is asked of the engine, and the room is given back."""
    await refuse_writes(world.database)
    world.database.failing = True
    await refused(world, StorageUnavailable)
    assert world.engine.generated == []
    assert world.admission.ticket.released


# Waiting for room


async def waiting(world: Generations) -> tuple[Any, asyncio.Task[None]]:
    """A stream that waits for room in the engine, and its generation."""
    world.admission.waits = asyncio.get_running_loop().create_future()
    stream = world.stream(asked())
    serving = world.begin(stream)
    await world.admission.entered.wait()
    return stream, serving


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        ("cancelled", Cancelled),
        ("disconnect", Cancelled),
        (SHUTDOWN, Draining),
        (STORAGE, StorageUnavailable),
    ],
)
async def test_cancelled_while_it_waits_for_room_it_is_withdrawn(world: Generations, reason, error):
    """It leaves the queue, is told why, and owes nothing."""
    stream, serving = await waiting(world)
    stream.cancel(reason)
    await serving
    assert (type(stream.error), stream.refused) == (error, True)
    assert world.admission.withdrawn == ["chatcmpl-1"]
    assert world.engine.generated == []
    assert await world.row() is None


async def test_admitted_request_is_withdrawn_no_more(world: Generations):
    """Cancelled between its admission and the engine, it is refused and gives its room back."""
    stream, serving = await waiting(world)
    world.admission.waits.set_result(None)
    stream.cancel("cancelled")
    await serving
    assert isinstance(stream.error, Cancelled)
    assert (world.engine.generated, await world.row()) == ([], None)
    assert world.admission.ticket.released


async def test_cancelled_while_its_reservation_is_written_it_is_not_withdrawn(world: Generations):
    """Its room is its own by then; it is refused once the store has answered."""
    world.database.failing = True
    stream = world.stream(asked())
    with busy_writer(world.database):
        serving = world.begin(stream)
        await until(lambda: world.database.queue_depth == 2)
        stream.cancel("cancelled")
    await serving
    assert (type(stream.error), world.admission.withdrawn) == (Cancelled, [])
    assert world.admission.ticket.released


async def test_room_is_given_back_before_the_settlement_is_written(world: Generations):
    """The engine has ended: the next request needs no commit of this one."""
    stream, serving = await running(world)
    with busy_writer(world.database):
        world.engine.finish()
        await until(lambda: world.admission.ticket.released)
        assert not stream.done
    await serving
    assert stream.done


async def test_request_that_nobody_wants_any_more_does_not_queue(world: Generations):
    """Cancelled while it was rendered."""
    stream = world.stream(asked())
    stream.cancel("cancelled")
    await world.begin(stream)
    assert isinstance(stream.error, Cancelled)
    assert not world.admission.entered.is_set()


# The end


async def test_end_that_cannot_be_stored_is_never_told(world: Generations):
    """An error stands where the end would; the bill is tried again."""
    stream = world.stream(asked())
    serving = world.begin(stream)
    world.engine.say("a")
    await until(lambda: text_of(stream))
    await refuse_writes(world.database)
    world.engine.finish()
    await serving
    assert isinstance(stream.error, StorageUnavailable)
    assert [type(event) for event in stream.in_ring()[1]][-2:] == [Failed, Done]
    assert world.journal.num_unsettled == 1
    await refuse_writes(world.database, refused=False)
    await world.journal._settle_left()
    assert world.journal.num_unsettled == 0
    assert (await world.row())["state"] == "settled"


async def test_defect_ends_the_stream_in_an_internal_error(world: Generations):
    """Its message is in no log and reaches no client."""
    world.engine.say("a")
    world.engine.fail(ValueError("a secret"))
    stream = await world.serve(asked())
    assert type(stream.error) is InternalError
    assert "a secret" not in repr(world.log)
    assert world.engine.aborted == ["chatcmpl-1"]
    assert (await world.row())["outcome"] == "internal_error"


FAILURES = (EngineFailed("died"), SafetyUnavailable("broke"))


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: error.code)
async def test_answer_in_one_piece_that_fails_is_withheld_and_gone(world: Generations, error: ServingError):
    """Its client gets an error alone, so nobody pays for the text, and nobody can fetch it."""
    stream, serving = await running(world, unseen=True)
    world.engine.fail(error)
    await serving
    assert (text_of(stream), controls(stream, Opened)) == ("", [])
    assert [failed.body["error"]["code"] for failed in controls(stream, Failed)] == [error.code]
    assert stream.frame_after(1)[1] == b"id: 2\ndata: [DONE]\n\n"
    row = await world.row()
    assert (row["completion_tokens"], row["withheld_tokens"], row["reasoning_tokens"]) == (1, 1, 0)
    segments = await world.database.read(lambda c: events.segments(c, row["seq"]))
    assert b"word" not in b"".join(segments)
    assert not world.balance.differs


async def test_answer_in_one_piece_that_cannot_be_settled_is_withheld(world: Generations):
    """All of it was generated, and its client gets 503."""
    stream, serving = await running(world, unseen=True)
    await refuse_writes(world.database)
    world.engine.finish()
    await serving
    assert isinstance(stream.error, StorageUnavailable)
    await refuse_writes(world.database, refused=False)
    await world.journal._settle_left()
    row = await world.row()
    assert (row["state"], row["completion_tokens"], row["withheld_tokens"]) == ("settled", 1, 1)


async def test_answer_in_one_piece_that_is_stopped_by_the_server_is_withheld(world: Generations):
    """Its client sends it again, and pays for that."""
    stream, serving = await running(world, unseen=True)
    stream.cancel(SHUTDOWN)
    await serving
    row = await world.row()
    assert (row["outcome"], row["completion_tokens"], row["withheld_tokens"]) == ("draining", 1, 1)


@pytest.mark.parametrize("end", ["finish", "cancel", "leave"])
async def test_answer_in_one_piece_is_billed_where_it_can_be_had(world: Generations, end: str):
    """Whole or stopped, it is an answer and no error."""
    stream, serving = await running(world, unseen=True)
    if end == "finish":
        world.engine.finish()
    else:
        stream.cancel("cancelled" if end == "cancel" else ABANDONED)
    await serving
    row = await world.row()
    assert (text_of(stream), row["completion_tokens"], row["withheld_tokens"]) == ("word", 1, 0)


async def test_failed_answer_of_a_conversation_is_billed(world: Generations):
    """Its text is in the conversation, where it can be read."""
    stream, serving = await running(world, request=conversing(), unseen=True)
    world.engine.fail(EngineFailed("died"))
    await serving
    row = await world.row()
    assert (text_of(stream), row["completion_tokens"], row["withheld_tokens"]) == ("word", 1, 0)


async def test_cancelled_task_settles_what_it_owes(world: Generations):
    """The process ends: the stream says so, and the row is not left open."""
    stream, serving = await running(world)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert isinstance(stream.error, Draining)
    row = await world.row()
    assert (row["state"], row["outcome"], row["completion_tokens"]) == ("settled", "cancelled", 1)


async def test_server_without_screens_answers_that_nothing_was_judged(tmp_path: Path):
    """Where a caller asks for the moderation."""
    async with generations(tmp_path, session_of=SafetySession) as world:
        world.engine.say("a")
        world.engine.finish()
        stream = await world.serve(asked(moderated=True))
        (chunk,) = controls(stream, ExtraChunk)
        assert chunk.field == "moderation"
        assert chunk.value == moderation.moderation(moderation.not_judged(), moderation.not_judged())


async def test_answer_that_had_ended_by_itself_is_whole_though_the_server_stops(world: Generations):
    """Its last token had come."""
    stream, serving = await running(world)
    world.engine.finish()
    stream.cancelled = SHUTDOWN
    await serving
    assert (stream.error, answer_of(stream).finish_reason) == (None, "stop")


async def test_deleted_answer_is_billed_and_keeps_no_text(world: Generations):
    """Neither its events nor its message's text are stored."""
    stream, serving = await running(world, request=conversing())
    stream.cancel(DELETED)
    await serving
    assert (await world.row())["completion_tokens"] == 1
    assert await world.count("events") == 0
    assert world.database.text_deleted.is_set()
    text = await world.database.read(
        lambda c: c.execute("SELECT text, status FROM messages WHERE id = 'msg_1'").fetchone()
    )
    assert text == ("", "deleted")
