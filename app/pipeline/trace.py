"""The counts and timings of one request, for its one log line and the metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from app.core import ChatRequest, Counts, Delta, FinishReason, Prompt
from app.metering.traffic import Timings


class Stage(NamedTuple):
    """A stage of a request, and its times on the monotonic clock."""

    name: str
    begins_s: float
    ends_s: float


class Trace:
    """The counts, times and end of one request; never its text."""

    def __init__(
        self,
        request: ChatRequest,
        counts: Mapping[int, Counts] | None = None,
        finish_reasons: Mapping[int, FinishReason] | None = None,
        *,
        key_id: str | None = None,
    ) -> None:
        """`counts` and `finish_reasons` are those of a continued answer; `key_id` is that of a stored key."""
        self._request = request
        self._key_id = key_id
        self._received_s = time.monotonic() - request.placement.socket_wait_s
        self._rendered_s: float | None = None
        self._admitted_s: float | None = None
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None
        self._finish_reasons: dict[int, FinishReason] = dict(finish_reasons or {})
        self._error: str | None = None
        self._prompt_tokens = 0
        self.counts: dict[int, Counts] = dict(counts or {})

    def rendered(self, prompt: Prompt) -> None:
        """The prompt is known."""
        self._prompt_tokens = prompt.billed_tokens
        self._rendered_s = time.monotonic()

    def admitted(self) -> None:
        """The request was admitted to the engine."""
        self._admitted_s = time.monotonic()

    def record(self, delta: Delta) -> None:
        """The engine has generated a delta."""
        self.counts[delta.choice] = delta.counts
        if self._first_token_s is None and delta.token_ids:
            self._first_token_s = time.monotonic()

    def record_finish(self, delta: Delta) -> None:
        """A choice's last delta is released."""
        assert delta.finish_reason is not None
        self._finish_reasons[delta.choice] = delta.finish_reason
        self._last_token_s = time.monotonic()

    def failed(self, code: str) -> None:
        """The request ended in an error."""
        self._error = code

    @property
    def stopped(self) -> bool:
        """True if a choice was stopped before it had ended by itself."""
        return "abort" in self._finish_reasons.values()

    @property
    def finish(self) -> str:
        """The end of the request: an error's code, or the choices' finish reasons."""
        return self._error or self._reasons or "abort"

    @property
    def _reasons(self) -> str:
        return ",".join(sorted(set(self._finish_reasons.values())))

    @property
    def unfinished(self) -> list[int]:
        """The choices that have no finish reason yet."""
        return [choice for choice in range(self._request.n) if choice not in self._finish_reasons]

    @property
    def traceparent(self) -> str:
        """The trace of its caller."""
        return self._request.traceparent

    def stages(self) -> list[Stage]:
        """The stages that it has reached; the last lasts until now."""
        begins = {
            "receive": self._received_s,
            "queue": self._rendered_s,
            "prefill": self._admitted_s,
            "decode": self._first_token_s,
            "settle": self._last_token_s,
        }
        reached = [(name, at_s) for name, at_s in begins.items() if at_s is not None]
        ends_s = [*(at_s for _, at_s in reached[1:]), time.monotonic()]
        return [Stage(name, at_s, end_s) for (name, at_s), end_s in zip(reached, ends_s, strict=True)]

    def timings(self) -> Timings:
        """The times until now, in seconds."""
        return Timings(
            queue_s=self._since_received(self._admitted_s),
            ttft_s=self._since_received(self._first_token_s),
            prefix_hit=self._prefix_hit,
            tpot_s=self._tpot_s(),
            total_s=time.monotonic() - self._received_s,
        )

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(c.completion_tokens for c in self.counts.values())

    def fields(self) -> dict[str, object]:
        """The canonical log line: ids, counts, timings in milliseconds."""
        first = self.counts.get(0, Counts())
        timings = self.timings()
        return {
            "request_id": self._request.request_id,
            "key": self._key_id,
            "model": self._request.model,
            "n": self._request.n,
            "prompt_tokens": first.prompt_tokens or self._prompt_tokens,
            "cached_tokens": first.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "finish_reason": self._reasons or None,
            "error": self._error,
            "queue_ms": _ms(timings.queue_s),
            "ttft_ms": _ms(timings.ttft_s),
            "tpot_ms": _ms(timings.tpot_s),
            "total_ms": _ms(timings.total_s),
        }

    def _since_received(self, at_s: float | None) -> float | None:
        return None if at_s is None else at_s - self._received_s

    @property
    def _prefix_hit(self) -> bool:
        """True if the prefix cache had half of the prompt, or more."""
        counts = next(iter(self.counts.values()), Counts())
        return 0 < counts.prompt_tokens <= 2 * counts.cached_tokens

    def _tpot_s(self) -> float | None:
        """(last token - first token) / (tokens - 1), of the longest choice."""
        steps = max((c.completion_tokens for c in self.counts.values()), default=0) - 1
        if steps < 1 or self._first_token_s is None or self._last_token_s is None:
            return None
        return (self._last_token_s - self._first_token_s) / steps


def _ms(duration_s: float | None) -> float | None:
    return None if duration_s is None else round(duration_s * 1000, 3)
