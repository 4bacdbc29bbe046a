"""Choices without SGLang: sinks that note what they take, and an engine that is lost when a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from app.core import Counts
from app.engine.sglang.live_choices import LiveChoice, LiveChoices, Replay
from app.engine.sink import TokenTally
from app.errors import ServingError


class NotingSink:
    """Keeps the steps that it takes."""

    def __init__(self, prompt_tokens: int = 5) -> None:
        self.counts = Counts(prompt_tokens)
        self.text = ""
        self.token_ids: list[int] = []
        self.steps: list[tuple[str, list[int], Counts]] = []
        self.finish: dict[str, Any] | None = None
        self.error: ServingError | None = None

    def take(
        self,
        text: str,
        token_ids: Sequence[int],
        finish: dict[str, Any] | None,
        counts: Counts,
        batch: Any,
        row: int,
    ) -> None:
        """See ChoiceSink."""
        del batch, row
        assert self.finish is None
        assert self.error is None
        self.counts = counts
        self.text += text
        self.token_ids += token_ids
        self.steps.append((text, list(token_ids), counts))
        self.finish = finish

    def fail(self, error: ServingError) -> None:
        """See ChoiceSink."""
        self.error = error


def choice(
    name: str, prior: Sequence[int] = (), index: int = 0, prompt_tokens: int = 5, max_tokens: int = 100
) -> LiveChoice:
    """A choice of the request `name`, with a sink that notes."""
    params = SimpleNamespace(max_new_tokens=max_tokens)
    request = SimpleNamespace(input_ids=[1] * prompt_tokens, sampling_params=params)
    return LiveChoice(f"{name}-{index:03d}", request, NotingSink(prompt_tokens), TokenTally(), prior)


class VirtualTime:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, pause_s: float) -> None:
        """Let `pause_s` pass at once."""
        self.now_s += pause_s
        await asyncio.sleep(0)


class FakeEngine:
    """An engine for `Recovery`. `on_submit` generates, or loses the engine, as a test says."""

    def __init__(self, live: LiveChoices) -> None:
        self.live = live
        self.restarts = 0
        self.failing_starts = 0
        self.start_s = 0.0
        """Seconds that a start takes, of `time`."""
        self.time = VirtualTime()
        self.submitted: list[str] = []
        self.is_back = False
        self.reason: str | None = None
        self.on_submit: Callable[[LiveChoice], None] = self.generate

    def generate(self, sent: LiveChoice, tokens: int = 20) -> None:
        """Have the engine hand over all it has again, and some more."""
        self.live.pop(sent.rid)
        self.live.running[sent.rid] = sent
        known = list(sent.known_ids)
        ids = [*known, *(65 for _ in range(tokens))]
        Replay(sent).take(bytes(ids).decode("utf-8", "replace"), ids, None, Counts(5, len(ids)), (None, 0))

    async def restart(self) -> None:
        """See Restartable."""
        self.restarts += 1
        await self.time.sleep(self.start_s)
        if self.failing_starts:
            self.failing_starts -= 1
            raise RuntimeError("no GPU")

    async def submit(self, sent: LiveChoice) -> None:
        """See Restartable."""
        self.submitted.append(sent.rid)
        self.live.running[sent.rid] = sent
        self.on_submit(sent)

    def recovered(self) -> None:
        """See Restartable."""
        self.is_back = True

    def fail_permanently(self, reason: str) -> None:
        """See Restartable."""
        self.reason = reason
