"""The counts and timings of one request, for its one log line."""

from __future__ import annotations

import time

from app.core import ChatRequest, Counts, Delta, FinishReason, Prompt


class Trace:
    """What happened to one request and when; never what was said."""

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        self._received_s = time.monotonic()
        self._rendered_s: float | None = None
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None
        self._finish_reasons: dict[int, FinishReason] = {}
        self._error: str | None = None
        self._prompt_tokens = 0
        self.counts: dict[int, Counts] = {}

    def rendered(self, prompt: Prompt) -> None:
        """The prompt is known and the request admitted."""
        self._rendered_s = time.monotonic()
        self._prompt_tokens = len(prompt.token_ids)

    def saw(self, delta: Delta) -> None:
        """A delta has come from the engine."""
        self.counts[delta.choice] = delta.counts
        if self._first_token_s is None and delta.token_ids:
            self._first_token_s = time.monotonic()
        if delta.finish_reason is not None:
            self._finish_reasons[delta.choice] = delta.finish_reason
            self._last_token_s = time.monotonic()

    def failed(self, code: str) -> None:
        """The request ended in an error."""
        self._error = code

    @property
    def outcome(self) -> str:
        """How the request ended: an error's code, or the choices' finish reasons."""
        return self._error or ",".join(sorted(set(self._finish_reasons.values()))) or "abort"

    def fields(self) -> dict[str, object]:
        """The canonical log line: ids, counts, timings in milliseconds."""
        completion_tokens = sum(c.completion_tokens for c in self.counts.values())
        first = self.counts.get(0, Counts())
        return {
            "request_id": self._request.request_id,
            "model": self._request.model,
            "n": self._request.n,
            "prompt_tokens": first.prompt_tokens or self._prompt_tokens,
            "cached_tokens": first.cached_tokens,
            "completion_tokens": completion_tokens,
            "finish_reason": ",".join(sorted(set(self._finish_reasons.values()))) or None,
            "error": self._error,
            "queue_ms": _ms(self._received_s, self._rendered_s),
            "ttft_ms": _ms(self._received_s, self._first_token_s),
            "tpot_ms": self._tpot_ms(),
            "total_ms": _ms(self._received_s, time.monotonic()),
        }

    def _tpot_ms(self) -> float | None:
        """(last token - first token) / (tokens - 1), of the longest choice."""
        steps = max((c.completion_tokens for c in self.counts.values()), default=0) - 1
        if steps < 1 or self._first_token_s is None or self._last_token_s is None:
            return None
        return round((self._last_token_s - self._first_token_s) * 1000 / steps, 3)


def _ms(start_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else round((end_s - start_s) * 1000, 3)
