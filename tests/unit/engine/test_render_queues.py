"""Short requests do not wait for long ones, and owners take turns at the threads."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from app.core import ChatRequest
from app.engine.render_queues import SHORT_BYTES, RenderQueues, is_short
from app.errors import EngineNotReady

pytestmark = pytest.mark.anyio


def asked(content: Any = "Hi", owner: str = "ada", past: Any = (), **body: Any) -> ChatRequest:
    """A request as it comes to an engine."""
    messages = [{"role": "user", "content": content}]
    return ChatRequest("r", owner, "m", {"messages": messages, **body}, 0, past=past)


LONG = "x" * (SHORT_BYTES + 1)


@pytest.mark.parametrize(
    "request_",
    [
        asked(LONG),
        asked("\u4e2d" * (SHORT_BYTES // 3 + 1)),
        asked([{"type": "text", "text": LONG}]),
        asked([{"type": "text", "text": ""}] * 1000),
        asked([{"type": "image_url", "image_url": {"url": "data:,"}}]),
        asked(tools=[{"type": "function", "function": {"name": "f"}}]),
        asked(response_format={"type": "json_object"}),
        asked(regex="a"),
        asked(ebnf="root ::= a"),
        asked(past=[range(SHORT_BYTES)]),
        asked(logit_bias={str(number): 1 for number in range(1000)}),
    ],
    ids=lambda request: str(request.body)[:60],
)
def test_what_may_take_long_is_not_short(request_: ChatRequest):
    """Long text, many parts, media, tools, grammars and a long past belong to the long queue."""
    assert not is_short(request_)


@pytest.mark.parametrize(
    "request_", [asked(), asked("x" * 8000), asked([{"type": "text", "text": "Hi"}]), asked(temperature=0.5)]
)
def test_an_ordinary_question_is_short(request_: ChatRequest):
    """A question with a few pages of text waits for none that is longer."""
    assert is_short(request_)


async def test_a_short_request_does_not_wait_for_long_ones():
    """While every thread of the long queue is busy and more wait, a short request is converted."""
    queues, gate = RenderQueues(), threading.Event()
    busy = [asyncio.create_task(queues.run(lambda _: gate.wait(10), asked(LONG))) for _ in range(20)]
    await asyncio.sleep(0)
    assert await queues.run(lambda request: request.owner, asked(owner="bob")) == "bob"
    assert not any(task.done() for task in busy)
    gate.set()
    await asyncio.gather(*busy)
    queues.close()


async def test_owners_take_turns():
    """An owner's only request is converted before the many that another owner sent earlier."""
    queues, gate = RenderQueues(), threading.Event()
    order: list[str] = []

    def convert(request: ChatRequest) -> None:
        gate.wait(10)
        order.append(request.owner)

    many = [asyncio.create_task(queues.run(convert, asked(LONG, "ada"))) for _ in range(30)]
    await asyncio.sleep(0)
    lonely = asyncio.create_task(queues.run(convert, asked(LONG, "bob")))
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*many, lonely)
    assert order.index("bob") < 10
    queues.close()


async def test_a_request_that_is_given_up_leaves_its_turn_to_the_next():
    """Cancelled requests, waiting or running, hold no thread once their work has ended."""
    queues, gate = RenderQueues(), threading.Event()
    tasks = [asyncio.create_task(queues.run(lambda _: gate.wait(10), asked(LONG))) for _ in range(20)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    gate.set()
    assert await queues.run(lambda _: "converted", asked(LONG)) == "converted"
    queues.close()


async def test_what_a_conversion_raises_is_raised():
    """A refusal comes through, and the thread is free again."""
    queues = RenderQueues()
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            await queues.run(lambda _: 1 / 0, asked())
    assert await queues.run(lambda _: 1, asked()) == 1
    queues.close()


async def test_whoever_waits_when_the_queues_close_is_told():
    """What runs goes on; all that wait, and whoever comes later, are refused, and none waits for ever."""
    queues, gate, begun = RenderQueues(), threading.Event(), threading.Semaphore(0)

    def convert(_: ChatRequest) -> str:
        begun.release()
        gate.wait(10)
        return "converted"

    tasks = [asyncio.create_task(queues.run(convert, asked(LONG, f"owner {i}"))) for i in range(20)]
    await asyncio.to_thread(begun.acquire)
    queues.close()
    gate.set()
    async with asyncio.timeout(10):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results.count("converted") >= 1
    assert {type(result) for result in results} == {str, EngineNotReady}
    with pytest.raises(EngineNotReady):
        await queues.run(convert, asked())
