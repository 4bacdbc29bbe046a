"""Several prompts in one request, each a generation of its own: a few at once, as far as there is room."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from app.core import ChatRequest
from app.errors import Overloaded, RateLimited, ServingError
from app.stream.token_stream import ABANDONED, TokenStream

MAX_CHOICES_AT_ONCE = 8
"""Choices of one request that are generated at once: admission shares the engine out among requests, and one
of 128 prompts is not to fill its queue."""


class SeveralPrompts:
    """The prompts of one request. The first has been begun; the others begin once it is admitted."""

    def __init__(
        self,
        first: TokenStream,
        extra_prompts: Sequence[ChatRequest],
        begin: Callable[[ChatRequest], Awaitable[TokenStream]],
        new_id: Callable[[], str],
    ) -> None:
        """`begin` starts a prompt, and raises what it is refused with."""
        self._begin = begin
        self._new_id = new_id
        self._waiting = deque(enumerate(extra_prompts, start=1))
        self._answers = {0: first}
        self._num_at_work = max(1, min(MAX_CHOICES_AT_ONCE // first.request.n, 1 + len(extra_prompts)))
        self.begun = [first]
        """All streams, those too that were refused and tried again."""
        self._stopped: str | None = None
        """The reason for which all were stopped: what is only beginning then is stopped too."""

    async def answered(self) -> list[TokenStream]:
        """The streams of the prompts in order, ended; up to the first that failed.

        Raises what a prompt was refused with.
        """
        first = self._answers[0]
        try:
            await first.status_sent()
        except ServingError as error:
            error.with_caller_param(first.request.caller_names)
            raise
        workers = [asyncio.create_task(self._work(first))]
        workers += [asyncio.create_task(self._work()) for _ in range(1, self._num_at_work)]
        try:
            done, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
            for worker in done:
                worker.result()
        finally:
            for worker in workers:
                worker.cancel()
        return [self._answers[number] for number in sorted(self._answers)]

    def leave(self) -> None:
        """Stop all: the client has left."""
        self._stop(ABANDONED)

    def _stop(self, reason: str) -> None:
        self._stopped = self._stopped or reason
        self._waiting.clear()
        for stream in self.begun:
            stream.cancel(reason)

    async def _work(self, first: TokenStream | None = None) -> None:
        """Answer one prompt after another, until none is left or there is no room for another one."""
        if first is not None:
            await self._await_end(first)
        while self._waiting:
            number, chat = self._waiting.popleft()
            try:
                stream = self._answers[number] = await self._begin(chat)
                self.begun.append(stream)
                if self._stopped is not None:
                    stream.cancel(self._stopped)
                await self._await_end(stream)
            except ServingError as error:
                if self._stopped is not None:  # all prompts are being stopped, so this error adds nothing
                    self._answers.pop(number, None)
                    break
                if not isinstance(error, Overloaded | RateLimited) or self._num_at_work == 1:
                    error.with_caller_param(chat.caller_names)
                    raise
                # A worker that still runs takes this prompt later, when its own has ended.
                self._answers.pop(number, None)
                self._waiting.appendleft((number, dataclasses.replace(chat, request_id=self._new_id())))
                break
        self._num_at_work -= 1

    async def _await_end(self, stream: TokenStream) -> None:
        await stream.status_sent()
        await stream.ended()
        if stream.error is not None:
            self._stop("cancelled")
