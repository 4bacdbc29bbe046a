"""What `bench store` asks a filled store: each question through the product's own readers, timed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any

from app.metering.usage import Period, usage_report
from app.store.batch import Unit
from app.store.conversation_list import page
from app.store.conversations import branch
from app.store.database import Database
from app.store.usage import differences
from scripts.benchmarks.stats import percentile
from scripts.benchmarks.store_rows import DAYS, MONTH, OWNER, Filled

PAGE = 20
BY_DAY_AND_MODEL: Sequence[str] = ("day", "model")


@dataclass(frozen=True, slots=True)
class Question:
    """A query, what its median must stay below (ms; None where nothing is asked), how it is counted."""

    label: str
    query: Unit[Any]
    bound_ms: float | None
    repeat: int | None = None


@dataclass(frozen=True, slots=True)
class Timed:
    """How long a question took, in ms, over its repetitions; the first ones are not counted."""

    label: str
    rows: int
    median_ms: float
    p95_ms: float
    bound_ms: float | None

    @property
    def verdict(self) -> str:
        """`met` or `missed` by the median."""
        if self.bound_ms is None:
            return ""
        return "met" if self.median_ms < self.bound_ms else "missed"


def questions(filled: Filled) -> list[Question]:
    """All of them, from the issue that set the bounds; and some that show what lies behind."""
    month = Period(f"{MONTH:%Y-%m}", MONTH, MONTH + timedelta(DAYS - 1))
    questions = [
        Question(
            "usage by day and model, of all owners",
            lambda c: usage_report(c, month, BY_DAY_AND_MODEL),
            50,
        ),
        Question(
            "usage by day and model, of one owner",
            lambda c: usage_report(c, month, BY_DAY_AND_MODEL, owner=OWNER),
            50,
        ),
        Question("first page of conversations", lambda c: page(c, OWNER, PAGE, None), 20),
        Question("page from the middle", lambda c: page(c, OWNER, PAGE, filled.middle_cursor), 20),
    ]
    questions += [_search(kind, words) for kind, words in filled.probes.items()]
    continued, wanted = filled.long_conversation_id, filled.long_messages
    questions.append(
        Question(f"branch of {wanted:,} messages", lambda c: branch(c, OWNER, continued, None), None)
    )
    questions.append(Question("every daily sum against its rows", differences, None, repeat=1))
    return questions


def _search(kind: str, words: str) -> Question:
    return Question(f"search: {kind}", lambda c: page(c, OWNER, PAGE, None, words=words), 50)


async def ask(database: Database, asked: Sequence[Question], repeat: int) -> list[Timed]:
    """Ask them in turns, so that a slow minute hits all alike; one unmeasured turn goes first."""
    times: dict[str, list[float]] = {question.label: [] for question in asked}
    rows: dict[str, int] = {}
    for turn in range(-1, repeat):
        for question in asked:
            if turn >= (repeat if question.repeat is None else question.repeat):
                continue
            began_s = time.perf_counter()
            answer = await database.read(question.query)
            if turn >= 0:
                times[question.label].append((time.perf_counter() - began_s) * 1e3)
            rows[question.label] = _rows(answer)
            await asyncio.sleep(0)
    return [
        Timed(q.label, rows[q.label], median(times[q.label]), percentile(times[q.label], 95), q.bound_ms)
        for q in asked
    ]


def _rows(answer: Any) -> int:
    """How much came back: an answer that is quick because it is empty shows itself."""
    if isinstance(answer, Mapping):
        return len(answer["groups"])
    for name in ("conversations", "messages"):
        if hasattr(answer, name):
            return len(getattr(answer, name))
    return len(answer)


def table(timed: Sequence[Timed]) -> str:
    """The times as a Markdown table."""
    rows = [["question", "rows", "median, ms", "p95, ms", "must", "verdict"]]
    for item in timed:
        must = "" if item.bound_ms is None else f"< {item.bound_ms:g}"
        times = [f"{item.median_ms:.3g}", f"{item.p95_ms:.3g}"]
        rows.append([item.label, f"{item.rows:,}", *times, must, item.verdict])
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
