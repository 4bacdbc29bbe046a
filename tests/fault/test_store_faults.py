"""The store's bad days over HTTP: clients are told the truth, nothing is lost or billed twice."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.engine.scripted.engine import Script, ScriptedEngine, scripted_text
from app.engine.scripted.service import Run
from app.store import indexing, ledger
from app.store.database import FILE_NAME
from app.store.usage import differences
from tests.support.broken_stores import (
    answer_of,
    check_books,
    checkpoint_often,
    failing,
    fill_disk,
    free_disk,
    outside,
    rows,
)
from tests.support.servers import Serve, Served, ServerProcess, Spawn, chat
from tests.support.sse_client import fetch, open_stream, until

PATH = "/api/chat/completions"
SLOW = 150
LONG = "a letter that needs pages of its own " * 500


class Paced(ScriptedEngine):
    """Keeps its scripts' rates until it is told to hurry: what a test does meanwhile has its time."""

    hurried = False

    async def _pause(self, run: Run, duration_s: float) -> None:
        await super()._pause(run, 0.0 if self.hurried else duration_s)


def hurry(served: Served) -> None:
    """Have all answers come at once from now on."""
    assert isinstance(served.engine, Paced)
    served.engine.hurried = True


def by_first_word(request: Any) -> Script:
    """`slow` lasts, `lengthy` needs pages, `endless` goes on, anything else is 20 tokens at once."""
    word = request.body["messages"][-1]["content"].split()[0]
    return {
        "slow": Script(rate=30, tokens=SLOW),
        "lengthy": Script(rate=400, tokens=4000),
        "endless": Script(rate=200, tokens=1_000_000),
    }.get(word, Script(tokens=20))


async def begin(serve: Serve, *, unit_s: float = 10.0, stream_s: float = 10.0, **settings: Any) -> Served:
    """A server that checkpoints often; how long units and streams wait for a store that is stuck."""
    served = await serve(by_first_word, engine_type=Paced, **settings)
    await checkpoint_often(served, unit_s=unit_s, stream_s=stream_s)
    return served


async def check_serves(served: Served) -> None:
    """New requests are answered, stored and settled."""
    async with await served.open(chat(LONG)) as stream:
        transcript = await stream.to_end()
    assert transcript.content() == "".join(scripted_text(0, 0, 20))
    assert not transcript.errors
    row = rows(served.runtime.settings.data_dir)[stream.id]
    assert (row["state"], row["completion_tokens"], row["outcome"]) == ("settled", 20, "stop")


async def check_refused(served: Served, body: dict[str, Any]) -> None:
    """A request is refused before its first byte, with when to come back."""
    response = await served.post(body)
    assert response.refusal() == (503, "storage_unavailable", None)
    assert int(response.headers["retry-after"]) > 0


# Nothing to do


