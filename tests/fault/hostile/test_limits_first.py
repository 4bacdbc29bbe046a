"""Limits come first: a key at its limit is refused by its head, and pays for everything that it sends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from typing import Any

import pytest

from app.api.http.layers import REFUSAL_DELAY_S
from app.api.routes.conversations import ConversationRoutes
from app.core import KeyTerms
from app.engine.scripted.engine import Script
from app.intake.bodies import BodyReader
from app.store import key_table, keys
from app.store.conversation_view import PAGE_MESSAGES, page
from app.store.export import VIEW
from app.store.keys import NewKey
from tests.support.clocks import unhindered_s
from tests.support.servers import Serve, Served, chat
from tests.support.sse_client import Connection, Response, until

CHAT = "/v1/chat/completions"
HUGE = 1_000_000
"""Bytes that are declared and never sent."""
SOON_S = 20.0
"""Ample for a refusal by the head; a body may take 30 s to arrive."""


async def made(served: Served, name: str, **terms: Any) -> dict[str, str]:
    """The header of a key that the server knows."""
    at_us = key_table.now_us()
    issued: NewKey = await served.runtime.database.write(
        lambda c: keys.create(c, KeyTerms(name, **terms), at_us)
    )
    await served.runtime.keys.load()
    return {"authorization": f"Bearer {issued.text}"}


async def send_head(
    served: Served, headers: dict[str, str], *, length: int, path: str = CHAT, body: bytes = b""
) -> Connection:
    """A POST with a declared length, and the beginning of its body."""
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {length}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    connection = await Connection.to(served.port)
    await connection.send("\r\n".join((*lines, "", "")).encode() + body)
    return connection


async def refused_by_head(served: Served, headers: dict[str, str], **options: Any) -> Response:
    """The answer to a head alone."""
    connection = await send_head(served, headers, length=HUGE, **options)
    try:
        async with asyncio.timeout(SOON_S):
            return await connection.response()
    finally:
        connection.close()


@pytest.mark.parametrize("path", [CHAT, "/api/chat/completions", "/v1/moderations"])
@pytest.mark.parametrize("body", [b"", b'{"messages": ['])
async def test_over_its_limit_a_key_is_refused_before_its_body(serve: Serve, path: str, body: bytes):
    """Nothing of 30 MB has to arrive, whether nothing or little of it was sent."""
    served = await serve(Script(tokens=4))
    ann = await made(served, "ann", rpm=1)
    assert (await served.post(chat(stream=False), **ann)).status == 200
    answer = await refused_by_head(served, ann, path=path, body=body)
    assert answer.refusal() == (429, "rate_limit_exceeded", None)
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{" * 20, 400),
        (b"\xff", 400),
        (json.dumps({"model": "scripted", "messages": [], "what": 1}).encode(), 400),
        (json.dumps({"model": "another", "messages": [{"role": "user", "content": "a"}]}).encode(), 404),
    ],
)
async def test_every_bad_request_is_paid_for(serve: Serve, body: bytes, status: int):
    """Three bodies that are no request are three requests; the fourth is 429, as a good one is."""
    served = await serve(Script(tokens=4))
    ann = await made(served, "ann", rpm=3)
    for left in (2, 1, 0):
        connection = await send_head(served, ann, length=len(body), body=body)
        answer = await connection.response()
        connection.close()
        assert (answer.status, answer.headers["x-ratelimit-remaining-requests"]) == (status, str(left))
    assert (await served.post(chat(stream=False), **ann)).status == 429


async def test_a_client_that_leaves_its_body_unsent_has_paid(serve: Serve):
    """And its place among the generations is free again."""
    served = await serve(Script(tokens=4))
    ann = await made(served, "ann", rpm=2, max_streams=1)
    connection = await send_head(served, ann, length=HUGE, body=b"{")
    await until(lambda: not served.runtime.limiter.has_room(served.runtime.keys.get(key_id(ann))))
    connection.close()
    await until(lambda: not served.connections)
    answer = await served.post(chat(stream=False), **ann)
    assert (answer.status, answer.headers["x-ratelimit-remaining-requests"]) == (200, "0")


def key_id(headers: dict[str, str]) -> str:
    """The id of the key in a header."""
    return headers["authorization"].removeprefix("Bearer ").rpartition("-")[0]


async def test_bodies_count_among_the_generations_at_once(serve: Serve):
    """A key that may have two has two bodies on their way at most; another key is served."""
    served = await serve(Script(tokens=4))
    ann, bob = await made(served, "ann", max_streams=2), await made(served, "bob")
    dripping = [await send_head(served, ann, length=HUGE, body=b"{") for _ in range(2)]
    await until(lambda: not served.runtime.limiter.has_room(served.runtime.keys.get(key_id(ann))))
    answer = await refused_by_head(served, ann)
    assert answer.refusal() == (429, "rate_limit_exceeded", None)
    assert int(answer.headers["retry-after"]) >= 1
    assert (await served.post(chat(stream=False), **bob)).status == 200
    for connection in dripping:
        connection.close()
    await until(lambda: served.runtime.limiter.has_room(served.runtime.keys.get(key_id(ann))))
    assert (await served.post(chat(stream=False), **ann)).status == 200


async def test_a_known_idempotency_key_attaches_at_the_limit(serve: Serve):
    """While its generation runs and after the server has forgotten it, and with another body it is 409."""
    served = await serve(Script(tokens=400, rate=400), retention_s=0)
    ann = await made(served, "ann", rpm=1, max_streams=1)
    named = {**ann, "idempotency-key": "one"}
    body = chat("hello", stream=False)
    running, attached = await asyncio.gather(
        served.post(body, **named), attach_once_live(served, body, named)
    )
    assert (running.status, attached.status) == (200, 200)
    assert attached.headers["x-request-id"] == running.headers["x-request-id"]
    await until(lambda: not served.runtime.streams.num_retained)
    stored = await served.post(body, **named)
    assert (stored.status, stored.headers["x-request-id"]) == (200, running.headers["x-request-id"])
    assert (await served.post(chat("other", stream=False), **named)).status == 409
    assert (await refused_by_head(served, ann | {"idempotency-key": "two"})).status == 429
    assert sum(served.runtime.limiter.refused["standard"].values()) == 1


async def test_under_a_known_idempotency_key_no_other_body_is_parsed(serve: Serve):
    """Whoever is let in uncharged for a known key learns that the body is another one, whatever is in it."""
    served = await serve(Script(tokens=1))
    named = {**await made(served, "ann", rpm=1), "idempotency-key": "one"}
    assert (await served.post(chat("hello", stream=False), **named)).status == 200
    for body in (b'{"model": ', b'{"a": [' + b"{}," * 90_000 + b"{}]}"):
        assert (await served.post(body, **named)).refusal()[:2] == (409, "idempotency_key_reused")


async def attach_once_live(served: Served, body: Any, headers: dict[str, str]) -> Response:
    """The same request again, once the first has begun."""
    await until(served.live)
    return await served.post(body, **headers)


# Choices


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "parameters",
    [
        {"n": 128, "max_tokens": 50},
        {"n": 128, "max_tokens": 50, "min_tokens": 7},
        {"n": 7, "max_tokens": 140, "ignore_eos": True},
        {"n": 100},
        {"n": 1},
    ],
)
async def test_choices_together_use_a_minutes_tokens_at_most(
    serve: Serve, parameters: dict[str, Any], streaming: bool
):
    """The prompt and what is released of all choices are never more than tpm; the answer says why it ends."""
    served = await serve(Script(tokens=2_000, rate=2_000))
    ann = await made(served, "ann", tpm=1_000)
    body = chat("hello", stream=streaming, stream_options={"include_usage": True}, **parameters)
    if not streaming:
        del body["stream_options"]
    answer = await served.post(body, **ann)
    assert answer.status == 200
    usage, budget, reasons = read(answer, streaming=streaming)
    released = usage["total_tokens"] - usage.get("withheld_tokens", 0)
    asked = min(parameters["n"] * parameters.get("max_tokens", 2_000) + 2, 1_000)
    assert released == asked
    assert usage["total_tokens"] <= 1_000 + parameters["n"]
    assert budget is not None or asked < 1_000
    assert set(reasons) == {"length"}
    assert (await served.post(chat(stream=False), **ann)).status == 429 or asked < 1_000


def read(answer: Response, *, streaming: bool) -> tuple[dict[str, Any], Any, list[str]]:
    """Usage, notice and finish reasons of an answer."""
    if not streaming:
        whole = answer.json()
        return whole["usage"], whole.get("budget"), [c["finish_reason"] for c in whole["choices"]]
    lines = [line[6:] for line in answer.body.decode().split("\n") if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    budget = next((chunk["budget"] for chunk in chunks if "budget" in chunk), None)
    usage = next(chunk["usage"] for chunk in chunks if chunk.get("usage"))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return usage, budget, [c["finish_reason"] for c in choices if c["finish_reason"]]


@pytest.mark.parametrize(
    ("parameters", "terms"),
    [
        ({"n": 128}, {"max_streams": 1}),
        ({"n": 2}, {"max_streams": 1}),
        ({"n": 128}, {"tpm": 100}),
        ({"n": 4, "min_tokens": 30}, {"tpm": 100}),
        ({"n": 2, "max_tokens": 60, "ignore_eos": True}, {"tpm": 100}),
    ],
)
async def test_what_can_never_fit_is_refused(serve: Serve, parameters: dict[str, Any], terms: Any):
    """429 without Retry-After: the same request would not fit later either."""
    served = await serve(Script(tokens=4))
    ann = await made(served, "ann", **terms)
    answer = await served.post(chat(stream=False, **parameters), **ann)
    assert answer.refusal() == (429, "rate_limit_exceeded", None)
    assert answer.headers["x-should-retry"] == "false"


async def test_two_choices_fit_a_key_of_four_generations(serve: Serve):
    """As OpenAI's clients ask; beside them two more, and no third."""
    served = await serve(Script(tokens=1_000, rate=200))
    ann = await made(served, "ann", max_streams=4)
    first, second = [await served.open(chat(n=2), headers=ann) for _ in range(2)]
    assert (await served.post(chat(stream=False), **ann)).status == 429
    await served.call("DELETE", f"/api/chat/completions/{first.id}", **ann)
    await first.to_end()
    await until(lambda: len(served.live()) == 1)
    assert (await served.post(chat(stream=False, n=2, max_tokens=2), **ann)).status == 200
    await served.call("DELETE", f"/api/chat/completions/{second.id}", **ann)
    await second.to_end()


