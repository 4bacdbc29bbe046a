"""A restart of the server loses no stream: what SIGTERM cuts goes on when its client returns."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from app.engine.scripted.engine import scripted_text
from tests.support.servers import ServerProcess, Spawn, chat
from tests.support.sse_client import Response, Stream, Transcript, fetch, open_stream, until

PATH = "/api/chat/completions"
TOKENS = 120
SLOW = f"rate=20,tokens={TOKENS}"
"""For six seconds: a stop meets it in its middle."""
FAST = f"rate=400,tokens={TOKENS}"


async def cut(stream: Stream) -> Transcript:
    """What a client has of a stream when its connection ends; the stream itself has not ended."""
    async with stream:
        try:
            async for _ in stream.events():
                pass
        except ConnectionResetError:
            pass
    transcript = stream.transcript
    transcript.check_ids()
    assert not transcript.done
    assert transcript.errors == []
    return transcript


async def attached(port: int, stream: Stream) -> Stream:
    """The stream of a client that returns with what it has, as soon as the server has opened its store."""
    async with asyncio.timeout(10):
        while True:
            try:
                again = await open_stream(port, stream_id=stream.id, after=stream.transcript.last_id)
            except AssertionError as error:
                if not str(error).startswith("503"):
                    raise
            else:
                again.transcript = stream.transcript
                return again


async def returned(port: int, stream: Stream) -> Transcript:
    """The rest of a stream, for a client that returns with what it has."""
    async with await attached(port, stream) as again:
        return await again.to_end()


def rows(tmp_path: Path, query: str) -> list[tuple[Any, ...]]:
    """What a query finds in the store of the servers."""
    connection = sqlite3.connect(tmp_path / "data" / "tokenring.db")
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def bills(tmp_path: Path) -> dict[str, tuple[Any, ...]]:
    """Each request's state, outcome and tokens, by id."""
    query = "SELECT id, state, outcome, prompt_tokens, completion_tokens, withheld_tokens FROM requests"
    return {request_id: tuple(bill) for request_id, *bill in rows(tmp_path, query)}


async def stop(process: ServerProcess, streams: Sequence[Stream]) -> None:
    """SIGTERM, as the clients of these streams see it; the process exits with 0."""
    process.terminate()
    await asyncio.gather(*map(cut, streams))
    assert await process.exit_status(60) == 0


async def test_every_stream_goes_on_where_it_was_cut(spawn: Spawn, tmp_path: Path):
    """16 streams, a stop in their middle, a start: every client has the text of an undisturbed answer.

    The log of either process has counts and ids alone.
    """
    process = await spawn(SLOW, "--drain-timeout-s", "1")
    port = await process.ready()
    streams = [await open_stream(port, chat(f"aardvarks? {number}", seed=number)) for number in range(16)]
    await asyncio.gather(*(stream.read_events(4) for stream in streams))
    await stop(process, streams)
    assert not process.noise
    assert {bill[0] for bill in bills(tmp_path).values()} == {"reserved"}
    before = [stream.transcript.last_id for stream in streams]
    again = await spawn(FAST)
    port = await again.ready()
    transcripts = await asyncio.gather(*(returned(port, stream) for stream in streams))
    for seed, (transcript, last_id) in enumerate(zip(transcripts, before, strict=True)):
        assert transcript.content() == "".join(scripted_text(seed, 0, TOKENS))
        assert transcript.finish_reasons == {0: "stop"}
        assert transcript.done
        assert transcript.last_id > last_id
    again.terminate()
    assert await again.exit_status() == 0
    settled = bills(tmp_path)
    assert set(settled) == {stream.id for stream in streams}
    assert {(*bill[:2], *bill[3:]) for bill in settled.values()} == {("settled", "stop", TOKENS, 0)}
    assert rows(tmp_path, "SELECT requests, completion_tokens FROM usage_daily") == [(16, 16 * TOKENS)]
    assert rows(tmp_path, "SELECT * FROM suspended") == []
    assert not [line for process in (process, again) for line in process.log if line["level"] == "error"]
    assert not [line for line in again.log if line["event"] == "ledger_differs"]
    log = repr([*process.log, *again.log])
    assert "aardvark" not in log
    assert scripted_text(0, 0, 1)[0].strip() + " " + scripted_text(0, 0, 2)[1].strip() not in log