async def test_idle_server_writes_nothing(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    """Once its requests are over the journal looks, and has no unit for the writer: VACUUM has its minute."""
    served = await begin(serve)
    await check_serves(served)
    database = served.runtime.database
    read, looks = database.read, []

    async def noted(query: Any) -> Any:
        looks.append((query, database.num_units))
        return await read(query)

    monkeypatch.setattr(database, "read", noted)
    await until(lambda: len({units for _, units in looks[-8:]}) == 1 and len(looks) >= 8)
    assert indexing._is_due in [query for query, _ in looks[-8:]]


# Disk full


async def test_disk_full_ends_streams_honestly(serve: Serve):
    """Past the journal's patience a live stream ends in an error, billed for what it generated, once."""
    served = await begin(serve, stream_s=0.3)
    data_dir = served.runtime.settings.data_dir
    async with await served.open(chat("endless")) as stream:
        await stream.read_events(50)
        await fill_disk(served)
        transcript = await stream.to_end()
    assert [error["code"] for error in transcript.errors] == ["storage_unavailable"]
    assert transcript.done
    assert transcript.finish_reasons == {0: "stop"}
    await free_disk(served)
    await check_books(served)
    row = rows(data_dir)[stream.id]
    assert (row["outcome"], row["reconciled"]) == ("storage_unavailable", 0)
    said = transcript.content()
    generated = row["completion_tokens"]
    assert said == "".join(scripted_text(0, 0, generated))
    assert answer_of(data_dir, stream.id) == ("interrupted", said)
    await check_serves(served)


@pytest.mark.parametrize("streaming", [True, False])
async def test_disk_full_refuses_new_requests(serve: Serve, streaming: bool):
    """While nothing can be written new requests get 503 and generate nothing; then they are served."""
    served = await begin(serve)
    async with await served.open(chat("slow")) as stream:
        await stream.read_events(10)
        await fill_disk(served)
        await failing(served)
        before = set(rows(served.runtime.settings.data_dir))
        for _ in range(3):
            await check_refused(served, chat(LONG, stream=streaming))
        assert served.running == 1
        await free_disk(served)
        hurry(served)
        transcript = await stream.to_end()
    assert not transcript.errors
    await check_serves(served)
    await check_books(served)
    assert len(rows(served.runtime.settings.data_dir)) == len(before) + 1


async def test_the_first_request_to_meet_a_full_disk_gets_nothing(serve: Serve):
    """Where nothing has failed yet, a request whose reservation fails ends in an error before any text."""
    served = await begin(serve)
    await fill_disk(served)
    async with await served.open(chat(LONG)) as stream:
        transcript = await stream.to_end()
    assert [error["code"] for error in transcript.errors] == ["storage_unavailable"]
    assert transcript.content() == ""
    assert transcript.done
    await check_refused(served, chat(LONG))
    assert rows(served.runtime.settings.data_dir) == {}
    assert served.running == 0
    await free_disk(served)
    await check_serves(served)
    await check_books(served)


async def test_a_refused_request_may_be_sent_again(serve: Serve):
    """The idempotency key of a request that could not be stored is free for the next try."""
    served = await begin(serve)
    await fill_disk(served)
    first = await served.post(chat(LONG, stream=False), idempotency_key="k")
    assert first.refusal() == (503, "storage_unavailable", None)
    await free_disk(served)
    second = await served.post(chat(LONG, stream=False), idempotency_key="k")
    assert second.status == 200
    assert len(rows(served.runtime.settings.data_dir)) == 1
    await check_books(served)


async def test_disk_full_for_a_while_is_not_noticed(serve: Serve):
    """Room that comes back within the journal's patience: the stream is whole, stored and billed."""
    served = await begin(serve)
    data_dir = served.runtime.settings.data_dir
    async with await served.open(chat("slow " + LONG)) as stream:
        await stream.read_events(10)
        await fill_disk(served)
        await failing(served)
        await free_disk(served)
        hurry(served)
        transcript = await stream.to_end()
    text = "".join(scripted_text(0, 0, SLOW))
    assert (transcript.content(), transcript.errors) == (text, [])
    assert transcript.finish_reasons == {0: "stop"}
    await check_books(served)
    row = rows(data_dir)[stream.id]
    assert (row["completion_tokens"], row["outcome"]) == (SLOW, "stop")
    assert answer_of(data_dir, stream.id) == ("complete", text)


async def test_an_answer_that_ends_on_a_full_disk_is_kept(serve: Serve):
    """An answer that could not be settled says so at its end; it is stored and billed once there is room."""
    served = await begin(serve)
    data_dir = served.runtime.settings.data_dir
    async with await served.open(chat("lengthy")) as stream:
        await stream.read_events(10)
        await fill_disk(served)
        hurry(served)
        transcript = await stream.to_end()
    text = "".join(scripted_text(0, 0, 4000))
    assert transcript.content() == text
    assert [error["code"] for error in transcript.errors] == ["storage_unavailable"]
    assert transcript.done
    assert served.runtime.journal.num_unsettled == 1
    await free_disk(served)
    await check_books(served)
    row = rows(data_dir)[stream.id]
    assert (row["completion_tokens"], row["reconciled"]) == (4000, 0)
    assert answer_of(data_dir, stream.id)[1] == text
    await check_serves(served)


async def test_what_could_not_be_settled_is_settled_at_the_next_start(serve: Serve, tmp_path: Path):
    """A server that stops while its disk is full leaves its books to the next start, at the checkpoint."""
    data_dir = tmp_path / "data"
    served = await begin(serve, data_dir=data_dir)
    async with await served.open(chat("lengthy")) as stream:
        await stream.read_events(20)
        await fill_disk(served)
        hurry(served)
        await stream.to_end()
    await served.close()
    assert rows(data_dir)[stream.id]["state"] == "reserved"
    again = await begin(serve, data_dir=data_dir)
    assert again.logged("reconciled")[0]["requests"] == 1
    await check_books(again)
    row = rows(data_dir)[stream.id]
    assert (row["outcome"], row["reconciled"]) == ("interrupted", 1)
    assert row["completion_tokens"] <= 4000
    status, text = answer_of(data_dir, stream.id)
    assert status == "interrupted"
    assert "".join(scripted_text(0, 0, 4000)).startswith(text)


def _let_files_grow(process: ServerProcess, limit_bytes: int) -> None:
    _, hard = resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (limit_bytes, hard))


