"""One system prompt through its editions, as the prefix report adds it up, and its breaks."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from app.prefix_report.diff import TextDifference
from app.prefix_report.line import PromptEdition

Cause = Literal["restarted", "salt", "system", "tools", "template", "evicted"]
Unit = Literal["character", "tool", "token"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
MAX_BREAKS = 8
_RECENT, _USUAL = 8, 64
"""Requests that a moving average is about."""
_JUDGED_FROM = 16
_RISEN = 0.75


class SeriesKey(NamedTuple):
    """The owner, key and model of a series; `key_id` is None where no stored key was used."""

    owner: str
    key_id: str | None
    model: str


@dataclass(frozen=True, slots=True)
class Break:
    """One request that found less in the cache than it should have; `at_us` is UTC."""

    cause: Cause
    what: str
    """The detail: `clock`, `id`, `text`; the tools' difference; a parameter, `policy`, `template`."""
    unit: Unit
    position: int
    length: int
    expected_tokens: int
    cached_tokens: int
    request_id: str
    at_us: int
    shown: str = field(default="", repr=False)


@dataclass(slots=True, eq=False)
class PromptSeries:
    """A system prompt through its editions."""

    series_key: SeriesKey
    id: str
    lines: list[PromptEdition] = field(default_factory=list)
    """The editions, as they were first seen."""
    requests: int = 0
    judged: int = 0
    expected_tokens: int = 0
    cached_tokens: int = 0
    breaks: Counter[Cause] = field(default_factory=Counter)
    last: deque[Break] = field(default_factory=lambda: deque(maxlen=MAX_BREAKS))
    varies: TextDifference | None = None
    """The last difference between two editions' texts, with or without a break."""
    recent: float = 1.0
    usual: float = 1.0
    fallen: bool = False
    seen_us: int = 0

    def asked(self) -> None:
        """Count a request."""
        self.requests += 1

    def saw(self, wall_us: int) -> None:
        """Note the UTC time in microseconds at which the prompt was last seen."""
        self.seen_us = wall_us

    def vary(self, difference: TextDifference) -> None:
        """Note how the newest edition's text differs from the one before it."""
        self.varies = difference

    def count(self, expected_tokens: int, cached_tokens: int) -> bool:
        """Add up a judged request; True where the hit rate has just fallen to half of what was usual."""
        obtained = min(cached_tokens, expected_tokens)
        self.expected_tokens += expected_tokens
        self.cached_tokens += obtained
        return self.rated(obtained / expected_tokens)

    @property
    def newest(self) -> PromptEdition:
        """The edition that was seen last."""
        return max(self.lines, key=lambda line: line.seen_s)

    def rated(self, rate: float) -> bool:
        """Take a request's hit rate; True where the rate has just fallen to half of what was usual."""
        self.judged += 1
        self.recent += (rate - self.recent) / min(self.judged, _RECENT)
        self.usual += (rate - self.usual) / min(self.judged, _USUAL)
        if self.fallen:
            self.fallen = self.recent < _RISEN * self.usual
            return False
        self.fallen = self.judged > _JUDGED_FROM and self.recent <= self.usual / 2
        return self.fallen