VARIANTS: dict[str, list[dict[str, Any]]] = {
    "": [
        {"n": 2},
        {"n": 2, "stream_options": {"continuous_usage_stats": True}},
        {"stop": ["a string that never comes"]},
        {"store": False},
    ],
    ",reasoning=50": [{}],
    ",tool=weather": [{}],
}
"""What each script is asked for at once."""


@pytest.mark.parametrize("script", VARIANTS, ids=["requests", "reasoning", "a tool"])
async def test_all_of_an_answer_goes_on(spawn: Spawn, script: str):
    """Choices, reasoning, tool calls and usage are those of an undisturbed answer, stored or not."""
    process = await spawn(SLOW + script, "--drain-timeout-s", "0.5")
    port = await process.ready()
    bodies = [
        chat(**{"stream_options": {"include_usage": True}} | parameters) for parameters in VARIANTS[script]
    ]
    streams = [await open_stream(port, body) for body in bodies]
    await asyncio.gather(*(stream.read_events(4) for stream in streams))
    await stop(process, streams)
    port = await (await spawn(FAST + script)).ready()
    for body, stream in zip(bodies, streams, strict=True):
        resumed = await returned(port, stream)
        async with await open_stream(port, body) as undisturbed:
            whole = await undisturbed.to_end()
        assert resumed.text == whole.text, body
        assert resumed.finish_reasons == whole.finish_reasons, body
        assert resumed.usage is not None, body
        assert whole.usage is not None, body
        assert resumed.usage["completion_tokens"] == whole.usage["completion_tokens"], body
        assert resumed.usage["prompt_tokens"] == whole.usage["prompt_tokens"], body


async def test_what_a_client_has_left_goes_on_where_it_may_come_back(spawn: Spawn, tmp_path: Path):
    """With the sign an unread stream is suspended and resumed; without it the answer has ended before."""
    process = await spawn(SLOW, "--drain-timeout-s", "0.2", "--abandon-grace-s", "0.1")
    port = await process.ready()
    body = chat(store=False)
    signed = await open_stream(port, body, headers={"x-resume": "1"})
    unsigned = await open_stream(port, body)
    for stream in (signed, unsigned):
        await stream.read_events(4)
        stream.connection.close()
    await process.logged("request")
    await stop(process, [])
    port = await (await spawn(FAST)).ready()
    assert (await returned(port, signed)).content() == "".join(scripted_text(0, 0, TOKENS))
    await until(lambda: bills(tmp_path)[signed.id][0] == "settled")
    ends = {request_id: bill[:2] for request_id, bill in bills(tmp_path).items()}
    assert ends == {signed.id: ("settled", "stop"), unsigned.id: ("settled", "abort")}
    assert bills(tmp_path)[unsigned.id][3] < TOKENS


async def test_a_stored_conversation_goes_on_after_it(spawn: Spawn, tmp_path: Path):
    """While its answer is suspended, a new turn is told to wait; afterwards it continues the whole answer."""
    process = await spawn(SLOW, "--drain-timeout-s", "0.2")
    stream = await open_stream(await process.ready(), chat())
    await stream.read_events(4)
    conversation = stream.head.headers["x-conversation-id"]
    await stop(process, [stream])
    port = await (again := await spawn(FAST)).ready()
    turn = chat("and then?", conversation_id=conversation, stream=False)
    busy = await fetch(port, "POST", PATH, turn)
    assert busy.refusal() == (409, "conversation_busy", "conversation_id")
    assert stream.id in busy.error()["message"]
    await returned(port, stream)
    answer = await fetch(port, "POST", PATH, turn)
    assert answer.status == 200
    view = (await fetch(port, "GET", f"/api/conversations/{conversation}")).json()
    said = [message for message in view["messages"] if message["role"] == "assistant"]
    assert [message["status"] for message in said] == ["complete", "complete"]
    assert said[0]["content"] == "".join(scripted_text(0, 0, TOKENS))
    again.terminate()
    assert await again.exit_status() == 0


