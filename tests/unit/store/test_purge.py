"""A purged conversation leaves counts and not one word, in no file of the store."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import structlog

from app.errors import Conflict, NotFound, StorageUnavailable
from app.store import conversation_list, events, purge, safety_events
from app.store.database import FILE_NAME, Database
from app.store.export import VIEW, document
from app.store.purge import MESSAGES, Purge, _claim_due, _wiping, purge_now
from app.store.safety_events import SafetyEvent
from tests.support.conversing import Chats
from tests.support.sse_client import until

DAY_US = 86_400_000_000


@dataclass
class Kept:
    """A store in a directory of its own, and what was said in it."""

    database: Database
    chats: Chats = field(default_factory=Chats)
    said: dict[str, list[str]] = field(default_factory=dict)
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    def words(self, n: int) -> str:
        """Words that are in no other text, and can be told from all else by their ends."""
        letters = "abcdefghijklmnopqrstuvwxyz"
        return " ".join("".join(self.rng.choices(letters, k=12)) + "0" for _ in range(n))

    async def converse(self, conversation_id: str, num_words: int = 20, *, finish: bool = True) -> None:
        """Write a turn with two answers, events and a key."""
        asked, answered, other = (self.words(num_words) for _ in range(3))
        self.said.setdefault(conversation_id, []).extend(f"{asked} {answered} {other}".split())

        def unit(c: sqlite3.Connection) -> None:
            self.chats.c = c
            answer_ids = self.chats.begin(conversation_id, asked, title=asked[:64], choices=2)
            (seq,) = c.execute("SELECT request_seq FROM messages WHERE id = ?", answer_ids[:1]).fetchone()
            events.append(c, seq, 1, answered.encode())
            c.execute("UPDATE requests SET idempotency_key = ? WHERE seq = ?", (asked[:25], seq))
            if finish:
                self.chats.finish(answer_ids, answered, other)

        await self.database.write(unit)

    async def delete(self, conversation_id: str, days_ago: float = 31) -> None:
        """Delete a conversation as if so many days ago."""
        at_us = time.time_ns() // 1000 - int(days_ago * DAY_US)
        await self.database.write(lambda c: conversation_list.delete(c, "local", conversation_id, at_us))

    async def purge(self) -> int:
        """Purge what is due, and have the file written anew."""
        purging = Purge(self.database, structlog.get_logger(), 30)
        num_purged = await purging.once()
        await purging.compact()
        return num_purged

    def left(self, *conversation_ids: str) -> set[str]:
        """The ends of their words in the files of the store; the index has beginnings only once."""
        files = self.database.path.parent.glob(FILE_NAME + "*")
        stored = {end for path in files for end in re.findall(rb"[a-z]{8}0", path.read_bytes())}
        said = {word[-9:] for i in conversation_ids for word in self.said[i]}
        return {end.decode() for end in stored} & said

    async def count(self, query: str) -> int:
        """The number a query gives."""
        number: int = await self.database.read(lambda c: c.execute(query).fetchone()[0])
        return number


@pytest.fixture
async def kept(tmp_path: Path) -> AsyncIterator[Kept]:
    """An empty store."""
    database = Database(tmp_path, patience_s=0.2)
    await database.open()
    yield Kept(database)
    await database.aclose()


async def test_purged_text_is_in_no_file(kept):
    """Rows, titles, events, keys, index, free pages and log hold none of it; others keep theirs."""
    for i in range(30):
        await kept.converse(f"conv_{i % 10}", num_words=5 if i % 3 else 900)
    await kept.delete("conv_3")
    await kept.delete("conv_8")
    assert kept.left("conv_3")
    assert await kept.purge() == 2
    assert kept.left("conv_3", "conv_8") == set()
    assert kept.left("conv_4")
    assert len(await kept.database.read(lambda c: c.execute("PRAGMA integrity_check").fetchall())) == 1
    await kept.database.write(lambda c: c.execute("INSERT INTO search (search) VALUES ('integrity-check')"))


@pytest.mark.parametrize("seed", [1, 3])  # where SQLite alone leaves some
async def test_nothing_stays_in_corners(kept, seed):
    """Pages that were split and filled again hold no copies, nor get them back; other rows stay."""
    kept.rng.seed(seed)
    ids = [f"conv_{i}" for i in range(60)]
    for _ in range(400):
        await kept.converse(kept.rng.choice(ids), num_words=kept.rng.choice([1, 3, 10, 40, 120, 600]))
    gone = kept.rng.sample(list(kept.said), 20)
    for conversation_id in gone:
        await kept.delete(conversation_id)
    others = await kept.database.read(lambda c: shown(c, gone))
    assert await kept.purge() == 20
    assert await kept.database.read(lambda c: shown(c, gone)) == others
    assert await kept.count("SELECT count(*) FROM pragma_integrity_check WHERE integrity_check = 'ok'") == 1
    for conversation_id in sorted(set(kept.said) - set(gone)):
        await kept.converse(conversation_id, num_words=40)
    await kept.database.checkpoint_wal()
    assert kept.left(*gone) == set()


def shown(c: sqlite3.Connection, without: Sequence[str]) -> list[bytes]:
    """All other conversations."""
    rows = c.execute("SELECT id FROM conversations ORDER BY seq").fetchall()
    return [b"".join(document(c, "local", found, VIEW)) for (found,) in rows if found not in without]


async def test_purge_goes_on_beside_turns(kept):
    """Turns are written between the units of a purge, and all of them are there after it."""
    for i in range(40):
        await kept.converse(f"conv_{i}", num_words=60)
    await kept.delete("conv_3")
    purging = asyncio.create_task(Purge(kept.database, structlog.get_logger(), 30).once())
    written = 0
    while not purging.done():
        await kept.converse(f"conv_new_{written}", num_words=60)
        written += 1
    assert await purging == 1
    assert written > 5
    assert await kept.purge() == 1
    assert kept.left("conv_3") == set()
    assert await kept.count("SELECT count(*) FROM conversations") == 39 + written
    assert await kept.count("SELECT count(*) FROM pragma_integrity_check WHERE integrity_check = 'ok'") == 1


async def test_counts_stay(kept):
    """The ledger keeps its rows, without what was said."""
    await kept.converse("conv_1")
    await kept.delete("conv_1")
    await kept.purge()
    assert await kept.count("SELECT sum(completion_tokens) FROM requests") == 5
    assert await kept.count("SELECT sum(completion_tokens) FROM usage_daily") == 5
    for table in ("conversations", "messages", "events"):
        assert await kept.count(f"SELECT count(*) FROM {table}") == 0


async def test_only_what_is_due_is_purged(kept):
    """Deleted less than the days ago, or not at all: it stays and can be restored."""
    for conversation_id in ("conv_young", "conv_kept"):
        await kept.converse(conversation_id)
    await kept.delete("conv_young", days_ago=29.9)
    assert await kept.purge() == 0
    await kept.database.write(lambda c: conversation_list.restore(c, "local", "conv_young"))
    assert kept.left("conv_young")


async def test_purged_conversation_cannot_be_restored(kept):
    """Not even when the purge was cut short."""
    await kept.converse("conv_1")
    await kept.delete("conv_1")
    before_us = time.time_ns() // 1000
    assert await kept.database.write(lambda c: _claim_due(c, before_us)) == [1]
    with pytest.raises(NotFound):
        await kept.database.write(lambda c: conversation_list.restore(c, "local", "conv_1"))


async def test_purge_that_was_cut_short_is_done_again(kept):
    """Whatever the step it died at, the next one does the rest."""
    await kept.converse("conv_1")
    await kept.delete("conv_1")
    before_us = time.time_ns() // 1000
    seqs = await kept.database.write(lambda c: _claim_due(c, before_us))
    wipe, *_ = _wiping(seqs)
    assert await kept.database.write(wipe)
    assert await kept.purge() == 1
    assert kept.left("conv_1") == set()


async def test_reader_of_another_process_postpones_the_end(kept):
    """A long transaction keeps the log; when it is over, the next purge empties it."""
    await kept.converse("conv_1")
    reader = sqlite3.connect(kept.database.path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM messages").fetchone()
    await kept.delete("conv_1")
    assert await kept.purge() == 0
    assert kept.left("conv_1")
    reader.execute("COMMIT")
    reader.close()
    assert await kept.purge() == 1
    assert kept.left("conv_1") == set()


async def test_long_conversation_is_purged_in_pieces(kept):
    """More messages than a cascade could go down, with other units in between."""

    def unit(c: sqlite3.Connection) -> None:
        c.executemany(
            "INSERT INTO messages (conversation_seq, parent_seq, id, role, text, created_at_us, status)"
            " VALUES (1, (SELECT max(seq) FROM messages), ?, 'user', 'hi', 0, 'complete')",
            [(f"msg_{i}",) for i in range(3000)],
        )

    await kept.converse("conv_1")
    await kept.database.write(unit)
    await kept.delete("conv_1")
    assert await kept.purge() == 1
    assert await kept.count("SELECT count(*) FROM messages") == 0
    assert kept.database.num_units > 3000 / MESSAGES


async def test_conversation_that_is_being_answered_waits(kept):
    """It is purged after its turn has ended."""
    await kept.converse("conv_1", finish=False)
    await kept.delete("conv_1")
    assert await kept.purge() == 0
    connection = connect(kept)
    with pytest.raises(Conflict):
        purge_now(connection, ["conv_1"], vacuum=True)
    connection.close()


async def test_purge_now_beside_a_server(kept):
    """A second connection purges at once, deleted or not, while the store is open."""
    await kept.converse("conv_1")
    await kept.converse("conv_2")
    connection = connect(kept)
    assert await asyncio.to_thread(purge_now, connection, ["conv_1"], vacuum=True)
    with pytest.raises(NotFound):
        purge_now(connection, ["conv_1"], vacuum=True)
    connection.close()
    assert kept.left("conv_1") == set()
    await kept.converse("conv_2")
    assert kept.left("conv_2")


async def test_answer_deleted_alone_leaves_what_was_asked(kept):
    """The next purge takes its words out of the index and the files; the question is still there."""
    await kept.converse("conv_1")
    await kept.database.write(lambda c: events.erase(c, 1))
    assert await kept.purge() == 0
    assert kept.left("conv_1") == {word[-9:] for word in kept.said["conv_1"][:20]}
    assert await kept.database.read(events.num_erased) == 0


async def test_log_is_emptied_soon_after_something_was_forgotten(kept):
    """What was never to be stored does not stay in a log that nobody writes to any more."""
    await kept.converse("conv_1")
    await kept.database.write(lambda c: c.execute("DELETE FROM events"))
    running = asyncio.create_task(Purge(kept.database, structlog.get_logger(), 30).run())
    kept.database.text_deleted.set()
    log = kept.database.path.with_name(FILE_NAME + "-wal")
    await until(lambda: log.stat().st_size == 0)
    running.cancel()


async def test_purge_runs_when_started(kept):
    """The first purge does not wait an hour."""
    await kept.converse("conv_1")
    await kept.delete("conv_1")
    log = structlog.testing.LogCapture()
    logger = structlog.wrap_logger(None, processors=[log])
    running = asyncio.create_task(Purge(kept.database, logger, 30).run())
    await until(lambda: log.entries)
    running.cancel()
    assert [(line["event"], line["conversations"]) for line in log.entries] == [("purged", 1)]


async def test_store_that_cannot_be_written_postpones_the_purge(kept):
    """A disk that is full, or a store that is locked, is met again in an hour."""
    await kept.converse("conv_1")
    await kept.delete("conv_1")
    log = structlog.testing.LogCapture()
    await kept.database.aclose()
    running = asyncio.create_task(
        Purge(kept.database, structlog.wrap_logger(None, processors=[log]), 30).run()
    )
    await until(lambda: log.entries)
    running.cancel()
    assert [(line["event"], line["error"]) for line in log.entries] == [
        ("purge_postponed", "storage_unavailable")
    ]


def connect(kept: Kept) -> sqlite3.Connection:
    """A connection of another process's kind."""
    return sqlite3.connect(kept.database.path, isolation_level=None, check_same_thread=False)


