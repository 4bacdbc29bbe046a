"""Several prompts of one request: what becomes of those that only begin when all are stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from app.core import ChatRequest
from app.errors import Cancelled, EngineFailed, ServingError
from app.intake.several_prompts import SeveralPrompts
from app.stream.token_stream import TokenStream


class Stream:
    """A stream that the test opens and ends; one that waits is refused when it is cancelled."""

    def __init__(self, request: ChatRequest) -> None:
        self.request = request
        self.error: ServingError | None = None
        self.cancelled: str | None = None
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended = asyncio.Event()

    async def status_sent(self) -> None:
        await self._opened

    async def ended(self) -> None:
        await self._ended.wait()

    def open(self) -> None:
        """Admit it."""
        self._opened.set_result(None)

    def end(self, error: ServingError | None = None) -> None:
        """Its last event."""
        self.error = error
        self._ended.set()

    def cancel(self, reason: str) -> None:
        self.cancelled = self.cancelled or reason
        if not self._opened.done():
            self._opened.set_exception(Cancelled("The request was cancelled while it waited."))
        self._ended.set()


def chat(number: int) -> ChatRequest:
    """A prompt."""
    return ChatRequest(f"r{number}", "ada", "m", {}, 0)


class World:
    """Three prompts, of which the first was begun."""

    def __init__(self) -> None:
        self.streams = {"r0": Stream(chat(0))}
        self.may_begin = asyncio.Event()
        first, others = cast(TokenStream, self.streams["r0"]), [chat(1), chat(2)]
        self.prompts = SeveralPrompts(first, others, self._begin, lambda: "again")
        self.answered = asyncio.create_task(self.prompts.answered())

    async def _begin(self, request: ChatRequest) -> TokenStream:
        await self.may_begin.wait()
        stream = self.streams[request.request_id] = Stream(request)
        return cast(TokenStream, stream)

    async def ends(self) -> Sequence[Any]:
        """The streams of the answer."""
        async with asyncio.timeout(5.0):
            return await self.answered


async def turns() -> None:
    """Let everything go on as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_prompt_that_begins_after_its_client_left_is_stopped() -> None:
    """Nobody would read it."""
    world = World()
    world.streams["r0"].open()
    await turns()
    world.prompts.leave()
    world.may_begin.set()
    await world.ends()
    assert [stream.cancelled for stream in world.streams.values()] == ["disconnect"] * 3


@pytest.mark.parametrize("begun", [True, False], ids=["waiting", "beginning"])
async def test_the_error_of_a_prompt_is_told_and_not_the_end_of_those_that_waited(*, begun: bool) -> None:
    """They were stopped for it."""
    world = World()
    world.streams["r0"].open()
    if begun:
        world.may_begin.set()
    await turns()
    world.streams["r0"].end(EngineFailed("lost"))
    await turns()
    world.may_begin.set()
    assert [stream.request.request_id for stream in await world.ends()] == ["r0"]