async def test_the_same_post_goes_on_with_its_idempotency_key(spawn: Spawn, tmp_path: Path):
    """An answer in one piece is refused while the server stops, and whole when its request comes again."""
    process = await spawn(SLOW, "--drain-timeout-s", "0.5")
    port = await process.ready()
    headers = {"idempotency-key": "once"}
    body = chat(stream=False)
    waiting = asyncio.create_task(fetch(port, "POST", PATH, body, headers))
    stream = await open_stream(port, chat("streamed"), headers={"idempotency-key": "streamed"})
    await stream.read_events(4)
    process.terminate()
    refused, _ = await asyncio.gather(waiting, cut(stream))
    assert refused.refusal() == (503, "draining", None)
    assert int(refused.headers["retry-after"]) > 0
    assert await process.exit_status() == 0
    port = await (again := await spawn(FAST)).ready()
    conflict = await fetch(port, "POST", PATH, chat("other"), headers)
    assert conflict.refusal() == (409, "idempotency_key_reused", "Idempotency-Key")
    answer = await fetch(port, "POST", PATH, body, headers)
    assert answer.json()["choices"][0]["message"]["content"] == "".join(scripted_text(0, 0, TOKENS))
    last_id = {"idempotency-key": "streamed", "last-event-id": str(stream.transcript.last_id)}
    async with await open_stream(port, chat("streamed"), headers=last_id) as rest:
        rest.transcript = stream.transcript
        transcript = await rest.to_end()
    assert (transcript.content(), transcript.done) == ("".join(scripted_text(0, 0, TOKENS)), True)
    assert len(bills(tmp_path)) == 2
    again.terminate()
    assert await again.exit_status() == 0


async def test_two_clients_that_return_at_once_start_one_continuation(spawn: Spawn, tmp_path: Path):
    """Each has the whole rest; the ledger has one request."""
    process = await spawn(SLOW, "--drain-timeout-s", "0.2")
    stream = await open_stream(await process.ready(), chat())
    await stream.read_events(4)
    await stop(process, [stream])
    port = await (again := await spawn(FAST)).ready()
    readers = await asyncio.gather(
        *(open_stream(port, stream_id=stream.id, after=stream.transcript.last_id) for _ in range(5))
    )
    contents = set()
    for reader in readers:
        async with reader:
            contents.add((await reader.to_end()).content())
    assert {stream.transcript.content() + rest for rest in contents} == {"".join(scripted_text(0, 0, TOKENS))}
    again.terminate()
    assert await again.exit_status() == 0
    assert [bill[:2] for bill in bills(tmp_path).values()] == [("settled", "stop")]


async def test_a_client_that_returns_while_the_engine_loads_waits_with_its_stream(spawn: Spawn):
    """It has its headers and heartbeats at once, and the rest of its answer when the model is there."""
    process = await spawn(SLOW, "--drain-timeout-s", "0.2")
    stream = await open_stream(await process.ready(), chat())
    await stream.read_events(4)
    await stop(process, [stream])
    again = await spawn(f"{FAST},start_s=5", "--heartbeat-s", "0.1")
    port = await again.port()
    waiting = await attached(port, stream)
    assert (await fetch(port, "GET", "/readyz")).status == 503
    async with waiting:
        transcript = await waiting.to_end()
    assert transcript.content() == "".join(scripted_text(0, 0, TOKENS))
    assert transcript.done


async def test_a_stream_is_suspended_as_often_as_the_server_stops(spawn: Spawn, tmp_path: Path):
    """A stop while it goes on, and one while its engine loads, suspend it again; it has one bill."""
    process = await spawn(SLOW, "--drain-timeout-s", "0.2")
    stream = await open_stream(await process.ready(), chat(n=2))
    await stream.read_events(6)
    await stop(process, [stream])
    for script in (SLOW, f"{SLOW},start_s=60", SLOW):
        process = await spawn(script, "--drain-timeout-s", "0.3")
        port = await process.port() if "start_s" in script else await process.ready()
        await stop(process, [await attached(port, stream)])
    process = await spawn(FAST)
    transcript = await returned(await process.ready(), stream)
    for choice in range(2):
        assert transcript.content(choice) == "".join(scripted_text(0, choice, TOKENS))
    process.terminate()
    assert await process.exit_status() == 0
    (bill,) = bills(tmp_path).values()
    assert (*bill[:2], *bill[3:]) == ("settled", "stop", 2 * TOKENS, 0)