async def test_a_disk_that_refuses_writes(spawn: Spawn, tmp_path: Path):
    """Writes that the system itself fails: 503, then service again, with the stream begun before unharmed."""
    process = await spawn("rate=30,tokens=150", "--data-dir", "data")
    port = await process.ready()
    async with await open_stream(port, chat()) as stream:
        await stream.read_events(10)
        _let_files_grow(process, 1)
        await process.logged("not_written")
        refused = await fetch(port, "POST", PATH, chat())
        assert refused.refusal() == (503, "storage_unavailable", None)
        assert int(refused.headers["retry-after"]) > 0
        _let_files_grow(process, resource.RLIM_INFINITY)
        answered = await fetch(port, "POST", PATH, chat(stream=False, max_tokens=5))
        assert answered.status == 200
        transcript = await stream.to_end()
    assert (transcript.content(), transcript.errors) == ("".join(scripted_text(0, 0, 150)), [])
    process.terminate()
    assert await process.exit_status() == 0
    with outside(tmp_path / "data") as c:
        assert c.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert differences(c) == []
    billed = [row["completion_tokens"] for row in rows(tmp_path / "data").values()]
    assert sorted(billed) == [5, 150]


# Other processes


async def test_a_long_reader_holds_up_nobody(serve: Serve):
    """While another process reads one old snapshot, requests are served and settled as ever."""
    served = await begin(serve)
    with outside(served.runtime.settings.data_dir) as other:
        other.execute("BEGIN")
        assert other.execute("SELECT count(*) FROM requests").fetchone() == (0,)
        bodies = [chat("slow"), *(chat(LONG) for _ in range(20))]
        streams = [await served.open(body) for body in bodies]
        hurry(served)
        transcripts = await asyncio.gather(*(stream.to_end() for stream in streams))
        assert not any(transcript.errors for transcript in transcripts)
        assert other.execute("SELECT count(*) FROM requests").fetchone() == (0,)
        await check_books(served)
    assert len(rows(served.runtime.settings.data_dir)) == 21


async def test_a_short_lock_is_waited_for(serve: Serve):
    """While another process writes, streams go on and new requests wait; then all are answered."""
    served = await begin(serve)
    streams = [await served.open(chat("slow")) for _ in range(5)]
    for stream in streams:
        await stream.read_events(3)
    with outside(served.runtime.settings.data_dir) as other:
        other.execute("BEGIN IMMEDIATE")
        await failing(served)
        before = [stream.transcript.num_events for stream in streams]
        for stream in streams:
            await stream.read_events(5)
        bodies = [chat(LONG, stream=streaming) for streaming in (True, False)]
        waiting = [asyncio.create_task(served.post(body)) for body in bodies]
        for stream in streams:
            await stream.read_events(5)
        assert all(s.transcript.num_events >= n + 10 for s, n in zip(streams, before, strict=True))
        assert not any(task.done() for task in waiting)
        other.execute("ROLLBACK")
    assert [(await task).status for task in waiting] == [200, 200]
    hurry(served)
    for stream in streams:
        transcript = await stream.to_end()
        assert (transcript.content(), transcript.errors) == ("".join(scripted_text(0, 0, SLOW)), [])
    await check_books(served)
    tokens = sorted(row["completion_tokens"] for row in rows(served.runtime.settings.data_dir).values())
    assert tokens == [20, 20, *[SLOW] * 5]