# Reads


def hold_clock(served: Served) -> None:
    """Have no time pass for the count of reads, however slow the machine is."""
    now_s = served.runtime.reads._clock_s()
    served.runtime.reads._clock_s = lambda: now_s


READS = (
    "/api/conversations",
    "/api/conversations?q=word",
    "/api/conversations/conv-1",
    "/api/conversations/conv-1/export",
    "/api/usage",
    "/api/usage?group_by=metadata.project",
    "/v1/chat/completions/chatcmpl-1",
    "/api/chat/completions/chatcmpl-1",
)


async def test_floods_of_reads_are_429(serve: Serve):
    """All kinds together, by owner; chat and other owners are not touched."""
    served = await serve(Script(tokens=4), max_reads_per_s=2.0)
    hold_clock(served)
    ann, bob = await made(served, "ann"), await made(served, "bob")
    answers = [await served.call("GET", READS[i % len(READS)], **ann) for i in range(40)]
    limited = [answer for answer in answers if answer.status == 429]
    assert len(limited) >= 40 - 20 - 10
    assert {answer.status for answer in answers} <= {200, 404, 429}
    for answer in limited:
        assert answer.refusal() == (429, "rate_limit_exceeded", None)
        assert int(answer.headers["retry-after"]) >= 1
    assert served.runtime.limiter.refused["standard"]["reads"] == len(limited)
    assert (await served.post(chat(stream=False), **ann)).status == 200
    for path in READS:
        assert (await served.call("GET", path, **bob)).status in (200, 404)


