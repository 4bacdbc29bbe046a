"""How much prompt the engine may have before it at once: a window that opens and closes by TTFT.

In tokens of prompts that were let in and have no first token yet. It begins small, doubles with
each window of first tokens in time until one comes late, and from then on grows by one step a
window (additive increase, multiplicative decrease, as TCP's: Chiu and Jain, 1989). A herd after
a restart meets a narrow window; a running node has one as wide as its TTFT target bears.
"""

from __future__ import annotations

import math

from app.admission.throughput import Throughput

STEP_TOKENS = 2048
"""The window after a start, its least, and what it grows by."""
LEAST_TOKENS = 64
"""What a request counts at least: each costs something, however short its prompt."""
DECREASE = 0.7


class PrefillWindow:
    """The window. `target_s` is the time from being let in to the first token."""

    def __init__(self, target_s: float, widest_tokens: int) -> None:
        self._target_s = target_s
        self._widest = max(widest_tokens, STEP_TOKENS)
        self.waiting_tokens = 0
        """Let in, and without a first token."""
        self._prefill = Throughput(self._widest / target_s, 0.0)
        self.reset()

    def reset(self) -> None:
        """Narrow the window: the engine has just started. What it had before it is lost with it."""
        self.window_tokens = float(STEP_TOKENS)
        self._threshold = math.inf
        self._closed_at_s = -math.inf
        self._limiting = False

    def has_room(self, tokens: int) -> bool:
        """Whether a prompt of so many uncached tokens may go to the engine now; a single one always."""
        open_ = not self.waiting_tokens or self.waiting_tokens + self.size(tokens) <= self.window_tokens
        self._limiting = self._limiting or not open_
        return open_

    def soon_tokens(self, age_s: float) -> int:
        """What may wait for the prefill alone, at the pace of late: for half of the target, less its age."""
        left_s = max(self._target_s / 2 - age_s, 0.0)
        return int(self._prefill.tokens_per_s * left_s) - self.waiting_tokens

    @staticmethod
    def size(tokens: int) -> int:
        """What a prompt counts."""
        return max(tokens, LEAST_TOKENS)

    def enter(self, tokens: int, now_s: float) -> bool:
        """Let a prompt in; whether it has others before it."""
        before = self.waiting_tokens > 0
        if not before:
            # From here on it is measured, not since the last burst.
            self._prefill.advance(now_s, waiting=False)
        self.waiting_tokens += self.size(tokens)
        return before

    def leave(self, tokens: int) -> None:
        """A prompt ended without a first token."""
        self.waiting_tokens -= self.size(tokens)

    def started(self, tokens: int, admitted_s: float, now_s: float, *, queued_behind: bool) -> None:
        """A prompt has its first token. Late ones count where they had others before them."""
        size = self.size(tokens)
        self._prefill.advance(
            now_s, waiting=self._limiting
        )  # a window that holds nobody back measures nothing
        self._prefill.freed(size if self._limiting else 0)
        wide = self._limiting or 2 * self.waiting_tokens >= self.window_tokens
        self.waiting_tokens -= size
        if now_s - admitted_s > self._target_s:
            if (
                queued_behind and admitted_s >= self._closed_at_s
            ):  # once for those let in before it was narrowed
                self.window_tokens = max(self.window_tokens * DECREASE, STEP_TOKENS)
                self._threshold = self.window_tokens
                self._closed_at_s = now_s
        elif wide:  # a window that nobody fills says nothing about a wider one
            slow = self.window_tokens >= self._threshold
            self.window_tokens += STEP_TOKENS * size / self.window_tokens if slow else size
            self.window_tokens = min(self.window_tokens, self._widest)
        if not self.waiting_tokens:
            self._limiting = False