async def test_a_lock_that_outlasts_units_refuses_new_requests(serve: Serve):
    """Past the writer's patience new requests get 503; live streams go on as long as the journal's lasts."""
    served = await begin(serve, unit_s=0.05)
    async with await served.open(chat("slow")) as stream:
        await stream.read_events(3)
        with outside(served.runtime.settings.data_dir) as other:
            other.execute("BEGIN IMMEDIATE")
            await failing(served)
            await check_refused(served, chat())
            await stream.read_events(5)
            other.execute("ROLLBACK")
        hurry(served)
        transcript = await stream.to_end()
    assert (transcript.content(), transcript.errors) == ("".join(scripted_text(0, 0, SLOW)), [])
    await check_serves(served)
    await check_books(served)


async def test_a_lock_that_outlasts_everybody(serve: Serve):
    """Past the journal's patience too, streams end in an error; all is settled once the lock is gone."""
    served = await begin(serve, unit_s=0.05, stream_s=0.3)
    streams = [await served.open(chat("endless")) for _ in range(3)]
    for stream in streams:
        await stream.read_events(3)
    with outside(served.runtime.settings.data_dir) as other:
        other.execute("BEGIN IMMEDIATE")
        for stream in streams:
            transcript = await stream.to_end()
            assert [error["code"] for error in transcript.errors] == ["storage_unavailable"]
            assert transcript.done
        await check_refused(served, chat())
        other.execute("ROLLBACK")
    await check_books(served)
    for stream in streams:
        generated = rows(served.runtime.settings.data_dir)[stream.id]["completion_tokens"]
        assert stream.transcript.content() == "".join(scripted_text(0, 0, generated))
    await check_serves(served)


# The clock, and ourselves


async def test_the_clock_steps_back(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    """A clock set back by a day: the order of conversations, cursors, turns and the books stand."""
    served = await begin(serve)
    offset_s, now_ns, now_s = 0, time.time_ns, time.time
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + offset_s * 10**9)
    monkeypatch.setattr(time, "time", lambda: now_s() + offset_s)
    ids: list[str] = []

    async def ask(**more: Any) -> str:
        async with await served.open(chat("hello", **more)) as stream:
            assert not (await stream.to_end()).errors
        return stream.head.headers["x-conversation-id"]

    async def listed(path: str = "/api/conversations?limit=2") -> list[str]:
        page = (await served.call("GET", path)).json()
        return [conversation["id"] for conversation in page["data"]]

    for _ in range(3):
        ids.insert(0, await ask())
    first = (await served.call("GET", "/api/conversations?limit=2")).json()
    offset_s = -86_400
    async with await served.open(chat("slow")) as stream:
        await stream.read_events(5)
        offset_s = -2 * 86_400
        hurry(served)
        assert not (await stream.to_end()).errors
    ids.insert(0, stream.head.headers["x-conversation-id"])
    ids.insert(0, await ask())
    assert await ask(conversation_id=ids[-1]) == ids[-1]
    assert await listed() == ids[:2]
    assert await listed(f"/api/conversations?limit=2&cursor={first['next_cursor']}") == ids[-1:]
    messages = (await served.call("GET", f"/api/conversations/{ids[-1]}")).json()["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    await check_books(served)
    with outside(served.runtime.settings.data_dir) as c:
        assert c.execute("SELECT sum(requests) FROM usage_daily").fetchone() == (6,)
        assert c.execute("SELECT count(*) FROM usage_daily").fetchone() == (3,)


async def test_a_settlement_that_is_faulty_harms_no_other(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    """A bug that one settlement meets: its client is told, the others are checkpointed and settled."""
    settle = ledger.settle

    def faulty(c: sqlite3.Connection, s: ledger.Settlement) -> bool:
        if s.usage.completion_tokens == 7:
            raise KeyError("a bug")
        return settle(c, s)

    def one_by_one(*_args: object) -> None:
        raise ledger.AlreadySettled

    monkeypatch.setattr(ledger, "settle", faulty)
    monkeypatch.setattr(ledger, "settle_all", one_by_one)
    served = await begin(serve)
    data_dir = served.runtime.settings.data_dir
    async with await served.open(chat("slow")) as other:
        await other.read_events(3)
        async with await served.open(chat(max_tokens=7)) as stream:
            transcript = await stream.to_end()
        assert [error["code"] for error in transcript.errors] == ["internal_error"]
        assert transcript.done
        await until(lambda: served.logged("settlement_broke"))
        assert not served.runtime.journal.num_unsettled
        hurry(served)
        assert not (await other.to_end()).errors
    assert rows(data_dir)[other.id]["state"] == "settled"
    assert rows(data_dir)[stream.id]["state"] == "reserved"
    await served.close()
    monkeypatch.undo()
    again = await begin(serve, data_dir=data_dir)
    await check_books(again)
    assert rows(data_dir)[stream.id]["completion_tokens"] <= 7


# Starts that are refused


def _damaged(data_dir: Path) -> None:
    (data_dir / FILE_NAME).write_bytes(b"not a database" * 1000)


def _newer(data_dir: Path) -> None:
    with outside(data_dir) as c:
        c.execute("CREATE TABLE migrations (name TEXT PRIMARY KEY, applied_at TEXT NOT NULL)")
        c.execute("INSERT INTO migrations VALUES ('999_later', '2030-01-01')")


def _no_directory(data_dir: Path) -> None:
    data_dir.rmdir()
    data_dir.write_text("")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_damaged, "Restore a backup"),
        (_newer, "999_later"),
        (_no_directory, "it is not a directory"),
    ],
)
async def test_a_start_that_is_refused(spawn: Spawn, tmp_path: Path, spoil: Any, words: str):
    """`serve` ends with 78 and a sentence, and its port is free again."""
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    spoil(data_dir)
    process = await spawn("", "--data-dir", "data")
    assert await process.exit_status(60) == 78
    line = process.noise[-1]
    assert line.startswith("tokenring: ")
    assert words in line
    assert process.log[-1] == process.log[-1] | {"event": "stopped", "status": 78}
    with socket.socket() as free:
        free.bind(("127.0.0.1", await process.port()))


