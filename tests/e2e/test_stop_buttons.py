"""Stop buttons of real clients: they close the stream and call no route; the place is free, the bill ends."""

from __future__ import annotations

import asyncio
import shutil
import signal
from typing import Any

import aiohttp
import pytest

from app.core import KeyTerms
from app.engine.scripted.engine import Script, scripted_text
from app.store import key_table, keys
from tests.support.sdks import Case, Sdk
from tests.support.servers import Serve, Served, chat
from tests.support.sse_client import Connection, Response, open_stream, until

V1 = "/v1/chat/completions"
ENDLESS = Script(rate=50, tokens=30_000)
FREE_S = 5.0
"""Seconds after which a client that was stopped must hold nothing any more."""

# The first test of an SDK may have to install it.
pytestmark = pytest.mark.timeout(300)


async def one_at_a_time(served: Served, **terms: Any) -> str:
    """A key with one place, known to the server."""
    at_us = key_table.now_us()
    issued = await served.runtime.database.write(
        lambda c: keys.create(c, KeyTerms("ann", max_streams=1, **terms), at_us)
    )
    await served.runtime.keys.load()
    return issued.text


async def ask(served: Served, key: str, **headers: str) -> Response:
    """A short question of the same key, in one piece."""
    body = chat(stream=False, max_tokens=2)
    return await served.call("POST", V1, body, authorization=f"Bearer {key}", **headers)


async def bill(served: Served, stream_id: str) -> tuple[str, int]:
    """How the ledger says that a request ended, and the tokens of its answer."""
    sql = "SELECT outcome, completion_tokens FROM requests WHERE id = ?"
    outcome, tokens = await served.runtime.database.read(lambda c: c.execute(sql, (stream_id,)).fetchone())
    return outcome, tokens


async def check_stopped(served: Served, key: str, stream_id: str) -> None:
    """Within 5 s the engine is idle and the place is free; what is billed is what was generated, no more."""
    await until(lambda: not served.live(), FREE_S)
    assert served.running == 0
    assert (await ask(served, key)).status == 200
    outcome, tokens = await bill(served, stream_id)
    [line] = [line for line in served.logged("request") if line["request_id"] == stream_id]
    assert (outcome, line["cancelled"]) == ("abort", "disconnect")
    headers = {"authorization": f"Bearer {key}"}
    read = await served.call("GET", f"{V1}/{stream_id}", **headers)
    text = "".join(scripted_text(0, 0, tokens))
    assert read.json()["choices"][0]["message"]["content"] == text
    assert read.json()["usage"]["completion_tokens"] == tokens == line["completion_tokens"] > 0
    assert not served.runtime.balance.differs


async def test_the_stop_of_an_sdk(sdk: Sdk, serve: Serve):
    """OpenAI's SDKs close the stream: `close()` in Python, the abort signal in Node."""
    served = await serve(ENDLESS)
    key = await one_at_a_time(served)
    seen = await sdk.run(served.port, Case("stop", "stop", bool, api_key=key))
    assert "crash" not in seen, (sdk.version, seen)
    await check_stopped(served, key, seen["id"])


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_an_interrupted_curl(serve: Serve):
    """Ctrl-C."""
    served = await serve(ENDLESS)
    key = await one_at_a_time(served)
    body = '{"model": "scripted", "stream": true, "messages": [{"role": "user", "content": "hello"}]}'
    command = ("curl", "-sN", "--noproxy", "*", "-H", f"authorization: Bearer {key}", "-d", body)
    url = f"http://127.0.0.1:{served.port}{V1}"
    curl = await asyncio.create_subprocess_exec(*command, url, stdout=asyncio.subprocess.PIPE)
    assert curl.stdout is not None
    await curl.stdout.readuntil(b"id: 5\n")
    [stream] = served.live()
    curl.send_signal(signal.SIGINT)
    await curl.wait()
    await check_stopped(served, key, stream.request_id)