async def test_one_owners_slow_reads_leave_the_store_to_chat(serve: Serve):
    """While one owner's reads hang, others read, and chat continues conversations."""
    served = await serve(Script(tokens=4))
    ann, bob = await made(served, "ann"), await made(served, "bob")
    first = (await served.post(chat(stream=False), **bob)).json()
    hanging, let_go = threading.Event(), threading.Event()

    def hang(_connection: Any) -> None:
        hanging.set()
        let_go.wait()

    async def slow() -> None:
        async with served.runtime.reads.slot("ann"):
            await served.runtime.database.read(hang)

    slow_reads = [asyncio.create_task(slow()) for _ in range(20)]
    try:
        await asyncio.to_thread(hanging.wait)
        async with asyncio.timeout(SOON_S):
            assert (await served.call("GET", "/api/conversations", **bob)).status == 200
            again = chat(stream=False, conversation_id=first["conversation_id"])
            assert (await served.post(again, **bob)).status == 200
            assert (await served.post(chat(stream=False), **ann)).status == 200
    finally:
        let_go.set()
        await asyncio.gather(*slow_reads)


async def test_every_page_of_an_export_waits_for_its_turn(serve: Serve):
    """An export that is longer than a page reads none beside another read of its owner, and then all."""
    served = await serve(Script(tokens=4))
    ann = await made(served, "ann")
    messages = [{"role": "user", "content": str(i)} for i in range(PAGE_MESSAGES + 10)]
    turn = await served.post(chat(stream=False, store=True, messages=messages), **ann)
    owner = served.runtime.keys.get(key_id(ann)).owner
    database, conversation_id = served.runtime.database, turn.headers["x-conversation-id"]
    outline = await database.read(lambda c: VIEW.outline(c, owner, conversation_id))
    runtime = served.runtime
    bodies = BodyReader(runtime.backends, max_bytes=0, timeout_s=1)
    routes = ConversationRoutes(runtime, bodies)
    chunks = routes._chunks(owner, outline, VIEW, await routes._page(owner, outline, 0))
    written = [await anext(chunks), await anext(chunks)]
    async with served.runtime.reads.slot(owner):
        second = asyncio.ensure_future(anext(chunks))
        await database.read(lambda c: page(c, outline, PAGE_MESSAGES))
        await asyncio.wait([second], timeout=0.2)
        assert not second.done()
    written.append(await second)
    written += [piece async for piece in chunks]
    assert len(json.loads(b"".join(written))["messages"]) == len(messages) + 1


