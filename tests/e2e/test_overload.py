"""A full server over real sockets: what those are told who cannot wait, and what is seen of those who do."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.core import ChatRequest, KeyTerms
from app.engine.scripted.engine import Script, ScriptedEngine
from app.store import key_table, keys
from app.store.keys import NewKey
from tests.support.servers import Serve, Served, chat
from tests.support.sse_client import Connection, Response, request_bytes, until

POOL_TOKENS = 1000


class SmallPool(ScriptedEngine):
    """An engine with little memory."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._card = dataclasses.replace(self._card, kv_capacity_tokens=POOL_TOKENS)


def script(request: ChatRequest) -> Script:
    """Answers to `hold` never end by themselves."""
    holds = request.body["messages"][0]["content"] == "hold"
    return Script(tokens=10**6, fault="hang", fault_after=1) if holds else Script(tokens=4)


def ask(content: str, tokens: int, **parameters: Any) -> dict[str, Any]:
    """A request that is known to take so many tokens, and a few for its prompt."""
    return chat(content, max_tokens=tokens, ignore_eos=True, **parameters)


class Crowd:
    """A server with a small pool, what runs on it, and what waits."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.connections: list[Connection] = []

    @property
    def queue(self) -> Any:
        """The queue before the engine."""
        return self.served.runtime.backends.large.admission.queue

    async def key(self, name: str, **terms: Any) -> dict[str, str]:
        """A key, as the header that sends it."""
        at_us = key_table.now_us()
        write = self.served.runtime.database.write
        issued: NewKey = await write(lambda c: keys.create(c, KeyTerms(name, **terms), at_us))
        await self.served.runtime.keys.load()
        return {"authorization": f"Bearer {issued.text}"}

    async def hold(self, tokens: int, headers: dict[str, str] | None = None) -> None:
        """Run a request that does not end."""
        running = self._num_open()
        await self._send(ask("hold", tokens), headers)
        await until(lambda: self._num_open() > running)

    def _num_open(self) -> int:
        return sum(not stream.status_unsent for stream in self.served.live())

    async def wait(self, tokens: int, headers: dict[str, str] | None = None) -> Connection:
        """Send a request that has to wait; its connection."""
        waiting = len(self.queue)
        connection = await self._send(ask("hello", tokens, stream=False), headers)
        await until(lambda: len(self.queue) > waiting)
        return connection

    async def _send(self, body: dict[str, Any], headers: dict[str, str] | None) -> Connection:
        connection = await Connection.to(self.served.port)
        self.connections.append(connection)
        await connection.request("POST", "/api/chat/completions", body, headers)
        return connection


@pytest.fixture
async def crowd(serve: Serve, bounds: dict[str, Any]) -> AsyncIterator[Crowd]:
    """On a server with these bounds."""
    found = Crowd(await serve(script, engine_type=SmallPool, **bounds))
    yield found
    for connection in found.connections:
        connection.close()


def retry_after_s(answer: Response) -> int:
    """Seconds, whole ones, as the header says."""
    value = answer.headers["retry-after"]
    assert value.isdecimal()
    return int(value)


def check_shape(answer: Response, status: int, code: str, type_: str) -> None:
    """The one body, a request id, and a time to come back."""
    assert answer.refusal() == (status, code, None)
    assert answer.error()["type"] == type_
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"].startswith("chatcmpl-")
    assert 1 <= retry_after_s(answer) <= 120


@pytest.mark.parametrize(
    "bounds", [{"max_queued_requests": 4, "queue_standard_s": 300.0, "ttft_target_s": 300.0}]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_key_with_more_than_its_share_is_429(crowd: Crowd, stream: bool):
    """`key_overloaded`, before the first byte, also to who asks for a stream; another key may still wait."""
    ann, bob = await crowd.key("ann"), await crowd.key("bob")
    await crowd.hold(800, ann)
    await crowd.hold(30, bob)
    for _ in range(2):
        await crowd.wait(500, ann)
    refused = await crowd.served.post(ask("hello", 500, stream=stream), **ann)
    check_shape(refused, 429, "key_overloaded", "tokens")
    assert "x-should-retry" not in refused.headers
    assert "(requests running: 1, waiting: 2)" in refused.error()["message"]
    assert f"Try again in {retry_after_s(refused)} s." in refused.error()["message"]
    await crowd.wait(500, bob)


@pytest.mark.parametrize("bounds", [{"max_queued_requests": 1, "queue_standard_s": 300.0}])
async def test_a_full_server_is_503(crowd: Crowd):
    """`overloaded`, where no key is to blame."""
    await crowd.hold(900)
    await crowd.wait(500)
    refused = await crowd.served.post(ask("hello", 500))
    check_shape(refused, 503, "overloaded", "server_error")
    assert "x-should-retry" not in refused.headers
    assert f"Try again in {retry_after_s(refused)} s." in refused.error()["message"]


@pytest.mark.parametrize("bounds", [{"queue_standard_s": 300.0}])
async def test_who_still_waits_when_the_server_ends_is_told_so(crowd: Crowd):
    """`draining`, and to send it again: nobody has cancelled anything. It began to wait after the signal."""
    await crowd.hold(900)
    waiting = await crowd.wait(500)
    await crowd.served.runtime.streams.drain(0)
    assert (await waiting.response()).refusal() == (503, "draining", None)


@pytest.mark.parametrize("bounds", [{"max_queued_requests": 1, "queue_standard_s": 300.0}])
async def test_who_had_better_not_try_again_is_told_so(crowd: Crowd):
    """Once the next two minutes are promised to others: `x-should-retry: false`, and about two minutes."""
    await crowd.hold(900)
    await crowd.wait(900)
    told = []
    for number in range(40):
        refused = await crowd.served.post(ask(f"hello {number}", 900))
        check_shape(refused, 503, "overloaded", "server_error")
        if "x-should-retry" in refused.headers:
            break
        told.append(retry_after_s(refused))
    assert refused.headers["x-should-retry"] == "false"
    assert "No capacity expected" in refused.error()["message"]
    assert 108 <= retry_after_s(refused) <= 120
    assert told[0] < told[-1]


@pytest.mark.parametrize("bounds", [{"queue_standard_s": 0.3}])
async def test_who_has_waited_long_enough_is_503(crowd: Crowd):
    """`queue_timeout` after the tier's whole time, and what waited is gone."""
    await crowd.hold(900)
    waiting = await crowd.wait(10**4)
    refused = await waiting.response()
    check_shape(refused, 503, "queue_timeout", "server_error")
    assert not crowd.queue


