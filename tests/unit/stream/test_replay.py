"""Replay from the store: as it was, or as far as it is known and then a truthful end."""

from __future__ import annotations

import dataclasses

import orjson
import pytest

from app.api.openai.chat_completion import ChunkWire, completion
from app.core import Counts, Delta, ToolCall
from app.errors import (
    CODES,
    EngineFailed,
    InternalError,
    Interrupted,
    NotFound,
    ReplayExpired,
    ReplayPositionUnknown,
    ServingError,
    StorageUnavailable,
)
from app.store.events import StoredStream
from app.stream.replay import END_ID, replayed, stream_facts
from app.stream.token_stream import TokenStream
from tests.support.replays import BIG, OPENAI_USAGE, asked, frames, opened, stored, understood


def say(stream: TokenStream, *pieces: str) -> None:
    """Release text of choice 0."""
    for piece in pieces:
        stream.append(Delta(0, "text", piece, (1,), Counts()))


def finish(stream: TokenStream) -> None:
    """End a stream as the pipeline does."""
    stream.append(Delta(0, "text", "", (), Counts(), "stop"))
    stream.usage = OPENAI_USAGE
    if stream.request.include_usage:
        stream.extra_chunk("usage", OPENAI_USAGE)
    stream.close()


def kept(stream: TokenStream, **fields) -> StoredStream:
    """The stream's row with all its events."""
    segments = stream.dump(0)
    return stored(stream.request, [segments[1]] if segments else [], **fields)


def revived(row: StoredStream, after: int = 0, limit_bytes: int = BIG) -> TokenStream:
    """The stream as a route attaches to it."""
    return replayed(row, ChunkWire, limit_bytes, after)


async def answered(**fields) -> TokenStream:
    """A live stream that has ended."""
    stream = opened(asked(**fields))
    say(stream, "Hello", " wor", "ld")
    finish(stream)
    return stream


async def died() -> StoredStream:
    """The row of a stream whose process died after its fourth event was checkpointed."""
    stream = opened(asked())
    say(stream, "Hello", " wor", "ld")
    return kept(stream, finish="interrupted", reconciled=True)


@pytest.mark.parametrize("fields", [{}, {"include_usage": True}, {"conversation_id": "c", "message_id": "m"}])
async def test_ended_stream_replays_as_it_was(fields):
    """From every position the frames of a stored stream are those of the live one."""
    live = await answered(**fields)
    for after in range(live.last_id + 1):
        stream = revived(kept(live), after)
        assert stream.done
        assert not stream.refused
        assert frames(stream, after) == frames(live, after)


async def test_ended_stream_has_its_facts():
    """The request is known again as far as frames and routes need it; no prompt is."""
    live = await answered(conversation_id="conv_1", message_id="msg_1", include_usage=True, n=1)
    request = revived(kept(live)).request
    assert request == dataclasses.replace(live.request, body={})
    assert revived(kept(live)).finished_at_s is not None


async def test_position_of_the_end_is_the_last_id():
    """Who has read [DONE] is at the end; beyond it nothing was ever sent."""
    live = await answered()
    stream = revived(kept(live), live.last_id)
    assert (stream.done, stream.last_id) == (True, live.last_id)
    stream = revived(kept(live), live.last_id + 1)
    with pytest.raises(ReplayPositionUnknown):
        stream.attach(live.last_id + 1)


async def test_answer_in_one_piece_is_the_same():
    """The JSON of a stored answer is the live one's, its usage from the row."""
    live = opened(asked(n=2, logprobs=True))
    live.append(Delta(1, "reasoning", "hm", (1,), Counts()))
    live.append(Delta(0, "text", "a", (1,), Counts(), logprobs=[{"token": "a", "logprob": -0.5}]))
    live.append(Delta(1, "tool", "{}", (1,), Counts(), tool=ToolCall(0, "call_1", "weather")))
    live.append(Delta(1, "tool", "", (), Counts(), "tool_calls"))
    live.append(Delta(0, "text", "b", (1,), Counts(), "stop", matched_stop="END"))
    live.usage = OPENAI_USAGE
    live.close()
    assert completion(revived(kept(live))) == completion(live)
    assert completion(live)["usage"] == OPENAI_USAGE


async def test_error_of_a_stream_is_kept():
    """A stream that failed replays its error event, and raises the error in one piece."""
    for error in (EngineFailed("It died.", param="p"), StorageUnavailable("Full.")):
        live = opened(asked())
        say(live, "Hel")
        live.fail(error)
        stream = revived(kept(live, finish=error.code))
        assert frames(stream) == frames(live)
        with pytest.raises(ServingError) as raised:
            completion(stream)
        assert raised.value.as_body() == error.as_body()
        assert (raised.value.status, raised.value.retry_after_s) == (error.status, error.retry_after_s)


async def test_every_code_has_a_class_to_come_back_as():
    """Whatever error a stream ended in, it can be read from the store."""
    for code in CODES.keys() - {"interrupted"}:  # the one that is never stored
        live = opened(asked())
        live.fail(ServingError("It failed.", code=code))
        error = revived(kept(live)).error
        assert (error.code, error.status) == (code, CODES[code].status)