async def test_a_kill_of_the_process_that_goes_on_settles_at_the_checkpoint(spawn: Spawn, tmp_path: Path):
    """Exactly once: the stream then ends as one whose process died, behind what its client has."""
    process = await spawn(SLOW, "--drain-timeout-s", "0.2")
    stream = await open_stream(await process.ready(), chat())
    await stream.read_events(4)
    await stop(process, [stream])
    process = await spawn(SLOW)
    again = await open_stream(await process.ready(), stream_id=stream.id, after=stream.transcript.last_id)
    again.transcript = stream.transcript
    await again.read_events(4)
    await until(lambda: rows(tmp_path, "SELECT * FROM suspended") == [])
    process.process.kill()
    await process.process.wait()
    again.connection.close()
    port = await (last := await spawn(FAST)).ready()
    assert [line["requests"] for line in last.log if line["event"] == "reconciled"] == [1]
    async with await open_stream(port, stream_id=stream.id, after=0) as replay:
        transcript = await replay.to_end()
    assert transcript.errors[0]["code"] == "interrupted"
    assert "".join(scripted_text(0, 0, TOKENS)).startswith(transcript.content())
    last.terminate()
    assert await last.exit_status() == 0
    (bill,) = bills(tmp_path).values()
    assert bill[:2] == ("settled", "interrupted")
    assert rows(tmp_path, "SELECT requests FROM usage_daily") == [(1,)]


async def test_a_kill_before_anybody_returned_keeps_the_stream(spawn: Spawn, tmp_path: Path):
    """What is suspended stays so, however the next process ends."""
    process = await spawn(SLOW, "--drain-timeout-s", "0.2")
    stream = await open_stream(await process.ready(), chat())
    await stream.read_events(4)
    await stop(process, [stream])
    process = await spawn(FAST)
    await process.ready()
    process.process.kill()
    await process.process.wait()
    transcript = await returned(await (await spawn(FAST)).ready(), stream)
    assert transcript.content() == "".join(scripted_text(0, 0, TOKENS))


REFUSED_RETURNS = (
    ("last-event-id", "999999", "invalid_last_event_id"),
    ("x-plain-events", "7", "invalid_value"),
)


async def test_a_return_that_is_refused_has_nothing_go_on(spawn: Spawn):
    """A suspended answer whose reader is refused stays suspended; it goes on when somebody can read it."""
    process = await spawn(SLOW, "--drain-timeout-s", "0.2")
    body, known = chat(), {"idempotency-key": "k"}
    stream = await open_stream(await process.ready(), body, headers=known)
    await stream.read_events(4)
    await stop(process, [stream])
    port = await (process := await spawn(SLOW)).ready()
    for header, value, code in REFUSED_RETURNS:
        for refused in (
            await fetch(port, "GET", f"{PATH}/{stream.id}", None, {header: value}),
            await fetch(port, "POST", PATH, body, {**known, header: value}),
        ):
            assert refused.refusal()[1] == code
        assert (await fetch(port, "GET", "/readyz")).json()["live_streams"] == 0
    async with await open_stream(port, stream_id=stream.id, after=stream.transcript.last_id):
        assert (await fetch(port, "GET", "/readyz")).json()["live_streams"] == 1


async def test_a_stream_that_nobody_asks_for_is_settled(spawn: Spawn, tmp_path: Path):
    """It ends with what was released of it, and its prompt is gone."""
    process = await spawn(SLOW, "--drain-timeout-s", "0.2")
    stream = await open_stream(await process.ready(), chat("a question that is kept for the restart"))
    await stream.read_events(4)
    await stop(process, [stream])
    assert rows(tmp_path, "SELECT count(*) FROM suspended") == [(1,)]
    process = await spawn(FAST, "--suspend-timeout-s", "0.1")
    port = await process.ready()
    await process.logged("suspended_expired")
    async with await open_stream(port, stream_id=stream.id, after=stream.transcript.last_id) as late:
        transcript = await late.to_end()
    assert transcript.errors[0]["code"] == "interrupted"
    process.terminate()
    assert await process.exit_status() == 0
    assert rows(tmp_path, "SELECT count(*) FROM suspended") == [(0,)]
    (bill,) = bills(tmp_path).values()
    assert bill[:2] == ("settled", "interrupted")