async def test_safety_events_outlive_a_purge(kept):
    """They hold no text: what was decided about a purged conversation can still be listed."""
    await kept.converse("conv_1")
    event = SafetyEvent(1, "req", "local", None, "m", "prompt", "encoder", "watch", "S2", 0.5, 0.4, "hash")
    await kept.database.write(lambda c: safety_events.add(c, event))
    await kept.delete("conv_1")
    assert await kept.purge() == 1
    assert [found for _, found in (await kept.database.read(lambda c: safety_events.page(c, 9))).events] == [
        event
    ]


class HandDatabase:
    """A store of which a purge sees only that text was deleted, and how emptying its log went."""

    def __init__(self, *outcomes: bool | Exception) -> None:
        self.text_deleted = asyncio.Event()
        self._outcomes = list(outcomes)
        self.num_emptied = 0

    async def checkpoint_wal(self) -> bool:
        """See Database."""
        self.num_emptied += 1
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


@pytest.mark.parametrize("outcome", [False, StorageUnavailable("full"), ValueError("a secret")])
async def test_log_that_could_not_be_emptied_is_emptied_later(
    outcome: bool | Exception, monkeypatch: pytest.MonkeyPatch
):
    """A reader was in the way, or the disk was full, or there is a defect: which alone is logged."""
    monkeypatch.setattr(purge, "CHECKPOINT_S", 0.001)
    log = structlog.testing.LogCapture()
    database = HandDatabase(outcome, True)
    purging = Purge(cast("Database", database), structlog.wrap_logger(None, processors=[log]), 30)
    emptying = asyncio.create_task(purging._checkpoint_wal())
    database.text_deleted.set()
    await until(lambda: database.num_emptied == 2 and not database.text_deleted.is_set())
    emptying.cancel()
    events_logged = ["wal_checkpoint_failed"] if isinstance(outcome, ValueError) else []
    assert [line["event"] for line in log.entries] == events_logged
    assert "a secret" not in repr(log.entries)