@pytest.mark.parametrize("bounds", [{"max_queued_requests": 1, "queue_standard_s": 300.0}])
async def test_a_full_server_takes_nothing_of_a_key_s_limits(crowd: Crowd):
    """A request that is 503 counts neither as one nor as tokens."""
    ann, bob = await crowd.key("ann", rpm=2, tpm=2000), await crowd.key("bob")
    await crowd.hold(900, bob)
    await crowd.wait(500, bob)
    for _ in range(3):
        refused = await crowd.served.post(ask("hello", 1500), **ann)
        assert refused.refusal()[:2] == (503, "overloaded")
        assert refused.headers["x-ratelimit-remaining-requests"] == "2"
        assert refused.headers["x-ratelimit-remaining-tokens"] == "2000"


@pytest.mark.parametrize("bounds", [{"max_queued_requests": 1, "queue_standard_s": 300.0}])
async def test_who_waits_is_served_when_there_is_room(crowd: Crowd):
    """It gets its answer on the connection on which it waited."""
    await crowd.hold(900)
    waiting = await crowd.wait(500)
    [running] = [stream for stream in crowd.served.live() if not stream.status_unsent]
    running.cancel("cancelled")
    assert (await waiting.response()).status == 200


# What is to be seen of it


async def admission_samples(served: Served) -> dict[tuple[str, ...], float]:
    """The samples about admission by their name and the labels after the model's."""
    text = (await served.call("GET", "/metrics", authorization="Bearer root")).body.decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("tokenring_admission_"):
                assert sample.labels["model"] == "scripted"
                rest = [sample.labels[name] for name in ("tier", "code", "outcome") if name in sample.labels]
                found[(sample.name.removeprefix("tokenring_admission_"), *rest)] = sample.value
    return found