async def test_the_stop_of_open_webui(serve: Serve):
    """Its back end cancels the task that reads, and closes the response of aiohttp and the session."""
    served = await serve(ENDLESS)
    key = await one_at_a_time(served)
    started = asyncio.Event()

    async def passed_on() -> None:
        session = aiohttp.ClientSession(trust_env=False)
        headers = {"authorization": f"Bearer {key}"}
        url = f"http://127.0.0.1:{served.port}{V1}"
        response = await session.request("POST", url, json=chat(), headers=headers)
        try:
            async for line in response.content:
                if line == b"id: 5\n":
                    started.set()
        finally:
            response.close()
            await session.close()

    task = asyncio.create_task(passed_on())
    await started.wait()
    [stream] = served.live()
    task.cancel()
    await asyncio.wait([task])
    await check_stopped(served, key, stream.request_id)


async def left(served: Served, key: str, **headers: str) -> str:
    """The id of a stream whose client has read a little of it and has left."""
    named = {"authorization": f"Bearer {key}"} | {k.replace("_", "-"): v for k, v in headers.items()}
    stream = await open_stream(served.port, chat(), headers=named, path=V1)
    await stream.read_events(3)
    stream.connection.close()
    await until_grace(served, stream.id)
    return stream.id


async def until_grace(served: Served, stream_id: str) -> None:
    """Wait for the grace period to begin: the last reader is gone some loop turns earlier."""
    await until(lambda: served.runtime.streams.grace_left_s(stream_id) is not None)


SIGNS = {
    "a key of idempotency": {"idempotency_key": "k"},
    "Last-Event-ID": {"last_event_id": "0"},
    "x-resume": {"x_resume": "1"},
}


@pytest.mark.parametrize("headers", SIGNS.values(), ids=SIGNS)
async def test_a_sign_keeps_the_answer(serve: Serve, headers: dict[str, str]):
    """What says that the client may come back gives it the long grace."""
    served = await serve(ENDLESS, abandon_grace_s=0)
    stream_id = await left(served, await one_at_a_time(served), **headers)
    assert served.stream(stream_id).cancelled is None
    assert served.runtime.streams.grace_left_s(stream_id) > 20


async def test_a_conversation_keeps_the_answer(serve: Serve):
    """`store: true` under /v1; under /api it is so by default."""
    served = await serve(ENDLESS, abandon_grace_s=0)
    for path, body in ((V1, chat(store=True)), ("/api/chat/completions", chat())):
        stream = await served.open(body, path=path)
        await stream.read_events(3)
        stream.connection.close()
        await until_grace(served, stream.id)
        assert served.runtime.streams.grace_left_s(stream.id) > 20


async def test_a_key_may_always_keep_its_answers(serve: Serve):
    """The key's term `resume` is `always`; a request may still say that nobody comes back."""
    served = await serve(ENDLESS, abandon_grace_s=0)
    key = await one_at_a_time(served, resume="always")
    stream_id = await left(served, key)
    assert served.runtime.streams.grace_left_s(stream_id) > 20
    served.stream(stream_id).cancel("cancelled")
    await until(lambda: not served.live())
    stream_id = await left(served, key, x_resume="0")
    await until(lambda: not served.live(), FREE_S)
    assert served.stream(stream_id).cancelled == "disconnect"


async def test_a_word_against_every_sign(serve: Serve):
    """`x-resume: 0` stops an answer that is stored and has an Idempotency-Key, as its client leaves."""
    served = await serve(ENDLESS, abandon_grace_s=0)
    headers = {"x-resume": "0", "idempotency-key": "k"}
    stream = await served.open(chat(), headers=headers)
    await stream.read_events(3)
    stream.connection.close()
    await until(lambda: not served.live(), FREE_S)
    wrong = await served.post(chat(), x_resume="soon")
    assert wrong.refusal() == (400, "invalid_value", "x-resume")


async def test_who_comes_back_in_the_short_grace_goes_on(serve: Serve):
    """The stream goes on as before; who has come back once has the long grace from then on."""
    served = await serve(ENDLESS)
    key = await one_at_a_time(served)
    stream_id = await left(served, key)
    assert 0 < served.runtime.streams.grace_left_s(stream_id) <= 3
    named = {"authorization": f"Bearer {key}", "accept": "text/event-stream"}
    again = await open_stream(served.port, stream_id=stream_id, after=3, headers=named, path=V1)
    await again.read_events(20)
    assert again.transcript.ids[0] > 3
    # Its first event opened it, the next two had a word each. What came meanwhile is in one frame.
    assert "".join(scripted_text(0, 0, 200)[2:]).startswith(again.transcript.content())
    again.connection.close()
    await until_grace(served, stream_id)
    assert served.runtime.streams.grace_left_s(stream_id) > 20


