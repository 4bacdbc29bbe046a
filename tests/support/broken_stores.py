"""Stores that cannot be written for a while, under a server, and what they hold afterwards."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.errors import StorageUnavailable
from app.store import ledger
from app.store.database import FILE_NAME
from app.store.usage import differences
from tests.support.servers import Served
from tests.support.sse_client import until


async def checkpoint_often(served: Served, *, unit_s: float = 10.0, stream_s: float = 10.0) -> None:
    """From now on; how long units and streams wait for a store that is stuck."""
    served.runtime.database._patience_s = unit_s
    journal = served.runtime.journal
    await journal.aclose()
    journal._checkpoint_s, journal._max_outage_s = 0.02, stream_s
    journal.start()


async def fill_disk(served: Served) -> None:
    """From now on the file may not grow."""

    def unit(c: sqlite3.Connection) -> None:
        (pages,) = c.execute("PRAGMA page_count").fetchone()
        c.execute(f"PRAGMA max_page_count={pages}").fetchone()

    await served.runtime.database.write(unit)


async def free_disk(served: Served) -> None:
    """There is room again. Said in one transaction with what does not fit yet, it is said in vain."""
    while True:
        with contextlib.suppress(StorageUnavailable):
            return await served.runtime.database.write(
                lambda c: c.execute("PRAGMA max_page_count=1000000").fetchone()
            )


async def failing(served: Served) -> None:
    """Wait until the store has been found not to take anything."""
    await until(lambda: served.runtime.database.failing)


@contextlib.contextmanager
def outside(data_dir: Path) -> Iterator[sqlite3.Connection]:
    """The store as another process has it."""
    connection = sqlite3.connect(data_dir / FILE_NAME, isolation_level=None, timeout=5)
    try:
        yield connection
    finally:
        connection.close()


def rows(data_dir: Path) -> dict[str, dict[str, Any]]:
    """The ledger by request id."""
    with outside(data_dir) as c:
        c.row_factory = sqlite3.Row
        return {row["id"]: dict(row) for row in c.execute("SELECT * FROM requests")}


def answer_of(data_dir: Path, request_id: str) -> tuple[str, str]:
    """The status and the text of a request's stored answer."""
    with outside(data_dir) as c:
        found: tuple[str, str] = c.execute(
            "SELECT status, text FROM messages WHERE request_seq = (SELECT seq FROM requests WHERE id = ?)",
            (request_id,),
        ).fetchone()
        return found


async def check_books(served: Served) -> None:
    """The file is sound, no request is open, and rows and daily sums say the same."""
    await served.settled()
    with outside(served.runtime.settings.data_dir) as c:
        assert c.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert c.execute("PRAGMA foreign_key_check").fetchall() == []
        assert ledger.unsettled_requests(c) == []
        assert differences(c) == []