class WrittenDatabase:
    """A store of which a purge sees how many units it has written at each look; the last number stays."""

    def __init__(self, *units: int) -> None:
        self._units = list(units)
        self.num_looks = 0
        self.vacuumed_at_look: list[int] = []

    @property
    def num_units(self) -> int:
        """See Database."""
        self.num_looks += 1
        return self._units.pop(0) if len(self._units) > 1 else self._units[0]

    async def vacuum(self) -> bool:
        """See Database."""
        self.vacuumed_at_look.append(self.num_looks)
        return True

    async def write(self, _unit: object) -> None:
        """See Database."""

    async def read(self, _query: object) -> list[int]:
        """See Database."""
        return []


async def test_file_is_written_anew_when_nothing_else_is(monkeypatch: pytest.MonkeyPatch):
    """Between two looks, and once where one purge was; without one never."""
    monkeypatch.setattr(purge, "IDLE_S", 0.001)
    monkeypatch.setattr(purge, "VACUUM_PERIOD_S", 0.001)
    database = WrittenDatabase(1, 2, 3, 5, 5)
    purging = Purge(cast("Database", database), structlog.get_logger(), 30)
    purging._wiped = [1]
    purging._overdue_at_s = time.monotonic() + 60
    running = asyncio.create_task(purging._vacuum())
    await until(lambda: database.num_looks > 8)
    running.cancel()
    assert database.vacuumed_at_look == [5]
    assert purging._wiped == []