@pytest.mark.parametrize(
    "bounds",
    [{"api_key": "root", "max_queued_requests": 3, "queue_standard_s": 300.0, "queue_batch_s": 300.0}],
)
async def test_what_waits_is_in_the_metrics(crowd: Crowd):
    """By tier: how many, how much, how long; what was let in and refused; the pool and the gate."""
    ann, bob = await crowd.key("ann", tier="batch"), await crowd.key("bob")
    await crowd.hold(800, bob)
    await crowd.wait(500, ann)
    await crowd.wait(600, bob)
    refused = await crowd.served.post(ask("hello", 500), **ann)
    samples = await admission_samples(crowd.served)
    tiers = ("interactive", "standard", "batch")
    assert [samples["waiting_requests", tier] for tier in tiers] == [0, 1, 1]
    assert samples["waiting_tokens", "standard"] in range(600, 610)
    assert samples["oldest_wait_seconds", "interactive"] == 0
    assert 0 < samples["oldest_wait_seconds", "standard"] < samples["oldest_wait_seconds", "batch"] < 10
    assert [samples["admitted_total", tier] for tier in tiers] == [0, 1, 0]
    assert samples["refused_total", "batch", refused.error()["code"]] == 1
    assert sum(value for (name, *_), value in samples.items() if name == "refused_total") == 1
    assert samples["reserved_tokens",] in range(800, 810)
    assert samples["reservable_tokens",] == 980
    assert (samples["prefill_tokens",], samples["gate_tokens",]) == (0, 2048)
    assert samples["appointments_total", "kept"] == samples["unread_aborted_total",] == 0


@pytest.mark.parametrize("bounds", [{"queue_standard_s": 300.0}])
async def test_what_waits_is_in_readyz(crowd: Crowd):
    """How many wait, for how much and how long, and the gate's window; the server stays ready."""
    empty = (await crowd.served.call("GET", "/readyz")).json()["queue"]
    assert empty == {
        "waiting_requests": 0,
        "waiting_tokens": 0,
        "oldest_wait_s": 0.0,
        "gate_window_tokens": 2048,
    }
    await crowd.hold(900)
    await crowd.wait(500)
    answer = await crowd.served.call("GET", "/readyz")
    queue = answer.json()["queue"]
    assert answer.status == 200
    assert queue["waiting_requests"] == 1
    assert queue["waiting_tokens"] in range(500, 510)
    assert 0 <= queue["oldest_wait_s"] < 10


@pytest.mark.parametrize("bounds", [{"queue_standard_s": 300.0}])
async def test_streams_that_nobody_reads_make_room(crowd: Crowd):
    """One whose client has left ends as soon as another waits for its memory, and is counted."""
    await crowd.hold(900)
    [connection], [stream] = crowd.connections, crowd.served.live()
    await until(lambda: stream.readers)
    connection.close()
    await until(lambda: not stream.readers)
    assert (await crowd.served.post(ask("hello", 500, stream=False))).status == 200
    assert stream.cancelled == "disconnect"
    assert (await admission_samples(crowd.served))["unread_aborted_total",] == 1


@pytest.mark.skipif(sys.platform != "linux", reason="no other kernel is asked since when a request is here")
@pytest.mark.parametrize("bounds", [{"ttft_target_s": 3.0}])
@pytest.mark.parametrize(("busy_s", "status"), [(0.0, 200), (1.6, 503)])
async def test_a_request_that_lay_unread_is_as_old_as_it_is(crowd: Crowd, busy_s: float, status: int):
    """While the event loop is busy its socket has it; read too late, on a full server, it is refused."""
    await crowd.hold(700)
    with socket.create_connection(("127.0.0.1", crowd.served.port)) as sock:
        sock.sendall(request_bytes("POST", "/api/chat/completions", ask("hello", 10, stream=False)))
        time.sleep(busy_s)  # noqa: ASYNC251  # the server's event loop is this one
        sock.setblocking(False)
        answer = await asyncio.get_running_loop().sock_recv(sock, 100)
    assert answer.startswith(b"HTTP/1.1 %d" % status)


async def test_a_cold_server_answers_eight_long_prompts_at_once(serve: Serve):
    """20,000 words each: none is refused on a guess. A busy machine gets more time than the default."""
    served = await serve(Script(tokens=5, prefill_rate=100_000, step_s=0.001), queue_standard_s=120)
    prompts = [" ".join(f"w{word}" for word in range(number, number + 20_000)) for number in range(8)]
    answers = await asyncio.gather(*(served.post(chat(text, stream=False)) for text in prompts))
    assert [answer.status for answer in answers] == [200] * 8
