"""A store opened by a command beside the server: one snapshot, a backup, or a refusal that says why."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from app.store import backup as beside
from app.store import conversation_list
from app.store.backup import backup, connected, conversations, make_missing, transaction
from app.store.database import FILE_NAME
from app.store.opening import StoreRefused, lock
from app.store.purge import deleted_before
from tests.support.conversing import Chats


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A directory with an empty store."""
    make_missing(tmp_path / "data")
    return tmp_path / "data"


def number_of(connection: sqlite3.Connection) -> int:
    """A number that a test stores."""
    (number,) = connection.execute("PRAGMA application_id").fetchone()
    return int(number)


def test_store_is_made_where_there_is_none_and_left_where_there_is_one(data_dir: Path):
    """As the server makes it: it can be opened, and only its user can read it."""
    assert (data_dir / FILE_NAME).stat().st_mode & 0o077 == 0
    with transaction(data_dir, write=True) as connection:
        connection.execute("INSERT INTO safety_secret (key) VALUES (x'01')")
    make_missing(data_dir)
    with transaction(data_dir) as connection:
        assert connection.execute("SELECT count(*) FROM safety_secret").fetchone()[0] >= 1


def test_store_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With SQLite's reason and what to do."""

    def full(*_arguments: object) -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    monkeypatch.setattr(beside, "prepare", full)
    with pytest.raises(StoreRefused, match="Make room on its disk"):
        make_missing(tmp_path)


def test_transaction_is_committed_at_its_end(data_dir: Path):
    """And not before."""
    with transaction(data_dir, write=True) as writer:
        writer.execute("PRAGMA application_id=7")
        with transaction(data_dir) as reader:
            assert number_of(reader) == 0
    with transaction(data_dir) as reader:
        assert number_of(reader) == 7


def test_transaction_is_undone_by_what_is_raised(data_dir: Path):
    """Nothing of it stays."""

    def broken() -> None:
        with transaction(data_dir, write=True) as writer:
            writer.execute("PRAGMA application_id=7")
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    with transaction(data_dir) as reader:
        assert number_of(reader) == 0


