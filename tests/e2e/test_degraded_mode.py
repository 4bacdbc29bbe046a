"""Degraded mode over real sockets: step by step up and down, what each does and tells."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.core import ChatRequest, KeyTerms
from app.engine.scripted.engine import Script, ScriptedEngine
from app.errors import Overloaded
from app.routing.degraded_mode import Step
from app.runtime import Runtime
from app.store import keys
from app.store.key_table import now_us
from tests.support.servers import Serve, Served, chat
from tests.support.sse_client import Connection, Stream, until

SMALL = "scripted-small"
POOL = 1000


def script(request: ChatRequest) -> Script:
    """Requests with a seed never end by themselves."""
    endless = "seed" in request.body
    return Script(tokens=1000, fault="hang" if endless else "", fault_after=1)


class SmallPool(ScriptedEngine):
    """An engine with little memory."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._card = dataclasses.replace(self._card, kv_capacity_tokens=POOL)


class Pressed:
    """A server whose large engine is full for as long as the test wants."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.waiting: list[Connection] = []
        self._held: Stream | None = None

    async def begin(self) -> None:
        """Fill the engine, and have others wait."""
        self._held = await self.served.open(chat("hold", seed=1, max_tokens=950, ignore_eos=True))
        for _ in range(2):
            await self.wait()

    async def wait(self) -> Connection:
        """Send a request that waits."""
        queue = self.served.runtime.backends.large.admission.queue
        before = len(queue)
        connection = await Connection.to(self.served.port)
        body = chat("hello", stream=False, max_tokens=300)
        await connection.request("POST", "/v1/chat/completions", body, {"x-no-degrade": "1"})
        await until(lambda: len(queue) > before)
        self.waiting.append(connection)
        return connection

    async def end(self) -> None:
        """Let them have their turn."""
        assert self._held is not None
        self.served.stream(self._held.id).cancel("cancelled")
        for connection in self.waiting:
            await connection.response()
            connection.close()

    async def step(self, step: Step) -> None:
        """Wait until the mode is there."""
        mode = self.served.runtime.degrade
        assert mode is not None
        await until(lambda: mode.step is step, 20)

    async def ask(self, *, model: str = "scripted", max_tokens: int = 900, **headers: str) -> Any:
        """Ask for a long answer, in one piece."""
        return await self.served.post(
            chat("hello", model=model, stream=False, max_tokens=max_tokens), **headers
        )

    @property
    def steps(self) -> list[str]:
        """Where it went."""
        return [line["step"] for line in self.served.logged("degraded")]


@pytest.fixture
async def pressed(serve: Serve) -> AsyncIterator[Pressed]:
    """A small model beside the full one; steps follow in tenths of a second."""
    served = await serve(
        script,
        engine_type=SmallPool,
        small_model="scripted:tokens=1000",
        queue_standard_s=60.0,
        max_queued_requests=3,
        ttft_target_s=100.0,
        degrade_rise_s=0.4,
        degrade_fall_s=0.2,
        degrade_short_tokens=50,
    )
    await until(lambda: served.runtime.backends.small and served.runtime.backends.small.ready)
    made = Pressed(served)
    yield made
    for connection in made.waiting:
        connection.close()


def go_to(runtime: Runtime, step: Step) -> None:
    """Have degraded mode gone so far, and stay there, though nothing presses."""
    assert runtime.degrade is not None
    runtime.degrade.step, runtime.degrade._fall_s = step, math.inf


async def test_short_then_small_then_refused_and_back(pressed: Pressed) -> None:
    """Each step is told in headers, lists and `/readyz`; none is jumped over, up or down."""
    served = pressed.served
    assert not {"x-degraded", "x-served-model"} & set((await pressed.ask()).headers)
    await pressed.begin()

    await pressed.step(Step.SHORT)
    models = (await served.call("GET", "/api/models")).json()["data"]
    assert [model["degraded"] for model in models] == [True, False]

    await pressed.step(Step.SMALL)
    answer = await pressed.ask()
    assert answer.headers["x-degraded"] == "short-output, small-model"
    assert answer.headers["x-served-model"] == answer.json()["model"] == SMALL
    assert answer.json()["usage"]["completion_tokens"] == 50
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    again = await served.call("GET", f"/v1/chat/completions/{answer.headers['x-request-id']}")
    assert again.headers["x-degraded"] == "short-output, small-model"
    stream = await served.open(chat("hello"))
    assert stream.head.headers["x-degraded"] == "short-output, small-model"
    assert (await stream.to_end()).content()

    await pressed.step(Step.REFUSE)
    assert (await served.call("GET", "/readyz")).json()["degraded"]["step"] == "refuse"
    refused = await pressed.ask(x_no_degrade="1")
    assert refused.refusal()[:2] == (503, "overloaded")
    assert (refused.headers["x-degraded"], "x-served-model" in refused.headers) == ("refused", False)
    assert int(refused.headers["retry-after"]) >= 1
    metrics = (await served.call("GET", "/metrics")).body.decode().splitlines()
    assert "tokenring_degraded_step 3.0" in metrics
    assert 'tokenring_degraded_requests_total{done="small-model"} 2.0' in metrics
    assert 'tokenring_degraded_requests_total{done="refused"} 1.0' in metrics

    await pressed.end()
    await pressed.step(Step.NORMAL)
    answer = await pressed.ask()
    assert (answer.status, answer.json()["model"]) == (200, "scripted")
    assert not {"x-degraded", "x-served-model"} & set(answer.headers)
    assert pressed.steps == ["short", "small", "refuse", "small", "short", "normal"]


async def test_token_ids_stay_with_the_model_of_their_vocabulary(serve: Serve) -> None:
    """A prompt of text may go to the small model; one of ids is answered by its own, and shorter."""
    served = await serve(Script(tokens=1000), small_model="scripted:tokens=1000", degrade_short_tokens=50)
    await until(lambda: served.runtime.backends.small and served.runtime.backends.small.ready)
    go_to(served.runtime, Step.SMALL)
    for prompt, model in (("one two", SMALL), ([1, 2], "scripted")):
        body = {"model": "scripted", "prompt": prompt, "max_tokens": 100}
        answer = await served.call("POST", "/v1/completions", body)
        assert (answer.headers["x-served-model"], answer.json()["model"]) == (model, model)
        assert answer.json()["usage"]["completion_tokens"] == 50
    auto = await served.call("POST", "/v1/completions", {"model": "auto", "prompt": [1, 2]})
    assert auto.refusal() == (400, "unsupported_parameter", "prompt")


async def test_what_the_mode_leaves_alone(pressed: Pressed) -> None:
    """Requests to the small model, and answers short enough by themselves."""
    go_to(pressed.served.runtime, Step.SHORT)
    answer = await pressed.ask(model=SMALL)
    assert ("x-degraded" in answer.headers, answer.json()["usage"]["completion_tokens"]) == (False, 900)
    assert "x-degraded" not in (await pressed.ask(max_tokens=50)).headers
    insisted = await pressed.ask(x_no_degrade="1")
    assert ("x-degraded" in insisted.headers, insisted.json()["usage"]["completion_tokens"]) == (False, 900)
    cut = await pressed.ask()
    assert (cut.headers["x-degraded"], cut.headers["x-served-model"]) == ("short-output", "scripted")
    assert cut.json()["usage"]["completion_tokens"] == 50


async def test_a_key_may_insist_for_all_its_requests(pressed: Pressed) -> None:
    """`degrade` off; one request may still say otherwise."""
    runtime = pressed.served.runtime
    issued = await runtime.database.write(lambda c: keys.create(c, KeyTerms("k", degrade="off"), now_us()))
    await runtime.keys.load()
    go_to(runtime, Step.SHORT)
    bearer = {"authorization": f"Bearer {issued.text}"}
    assert "x-degraded" not in (await pressed.ask(**bearer)).headers
    assert "x-degraded" in (await pressed.ask(**bearer, x_no_degrade="0")).headers


async def test_what_is_routed_to_the_large_model_is_degraded_too(pressed: Pressed) -> None:
    """Both are told: why it was to be the large one, and what was done then."""
    go_to(pressed.served.runtime, Step.SMALL)
    answer = await pressed.ask(model="auto", x_route="large")
    assert answer.headers["x-route-reason"] == "large; asked"
    assert answer.headers["x-degraded"] == "short-output, small-model"
    assert answer.headers["x-served-model"] == answer.json()["model"] == SMALL


async def test_a_small_model_that_is_away_or_full_takes_nothing(pressed: Pressed) -> None:
    """Then the large one answers, shorter."""
    go_to(pressed.served.runtime, Step.SMALL)
    assert pressed.served.runtime.small_engine is not None
    await pressed.served.runtime.small_engine.aclose()
    answer = await pressed.ask()
    assert (answer.headers["x-degraded"], answer.json()["model"]) == ("short-output", "scripted")


async def test_a_shortened_answer_takes_the_room_there_is(serve: Serve) -> None:
    """Without `max_tokens` no request is too long that was not before."""
    served = await serve(Script(tokens=100, context=64), degrade_short_tokens=40)
    assert served.runtime.degrade is not None
    go_to(served.runtime, Step.SHORT)
    answer = await served.post(chat("word " * 50, stream=False))
    assert answer.headers["x-degraded"] == "short-output"
    assert 0 < answer.json()["usage"]["completion_tokens"] < 40
    assert (await served.post(chat("word " * 70, stream=False))).refusal()[1] == "context_length_exceeded"


async def test_the_mode_can_be_off(serve: Serve) -> None:
    """Then there is none, and the queue refuses as ever."""
    served = await serve(degrade="off")
    assert served.runtime.degrade is None
    assert "degraded" not in (await served.call("GET", "/readyz")).json()
    assert not (await served.call("GET", "/api/models")).json()["data"][0]["degraded"]


async def test_a_refusal_by_the_small_model_is_none_of_this_mode(
    pressed: Pressed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queue is its own, and so is what it is asked for."""

    async def full(*_args: Any, **_options: Any) -> None:
        raise Overloaded("full")

    await pressed.begin()
    await pressed.step(Step.REFUSE)
    small = pressed.served.runtime.backends.small
    assert small is not None
    monkeypatch.setattr(small.admission, "admit", full)
    refused = await pressed.ask(model=SMALL)
    assert refused.refusal()[:2] == (503, "overloaded")
    assert "x-degraded" not in refused.headers
    await pressed.end()
