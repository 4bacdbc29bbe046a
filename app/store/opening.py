"""A data directory made ready for its one writer: locked, checked, brought up to date.

What cannot be used is refused in a sentence that says what to do, and left as it is. Its files are for
the server's user, and for the group where the operator chose so with set-group-ID on the directory
(`chmod g+s`): then the group keeps what it may. Modes are only ever narrowed. A directory that is another
user's, or has files that are not the server's, stays as it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

from app.store.schema import BEFORE_0_1, MIGRATIONS, applied, migrate

BUSY_TIMEOUT_S = 5.0
_TRY_S = 0.25
"""One try of the writer at a locked store; short, so that it is its patience that decides."""
_KEPT_WAL_BYTES = 64 * 1024**2
"""Bytes of the write-ahead log that are kept; what a long reader makes it grow beyond is given back."""
_CHECKPOINT_PAGES = 4096
"""Pages of the log at which a commit copies them into the file; most are the same pages again and again."""
_ASKED_S = 0.05
"""Seconds after which a command that read the lock's holder (`holder`) has released it."""
_OWNER = stat.S_IRWXU
_GROUP = stat.S_IRWXG
_ANY_EXECUTE = stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH
_SERVERS_FILES = ("tokenring.db*", "throughput.*", "pace.*", "lock")
_DAMAGED = "is damaged ({}). Restore a backup, or move the file away to start anew."
_NOT_WRITABLE = "cannot be written ({}). Give this user the right to, or choose another --data-dir."
_REFUSALS = {
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
    sqlite3.SQLITE_READONLY: _NOT_WRITABLE,
    sqlite3.SQLITE_CANTOPEN: _NOT_WRITABLE,
    sqlite3.SQLITE_PERM: _NOT_WRITABLE,
    sqlite3.SQLITE_FULL: "cannot be written ({}). Make room on its disk.",
    sqlite3.SQLITE_IOERR: "cannot be read or written ({}). Make room on its disk, or replace it.",
    sqlite3.SQLITE_BUSY: "is locked by another program ({}). End that program.",
}


class StoreRefused(Exception):
    """The data directory cannot be used; the message says why and what to do."""


def lock(data_dir: Path) -> IO[str]:
    """Hold the directory for this process, or say who does."""
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        create_private(data_dir / "lock")
        held = (data_dir / "lock").open("a+", encoding="utf-8")
    except OSError as exc:
        why = "it is not a directory" if isinstance(exc, FileExistsError) else exc.strerror
        raise StoreRefused(f"--data-dir {data_dir} {_NOT_WRITABLE.format(why)}") from exc
    try:
        _flock(held)
        note_models(held, ())
        _tighten(data_dir)
    except BlockingIOError as exc:
        held.close()
        other = holder(data_dir)
        pid = "unknown" if other is None or other.pid is None else other.pid
        raise StoreRefused(
            f"--data-dir {data_dir} is in use by process {pid}; stop it or choose another --data-dir."
        ) from exc
    except OSError as exc:
        with contextlib.suppress(OSError):  # what could not be written is tried again
            held.close()
        raise StoreRefused(
            f"--data-dir {data_dir} cannot be locked ({exc.strerror}). Make room on its disk, and have it"
            " on a local one."
        ) from exc
    return held


def _flock(held: IO[str]) -> None:
    """Lock the file; a command that reads its holder has it for a moment. Raises OSError."""
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(_ASKED_S)
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)


class Holder(NamedTuple):
    """The server that holds a data directory."""

    pid: int | None
    """None where it does not say; in a container it is that of the container."""
    models: Sequence[str] = ()
    """The models that it has loaded; empty while it starts."""


def note_models(held: IO[str], models: Sequence[str]) -> None:
    """Write into the held lock which models this process has loaded. Raises OSError."""
    held.truncate(0)
    held.write("".join(f"{line}\n" for line in (os.getpid(), *models)))
    held.flush()