async def test_a_second_server_on_a_directory_is_refused(spawn: Spawn, tmp_path: Path):
    """A second server on the same data directory ends with 78; the first goes on."""
    first = await spawn("", "--data-dir", "data")
    port = await first.ready()
    second = await spawn("", "--data-dir", "data")
    assert await second.exit_status(60) == 78
    explained, told = second.noise
    assert explained.startswith(f"doctor: data_dir: data is used by process {first.process.pid}")
    in_use = f"tokenring: --data-dir data is in use by process {first.process.pid};"
    assert told == f"{in_use} stop it or choose another --data-dir.\n"
    assert (await fetch(port, "POST", PATH, chat(stream=False))).status == 200


@contextlib.contextmanager
def files_of_children(limit_bytes: int) -> Iterator[None]:
    """Processes started meanwhile may not write larger files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("limit_bytes", "words"),
    [
        (1, "cannot be locked (File too large)"),
        (1000, "cannot be read or written (disk I/O error)"),
        (40_000, "The server cannot store anything now"),
    ],
)
async def test_a_start_on_a_full_disk_is_refused(spawn: Spawn, tmp_path: Path, limit_bytes: int, words: str):
    """Whatever the disk does not take at start, the server says so and ends; the books wait."""
    data_dir = tmp_path / "data"
    process = await spawn("rate=5000,tokens=1000000,context=2000000", "--data-dir", "data")
    port = await process.ready()
    async with await open_stream(port, chat()) as stream:
        reading = asyncio.create_task(stream.to_end())
        with outside(data_dir) as c:
            large = "SELECT sum(length(slice)) > 60000 FROM events"
            await until(lambda: c.execute(large).fetchone()[0], timeout_s=40)
        process.process.kill()
        await process.exit_status()
        await asyncio.wait([reading])
        assert not reading.exception() or isinstance(reading.exception(), ConnectionResetError)
    with files_of_children(limit_bytes):
        refused = await spawn("", "--data-dir", "data")
    assert await refused.exit_status(60) == 78
    line = refused.noise[-1]
    assert line.startswith("tokenring: ")
    assert words in line
    again = await spawn("", "--data-dir", "data")
    assert (await again.logged("reconciled"))["requests"] == 1
    (row,) = rows(data_dir).values()
    assert (row["state"], row["reconciled"]) == ("settled", 1)