async def test_a_suspended_stream_can_be_stopped(spawn: Spawn, tmp_path: Path):
    """By each way it is settled at what was released, and what was kept for it is deleted."""
    process = await spawn(SLOW, "--drain-timeout-s", "0.2")
    port = await process.ready()
    streams = [await open_stream(port, chat(f"question {number}")) for number in range(3)]
    await asyncio.gather(*(stream.read_events(4) for stream in streams))
    await stop(process, streams)
    process = await spawn(FAST)
    port = await process.ready()
    cancelled, deleted, forgotten = streams
    for path in (
        f"{PATH}/{cancelled.id}",
        f"/v1/chat/completions/{deleted.id}",
        f"/api/conversations/{forgotten.head.headers['x-conversation-id']}",
    ):
        assert (await fetch(port, "DELETE", path)).status == 200
    await until(lambda: {bill[0] for bill in bills(tmp_path).values()} == {"settled"})
    process.terminate()
    assert await process.exit_status() == 0
    assert rows(tmp_path, "SELECT count(*) FROM suspended") == [(0,)]
    kept = rows(tmp_path, "SELECT DISTINCT id FROM requests, events WHERE seq = request_seq")
    assert {request_id for (request_id,) in kept} == {cancelled.id, forgotten.id}
    settled = bills(tmp_path)
    assert set(settled) == {stream.id for stream in streams}
    assert all(0 < bill[3] - bill[4] < TOKENS for bill in settled.values())


async def test_a_revoked_key_goes_on_with_nothing(spawn: Spawn, tmp_path: Path):
    """The stream of a key that was revoked meanwhile ends truthfully."""
    process = await spawn(SLOW, "--drain-timeout-s", "0.2", TOKENRING_API_KEY="admin")
    port = await process.ready()
    admin = {"authorization": "Bearer admin"}

    async def key() -> Response:
        return await fetch(port, "POST", "/api/admin/keys", {"name": "ann", "owner": "ann"}, admin)

    first, second = (await key()).json(), (await key()).json()
    ann = {"authorization": f"Bearer {first['key']}"}
    stream = await open_stream(port, chat(), headers=ann)
    await stream.read_events(4)
    await stop(process, [stream])
    port = await (process := await spawn(FAST, TOKENRING_API_KEY="admin")).ready()
    assert (await fetch(port, "DELETE", f"/api/admin/keys/{first['id']}", headers=admin)).status == 200
    others = {"authorization": f"Bearer {second['key']}", "last-event-id": str(stream.transcript.last_id)}
    answer = await fetch(port, "GET", f"{PATH}/{stream.id}", headers=others)
    assert '"code":"interrupted"' in answer.body.decode()
    process.terminate()
    assert await process.exit_status() == 0
    (bill,) = bills(tmp_path).values()
    assert bill[:2] == ("settled", "interrupted")


async def test_a_watched_prompt_goes_on_under_the_same_terms(spawn: Spawn, tmp_path: Path):
    """With safety on, the answer is screened again from its first token, and released once."""
    process = await spawn(SLOW, "--drain-timeout-s", "0.3", "--safety", "on")
    stream = await open_stream(await process.ready(), chat(), headers={})
    await stream.read_events(4)
    await stop(process, [stream])
    transcript = await returned(await (await spawn(FAST, "--safety", "on")).ready(), stream)
    assert transcript.content() == "".join(scripted_text(0, 0, TOKENS))
    assert transcript.done


async def test_a_second_signal_suspends_at_once(spawn: Spawn, tmp_path: Path):
    """An impatient second SIGTERM waits for no stream, and loses none."""
    process = await spawn(SLOW)
    stream = await open_stream(await process.ready(), chat())
    await stream.read_events(4)
    process.terminate()
    await process.logged("draining")
    await stop(process, [stream])
    transcript = await returned(await (await spawn(FAST)).ready(), stream)
    assert transcript.content() == "".join(scripted_text(0, 0, TOKENS))
