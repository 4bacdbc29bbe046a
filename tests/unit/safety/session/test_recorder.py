"""The recorder: gathers in memory, writes in one unit, deletes what is old, and never ends a request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.errors import StorageUnavailable
from app.safety.policies.calibration import Calibration
from app.safety.policies.policy import Policy
from app.safety.policies.policy_file import parse
from app.safety.session import recorder as safety_recorder
from app.safety.session.recorder import RequestRecords, SafetyRecorder
from app.safety.verdict import Reading, stricter
from app.store import safety_records
from app.store.database import Database
from app.store.safety_records import SafetyRecord, Total
from tests.support.policies import calibration, policy
from tests.support.sse_client import until

DAY_US = 86_400_000_000
NOW_US = 1_790_000_000_000_000
TODAY = 20260921
OBSERVE = {"mode": "observe"}


class Log:
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def error(self, event: str, **_fields: Any) -> None:
        """Keep it."""
        self.entries.append(event)

    warning = error


class Clock:
    """A time in microseconds that a test sets."""

    def __init__(self) -> None:
        self.us = NOW_US

    def __call__(self) -> int:
        return self.us


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    """An open, empty store."""
    database = Database(tmp_path)
    await database.open()
    yield database
    await database.aclose()


def recorder_of(database: Any, keep_days: int = 30) -> tuple[SafetyRecorder, Log, Clock]:
    """A recorder, what it logs, and its clock."""
    log, clock = Log(), Clock()
    untyped: Any = log
    return SafetyRecorder(database, untyped, keep_days, clock), log, clock


async def written(recorder: SafetyRecorder, database: Database) -> list[SafetyRecord]:
    """What is in the store once all is written."""
    recorder.flush()
    await until(lambda: database.queue_depth == 0)
    return await database.read(lambda c: list(safety_records.records(c, 0, 99_999_999)))


async def texts(database: Database) -> dict[Total, int]:
    """What was counted."""
    return await database.read(lambda c: safety_records.totals(c, 0, 99_999_999))


def ask(recorder: SafetyRecorder, p: float, rules: Any = None, *, again: bool = False) -> RequestRecords:
    """A prompt whose harm is `p`."""
    records = RequestRecords(recorder, "tr-1")
    records.begin("How are you?", "user", again=again)
    rules = rules or policy(OBSERVE)
    first, second = (rules.judge([Reading(*r)]) for r in (("ngrams", {"S2": 0.2}), ("encoder", {"S2": p})))
    records.record_prompt(stricter(first, second), rules)
    return records


async def test_a_prompt_is_recorded_from_where_any_policy_could_act(database: Database):
    """With the scores of each stage; below that it is only counted."""
    recorder, _, _ = recorder_of(database)
    for p in (0.29, 0.3, 0.7):
        ask(recorder, p)
    low, high = await written(recorder, database)
    assert (low.action, low.done, low.score, low.key_id, low.day) == (None, None, 0.3, "tr-1", TODAY)
    assert low.readings == [("ngrams", 1, False, {"S2": 0.2}), ("encoder", 1, False, {"S2": 0.3})]
    assert (high.action, high.done, high.category, high.policy_hash) == (
        "block",
        None,
        "S2",
        policy(OBSERVE).hash,
    )
    assert list((await texts(database)).values()) == [3]


async def test_an_answer_is_recorded_by_its_peak(database: Database):
    """As the policy would have judged it, by the terms of a watched prompt if it would have watched that."""
    recorder, _, _ = recorder_of(database)
    for prompt_p in (0.1, 0.5):
        records = ask(recorder, prompt_p)
        verdict = records.record_answer({"S2": 0.55}, policy(OBSERVE), None)
        assert verdict is not None
        assert (verdict.action, verdict.observed) == (None, "block" if prompt_p == 0.5 else None)
        records.record_answer({}, policy(OBSERVE), None)
    answers = [r for r in await written(recorder, database) if r.subject == "answer"]
    assert [(r.action, r.done, r.watched, r.stage) for r in answers] == [
        (None, None, False, "stream"),
        ("block", None, True, "stream"),
    ]
    assert sorted((await texts(database)).values()) == [2, 4]


async def test_what_was_done_is_recorded(database: Database):
    """By a policy that is enforced: what was refused, halted or flagged."""
    recorder, _, _ = recorder_of(database)
    rules = policy({"categories": {"S3": {"action": "flag"}}})
    records = ask(recorder, 0.7, rules)
    records.record_answer({"S2": 0.9}, rules, rules.judge_output({"S2": 0.9}, watched=False))
    records.record_answer({}, rules, rules.halted())
    records.record_answer({"S3": 0.9}, rules, None)
    found = await written(recorder, database)
    assert [(r.stage, r.action, r.done) for r in found] == [
        ("encoder", "block", "block"),
        ("stream", "block", "block"),
        ("hard_list", "block", "block"),
        ("stream", "flag", "flag"),
    ]


async def test_a_record_has_what_decides_where_the_policy_is_enforced(database: Database):
    """Though a locked category acts while the policy observes, and does less."""
    recorder, _, _ = recorder_of(database)
    tables = calibration()
    tables["categories"]["S4"]["threshold"] = [0.95, 0.8, 0.6, 0.5]
    rules = Policy(parse(OBSERVE), Calibration.parse(tables))
    scores = {"S1": 0.991, "S4": 0.76}
    verdict = rules.judge([Reading("ngrams", {"S1": 0.2}), Reading("encoder", scores)])
    assert (verdict.action, verdict.observed, verdict.category) == ("watch", "block", "S4")
    records = RequestRecords(recorder, "tr-1")
    records.begin("How are you?", "user", again=False)
    assert records.record_prompt(verdict, rules)
    (record,) = await written(recorder, database)
    assert (record.action, record.done, record.category) == ("block", "watch", "S1")
    enforced = rules.enforced.judge_prompt(scores, "encoder")
    assert (record.score, record.threshold) == (0.991, enforced.threshold)
    assert record.policy_hash == rules.hash


async def test_the_time_of_a_record_is_the_hour(database: Database):
    """An exact one would lead to the request in the ledger."""
    recorder, _, clock = recorder_of(database)
    hour_us = NOW_US // 3_600_000_000 * 3_600_000_000
    for clock.us in (hour_us, hour_us + 3_599_999_999, hour_us + 3_600_000_000):
        ask(recorder, 0.7)
    times_us = [record.at_us for record in await written(recorder, database)]
    assert times_us == [hour_us, hour_us, hour_us + 3_600_000_000]


async def test_a_deletion_that_fails_loses_no_record(database: Database):
    """It is tried again on the next day, and nothing is logged as lost."""
    recorder, log, _ = recorder_of(database, keep_days=0)
    await database.write(lambda c: c.execute("DROP TABLE safety_totals"))
    ask(recorder, 0.7)
    assert await written(recorder, database) == []
    assert log.entries == []


async def test_a_prompt_that_nobody_read_is_not_counted(database: Database):
    """A screen failed, and the server lets that pass."""
    recorder, _, _ = recorder_of(database)
    records = RequestRecords(recorder, None)
    assert not records.record_prompt(replace(policy().judge_prompt({}, "encoder"), unread=True), policy())
    assert await written(recorder, database) == []
    assert await texts(database) == {}


async def test_records_are_written_a_second_later_in_one_unit(database: Database, monkeypatch: Any):
    """However many there are."""
    monkeypatch.setattr(safety_recorder, "FLUSH_S", 0.0)
    recorder, _, _ = recorder_of(database)
    ask(recorder, 0.7)
    await until(lambda: database.queue_depth == 0)
    units = database.num_units
    for _ in range(50):
        ask(recorder, 0.7)
    await until(lambda: database.num_units > units and database.queue_depth == 0)
    assert database.num_units == units + 1
    assert len(await written(recorder, database)) == 51


async def test_old_days_are_deleted_when_a_day_begins(database: Database):
    """Those before the last `keep_days`, with their counts."""
    recorder, _, clock = recorder_of(database, keep_days=2)
    for _ in range(4):
        ask(recorder, 0.7)
        await written(recorder, database)
        clock.us += DAY_US
    days = [TODAY + 1, TODAY + 2, TODAY + 3]
    assert [record.day for record in await written(recorder, database)] == days
    assert sorted(total.day for total in await texts(database)) == days


async def test_a_deletion_goes_on_until_all_is_gone(database: Database, monkeypatch: Any):
    """A piece at a time."""
    monkeypatch.setattr(safety_records, "DELETED_AT_ONCE", 3)
    recorder, _, clock = recorder_of(database, keep_days=1)
    for _ in range(10):
        ask(recorder, 0.7)
    assert len(await written(recorder, database)) == 10
    clock.us += 3 * DAY_US
    ask(recorder, 0.7)
    await until(lambda: database.queue_depth == 0)
    assert [record.day for record in await written(recorder, database)] == [TODAY + 3]


async def test_with_no_days_all_that_there_was_is_deleted(database: Database):
    """And nothing is added."""
    first, _, _ = recorder_of(database)
    ask(first, 0.7)
    assert await written(first, database)
    recorder, _, _ = recorder_of(database, keep_days=0)
    ask(recorder, 0.7)
    assert await written(recorder, database) == []
    assert await texts(database) == {}


async def test_a_day_has_a_bounded_number_of_records(database: Database, monkeypatch: Any):
    """After it neither a record nor a text is counted, so that the rates are those of what was counted."""
    monkeypatch.setattr(safety_recorder, "MAX_RECORDS", 3)
    recorder, log, clock = recorder_of(database)
    for _ in range(5):
        ask(recorder, 0.7)
    assert len(await written(recorder, database)) == 3
    assert list((await texts(database)).values()) == [3]
    assert log.entries == ["safety_records_full"]
    clock.us += DAY_US
    ask(recorder, 0.7)
    assert len(await written(recorder, database)) == 4


async def test_a_store_that_fails_is_logged_and_ends_nothing(database: Database):
    """Of a unit that fails, and of a store that takes none."""
    recorder, log, _ = recorder_of(database)
    await database.write(lambda c: c.execute("DROP TABLE safety_totals"))
    ask(recorder, 0.7)
    assert await written(recorder, database) == []
    assert log.entries == ["safety_records_lost"]

    class Closed:
        def submit(self, _unit: Any) -> None:
            raise StorageUnavailable("closed")

    recorder, log, _ = recorder_of(Closed())
    ask(recorder, 0.7)
    recorder.flush()
    assert log.entries == ["safety_records_lost"]
