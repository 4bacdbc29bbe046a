"""What a server under a soak says of itself, against what was done to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import NamedTuple

from scripts.crash.findings import Findings
from scripts.crash.http import get_text
from scripts.crash.machine import held
from scripts.crash.soak_checks import StoryChecks
from scripts.crash.soak_lives import Life, Lives

IDLE = (
    "live_streams",
    "retained_streams",
    "stream_readers",
    "suspended_streams",
    "unsettled_requests",
    "store_queue_depth",
    "admission_waiting_requests",
    "admission_waiting_tokens",
    "admission_reserved_tokens",
    "admission_prefill_tokens",
    "engine_running_requests",
    "engine_queued_requests",
)
"""Metrics that are zero when nothing is asked."""
POLL_S = 0.2


class Sample(NamedTuple):
    """What an idle server holds, at a time of the monotonic clock."""

    at_s: float
    life: int
    held: Mapping[str, int]


async def metrics(port: int, headers: Mapping[str, str]) -> dict[str, float]:
    """The sum of each metric over its labels, without the prefix. Raises one of `Gone`."""
    sums: dict[str, float] = {}
    for line in (await get_text(port, "/metrics", headers)).splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0].removeprefix("tokenring_")
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


async def wait_idle(port: int, headers: Mapping[str, str], timeout_s: float) -> dict[str, float]:
    """Wait until nothing is asked or kept any more; what is not zero by then."""
    until_s = time.monotonic() + timeout_s
    while True:
        values = await metrics(port, headers)
        busy = {name: values[name] for name in IDLE if values.get(name)}
        if not busy or time.monotonic() > until_s:
            return busy
        await asyncio.sleep(POLL_S)


class MetricChecks:
    """The counters of the life that runs, against what was done to it."""

    def __init__(self, lives: Lives, stories: StoryChecks, findings: Findings) -> None:
        self._lives = lives
        self._stories = stories
        self._findings = findings
        self._life = 0
        self._before: Mapping[str, float] = {}
        self._known = (0, 0, 0)

    def check(self, values: Mapping[str, float]) -> None:
        """Check what an idle server says once the stories of a round have been checked."""
        check, life = self._findings.check, self._lives.now
        differs = values["ledger_differs"] + values.get("ledger_differing_requests_total", 0)
        check(not differs, "the ledger is what the engine handed over", differs=differs)
        for name in ("contradictions_total", "safety_failures_total", "store_failing"):
            check(not values.get(name), f"{name} is 0", value=values.get(name))
        ended = values["continued_streams_total"] + values["expired_streams_total"]
        check(ended <= life.num_suspended, "no more streams go on than were suspended", counted=ended)
        _check_losses(values, life, self._findings)
        self._check_round(values)

    def _check_round(self, values: Mapping[str, float]) -> None:
        """What ended in this round, if the server lived all through it."""
        stories, number = self._stories, len(self._lives.all)
        seen = (stories.choices_lost, stories.choices_unseen, stories.num_unread)
        if number == self._life:
            lost, unseen, unread = (a - b for a, b in zip(seen, self._known, strict=True))
            counted = self._more(values, "choices_lost_total")
            facts = {"counted": counted, "lost": lost, "unseen": unseen}
            self._findings.check(lost <= counted <= lost + unseen, "lost choices are counted", **facts)
            counted = self._more(values, "admission_unread_aborted_total")
            facts = {"counted": counted, "unread": unread}
            self._findings.check(unread <= counted, "no unread answer is stopped uncounted", **facts)
        self._life, self._before, self._known = number, values, seen

    def _more(self, values: Mapping[str, float], name: str) -> int:
        return int(values.get(name, 0) - self._before.get(name, 0))


def _check_losses(values: Mapping[str, float], life: Life, findings: Findings) -> None:
    """Each loss while the engine was there is an outage with a restart; one in an outage may be another."""
    num_losses = len(life.losses)
    least = sum(not loss.while_away for loss in life.losses)
    for name in ("outages_total", "restarts_total"):
        counted = values.get(name, 0)
        findings.check(least <= counted <= num_losses, f"{name} agrees", counted=counted, losses=life.losses)
    resumed = values.get("choices_resumed_total", 0)
    findings.check(resumed > 0 or not least, "choices that go on are counted", counted=resumed)


def sample(life: Life, number: int) -> Sample:
    """What the server holds now."""
    return Sample(time.monotonic(), number, held(life.server.pid))


def slope_per_hour(samples: list[Sample], what: str) -> float:
    """The slope of the least squares' line through the samples, per hour; 0 for fewer than three."""
    if len(samples) < 3:
        return 0.0
    times = [s.at_s for s in samples]
    values = [float(s.held[what]) for s in samples]
    mean_t, mean_v = sum(times) / len(times), sum(values) / len(values)
    spread = sum((t - mean_t) ** 2 for t in times)
    covered = sum((t - mean_t) * (v - mean_v) for t, v in zip(times, values, strict=True))
    return 3600 * covered / spread if spread else 0.0


def last_two_thirds(samples: list[Sample]) -> list[Sample]:
    """Those in the last two thirds of the time that the samples span."""
    if not samples:
        return []
    begin_s = samples[0].at_s + (samples[-1].at_s - samples[0].at_s) / 3
    return [s for s in samples if s.at_s >= begin_s]
