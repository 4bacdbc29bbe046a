"""How many choices decode at once: as many as keep the time per output token (TPOT) within a target.

A decode step gives each running choice a token and takes the longer the more there are; a prompt that
comes has to wait for the step that runs. So a target for TPOT bounds both. The window narrows while tokens
take too long. While it holds requests back and there is time left it doubles, and once it has been narrowed
it widens by one (as the gate does). What runs is not stopped for it: a narrower window holds as answers end.
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


class DecodeWindow:
    """The window. `target_s` is the time per output token; 0 is none, and the window has no end."""

    def __init__(self, target_s: float = 0.0) -> None:
        self._target_s = target_s
        self.reset()

    def reset(self) -> None:
        """Begin anew: the engine has just started."""
        self.most_choices = FIRST_CHOICES if self._target_s else math.inf
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
        if not self._target_s:
            return
        if self._looked_s is None:
            self._looked_s = now_s
        self._tokens += tokens
        self._took_s += took_s
        if now_s - self._looked_s < LOOK_S:
            return
        part = self._took_s / self._tokens / self._target_s
        held_back, self._held_back = self._held_back, False
        self._tokens, self._took_s, self._looked_s = 0, 0.0, now_s
        if part > 1.0:
            if 1 < running <= OVER * self.most_choices:
                self._narrowed = True
                self.most_choices = max(self.most_choices * max(1.0 / part, LEAST_PART), 1.0)
        elif part < TIME_LEFT and held_back:
            self.most_choices += 1.0 if self._narrowed else self.most_choices