def holder(data_dir: Path) -> Holder | None:
    """The process whose server holds the directory; None without one."""
    try:
        held = (data_dir / "lock").open(encoding="utf-8", errors="replace")
    except OSError:
        return None
    with held:
        try:
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            pid, *models = held.read().splitlines() or [""]
            return Holder(int(pid) if pid.isdecimal() else None, models)
        except OSError:
            return None
    return None


def refusal(path: Path, exc: sqlite3.Error) -> str:
    """The reason for which SQLite cannot open the store, and what to do."""
    code = getattr(exc, "sqlite_errorcode", 0) & 0xFF
    return f"{path} {_REFUSALS.get(code, 'cannot be used ({}).').format(exc)}"


def prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Check the file, bring it up to date and make the connection its writer.

    Raises StoreRefused, sqlite3.Error.
    """
    busy_timeout(connection, BUSY_TIMEOUT_S)
    check_sound(connection, path)
    check_version(applied(connection), path)
    (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
    if mode != "wal":
        raise StoreRefused(f"{path} cannot have a write-ahead log; put --data-dir on a local disk.")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA secure_delete=ON")
    connection.execute(f"PRAGMA journal_size_limit={_KEPT_WAL_BYTES}")
    connection.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}")
    keep_temporary_files_in(connection, path.parent)
    migrate(connection, MIGRATIONS)
    busy_timeout(connection, _TRY_S)


def busy_timeout(connection: sqlite3.Connection, timeout_s: float) -> None:
    """Set the time that the connection waits for a locked store before it gives up."""
    connection.execute(f"PRAGMA busy_timeout={int(timeout_s * 1000)}")


def keep_temporary_files_in(connection: sqlite3.Connection, directory: Path) -> None:
    """Have this process's temporary files beside the store: VACUUM's has every text."""
    quoted = str(directory.absolute()).replace("'", "''")
    connection.execute(f"PRAGMA temp_store_directory='{quoted}'")


def check_sound(connection: sqlite3.Connection, path: Path) -> None:
    """Raise StoreRefused for a damaged file, all of which is read for that; else sqlite3.Error."""
    problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if problem != "ok":
        raise StoreRefused(f"{path} {_DAMAGED.format(' '.join(problem.split()))}")


def check_version(names: Sequence[str], path: Path) -> None:
    """Raise StoreRefused for a store with these migrations, where this version cannot bring it up to date."""
    ours = {migration.name for migration in MIGRATIONS}
    if unknown := [name for name in names if name not in ours | BEFORE_0_1]:
        raise StoreRefused(
            f"{path} was written by a newer version (it has {unknown[-1]})."
            " Run that version, or restore a backup from before it."
        )
    if names and ours.isdisjoint(names):
        raise StoreRefused(f"{path} was written by a version before 0.1.0. Start version 0.1.0 on it once.")


def _tighten(data_dir: Path) -> None:
    """Take the rights of others, and mostly of the group, from the directory and the server's files in it."""
    kept = _kept(data_dir)
    own = [path for pattern in _SERVERS_FILES for path in data_dir.glob(pattern)]
    for path in own:
        _narrow(path, kept & ~_ANY_EXECUTE)
    if len(own) == sum(1 for _ in data_dir.iterdir()):
        _narrow(data_dir, kept)


def create_private(path: Path) -> None:
    """Make an empty file, unless there is one, that only its directory's readers may read.

    SQLite gives its log and the log's index the mode of the database. What cannot be made, SQLite reports.
    """
    with contextlib.suppress(OSError):
        mode = (_kept(path.parent) & ~_ANY_EXECUTE) & ~stat.S_IWGRP
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))


def _kept(data_dir: Path) -> int:
    return _OWNER | _GROUP if data_dir.stat().st_mode & stat.S_ISGID else _OWNER


def _narrow(path: Path, kept: int) -> None:
    with contextlib.suppress(OSError):  # another user's, or a file system without modes
        mode = stat.S_IMODE(path.stat().st_mode)
        narrowed = mode & (kept | stat.S_ISGID | stat.S_ISVTX | stat.S_ISUID)
        if narrowed != mode and path.stat().st_uid == os.geteuid():
            path.chmod(narrowed)