async def test_purge_leaves_the_row_of_a_conversation_to_the_vacuum(kept):
    """So that one that died before it is done again."""
    await kept.converse("conv_1")
    await kept.delete("conv_1")
    purging = Purge(kept.database, structlog.get_logger(), 30)
    assert [await purging.once(), await purging.once()] == [1, 0]
    assert await kept.count("SELECT count(*) FROM conversations") == 1
    assert await purging.compact()
    assert await kept.count("SELECT count(*) FROM conversations") == 0
    assert kept.left("conv_1") == set()


@pytest.mark.parametrize(
    ("outcome", "event"),
    [
        (StorageUnavailable("The disk has no room."), "vacuum_postponed"),
        (ValueError("a secret"), "purge_broke"),
        (False, "vacuum_overdue"),
    ],
)
async def test_vacuum_that_could_not_be_done_is_tried_again(
    kept, monkeypatch: pytest.MonkeyPatch, outcome: bool | Exception, event: str
):
    """The log says so at once where it cannot be done, and after a week where it always gave way."""
    for name in ("IDLE_S", "RETRY_S"):
        monkeypatch.setattr(purge, name, 0.001)
    if outcome is False:
        monkeypatch.setattr(purge, "OVERDUE_S", 0.0)
    await kept.converse("conv_1")
    await kept.delete("conv_1")
    log = structlog.testing.LogCapture()
    purging = Purge(kept.database, structlog.wrap_logger(None, processors=[log]), 30)
    await purging.once()
    tries: list[int] = []

    async def vacuum() -> bool:
        tries.append(1)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(kept.database, "vacuum", vacuum)
    running = asyncio.create_task(purging._vacuum())
    await until(lambda: len(tries) >= 3)
    running.cancel()
    assert event in [line["event"] for line in log.entries]
    assert "a secret" not in repr(log.entries)
    assert len([line for line in log.entries if line["event"] == "vacuum_overdue"]) == (outcome is False)