async def test_interrupted_stream_ends_in_an_error():
    """What was checkpointed, then an error with the counts and the last id known, then [DONE]."""
    row = await died()
    stream = revived(row)
    transcript = understood(frames(stream))
    assert transcript.content() == "Hello world"
    assert transcript.done
    assert not transcript.finish_reasons
    (error,) = transcript.errors
    assert error["code"] == "interrupted"
    assert error["last_event_id"] == 4
    assert error["usage"] == OPENAI_USAGE
    assert transcript.ids[-2:] == [END_ID, END_ID + 1]


async def test_choices_that_ended_before_the_process_did_keep_their_end():
    """A finish reason that was checkpointed stays as it was; the other choice has none."""
    live = opened(asked(n=2))
    live.append(Delta(1, "text", "b", (1,), Counts(), "length"))
    transcript = understood(frames(revived(kept(live, reconciled=True))))
    assert transcript.finish_reasons == {1: "length"}
    assert [error["code"] for error in transcript.errors] == ["interrupted"]


@pytest.mark.parametrize("after", [4, 5, 6, 7, 900])
async def test_client_that_knows_more_gets_the_end_alone(after):
    """At or beyond the last event known, only the error and [DONE] follow, under ids of their own."""
    stream = revived(await died(), after)
    sent = frames(stream, after)
    transcript = understood(sent)
    assert transcript.ids == [END_ID, END_ID + 1]
    assert transcript.errors[0]["last_event_id"] == 4
    assert transcript.done


async def test_whoever_has_heard_the_end_of_an_interrupted_stream_is_at_its_end():
    """An EventSource comes back with the last id until it hears 204, and no live event had that id."""
    row = await died()
    assert understood(frames(revived(row, END_ID), END_ID)).ids == [END_ID + 1]
    assert revived(row, END_ID + 1).last_id == END_ID + 1, "the routes answer 204"
    with pytest.raises(ReplayPositionUnknown):
        revived(row, END_ID + 2).attach(END_ID + 2)


async def test_interrupted_answer_in_one_piece_is_its_error():
    """There is no whole answer to give: the JSON routes say interrupted."""
    with pytest.raises(Interrupted) as raised:
        completion(revived(await died()))
    assert raised.value.status == 500
    assert raised.value.as_body()["error"]["usage"]["completion_tokens"] == OPENAI_USAGE["completion_tokens"]


async def test_died_before_its_first_checkpoint():
    """Of a stream that was never checkpointed only its end is known."""
    row = stored(asked(), [], finish="interrupted", reconciled=True)
    assert understood(frames(revived(row))).ids == [END_ID, END_ID + 1]
    assert understood(frames(revived(row, 3), 3)).errors[0]["last_event_id"] == 0


async def test_what_never_began_is_not_there():
    """A refused request has no stream."""
    with pytest.raises(NotFound) as raised:
        revived(stored(asked(), []))
    assert raised.value.code == "stream_not_found"


async def test_not_settled_yet_is_to_be_asked_for_again():
    """A client that is back before the start has settled what was left open is not told that it is gone."""
    with pytest.raises(StorageUnavailable) as raised:
        revived(stored(asked(), [], state="reserved", finish=None))
    assert raised.value.retry_after_s == 1


async def test_damaged_events_are_an_error():
    """Events that cannot be read are not replayed in part."""
    row = kept(await answered())
    with pytest.raises(InternalError, match="damaged"):
        revived(dataclasses.replace(row, segments=[row.segments[0][:-1] + b"?"]))


async def test_longer_than_the_limit_is_expired_at_its_beginning():
    """A replay takes no more memory than a live stream: its oldest events are then gone."""
    live = opened(asked())
    say(live, *(f"{number} " for number in range(5000)))
    finish(live)
    stream = revived(kept(live), limit_bytes=16 * 1024)
    assert stream.nbytes <= 16 * 1024
    with pytest.raises(ReplayExpired):
        stream.attach(0)
    assert frames(stream, live.last_id - 3) == frames(live, live.last_id - 3)
    with pytest.raises(ReplayExpired):
        completion(stream)


async def test_cancelling_a_replay_does_nothing():
    """A stored stream has nothing to stop."""
    stream = revived(kept(await answered()))
    stream.cancel("cancelled")
    assert stream.cancelled is None


def test_facts_of_a_stream_have_what_writes_its_frames_again_and_no_word_of_it():
    """Nothing but numbers, switches and ids."""
    request = asked(n=2, include_usage=True, logprobs=True)
    body = {"messages": [{"role": "user", "content": "secret words"}]}
    facts = orjson.loads(stream_facts(dataclasses.replace(request, body=body)))
    assert (facts["n"], facts["include_usage"], facts["continuous_usage"], facts["logprobs"]) == (
        2,
        True,
        False,
        True,
    )
    assert "secret" not in repr(facts)