async def test_floods_of_attaching_requests_are_paced(serve: Serve):
    """A request that attaches is given back what it was charged, and counts among the reads instead."""
    served = await serve(Script(tokens=4), max_reads_per_s=0.5)
    hold_clock(served)
    ann = await made(served, "ann", rpm=10)
    named = {**ann, "idempotency-key": "one"}
    answers = [await served.post(chat(stream=False), **named) for _ in range(30)]
    assert {answer.status for answer in answers} == {200, 429}
    assert [answer.status for answer in answers].count(200) < 12
    assert served.runtime.limiter.refused["standard"]["reads"] > 0


async def test_floods_of_refusals_are_slowed_and_answers_are_not(serve: Serve):
    """On each connection a refusal a second, with a key and without; another key is answered at once."""
    served = await serve(Script(tokens=4))
    ann, bob = await made(served, "ann", rpm=1), await made(served, "bob")
    assert (await served.post(chat(stream=False), **ann)).status == 200
    refused = [0]

    async def flood(headers: dict[str, str]) -> None:
        async with await Connection.to(served.port) as connection:
            while True:
                await connection.request("POST", CHAT, chat(stream=False), headers)
                assert (await connection.response()).status in (401, 429)
                refused[0] += 1

    flooding = [asyncio.create_task(flood(headers)) for headers in (ann, {}) for _ in range(10)]
    try:
        await until(lambda: refused[0] >= 100, timeout_s=60)
        began, began_s = refused[0], asyncio.get_running_loop().time()
        for _ in range(20):
            assert (await served.post(chat(stream=False), **bob)).status == 200
        took_s = asyncio.get_running_loop().time() - began_s
        # A hundred a second for each of the two, and a second's wait on each of twenty connections.
        assert refused[0] - began <= 20 + 220 * (took_s + 1)
    finally:
        for task in flooding:
            task.cancel()
        await asyncio.gather(*flooding, return_exceptions=True)


async def refusals(served: Served, headers: dict[str, str]) -> None:
    """One after the other, for ever, on connections that the server may close."""
    while True:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            async with await Connection.to(served.port) as connection:
                while True:
                    await connection.request("GET", "/api/usage?month=none", None, headers)
                    await connection.response()


@pytest.mark.parametrize("max_connections", [0, 12])
async def test_a_flood_of_refusals_delays_and_displaces_nobody(serve: Serve, max_connections: int):
    """Without a key, and with another: one's own refusals come at once, and on connections of one's own."""
    served = await serve(Script(tokens=4), max_connections=max_connections, max_reads_per_s=0)
    ann, bob = await made(served, "ann"), await made(served, "bob")
    flooding = [asyncio.create_task(refusals(served, who)) for who in (ann, {}) for _ in range(12)]
    try:
        await asyncio.sleep(2 * REFUSAL_DELAY_S)  # each has had its hundred, and the rest is held
        for _ in range(5):
            began_s = unhindered_s()
            answer = await served.call("GET", "/api/usage?month=none", **bob)
            assert answer.status == 400, answer.body
            assert unhindered_s() - began_s < REFUSAL_DELAY_S
    finally:
        for task in flooding:
            task.cancel()
        await asyncio.gather(*flooding, return_exceptions=True)