async def test_purge_at_once_beside_a_server_leaves_the_vacuum_to_it(kept):
    """Rows, index and log are without the text; the server's next purge has the conversation to do."""
    await kept.converse("conv_1")
    with contextlib.closing(connect(kept)) as connection:
        assert purge_now(connection, ["conv_1"], vacuum=False)
    assert await kept.count("SELECT count(*) FROM messages") == 0
    assert (kept.database.path.with_name(FILE_NAME + "-wal")).stat().st_size == 0
    assert await kept.purge() == 1
    assert await kept.count("SELECT count(*) FROM conversations") == 0


async def test_purge_beside_a_server_is_followed_by_a_vacuum_without_the_days_pause(
    kept, monkeypatch: pytest.MonkeyPatch
):
    """The next idle look does it, though the hourly purge has just run and a VACUUM too."""
    monkeypatch.setattr(purge, "IDLE_S", 0.001)
    for conversation_id in ("conv_1", "conv_2", "conv_3"):
        await kept.converse(conversation_id)
    await kept.delete("conv_1")
    running = asyncio.create_task(Purge(kept.database, structlog.get_logger(), 30).run())
    await until(lambda: kept.left("conv_1") == set() and not kept.database._is_vacuuming())
    with contextlib.closing(connect(kept)) as connection:
        await asyncio.to_thread(purge_now, connection, ["conv_2"], vacuum=False)
        await until(lambda: connection.execute("SELECT id FROM conversations").fetchall() == [("conv_3",)])
    running.cancel()
    assert kept.left("conv_1", "conv_2") == set()


async def test_hourly_purge_that_meets_a_commands_first_ends_the_days_pause(kept):
    """What was due by itself keeps to the pause; what a command wiped does not."""
    purging = Purge(kept.database, structlog.get_logger(), 30)
    for conversation_id in ("conv_1", "conv_2"):
        await kept.converse(conversation_id)
    await kept.delete("conv_1")
    purging._vacuum_at_s = later_s = time.monotonic() + 60
    assert await purging.once() == 1
    assert purging._vacuum_at_s == later_s
    with contextlib.closing(connect(kept)) as connection:
        assert purge_now(connection, ["conv_2"], vacuum=False)
    assert await purging.once() == 1
    assert purging._vacuum_at_s == 0.0


