"""An upgrade is a restart: a store of the version before is served, and loses no stream from then on."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from app.engine.scripted.engine import scripted_text
from tests.fault.test_restart import FAST, SLOW, TOKENS, bills, returned, stop
from tests.support.servers import Spawn, chat
from tests.support.sse_client import fetch, open_stream

BEFORE = Path(__file__).parents[1] / "unit/store/schema_011.sql"
"""The schema of the last version that suspended nothing."""


def as_before(database: Path) -> None:
    """Make a store one of the version before: the same without what this one has added."""
    connection = sqlite3.connect(database)
    with connection:
        connection.execute("DROP TABLE suspended")
        connection.execute("DELETE FROM migrations WHERE name = '012_suspended'")
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    connection.close()
    made = sqlite3.connect(":memory:")
    made.executescript(BEFORE.read_text("utf-8"))
    query = "SELECT name FROM sqlite_schema WHERE type = 'table'"
    assert {name for (name,) in made.execute(query)} - tables == set()
    made.close()


async def test_a_store_of_the_version_before_goes_on(spawn: Spawn, tmp_path: Path):
    """What had ended is replayed, what was cut off is settled; from then on a stop loses no stream."""
    process = await spawn(SLOW)
    port = await process.ready()
    async with await open_stream(port, chat("first", max_tokens=9)) as stream:
        first = await stream.to_end()
    async with await open_stream(port, chat("cut off by a kill")) as cut_off:
        await cut_off.read_events(3)
        process.process.kill()
        await process.process.wait()
    as_before(tmp_path / "data" / "tokenring.db")
    process = await spawn(SLOW, "--drain-timeout-s", "0.2")
    port = await process.ready()
    assert [line["requests"] for line in process.log if line["event"] == "reconciled"] == [1]
    async with await open_stream(port, stream_id=stream.id, after=0) as replay:
        assert (await replay.to_end()).text == first.text
    live = await open_stream(port, chat("suspended"))
    await live.read_events(3)
    await stop(process, [live])
    process = await spawn(FAST)
    port = await process.ready()
    assert (await returned(port, live)).content() == "".join(scripted_text(0, 0, TOKENS))
    usage = await fetch(port, "GET", "/api/usage")
    assert usage.status == 200
    process.terminate()
    assert await process.exit_status() == 0
    assert sorted(bill[1] for bill in bills(tmp_path).values()) == ["interrupted", "length", "stop"]
