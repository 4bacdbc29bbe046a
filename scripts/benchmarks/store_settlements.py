"""Durable settlements per second: many in one commit against one commit each, interleaved, on one file.

Both go through the product's writer, so that both pay for its queue and its thread; the only difference is
how many units are in flight. What the disk takes for a sync is measured beside each round, for
the ratio is a matter of that as much as of ours: a unit costs CPU, a commit costs a sync.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from app.core import Usage
from app.store import conversations, events, ledger
from app.store.batch import Unit
from app.store.conversations import FinishedAnswer, NewMessage, NewTurn
from app.store.database import Database
from scripts.benchmarks.report import Figure
from scripts.benchmarks.store_rows import MODELS, OWNER

PRICE = ledger.Price(150, 75, 600)
SYNC_BYTES = 4096
SYNCS = 20
_ANSWER = " ".join(["an answer of some ninety words as they are"] * 10)
_SLICE = bytes(2000)

FIGURES = (
    Figure("settlements/s", "settlements_per_s", "higher", 20.0),
    Figure("settlements per commit", "per_commit", "higher"),
    Figure("CPU per settlement, us", "cpu_us", "lower"),
    Figure("one sync of the disk, us", "sync_us", "lower"),
)
WITH_ANSWERS = (Figure("settlements with their answers/s", "settlements_per_s", "higher"),)


@dataclass(frozen=True, slots=True)
class SettleRun:
    """One round of one way; `streams` is how many settlements were in flight at once."""

    streams: int
    settlements: int
    settlements_per_s: float
    per_commit: float
    cpu_us: float
    sync_us: float


Pairs = list[tuple[SettleRun, SettleRun]]
Reserved = tuple[int, ledger.BillingTerms, str | None]


async def measure_pairs(
    database: Database, folder: Path, in_flight: int, rounds: int, settlements: int, *, answers: bool
) -> Pairs:
    """Interleaved rounds, after one that is not measured: each `in_flight` at once, and one at a time.

    `settlements` is how many a round of the former has; the latter has a tenth. With `answers` each
    unit also stores its answer and its events, as that of a stored conversation does.
    """
    pairs: Pairs = []
    for number in range(-1, rounds):
        runs = {}
        for at_once in (in_flight, 1) if number % 2 else (1, in_flight):
            count = settlements if at_once > 1 else max(1, settlements // 10)
            units = await _reserved(database, count, answers=answers)
            runs[at_once] = await _settle(database, folder, units, at_once)
        if number >= 0:
            pairs.append((runs[in_flight], runs[1]))
    return pairs


async def _settle(database: Database, folder: Path, units: Sequence[Unit[object]], at_once: int) -> SettleRun:
    """Settle them with `at_once` callers, each of whom waits for its commit before its next one."""
    waiting, commits = iter(units), database.num_commits
    sync_us = _sync_us(folder)
    began_s, cpu_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*(_caller(database, waiting) for _ in range(at_once)))
    took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    commits = database.num_commits - commits
    count = len(units)
    return SettleRun(
        at_once, count, count / took_s, count / commits, cpu_s / count * 1e6, (sync_us + _sync_us(folder)) / 2
    )


async def _caller(database: Database, waiting: Iterator[Unit[object]]) -> None:
    for unit in waiting:
        await database.write(unit)


async def _reserved(database: Database, count: int, *, answers: bool) -> list[Unit[object]]:
    """Reserve that many requests, unmeasured; returns what settles them."""
    reserving = [database.submit(_reserving(answers=answers)) for _ in range(count)]
    return [_settling(*reserved) for reserved in await asyncio.gather(*reserving)]


def _reserving(*, answers: bool) -> Unit[Reserved]:
    at_us = time.time_ns() // 1000
    name = secrets.token_hex(14)
    reservation = ledger.Reservation(f"chatcmpl-{name}", OWNER, MODELS[0], at_us, 256, 100, PRICE, b"{}")
    question = NewMessage(f"msg_q{name[1:]}", "user", "a question of some nine words, as short ones are")
    answer_id = f"msg_{name}"
    turn = NewTurn(
        f"conv_{name}",
        OWNER,
        MODELS[0],
        "A question",
        True,
        None,
        [question],
        [answer_id],
        at_us,
    )

    def reserve(c: sqlite3.Connection) -> Reserved:
        if not answers:
            return ledger.reserve(c, reservation, None), reservation.terms, None
        conversation_seq = conversations.ensure(c, turn)
        request_seq = ledger.reserve(c, reservation, conversation_seq)
        conversations.add_turn(c, turn, conversation_seq, request_seq)
        return request_seq, reservation.terms, answer_id

    return reserve


def _settling(request_seq: int, terms: ledger.BillingTerms, answer_id: str | None) -> Unit[object]:
    at_us = time.time_ns() // 1000
    settlement = ledger.Settlement(request_seq, Usage(100, 128, 64), "stop", at_us, terms=terms)
    if answer_id is None:
        return ledger.SettleUnit(settlement)
    ids = bytes(4 * 128)
    answer = FinishedAnswer(answer_id, _ANSWER, None, "complete", "stop", ids, ids, None)

    def end(c: sqlite3.Connection) -> None:
        events.compact(c, request_seq, 1, _SLICE)
        conversations.finish_answers(c, [answer], at_us, 228)

    return ledger.SettleUnit(settlement, end)


def _sync_us(folder: Path) -> float:
    """The median of some syncs of a file beside the store, each after a page was written in place."""
    path = folder / "sync"
    taken = []
    with path.open("w+b", buffering=0) as file:
        file.write(os.urandom(SYNC_BYTES))
        os.fsync(file)
        for _ in range(SYNCS):
            file.seek(0)
            file.write(os.urandom(SYNC_BYTES))
            began_s = time.perf_counter()
            os.fdatasync(file)
            taken.append((time.perf_counter() - began_s) * 1e6)
    path.unlink()
    return median(taken)


def columns(pairs: Pairs) -> tuple[list[SettleRun], list[SettleRun]]:
    """Each side's runs, in order."""
    return [together for together, _ in pairs], [alone for _, alone in pairs]
