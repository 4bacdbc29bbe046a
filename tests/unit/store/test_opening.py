"""A data directory that cannot be used is refused in a sentence that says what to do."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from app.store import opening
from app.store.batch import Unit
from app.store.database import FILE_NAME, Database
from app.store.opening import Holder, StoreRefused, holder, lock, note_models

ROOT = Path(__file__).parents[3]


def insert(n: int, size: int = 0) -> Unit[int]:
    """A unit that inserts `n` with that many bytes, and returns it."""

    def unit(c: sqlite3.Connection) -> int:
        c.execute("INSERT INTO t VALUES (?, zeroblob(?))", (n, size))
        return n

    return unit


def files(data_dir: Path) -> set[str]:
    """The names of a directory's files."""
    return {path.name for path in data_dir.iterdir()}


# What cannot be opened


async def refusal(data_dir: Path) -> str:
    """Why the directory is refused."""
    database = Database(data_dir)
    with pytest.raises(StoreRefused) as refused:
        await database.open()
    await database.aclose()
    return str(refused.value)


async def filled(data_dir: Path) -> Path:
    """A store of some hundred pages, closed; returns its file."""
    database = Database(data_dir)
    await database.open()
    await database.write(lambda c: c.execute("CREATE TABLE t (n INTEGER PRIMARY KEY, blob)"))
    for n in range(20):
        await database.write(insert(n, size=20_000))
    await database.aclose()
    return data_dir / FILE_NAME


def _overwritten(path: Path) -> None:
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(4096)
        file.write(os.urandom(size - 3 * 4096))


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _cut_within_the_header(path: Path) -> None:
    os.truncate(path, 50)


def _something_else(path: Path) -> None:
    path.write_bytes(b"%PDF-1.7\n" + os.urandom(20_000))


