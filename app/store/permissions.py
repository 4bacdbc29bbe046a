"""File modes of the data directory: for the server's user, and for the group where the operator chose so.

Set-group-ID on the directory (`chmod g+s`) is the choice: then the group keeps what it may. Modes are
only ever narrowed. A directory that is another user's, or has files that are not the server's, stays as
it is.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

_OWNER = stat.S_IRWXU
_GROUP = stat.S_IRWXG
_ANY_EXECUTE = stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH
_SERVERS_FILES = ("tokenring.db*", "throughput.*", "pace.*", "lock")


def tighten(data_dir: Path) -> None:
    """Take the rights of others, and mostly of the group, from the directory and the server's files in it."""
    kept = _kept(data_dir)
    own = [path for pattern in _SERVERS_FILES for path in data_dir.glob(pattern)]
    for path in own:
        _narrow(path, kept & ~_ANY_EXECUTE)
    if len(own) == sum(1 for _ in data_dir.iterdir()):
        _narrow(data_dir, kept)


def create(path: Path) -> None:
    """Make an empty file, unless there is one, that its directory's readers may read, and nobody else.

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