async def test_vacuum_of_what_was_due_by_itself_waits_for_the_day(kept, monkeypatch: pytest.MonkeyPatch):
    """However many idle looks there are."""
    monkeypatch.setattr(purge, "IDLE_S", 0.001)
    purging = Purge(kept.database, structlog.get_logger(), 30)
    await kept.converse("conv_1")
    await kept.delete("conv_1")
    assert await purging.once() == 1
    purging._vacuum_at_s = time.monotonic() + 60
    looks: list[bool] = []
    look = purging._is_purged_elsewhere

    async def counted() -> bool:
        looks.append(await look())
        return looks[-1]

    monkeypatch.setattr(purging, "_is_purged_elsewhere", counted)
    running = asyncio.create_task(purging._vacuum())
    await until(lambda: len(looks) > 5)
    running.cancel()
    assert not any(looks)
    assert await kept.count("SELECT count(*) FROM conversations") == 1


async def test_purge_at_once_has_erased_answers_to_do(kept):
    """With no conversation to purge; with neither there is nothing to write."""
    await kept.converse("conv_1")
    with contextlib.closing(connect(kept)) as connection:
        assert purge_now(connection, [], vacuum=True)
        await kept.database.write(lambda c: events.erase(c, 1))
        assert purge_now(connection, [], vacuum=True)
    assert kept.left("conv_1") == {word[-9:] for word in kept.said["conv_1"][:20]}
    assert await kept.database.read(events.num_erased) == 0


async def test_purge_that_breaks_is_logged_and_comes_again(kept, monkeypatch: pytest.MonkeyPatch):
    """Its message is in no log."""
    log = structlog.testing.LogCapture()
    monkeypatch.setattr(purge, "PERIOD_S", 0.001)
    runs: list[int] = []

    async def broken(_purge: Purge) -> int:
        runs.append(1)
        raise ValueError("a secret")

    monkeypatch.setattr(Purge, "once", broken)
    running = asyncio.create_task(
        Purge(kept.database, structlog.wrap_logger(None, processors=[log]), 30).run()
    )
    await until(lambda: len(runs) >= 2)
    running.cancel()
    assert {line["event"] for line in log.entries} == {"purge_broke"}
    assert "a secret" not in repr(log.entries)


async def test_purge_is_postponed_while_another_process_reads(kept):
    """The rows are hidden for good; the text goes the next time."""
    await kept.converse("conv_1")
    await kept.delete("conv_1")
    log = structlog.testing.LogCapture()
    purging = Purge(kept.database, structlog.wrap_logger(None, processors=[log]), 30)
    with contextlib.closing(connect(kept)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM conversations").fetchone()
        assert await purging.once() == 0
        reader.execute("COMMIT")
    assert [line["event"] for line in log.entries] == ["purge_postponed"]
    assert await purging.once() == 1
    assert await purging.compact()
    assert kept.left("conv_1") == set()


async def test_purge_at_once_gives_up_on_a_reader_that_stays(kept, monkeypatch: pytest.MonkeyPatch):
    """What is left is done by the next purge, this one again."""
    monkeypatch.setattr(purge, "READER_TIMEOUT_S", 0.0)
    await kept.converse("conv_1")
    with contextlib.closing(connect(kept)) as reader, contextlib.closing(connect(kept)) as purging:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM conversations").fetchone()
        assert not purge_now(purging, ["conv_1"], vacuum=True)
        reader.execute("COMMIT")
    with contextlib.closing(connect(kept)) as purging:
        assert purge_now(purging, ["conv_1"], vacuum=True)
    assert kept.left("conv_1") == set()