def test_writer_beside_a_server_waits_longer_and_names_its_vacuum(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without a server the lock is another program's, and ends sooner."""
    assert beside.SERVED_TIMEOUT_S >= 120
    monkeypatch.setattr(beside, "SERVED_TIMEOUT_S", 0.25)
    monkeypatch.setattr(beside, "LOCK_TIMEOUT_S", 0.0)
    with closing(sqlite3.connect(data_dir / FILE_NAME, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # as VACUUM has it
        with pytest.raises(StoreRefused, match="End that program"), transaction(data_dir, write=True):
            pass
        with lock(data_dir):
            with transaction(data_dir) as reader:
                assert reader.execute("PRAGMA busy_timeout").fetchone() == (0,)
            with connected(data_dir, write=True) as writer:
                assert writer.execute("PRAGMA busy_timeout").fetchone() == (250,)
            with pytest.raises(StoreRefused) as refused, transaction(data_dir, write=True):
                pass
    assert "VACUUM" in str(refused.value)
    assert "End that program" not in str(refused.value)


def test_reader_cannot_write(data_dir: Path):
    """A command that only looks changes nothing."""
    with pytest.raises(StoreRefused, match="cannot be written"), transaction(data_dir) as reader:
        reader.execute("DELETE FROM safety_secret")


def test_foreign_keys_hold_and_deleted_rows_are_zeroed(data_dir: Path):
    """For a command as for the server."""
    with connected(data_dir, write=True) as connection:
        assert connection.execute("PRAGMA foreign_keys").fetchone() == (1,)
        assert connection.execute("PRAGMA secure_delete").fetchone() == (1,)


def test_directory_without_a_store_is_refused(tmp_path: Path):
    """The server makes it."""
    with pytest.raises(StoreRefused, match="its first start makes the store"), transaction(tmp_path):
        pass


def test_directory_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With the system's reason."""

    def no_right(_path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", no_right)
    with pytest.raises(StoreRefused, match="cannot be read: Permission denied"), transaction(tmp_path):
        pass


def test_newer_store_is_refused(data_dir: Path):
    """Its schema is not known here."""
    with transaction(data_dir, write=True) as connection:
        connection.execute("INSERT INTO migrations (name, applied_at) VALUES ('999_later', 0)")
    with (
        pytest.raises(StoreRefused, match=r"newer version \(it has 999_later\)"),
        transaction(data_dir, older=True),
    ):
        pass


def test_older_store_is_refused_unless_that_is_allowed(data_dir: Path):
    """The server brings it up to date; a backup of it may be made before."""
    with transaction(data_dir, write=True) as connection:
        connection.execute("DELETE FROM migrations WHERE name = (SELECT max(name) FROM migrations)")
    with pytest.raises(StoreRefused, match="start the server once"), transaction(data_dir):
        pass
    with transaction(data_dir, older=True) as connection:
        assert connection.in_transaction


def test_deleted_conversations_are_listed_once_they_are_due_and_answered():
    """One that is being answered is not purged."""
    chats = Chats()
    for conversation_id in ("conv_1", "conv_2", "conv_3"):
        chats.turn(conversation_id)
    chats.begin("conv_4", "asked")
    assert [i for i, _ in conversations(chats.c)] == ["conv_1", "conv_2", "conv_3", "conv_4"]
    for conversation_id, at_us in (("conv_1", 100), ("conv_2", 200), ("conv_4", 100)):
        conversation_list.delete(chats.c, "local", conversation_id, at_us)
    assert deleted_before(chats.c, 200, "id") == ["conv_1"]
    assert conversations(chats.c) == [("conv_3", "local")]


@pytest.fixture
def source(data_dir: Path) -> Iterator[sqlite3.Connection]:
    """A snapshot of the store, in which the number is 7."""
    with transaction(data_dir, write=True) as connection:
        connection.execute("PRAGMA application_id=7")
    with transaction(data_dir) as connection:
        number_of(connection)
        yield connection


def test_backup_is_the_snapshot(source: sqlite3.Connection, data_dir: Path, tmp_path: Path):
    """What is committed meanwhile is not in it; no other file is left."""
    source.execute("SELECT count(*) FROM requests").fetchone()
    with transaction(data_dir, write=True) as connection:
        connection.execute("PRAGMA application_id=8")
    target = tmp_path / "backup.db"
    assert backup(source, target) == target.stat().st_size > 0
    with closing(sqlite3.connect(target)) as copy:
        assert number_of(copy) == 7
    assert {path.name for path in tmp_path.iterdir()} == {"data", "backup.db"}


def test_backup_overwrites_nothing(source: sqlite3.Connection, tmp_path: Path):
    """A name that is taken is refused."""
    target = tmp_path / "backup.db"
    target.write_text("precious")
    with pytest.raises(StoreRefused, match="is not overwritten"):
        backup(source, target)
    assert target.read_text() == "precious"


def test_backup_does_not_overwrite_a_file_that_came_meanwhile(
    source: sqlite3.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nor leaves its own beginning."""
    target, copy = tmp_path / "backup.db", beside._copy

    def slow(connection: sqlite3.Connection, partial: Path) -> None:
        copy(connection, partial)
        target.write_text("precious")

    monkeypatch.setattr(beside, "_copy", slow)
    with pytest.raises(StoreRefused, match="is not overwritten"):
        backup(source, target)
    assert target.read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} == {"data", "backup.db"}


def test_backup_into_a_directory_that_is_not_there_is_refused(source: sqlite3.Connection, tmp_path: Path):
    """With the system's reason."""
    with pytest.raises(StoreRefused, match="cannot be written: No such file or directory"):
        backup(source, tmp_path / "nowhere" / "backup.db")


def test_backup_that_breaks_off_leaves_nothing(
    source: sqlite3.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The disk was full."""

    def full(_source: sqlite3.Connection, partial: Path) -> None:
        partial.write_bytes(b"x")
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(beside, "_copy", full)
    with pytest.raises(StoreRefused, match="cannot be written: database or disk is full"):
        backup(source, tmp_path / "backup.db")
    assert {path.name for path in tmp_path.iterdir()} == {"data"}


def test_backup_of_a_damaged_store_is_not_kept(data_dir: Path, tmp_path: Path):
    """It is checked before it gets its name."""
    with transaction(data_dir, write=True) as connection:
        connection.execute("CREATE TABLE filler (text CHECK (text = 'right'))")
        connection.execute("INSERT INTO filler VALUES ('right')")
    with connected(data_dir, write=True) as connection:
        connection.execute("PRAGMA ignore_check_constraints=1")
        connection.execute("UPDATE filler SET text = 'wrong'")
    with transaction(data_dir) as connection:
        connection.execute("SELECT count(*) FROM filler").fetchone()
        with pytest.raises(StoreRefused, match=r"The store is damaged \(.*\); no backup was written"):
            backup(connection, tmp_path / "backup.db")
    assert {path.name for path in tmp_path.iterdir()} == {"data"}
