"""Records of the policy's verdicts: gathered in memory, written once a second, bounded in days.

A record has no text, and names no request (app.store.safety_records). What a dying process has gathered
since the last write is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Literal

from structlog.typing import FilteringBoundLogger

from app.errors import StorageUnavailable
from app.log import safe_traceback
from app.safety.policies.policy import Policy
from app.safety.text.groups import Group, group_of
from app.safety.verdict import Reading, Scores, Verdict, harm
from app.store import safety_records
from app.store.batch import Unit
from app.store.database import Database
from app.store.ledger import day_of
from app.store.safety_records import MAX_RECORDS, SafetyRecord, Total

FLUSH_S = 1.0
"""Seconds between two writes."""
_HOUR_US = 3_600_000_000
Subject = Literal["prompt", "answer"]


class SafetyRecorder:
    """Gathers the records of all requests. With `keep_days` 0 it keeps none."""

    def __init__(
        self,
        database: Database,
        log: FilteringBoundLogger,
        keep_days: int,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self.keep_days = keep_days
        self._database = database
        self._log = log
        self._clock_us = clock_us
        self._records: list[SafetyRecord] = []
        self._totals: Counter[Total] = Counter()
        self._flushing: asyncio.TimerHandle | None = None
        self._day = 0
        self._left_today = MAX_RECORDS
        """Records that this process may still write today."""

    def now_us(self) -> int:
        """The time of a record."""
        return self._clock_us()

    def add(self, total: Total, record: SafetyRecord | None) -> None:
        """Count a text, and keep its record if it has one; neither once the day has too many records."""
        if total.day != self._day:
            self._day, self._left_today = total.day, MAX_RECORDS
            self._trim()
        if not self.keep_days or not self._left_today:
            return
        self._totals[total] += 1
        if record is not None:
            self._records.append(record)
            self._left_today -= 1
            if not self._left_today:
                self._log.warning("safety_records_full", day=total.day, records=MAX_RECORDS)
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Queue what was gathered for the store."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        records, totals = self._records, self._totals
        if totals:
            self._records, self._totals = [], Counter()
            unit = partial(safety_records.add, records=records, totals=totals)
            submit_or_log(self._database, self._log, unit, "safety_records_lost")

    def _trim(self) -> None:
        """Delete what is older than `keep_days`, in steps. After a failure it is tried on the next day."""
        day = datetime.fromtimestamp(self._clock_us() // 1_000_000, UTC) - timedelta(days=self.keep_days)
        from_day = day_of(int(day.timestamp()) * 1_000_000) if self.keep_days else self._day + 1

        def trim() -> None:
            with contextlib.suppress(StorageUnavailable):
                unit = partial(safety_records.trim, from_day=from_day)
                self._database.submit(unit).add_done_callback(trimmed)

        def trimmed(done: asyncio.Future[bool]) -> None:
            if not done.cancelled() and done.exception() is None and not done.result():
                trim()

        trim()


def submit_or_log(
    database: Database, log: FilteringBoundLogger, unit: Unit[Any], lost: str, **ids: str
) -> None:
    """Queue a unit on which no request's end may depend. `lost` is the log's event where it fails."""

    def written(done: asyncio.Future[Any]) -> None:
        if not done.cancelled() and (exc := done.exception()) is not None:
            log.error(lost, error=safe_traceback(exc), **ids)

    try:
        database.submit(unit).add_done_callback(written)
    except Exception as exc:  # noqa: BLE001  # the request ends all the same
        log.error(lost, error=safe_traceback(exc), **ids)


def as_enforced(verdict: Verdict, policy: Policy) -> Verdict:
    """The verdict on a prompt, with the category, score and threshold that decide where `policy` is enforced.

    The verdict of an observing policy names the category that acted; another one may do more.
    """
    if verdict.action in (None, verdict.enforced) or not verdict.readings:
        return verdict
    decided = policy.enforced.judge(verdict.readings)
    if decided.action != verdict.enforced:
        return verdict
    return replace(decided, action=verdict.action, observed=verdict.observed, policy_hash=verdict.policy_hash)


class RequestRecords:
    """The records of one request: of its prompt, and of each choice of its answer."""

    def __init__(self, recorder: SafetyRecorder, key_id: str | None) -> None:
        self._recorder = recorder
        self._key_id = key_id or ""
        self._group = Group("", "", "")
        self._again = False
        self._watched = False

    def begin(self, text: str, role: object, *, again: bool = False, watched: bool = False) -> None:
        """Begin with the text of the newest message.

        `again` is whether an earlier turn was recorded; `watched`, whether a continued answer's prompt is.
        """
        self._group = group_of(text, role)
        self._again = again
        self._watched = watched

    def record_prompt(self, verdict: Verdict, policy: Policy) -> bool:
        """Record a prompt that was read. Returns whether the enforced policy does something about it."""
        if verdict.unread:
            return False
        verdict = as_enforced(verdict, policy)
        self._watched = verdict.enforced == "watch"
        full = [harm(reading.scores) for reading in verdict.readings if reading.stage != "ngrams"]
        is_recorded = verdict.enforced is not None or max(full, default=0.0) >= policy.prompt_record_floor
        if is_recorded:
            self._add("prompt", verdict, verdict.readings, verdict.action)
        else:
            self._count("prompt", verdict.policy_hash, self._recorder.now_us())
        return verdict.enforced is not None

    def record_answer(self, peak: Scores, policy: Policy, halted: Verdict | None) -> Verdict | None:
        """Record a choice by the highest scores that two tokens in a row had; `halted` is what halted it.

        Returns the recorded verdict: `halted`, or else the enforced policy's, which nothing acts on. None
        without scores.
        """
        if halted is None and not peak:
            self._count("answer", policy.hash, self._recorder.now_us())
            return None
        if halted is not None:
            self._add("answer", halted, [Reading("stream", peak)] if peak else [], "block")
            return halted
        verdict = policy.enforced.judge_output(peak, watched=self._watched)
        verdict = replace(verdict, action=None, observed=verdict.action, policy_hash=policy.hash)
        is_flagged = verdict.observed == "flag" and not policy.observing
        self._add("answer", verdict, [Reading("stream", peak)], "flag" if is_flagged else None)
        return verdict

    def _count(
        self, subject: Subject, policy_hash: str, at_us: int, record: SafetyRecord | None = None
    ) -> None:
        total = Total(day_of(at_us), self._key_id, subject, policy_hash, *self._group)
        self._recorder.add(total, record)

    def _add(self, subject: Subject, verdict: Verdict, readings: Sequence[Reading], done: str | None) -> None:
        at_us, (length, role, script) = self._recorder.now_us(), self._group
        record = SafetyRecord(
            at_us=at_us // _HOUR_US * _HOUR_US,  # an exact time would lead to the request in the ledger
            day=day_of(at_us),
            key_id=self._key_id,
            subject=subject,
            stage=verdict.stage,
            action=verdict.enforced,
            done=done,
            category=verdict.category,
            score=verdict.score,
            threshold=verdict.threshold,
            policy_hash=verdict.policy_hash,
            length=length,
            role=role,
            script=script,
            again=self._again,
            watched=self._watched,
            readings=[(r.stage, r.texts, r.watch_only, r.scores) for r in readings],
        )
        self._count(subject, verdict.policy_hash, at_us, record)
