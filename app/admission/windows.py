"""Bounds on what the engine has to do at once: prompts to compute (prefill), answers that decode."""

from __future__ import annotations

import math

from app.admission.estimates import Throughput
from app.admission.tuning import AdmissionTuning


class PrefillWindow:
    """Bound on the uncached prompt tokens of admitted requests that have no first token yet.

    It begins small, doubles with each window of first tokens in time until one is late, and from then on
    grows by one step a window (additive increase, multiplicative decrease: Chiu and Jain, 1989). `target_s`
    is the time from admission to the first token.
    """

    def __init__(self, target_s: float, max_tokens: int, tuning: AdmissionTuning) -> None:
        self._target_s, self._tuning = target_s, tuning
        self._max_tokens = max(max_tokens, tuning.prefill_step_tokens)
        self.waiting_tokens = 0
        """Admitted, and without a first token."""
        self._speed = Throughput(self._max_tokens / target_s, 0.0, tuning)
        self.reset()

    def reset(self) -> None:
        """Narrow the window: the engine has just started."""
        self.window_tokens = float(self._tuning.prefill_step_tokens)
        self._threshold = math.inf
        self._narrowed_at_s = -math.inf
        self._is_full = False

    def fits(self, tokens: int) -> bool:
        """True if a prompt of so many uncached tokens may go to the engine now; a single one always."""
        return not self.waiting_tokens or self.waiting_tokens + self._size(tokens) <= self.window_tokens

    def mark_full(self) -> None:
        """Note that a request waits for this window alone: until it is empty, it measures the engine."""
        self._is_full = True

    def queueable_tokens(self, age_s: float) -> int:
        """Tokens that may wait for the prefill alone: half the target, less `age_s`, at its speed."""
        left_s = max(self._target_s / 2 - age_s, 0.0)
        return int(self._speed.tokens_per_s * left_s) - self.waiting_tokens

    def enter(self, tokens: int, now_s: float) -> bool:
        """Count an admitted prompt; returns whether others are before it."""
        queued_behind = self.waiting_tokens > 0
        if not queued_behind:  # the speed is measured from here on, not since the last burst
            self._speed.advance(now_s, waiting=False)
        self.waiting_tokens += self._size(tokens)
        return queued_behind

    def leave(self, tokens: int) -> None:
        """Count out a prompt that ended without a first token."""
        self.waiting_tokens -= self._size(tokens)

    def started(self, tokens: int, admitted_s: float, now_s: float, *, queued_behind: bool) -> None:
        """Count out a prompt that has its first token. A late one counts if others were before it."""
        size, step = self._size(tokens), self._tuning.prefill_step_tokens
        # A window that holds no request back measures no speed.
        self._speed.advance(now_s, waiting=self._is_full)
        self._speed.freed(size if self._is_full else 0)
        wide = self._is_full or 2 * self.waiting_tokens >= self.window_tokens
        self.waiting_tokens -= size
        if now_s - admitted_s > self._target_s:
            if queued_behind and admitted_s >= self._narrowed_at_s:  # once for all admitted before
                self.window_tokens = max(self.window_tokens * self._tuning.prefill_decrease, step)
                self._threshold, self._narrowed_at_s = self.window_tokens, now_s
        elif wide:  # an unfilled window says nothing about a wider one
            slow = self.window_tokens >= self._threshold
            self.window_tokens += step * size / self.window_tokens if slow else size
            self.window_tokens = min(self.window_tokens, self._max_tokens)
        if not self.waiting_tokens:
            self._is_full = False

    def _size(self, tokens: int) -> int:
        return max(tokens, self._tuning.prefill_min_tokens)


class DecodeWindow:
    """Bound on the choices that decode at once, to keep the time per output token (TPOT) within a target.

    A decode step gives each running choice one token and takes longer the more there are, and a new prompt
    waits for the step that runs. The window narrows while tokens take too long. While it holds requests back
    and there is time left, it widens: a full one to what the time left allows, another to twice, after a
    narrowing by one. Running answers are not stopped. `target_s` of 0 is no target, and the window has no
    end. With `slowdown` the target is that many times the least TPOT since the start.
    """

    def __init__(self, tuning: AdmissionTuning, target_s: float = 0.0, *, slowdown: float = 0.0) -> None:
        self._tuning = tuning
        self._fixed_target_s = target_s
        self._slowdown = slowdown
        self.reset()

    def reset(self) -> None:
        """Reset: the engine has just started."""
        first = self._tuning.decode_first_choices
        self._target_s = self._fixed_target_s
        self._smooth_s, self._least_s = 0.0, math.inf
        self.max_choices = first if self._target_s or self._slowdown else math.inf
        self._proven_choices = first
        self._narrowed = self._is_full = False
        self._tokens, self._took_s = 0, 0.0
        self._looked_s: float | None = None

    @property
    def shown(self) -> float:
        """The window as a metric shows it: 0 for one without end."""
        return 0.0 if math.isinf(self.max_choices) else self.max_choices

    def fits(self, num_choices: int, spare: float = 0.0) -> bool:
        """True if so many may run, a share of the window kept for others."""
        return num_choices <= self.max_choices * (1.0 - spare)

    def mark_full(self) -> None:
        """Note that more would run if the window were wider."""
        self._is_full = True

    def observe_decode(self, tokens: int, took_s: float, running: int, now_s: float) -> None:
        """Count tokens that a choice was given in that time, beside `running` with itself."""
        if not (self._target_s or self._slowdown):
            return
        tuning = self._tuning
        self._looked_s = now_s if self._looked_s is None else self._looked_s
        self._tokens += tokens
        self._took_s += took_s
        if now_s - self._looked_s < tuning.decode_look_s:
            return
        tpot_s = self._took_s / self._tokens
        if self._slowdown:  # smoothed, as a burst after a stall is no fast step
            weight = tuning.decode_smoothing if self._smooth_s else 1.0
            self._smooth_s += (tpot_s - self._smooth_s) * weight
            self._least_s = min(self._least_s, self._smooth_s)
            self._target_s = self._slowdown * self._least_s
        part_used = tpot_s / self._target_s
        was_full, self._is_full = self._is_full, False
        self._tokens, self._took_s, self._looked_s = 0, 0.0, now_s
        if part_used > 1.0:
            # With more running than that it was narrowed for them already.
            if 1 < running <= tuning.decode_overrun * self.max_choices:
                self._narrowed = True
                self.max_choices = max(self.max_choices * max(1.0 / part_used, tuning.decode_decrease), 1.0)
            return
        self._proven_choices = max(self._proven_choices, running)
        if part_used < tuning.decode_widen_below and was_full:
            self._widen(running, running / part_used)

    def _widen(self, running: int, safe_choices: float) -> None:
        """Let more run; `safe_choices` would be within the target were all of a step's time the choices'."""
        if self._narrowed:
            wider = self.max_choices + 1.0
        elif running >= self._tuning.decode_filled * self.max_choices:
            wider = max(self.max_choices + 1.0, safe_choices)
        else:
            wider = 2 * self.max_choices
        self.max_choices = max(
            min(wider, self._tuning.decode_unproven * self._proven_choices), self.max_choices
        )