def _wrong_about_itself(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(36)  # the number of free pages, https://www.sqlite.org/fileformat.html
        file.write((7).to_bytes(4))


@pytest.mark.parametrize(
    "damage", [_overwritten, _cut, _cut_within_the_header, _something_else, _wrong_about_itself]
)
async def test_a_damaged_file_is_refused(tmp_path: Path, damage: Callable[[Path], None]):
    """A file that is no sound database is named, left as it is, and a backup recommended."""
    path = await filled(tmp_path)
    damage(path)
    before = path.read_bytes()
    message = await refusal(tmp_path)
    assert message.startswith(f"{path} is damaged (")
    assert message.endswith("Restore a backup, or move the file away to start anew.")
    assert "\n" not in message
    assert path.read_bytes() == before


async def test_a_file_that_was_moved_away_starts_anew(tmp_path: Path):
    """What the refusal recommends works: without the file, an empty store is made."""
    path = await filled(tmp_path)
    _cut(path)
    await refusal(tmp_path)
    path.rename(tmp_path / "damaged.db")
    database = Database(tmp_path)
    await database.open()
    assert await database.read(lambda c: c.execute("SELECT count(*) FROM requests").fetchone()) == (0,)
    await database.aclose()


async def test_a_newer_schema_is_refused(tmp_path: Path):
    """A file that has had a migration unknown here is left to the version that knows it."""
    path = await filled(tmp_path)
    with sqlite3.connect(path) as connection:
        connection.execute("INSERT INTO migrations VALUES ('002_from_the_future', datetime('now'))")
    connection.close()
    before = path.read_bytes()
    message = await refusal(tmp_path)
    assert message == (
        f"{path} was written by a newer version (it has 002_from_the_future)."
        " Run that version, or restore a backup from before it."
    )
    assert path.read_bytes() == before


async def test_a_schema_from_before_the_first_release_is_refused(tmp_path: Path):
    """Its migrations are no longer known; version 0.1.0 has them. The file stays as it is."""
    path = await filled(tmp_path)
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM migrations")
        connection.execute("INSERT INTO migrations VALUES ('009_branch_indexes', datetime('now'))")
    connection.close()
    before = path.read_bytes()
    message = await refusal(tmp_path)
    assert message == f"{path} was written by a version before 0.1.0. Start version 0.1.0 on it once."
    assert path.read_bytes() == before


async def test_a_directory_that_is_a_file_is_refused(tmp_path: Path):
    """A file where the directory should be, or above it, is named as what is wrong."""
    (tmp_path / "data").write_text("")
    assert await refusal(tmp_path / "data") == (
        f"--data-dir {tmp_path / 'data'} cannot be written (it is not a directory)."
        " Give this user the right to, or choose another --data-dir."
    )
    assert "cannot be written (Not a directory)" in await refusal(tmp_path / "data" / "below")


async def test_a_directory_that_cannot_be_made_is_refused():
    """A path where nobody may make a directory is named, to root too."""
    assert "--data-dir /proc/tokenring cannot be written (" in await refusal(Path("/proc/tokenring"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
async def test_a_directory_without_permission_is_refused(tmp_path: Path):
    """A directory this user may not write is named."""
    data_dir = tmp_path / "data"
    data_dir.mkdir(mode=0o500)
    assert "cannot be written (Permission denied)" in await refusal(data_dir)


async def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path):
    """Something that is no file where the store should be is named."""
    (tmp_path / FILE_NAME).mkdir()
    message = await refusal(tmp_path)
    assert message.startswith(f"{tmp_path / FILE_NAME} cannot be written (unable to open database file).")


def test_a_file_system_without_shared_memory_is_refused(tmp_path: Path):
    """Where SQLite cannot have its log, the directory must be elsewhere."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    with pytest.raises(StoreRefused, match="put --data-dir on a local disk"):
        opening.prepare(connection, tmp_path / FILE_NAME)
    connection.close()


async def test_a_lock_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A disk without room for a process id is refused in a sentence too."""

    def no_room(_fd: object, _how: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fcntl.flock", no_room)
    assert "cannot be locked (No space left on device). Make room" in await refusal(tmp_path)


async def test_a_file_locked_for_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A store that another program has locked for itself is refused after a while."""
    monkeypatch.setattr(opening, "BUSY_TIMEOUT_S", 0.01)
    path = await filled(tmp_path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA locking_mode=EXCLUSIVE").fetchone()
    other.execute("BEGIN IMMEDIATE")
    assert await refusal(tmp_path) == (
        f"{path} is locked by another program (database is locked). End that program."
    )
    other.close()


async def test_a_new_directory_is_for_this_user_alone(tmp_path: Path):
    """What people wrote is in it: nobody else may look into a directory that the server made."""
    path = await filled(tmp_path / "new" / "data")
    assert path.parent.stat().st_mode & 0o777 == 0o700


_HOLD = """
import asyncio, sys
from pathlib import Path
from app.store.database import Database

async def main():
    await Database(Path(sys.argv[1])).open()
    print("open", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_second_process_is_refused(tmp_path: Path):
    """A directory is one process's; another is told whose, and has it once that one was killed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _HOLD, str(tmp_path), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"open\n"
    assert await refusal(tmp_path) == (
        f"--data-dir {tmp_path} is in use by process {process.pid}; stop it or choose another --data-dir."
    )
    process.kill()
    await process.wait()
    database = Database(tmp_path)
    await database.open()
    await database.aclose()


# Who holds a directory


def test_the_holder_says_which_models_it_has(tmp_path: Path):
    """Nobody, then this process, then with its models; nobody again once it has gone."""
    assert holder(tmp_path) is None
    with lock(tmp_path) as held:
        assert holder(tmp_path) == Holder(os.getpid(), [])
        note_models(held, ["llama", "größer"])
        assert holder(tmp_path) == Holder(os.getpid(), ["llama", "größer"])
    assert holder(tmp_path) is None


def test_a_command_that_asks_who_holds_it_keeps_no_server_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The lock that the question takes is waited for."""
    lock(tmp_path).close()
    with (tmp_path / "lock").open() as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        monkeypatch.setattr("time.sleep", lambda _s: fcntl.flock(asking, fcntl.LOCK_UN))
        lock(tmp_path).close()
