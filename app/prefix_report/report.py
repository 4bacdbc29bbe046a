"""The prefix report: for each key's prompts, the tokens expected in the cache, found there, and why.

`saw` is told of every request once its cached tokens are known. A system prompt's editions (another
clock in it, another tool list) are lines of one family. When a request finds less than its line is
expected to have, that is a *break*, with one cause, the first that holds:

    restarted  the engine began anew since the line was seen
    salt       the cache salt is another than the line's
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
from app.prefix_report.diff import TextDifference, similar, text_difference, tools_difference
from app.prefix_report.family import CAUSES, Break, Cause, PromptSeries, SeriesKey, Unit
from app.prefix_report.line import HEAD_TOKENS, PromptEdition, Stable, estimate_of, stable_of

_PASSING = ("clock", "id")
_UNITS: Mapping[Cause, Unit] = {"system": "character", "tools": "tool"}

KEEP_S = 24 * 3600.0
MAX_BYTES = 32 * 1024**2
MAX_FAMILIES = 32
"""System prompts of one key and model; the one seen longest ago makes room."""
MAX_EDITIONS = 4
MAX_KEYS = 4096
_COMPARED_FAMILIES = 8


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
        """The number of times that each model's engine has started anew."""
        self._lines: OrderedDict[tuple[SeriesKey, Stable], tuple[PromptEdition, PromptSeries]] = OrderedDict()
        self._families: OrderedDict[SeriesKey, list[PromptSeries]] = OrderedDict()
        self.breaks: Counter[str] = Counter(dict.fromkeys(CAUSES, 0))
        """The number of breaks by cause, since the start."""
        self.size_bytes = 0

    def restarted(self, model: str) -> None:
        """A model's engine began anew, with an empty cache."""
        self._epochs[model] += 1

    def saw(
        self,
        request: ChatRequest,
        prompt: Prompt,
        counts: Counts,
        sent_s: float | None = None,
        *,
        key_id: str | None = None,
        salt: str = "",
    ) -> None:
        """A request's cached tokens are known: judge them. Never raises.

        `counts` are as billed, `request` has its history, `sent_s` is when the engine was asked, on the
        monotonic clock: what came into the cache later is not expected. A raw prompt has no system prompt.
        """
        if request.raw is not None:
            return
        try:
            self._saw(
                request,
                prompt,
                counts,
                SeriesKey(request.owner, key_id, request.model),
                salt=salt,
                sent_s=sent_s,
            )
        except Exception as exc:  # noqa: BLE001  # a report is no reason to fail a request
            self._log.error("prefix_report_broke", request_id=request.request_id, error=safe_traceback(exc))

    def _saw(
        self,
        request: ChatRequest,
        prompt: Prompt,
        counts: Counts,
        series_key: SeriesKey,
        *,
        salt: str,
        sent_s: float | None,
    ) -> None:
        stable = _bounded(stable_of(request.body))
        now_s, epoch = self._clock_s(), self._epochs[series_key.model]
        seen = _Seen(request, prompt, counts.cached_tokens, salt, epoch, now_s if sent_s is None else sent_s)
        entry = self._lines.get((series_key, stable))
        if entry is None:
            self._meet(seen, series_key, stable, now_s)
            return
        line, family = entry
        self._lines.move_to_end((series_key, stable))
        line.saw(now_s)
        family.asked()
        if line.boundary is None:
            self._learn(seen, line, family, now_s)
        elif seen.sent_s >= line.since_s:
            expected = line.boundary - prompt.unbilled_tokens
            missing = expected - seen.cached
            if missing <= 0 or (not line.slack and missing < self._page):
                line.cached_under(salt, epoch)
                self._count(family, expected, seen.cached)
            else:
                self._explain(seen, line, family, now_s)

    def _meet(self, seen: _Seen, series_key: SeriesKey, stable: Stable, now_s: float) -> None:
        """A text with tools that was not seen before: an edition of a known one, or new."""
        family, passing = self._family(series_key, stable), None
        if family is None:
            family = self._new_family(series_key, stable)
        else:
            passing = self._edited(seen, family, stable)
        family.asked()
        estimate = estimate_of(seen.request, seen.prompt, stable)
        line = PromptEdition(stable, seen.salt, seen.epoch, now_s, estimate, seen.prompt.unbilled_tokens)
        line.render(seen.request, seen.prompt)
        line.saw(now_s)
        if passing is not None:
            self._drop_line(family, passing)
        self._add(line, family)

    def _family(self, series_key: SeriesKey, stable: Stable) -> PromptSeries | None:
        """The family that a new edition belongs to, the one seen last first."""
        families = sorted(self._families.get(series_key, ()), key=lambda f: f.seen_us, reverse=True)
        for family in families:
            if any(line.stable.text == stable.text for line in family.lines):
                return family
        for family in families[:_COMPARED_FAMILIES]:
            if stable.text and similar(family.newest.stable.text, stable.text):
                return family
        return None

    def _new_family(self, series_key: SeriesKey, stable: Stable) -> PromptSeries:
        text = stable.text.encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(text, digest_size=6, key=self._secret)
        family = PromptSeries(series_key, f"prefix-{digest.hexdigest()}")
        families = self._families.setdefault(series_key, [])
        self._families.move_to_end(series_key)
        families.append(family)
        if len(families) > MAX_FAMILIES:
            self._drop_family(min(families[:-1], key=lambda f: f.seen_us))
        if len(self._families) > MAX_KEYS:
            for old in list(next(iter(self._families.values()))):
                self._drop_family(old)
        return family

    def _edited(self, seen: _Seen, family: PromptSeries, stable: Stable) -> PromptEdition | None:
        """Judge the first request of a new edition by what the last one had.

        Returns the last one where it will hardly come again: another clock or id stands in its place.
        """
        same_text = [line for line in family.lines if line.stable.text == stable.text]
        cause: Cause = "tools" if same_text else "system"
        old = max(same_text, key=lambda line: line.seen_s) if same_text else family.newest
        if same_text:
            difference = tools_difference(old.stable.tools, stable.tools)
        else:
            difference = text_difference(old.stable.text, stable.text)
            family.vary(difference)
        passing = old if difference.kind in _PASSING else None
        if seen.sent_s < old.since_s:
            return passing
        ours = estimate_of(seen.request, seen.prompt, stable) or old.expected
        expected = min(old.expected, ours) - seen.prompt.unbilled_tokens
        if seen.cached + self._page > expected:
            self._count(family, expected, seen.cached)
        else:
            self._broke(seen, family, expected, self._known_cause(seen, old) or cause, difference=difference)
        return passing

    def _known_cause(self, seen: _Seen, line: PromptEdition) -> Cause | None:
        """A cause that explains the whole loss, whatever else is different."""
        if line.epoch != seen.epoch:
            return "restarted"
        return "salt" if line.salt != seen.salt else None

    def _learn(self, seen: _Seen, line: PromptEdition, family: PromptSeries, now_s: float) -> None:
        """A line's second request tells how far its prompts stay the same."""
        at = line.compare(seen.request, seen.prompt)
        if at is not None:
            self._rendered_anew(seen, line, family, at, now_s=now_s)
            return
        self._resize(line)
        if line.boundary is not None and seen.sent_s >= line.since_s:
            self._judge(seen, line, family)

    def _explain(self, seen: _Seen, line: PromptEdition, family: PromptSeries, now_s: float) -> None:
        """Less was cached than the line's boundary, as far as that is known."""
        at = line.compare(seen.request, seen.prompt)
        if at is None:
            self._judge(seen, line, family)
        else:
            self._rendered_anew(seen, line, family, at, now_s=now_s)

    def _judge(self, seen: _Seen, line: PromptEdition, family: PromptSeries) -> None:
        """Text, tools and rendering are the same."""
        expected = line.expected - seen.prompt.unbilled_tokens
        if seen.cached + self._page > expected:
            self._count(family, expected, seen.cached)
        else:
            self._broke(seen, family, expected, self._known_cause(seen, line) or "evicted")
        line.cached_under(seen.salt, seen.epoch)

    def _rendered_anew(
        self, seen: _Seen, line: PromptEdition, family: PromptSeries, at: int, *, now_s: float
    ) -> None:
        """The same text and tools are other tokens from `at` on; from here on these are expected."""
        expected = line.expected - seen.prompt.unbilled_tokens
        if seen.sent_s >= line.since_s and seen.cached + self._page <= expected:
            cause = self._known_cause(seen, line) or "template"
            what = line.changed_option(seen.request, seen.prompt)
            self._broke(
                seen, family, expected, cause, difference=TextDifference("changed", at, 0, at), what=what
            )
        else:
            self._count(family, expected, seen.cached)
        line.render_anew(seen.request, seen.prompt, now_s)
        line.cached_under(seen.salt, seen.epoch)
        self._resize(line)

    def _broke(
        self,
        seen: _Seen,
        family: PromptSeries,
        expected: int,
        cause: Cause,
        *,
        difference: TextDifference | None = None,
        what: str = "",
    ) -> None:
        """Count a break; what was found different is its cause only where nothing explains the whole loss."""
        unit = _UNITS.get(cause, "token")
        if difference is None or cause in ("restarted", "salt"):
            difference, what = TextDifference("changed", seen.cached, 0, seen.cached), ""
        elif not what:
            what = difference.kind
        self.breaks[cause] += 1
        family.breaks[cause] += 1
        family.last.append(
            Break(
                cause,
                what,
                unit,
                difference.position,
                difference.length,
                expected,
                seen.cached,
                seen.request.request_id,
                self._wall_us(),
                difference.shown,
            )
        )
        self._count(family, expected, seen.cached)

    def _count(self, family: PromptSeries, expected: int, cached: int) -> None:
        """Add up what was expected and obtained, and tell when the rate falls by half."""
        family.saw(self._wall_us())
        if expected < self._page:
            return
        if family.count(expected, cached):
            last = family.last[-1] if family.last else None
            self._log.warning(
                "prefix_hit_rate_fell",
                prefix=family.id,
                key=family.series_key.key_id,
                model=family.series_key.model,
                usual=round(family.usual, 2),
                recent=round(family.recent, 2),
                cause=None if last is None else last.cause,
                what=None if last is None else last.what,
                unit=None if last is None else last.unit,
                position=None if last is None else last.position,
            )

    # Memory

    def _add(self, line: PromptEdition, family: PromptSeries) -> None:
        if len(family.lines) >= MAX_EDITIONS:
            self._drop_line(family, min(family.lines, key=lambda entry: entry.seen_s))
        family.lines.append(line)
        family.saw(self._wall_us())
        self._lines[family.series_key, line.stable] = (line, family)
        self._resize(line)
        self._shrink(line.seen_s)

    def _resize(self, line: PromptEdition) -> None:
        self.size_bytes += line.recount()

    def _shrink(self, now_s: float) -> None:
        """Forget what was not seen for long, and the oldest while there is too much."""
        while self._lines:
            line, family = next(iter(self._lines.values()))
            if self.size_bytes <= self._max_bytes and now_s - line.seen_s <= KEEP_S:
                return
            self._drop_line(family, line)
            if not family.lines:
                self._drop_family(family)

    def _drop_line(self, family: PromptSeries, line: PromptEdition) -> None:
        family.lines.remove(line)
        del self._lines[family.series_key, line.stable]
        self.size_bytes -= line.counted_bytes

    def _drop_family(self, family: PromptSeries) -> None:
        for line in list(family.lines):
            self._drop_line(family, line)
        families = self._families[family.series_key]
        families.remove(family)
        if not families:
            del self._families[family.series_key]

    # What is shown

    def families(self, owner: str | None = None) -> Iterator[PromptSeries]:
        """Every system prompt in memory, or one owner's, the key seen first at the beginning."""
        for series_key, families in self._families.items():
            if owner is None or series_key.owner == owner:
                yield from families


class _Seen(NamedTuple):
    request: ChatRequest
    prompt: Prompt
    cached: int
    salt: str
    epoch: int
    sent_s: float


def _bounded(stable: Stable) -> Stable:
    """A text of more than any head's length stands for itself by its beginning and its hash."""
    if len(stable.text) <= 4 * HEAD_TOKENS:
        return stable
    return Stable(f"{stable.text[: 4 * HEAD_TOKENS]}{hash(stable.text)}", stable.tools)