@pytest.mark.parametrize(("headers", "kept"), [({}, False), ({"x-resume": "1"}, True)])
async def test_who_leaves_an_answer_in_one_piece(serve: Serve, headers: dict[str, str], kept: bool):
    """It has no id to come back with: it stops at once, or goes on where it was asked to."""
    served = await serve(ENDLESS)
    key = await one_at_a_time(served)
    connection = await Connection.to(served.port)
    body = chat(stream=False)
    await connection.request("POST", V1, body, {"authorization": f"Bearer {key}", **headers})
    await until(lambda: served.live() and served.live()[0].last_id > 5)
    [stream] = served.live()
    connection.close()
    if kept:
        await until_grace(served, stream.request_id)
        assert served.runtime.streams.grace_left_s(stream.request_id) > 20
    else:
        await check_stopped(served, key, stream.request_id)


async def test_the_refusal_names_what_runs_and_how_to_stop_it(serve: Serve):
    """429: the ids of this key's answers alone, the route, and the seconds until the place is free."""
    served = await serve(ENDLESS)
    ann, bob = await one_at_a_time(served), await one_at_a_time(served)
    other = await left(served, bob)
    stream_id = await left(served, ann)
    refused = await ask(served, ann)
    assert refused.refusal() == (429, "rate_limit_exceeded", None)
    message, path = refused.error()["message"], f"{V1}/{stream_id}/cancel"
    assert f"has 1: {stream_id}. Stop one, as with POST {path}, or try again" in message
    assert other not in message
    assert 1 <= int(refused.headers["retry-after"]) <= 4
    await asyncio.sleep(int(refused.headers["retry-after"]))
    assert served.stream(stream_id).cancelled == "disconnect"
    await until(lambda: not served.live())  # its last write, which a busy disk makes longer
    assert (await ask(served, ann)).status == 200


async def test_the_route_in_the_refusal_frees_the_place(serve: Serve):
    """What the message says can be done as it stands."""
    served = await serve(ENDLESS)
    key = await one_at_a_time(served)
    await left(served, key, x_resume="1")
    message = (await ask(served, key)).error()["message"]
    path = message.partition("POST ")[2].partition(",")[0]
    stopped = await served.call("POST", path, authorization=f"Bearer {key}")
    assert stopped.json()["cancelled"]
    await until(lambda: not served.live())
    assert (await ask(served, key)).status == 200


async def test_a_sign_for_every_request_holds_no_more_than_the_places(serve: Serve):
    """Answers that were left count as long as they go on: leaving makes no room for more of them."""
    served = await serve(ENDLESS)
    key = await one_at_a_time(served)
    first = await left(served, key, idempotency_key="k0")
    refusals = [await ask(served, key, idempotency_key=f"k{i}") for i in range(1, 4)]
    assert [(r.status, first in r.error()["message"]) for r in refusals] == [(429, True)] * 3
    assert len(served.live()) == 1
    served.runtime.streams._grace_over(served.stream(first))
    await until(lambda: not served.live())
    assert (await ask(served, key)).status == 200


async def test_the_key_of_an_abandoned_answer_gives_that_answer(serve: Serve):
    """The same POST is not generated and billed again: it has what was generated, and it says why it ends."""
    served = await serve(ENDLESS, resume_grace_s=0.1)
    key = await one_at_a_time(served)
    stream_id = await left(served, key, idempotency_key="k")
    await until(lambda: not served.live())
    headers = {"authorization": f"Bearer {key}", "idempotency-key": "k"}
    async with await open_stream(served.port, chat(), headers=headers, path=V1) as again:
        transcript = await again.to_end()
    _, tokens = await bill(served, stream_id)
    assert again.id == stream_id
    assert transcript.content() == "".join(scripted_text(0, 0, tokens))
    whole = await served.call("GET", f"{V1}/{stream_id}", **headers)
    assert whole.json()["abandoned"]["message"].startswith("The client left and did not return in time")
    assert len(served.logged("request")) == 1
