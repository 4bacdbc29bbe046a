"""The prefix report: for each key's prompts, the tokens expected in the cache, found there, and why.

`record` is called for every request once its cached tokens are known. A system prompt's editions (another
clock in it, another tool list) are one series. When a request finds less than its edition is expected to
have, that is a *break*, with one cause, the first that holds:

    restarted  the engine was started again since the edition was seen
    salt       the cache salt is another than the edition's
    system     the system text is another: from which character on, and whether a clock or an id stands there
    tools      the tool list is another: from which tool on
    template   the same text and tools became other tokens: from which token on
    evicted    nothing is different: the cache no longer had it, from which token on

Tokens are as they are billed, without the operator's own. Text stays in memory, bounded, and is in
no log and no metric.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from structlog.typing import FilteringBoundLogger

from app.core import ChatRequest, Counts, Prompt
from app.log import safe_traceback
from app.prefix_report.diff import Difference, similar, text_difference, tools_difference
from app.prefix_report.series import (
    CAUSES,
    Break,
    Cause,
    PromptEdition,
    PromptSeries,
    SeriesKey,
    StablePart,
    Unit,
    estimate_of,
    stable_of,
)

_PASSING = ("clock", "id")
_UNITS: Mapping[Cause, Unit] = {"system": "character", "tools": "tool"}

KEEP_S = 24 * 3600.0
MAX_BYTES = 32 * 1024**2
"""Bytes of all editions. Each counts at least 1 KiB, so that this bounds their number too."""
MAX_SERIES = 32
"""System prompts of one key and model; the one seen longest ago makes room."""
MAX_EDITIONS = 4
_COMPARED_SERIES = 8


class PrefixReport:
    """The prefix report of one engine. Up to `page_tokens` may be missing unnoticed."""

    def __init__(
        self,
        log: FilteringBoundLogger,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        wall_us: Callable[[], int] = lambda: time.time_ns() // 1000,
        page_tokens: int = 16,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._log = log
        self._clock_s = clock_s
        self._wall_us = wall_us
        self._page = page_tokens
        self._max_bytes = max_bytes
        self._secret = secrets.token_bytes(16)
        self._epochs: Counter[str] = Counter()
        """The number of times that each model's engine was started again."""
        self._editions: OrderedDict[tuple[SeriesKey, StablePart], PromptEdition] = OrderedDict()
        """The one seen longest ago first."""
        self._series: dict[SeriesKey, list[PromptSeries]] = {}
        self.breaks: Counter[str] = Counter(dict.fromkeys(CAUSES, 0))
        """The number of breaks by cause, since the start."""
        self.size_bytes = 0

    def restarted(self, model: str) -> None:
        """A model's engine was started again, with an empty cache."""
        self._epochs[model] += 1

    def series(self, owner: str | None = None) -> Iterator[PromptSeries]:
        """Every system prompt in memory, or one owner's, the key seen first at the beginning."""
        for series_key, of_key in self._series.items():
            if owner is None or series_key.owner == owner:
                yield from of_key

    def record(
        self,
        request: ChatRequest,
        prompt: Prompt,
        counts: Counts,
        sent_s: float | None = None,
        *,
        key_id: str | None = None,
        salt: str = "",
    ) -> None:
        """Judge a request whose cached tokens are known. Never raises.

        `counts` are as billed, `request` has its history, `sent_s` is when the engine was asked, on the
        monotonic clock: a prefix that was cached later is not expected. A raw prompt has no system prompt.
        """
        if request.raw is not None:
            return
        try:
            now_s, epoch = self._clock_s(), self._epochs[request.model]
            sent_s = now_s if sent_s is None else sent_s
            seen = _SeenRequest(request, prompt, counts.cached_tokens, salt, epoch, sent_s, now_s)
            self._record(seen, SeriesKey(request.owner, key_id, request.model))
        except Exception as exc:  # noqa: BLE001  # a report is no reason to fail a request
            self._log.error("prefix_report_broke", request_id=request.request_id, error=safe_traceback(exc))

    def _record(self, seen: _SeenRequest, series_key: SeriesKey) -> None:
        stable = stable_of(seen.request.body)
        edition = self._editions.get((series_key, stable))
        if edition is None:
            self._add(seen, series_key, stable)
            return
        self._editions.move_to_end((series_key, stable))
        edition.touch(seen.now_s)
        edition.series.touch(self._wall_us())
        if edition.boundary is not None and seen.sent_s < edition.since_s:
            return
        at, missing = None, edition.expected - seen.unbilled - seen.cached
        if edition.boundary is None or missing >= (self._page if edition.is_exact else 1):
            at = edition.compare(seen.request, seen.prompt)
        if at is not None:
            what = edition.changed_option(seen.request, seen.prompt)
            self._judge(seen, edition, edition.expected, "template", Difference(what, at, 0))
            edition.set_reference(seen.request, seen.prompt, seen.now_s)
        elif edition.boundary is not None and seen.sent_s >= edition.since_s:
            self._judge(seen, edition, edition.boundary, "evicted", Difference("", seen.cached, 0))
        else:
            return
        edition.cached_under(seen.salt, seen.epoch)

    def _judge(
        self, seen: _SeenRequest, edition: PromptEdition, expected: int, cause: Cause, difference: Difference
    ) -> None:
        """Count a request that should have found `expected` tokens, and a break where it found less.

        The cause is what was found different, unless a restart or the salt explains the whole loss.
        """
        series, expected = edition.series, expected - seen.unbilled
        if seen.sent_s < edition.since_s:
            return
        if seen.cached + self._page <= expected:
            if edition.epoch != seen.epoch or edition.salt != seen.salt:
                cause = "restarted" if edition.epoch != seen.epoch else "salt"
                difference = Difference("", seen.cached, 0)
            self.breaks[cause] += 1
            series.breaks[cause] += 1
            unit, request_id = _UNITS.get(cause, "token"), seen.request.request_id
            lost = Break(cause, unit, *difference, expected, seen.cached, request_id, self._wall_us())
            series.last.append(lost)
        self._count(series, expected, seen.cached)

    def _count(self, series: PromptSeries, expected: int, cached: int) -> None:
        """Add up tokens expected and obtained, and log a rate that falls by half."""
        if expected < self._page or not series.count(expected, cached):
            return
        last = series.last[-1] if series.last else None
        self._log.warning(
            "prefix_hit_rate_fell",
            prefix=series.id,
            key=series.series_key.key_id,
            model=series.series_key.model,
            usual=round(series.usual, 2),
            recent=round(series.recent, 2),
            **{name: getattr(last, name, None) for name in ("cause", "what", "unit", "position")},
        )

    # New editions

    def _add(self, seen: _SeenRequest, series_key: SeriesKey, stable: StablePart) -> None:
        """Add an edition that was not seen before, of a known series or a new one."""
        series, replaced = self._find_series(series_key, stable), None
        if series is None:
            series = self._new_series(series_key, stable)
        else:
            replaced = self._judge_edit(seen, series, stable)
        series.touch(self._wall_us())
        estimate = estimate_of(seen.request, seen.prompt, stable)
        edition = PromptEdition(series, stable, seen.salt, seen.epoch, seen.now_s, estimate)
        edition.set_reference(seen.request, seen.prompt, seen.now_s)
        edition.touch(seen.now_s)
        if replaced is not None:
            self._drop(replaced)
        if len(series.editions) >= MAX_EDITIONS:
            self._drop(min(series.editions, key=lambda each: each.seen_s))
        series.editions.append(edition)
        self._editions[series_key, stable] = edition
        self.size_bytes += edition.size_bytes
        self._forget(seen.now_s)

    def _find_series(self, series_key: SeriesKey, stable: StablePart) -> PromptSeries | None:
        """The series that a new edition belongs to, the one seen last first."""
        of_key = sorted(self._series.get(series_key, ()), key=lambda series: series.seen_us, reverse=True)
        for series in of_key:
            if any(edition.stable.text == stable.text for edition in series.editions):
                return series
        for series in of_key[:_COMPARED_SERIES]:
            if stable.text and similar(series.newest.stable.text, stable.text):
                return series
        return None

    def _new_series(self, series_key: SeriesKey, stable: StablePart) -> PromptSeries:
        text = stable.text.encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(text, digest_size=6, key=self._secret)
        of_key = self._series.setdefault(series_key, [])
        if len(of_key) >= MAX_SERIES:
            oldest = min(of_key, key=lambda series: series.seen_us)
            of_key.remove(oldest)
            for edition in list(oldest.editions):
                self._drop(edition)
        series = PromptSeries(series_key, f"prefix-{digest.hexdigest()}")
        of_key.append(series)
        return series

    def _judge_edit(
        self, seen: _SeenRequest, series: PromptSeries, stable: StablePart
    ) -> PromptEdition | None:
        """Judge the first request of a new edition by what the last one had.

        Returns the last one if it will hardly be seen again: another clock or id replaces it.
        """
        same_text = [edition for edition in series.editions if edition.stable.text == stable.text]
        old = max(same_text, key=lambda edition: edition.seen_s) if same_text else series.newest
        if same_text:
            difference = tools_difference(old.stable.tools, stable.tools)
        else:
            difference = text_difference(old.stable.text, stable.text)
            series.vary(difference)
        ours = estimate_of(seen.request, seen.prompt, stable) or old.expected
        self._judge(seen, old, min(old.expected, ours), "tools" if same_text else "system", difference)
        return old if difference.kind in _PASSING else None

    # Memory

    def _forget(self, now_s: float) -> None:
        """Drop what was not seen for long, and the oldest while there is too much."""
        while self._editions:
            oldest = next(iter(self._editions.values()))
            if self.size_bytes <= self._max_bytes and now_s - oldest.seen_s <= KEEP_S:
                return
            self._drop(oldest)
            series_key, of_key = oldest.series.series_key, self._series[oldest.series.series_key]
            if not oldest.series.editions:
                of_key.remove(oldest.series)
            if not of_key:
                del self._series[series_key]

    def _drop(self, edition: PromptEdition) -> None:
        edition.series.editions.remove(edition)
        del self._editions[edition.series.series_key, edition.stable]
        self.size_bytes -= edition.size_bytes


class _SeenRequest(NamedTuple):
    request: ChatRequest
    prompt: Prompt
    cached: int
    salt: str
    epoch: int
    sent_s: float
    now_s: float

    @property
    def unbilled(self) -> int:
        return self.prompt.unbilled_tokens
