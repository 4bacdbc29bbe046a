"""The data directory is its user's alone, unless the operator shares it with a group."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from app.store.backup import backup, make_missing, transaction
from app.store.database import FILE_NAME, Database


def mode(path: Path) -> int:
    """The permission bits of a file."""
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def ordinary_umask():
    """What processes have by default: all may read."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(data_dir: Path) -> dict[str, int]:
    """The permission bits of a directory's files."""
    return {path.name: mode(path) for path in data_dir.iterdir()}


async def filled(data_dir: Path) -> dict[str, int]:
    """The modes of a running server's files."""
    database = Database(data_dir)
    await database.open()
    try:
        await database.write(lambda c: c.execute("PRAGMA user_version=1"))
        return modes(data_dir)
    finally:
        await database.aclose()


async def test_a_new_store_is_its_users_alone(tmp_path: Path):
    """Directory, database, log, its index and lock."""
    left = await filled(tmp_path / "new")
    assert mode(tmp_path / "new") == 0o700
    assert left.keys() == {FILE_NAME, FILE_NAME + "-wal", FILE_NAME + "-shm", "lock"}
    assert set(left.values()) == {0o600}


async def test_an_existing_store_is_tightened_at_start(tmp_path: Path):
    """One that an older version made, in a directory that all may read, with a log left by a crash."""
    (tmp_path / "old").mkdir(0o755)
    await filled(tmp_path / "old")
    for name in (FILE_NAME, "lock", "throughput.json", FILE_NAME + "-wal"):
        (tmp_path / "old" / name).touch()
        (tmp_path / "old" / name).chmod(0o644)
    (tmp_path / "old").chmod(0o755)
    left = await filled(tmp_path / "old")
    assert mode(tmp_path / "old") == 0o700
    assert set(left.values()) == {0o600}


async def test_a_directory_with_set_group_id_stays_its_groups(tmp_path: Path):
    """The operator's choice: the group may read what it may, others nothing."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2755)
    left = await filled(shared)
    assert mode(shared) == 0o2750
    assert left[FILE_NAME] == 0o640
    assert left[FILE_NAME + "-wal"] == 0o640


async def test_a_directory_with_other_files_stays_as_it_is(tmp_path: Path):
    """It is not the server's alone, and neither are they; what is the server's is closed."""
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    mixed.chmod(0o755)
    (mixed / "notes.txt").touch()
    left = await filled(mixed)
    assert (mode(mixed), left.pop("notes.txt")) == (0o755, 0o644)
    assert set(left.values()) == {0o600}


def test_a_store_made_by_a_command_and_its_backup_are_its_users_alone(tmp_path: Path):
    """Without a server having run."""
    make_missing(tmp_path / "made")
    with transaction(tmp_path / "made") as connection:
        backup(connection, tmp_path / "copy.db")
    assert mode(tmp_path / "made" / FILE_NAME) == mode(tmp_path / "copy.db") == 0o600
