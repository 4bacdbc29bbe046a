"""How many choices decode at once: as many as keep the time per output token (TPOT) within a target.

A decode step gives each running choice a token and takes the longer the more there are; a prompt that
comes has to wait for the step that runs. So a target for TPOT bounds both. The window narrows while tokens
take too long. While it holds requests back and there is time left it widens: a full one to what the time left
allows, another by twice, and once it has been narrowed by one. What runs is not stopped for it: a narrower
window holds as answers end.
"""

from __future__ import annotations

import math

LOOK_S = 1.0
"""How long TPOT is measured before the window is changed."""
TIME_LEFT = 0.95
"""Below this part of the target the window widens."""
FIRST_CHOICES = 8.0
"""The window after a start."""
LEAST_PART = 0.7
"""What one look leaves of it, at the least: a long prompt makes one slow second."""
OVER = 1.5
"""With so many times as many running it does not narrow: they were let in before it last did."""


FILLED = 0.75
"""From this part of it on the window is full; then TPOT tells how far it may widen."""
UNPROVEN = 3.0
"""The window is at most so many times what has been seen to run within the target: a request of many choices
must not be the one that shows how slow so many are, for they are let in together."""
SMOOTHING = 0.3
"""Weight of one look in the TPOT of an engine that few use: a burst after a stall is no fast step."""


class DecodeWindow:
    """The window. `target_s` is the time per output token; 0 is none, and the window has no end.

    With `slowdown` the target is so many times the least TPOT that was measured since the start.
    """

    def __init__(self, target_s: float = 0.0, *, slowdown: float = 0.0) -> None:
        self._fixed_target_s = target_s
        self._slowdown = slowdown
        self.reset()

    def reset(self) -> None:
        """Begin anew: the engine has just started."""
        self._target_s = self._fixed_target_s
        self._smooth_s = self._least_s = 0.0
        self.most_choices = FIRST_CHOICES if self._target_s or self._slowdown else math.inf
        self._proven_choices = FIRST_CHOICES
        self._narrowed = self._held_back = False
        self._tokens = 0
        self._took_s = 0.0
        self._looked_s: float | None = None

    @property
    def shown(self) -> float:
        """The window as a metric shows it: 0 for one without end."""
        return 0.0 if math.isinf(self.most_choices) else self.most_choices

    def has_place(self, num_choices: int, spare: float) -> bool:
        """Whether so many may run, a part of the window kept for others."""
        open_ = num_choices <= self.most_choices * (1.0 - spare)
        self._held_back = self._held_back or not open_
        return open_

    def made(self, tokens: int, took_s: float, running: int, now_s: float) -> None:
        """A choice has been given so many tokens in that time, beside `running` with itself."""
        if not (self._target_s or self._slowdown):
            return
        if self._looked_s is None:
            self._looked_s = now_s
        self._tokens += tokens
        self._took_s += took_s
        if now_s - self._looked_s < LOOK_S:
            return
        tpot_s = self._took_s / self._tokens
        if self._slowdown:
            self._learn(tpot_s)
        part = tpot_s / self._target_s
        held_back, self._held_back = self._held_back, False
        self._tokens, self._took_s, self._looked_s = 0, 0.0, now_s
        if part > 1.0:
            if 1 < running <= OVER * self.most_choices:
                self._narrowed = True
                self.most_choices = max(self.most_choices * max(1.0 / part, LEAST_PART), 1.0)
            return
        self._proven_choices = max(self._proven_choices, running)
        if part < TIME_LEFT and held_back:
            self._widen(running, running / part)

    def _widen(self, running: int, safe_choices: float) -> None:
        """Let more run; `safe_choices` would be within the target were all of a step's time the choices'."""
        if self._narrowed:
            wider = self.most_choices + 1.0
        elif running >= FILLED * self.most_choices:
            wider = max(self.most_choices + 1.0, safe_choices)
        else:
            wider = 2 * self.most_choices
        self.most_choices = max(min(wider, UNPROVEN * self._proven_choices), self.most_choices)

    def _learn(self, tpot_s: float) -> None:
        self._smooth_s += (tpot_s - self._smooth_s) * (SMOOTHING if self._smooth_s else 1.0)
        self._least_s = min(self._least_s or math.inf, self._smooth_s)
        self._target_s = self._slowdown * self._least_s
