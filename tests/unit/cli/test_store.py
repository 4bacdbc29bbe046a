"""The commands over the store: what they print, what they refuse, beside a server too."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from app.cli.main import EXIT_USAGE, main
from app.core import Usage
from app.store import backup as beside
from app.store.database import FILE_NAME, Database
from app.store.opening import StoreRefused
from app.store.schema import MIGRATIONS, migrate
from tests.support.commands import without_store
from tests.support.ledgers import at, reserved, settled

USAGE = Usage(1000, 2000, 400, 300, 100)


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data directory whose store has three requests of November 2021 and one of this month, all settled."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "kept"
    path.mkdir()
    with writing(path) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        migrate(connection, MIGRATIONS)
        for at_us, owner in (
            (at("2021-11-20"), "ann"),
            (at("2021-11-20"), "bob"),
            (at("2021-11-21"), "ann"),
            (time.time_ns() // 1000, "now"),
        ):
            settled(connection, USAGE, created_at_us=at_us, owner=owner)
    return path


def writing(data_dir: Path) -> AbstractContextManager[sqlite3.Connection]:
    """A connection that commits each statement, as a server's does beside the commands."""
    return closing(sqlite3.connect(data_dir / FILE_NAME, isolation_level=None))


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command over the store: (its exit status, what it printed)."""

    def run_(*argv: str) -> tuple[int, str]:
        status = main([*argv, "--data-dir", str(data_dir)])
        out, err = capsys.readouterr()
        return status, out + without_store(err)

    return run_


def tamper(data_dir: Path, statement: str) -> None:
    """Change the store as no command would."""
    with writing(data_dir) as connection:
        connection.execute(statement)


def test_usage_as_json(run: Run):
    """With --json a command prints one object, that of the API, over all owners."""
    status, printed = run("usage", "--period", "2021-11", "--group-by", "owner", "--json")
    report = json.loads(printed)
    assert status == 0
    assert [(g["owner"], g["requests"], g["cost_micro_usd"]) for g in report["groups"]] == [
        ("ann", 2, 6340),
        ("bob", 1, 3170),
    ]
    assert report["object"] == "usage"


def test_usage_as_a_table(run: Run):
    """Without it, a line a group and one for the sum of them."""
    status, printed = run("usage", "--from", "2021-11-20", "--to", "2021-11-20", "--group-by", "day,key")
    lines = [line.split() for line in printed.splitlines()]
    assert status == 0
    assert lines[1] == ["day", "key", "key_name", "owner", "requests", "input", "cached", "output", "USD"]
    assert lines[2] == ["2021-11-20", "none", "-", "ann", "1", "1000", "400", "2000", "0.003170"]
    assert lines[-1] == ["2", "2000", "800", "4000", "0.006340"]


def test_usage_without_a_period_is_this_month(run: Run):
    """Who asks for nothing in particular gets what is being used now."""
    report = json.loads(run("usage", "--group-by", "owner", "--json")[1])
    assert report["period"] == f"{datetime.now(UTC):%Y-%m}"
    assert "now" in [group["owner"] for group in report["groups"]]


def test_books_that_balance(run: Run):
    """A verification that finds nothing ends with 0."""
    assert run("usage", "--verify") == (0, "Every daily sum is the sum of its rows.\n")
    assert json.loads(run("usage", "--verify", "--json")[1]) == {
        "object": "usage.verification",
        "balanced": True,
        "rebuilt": False,
        "differences": [],
    }


def test_one_difference_is_found_and_put_right(run: Run, data_dir: Path):
    """A sum that was changed is named, with status 1 until it is rebuilt."""
    tamper(data_dir, "UPDATE usage_daily SET cost_micro_usd = 3171 WHERE owner = 'bob'")
    status, printed = run("usage", "--verify")
    assert status == 1
    assert printed.splitlines()[:-1] == [
        "2021-11-20 llama bob none: cost_micro_usd is 3171, its rows say 3170"
    ]
    status, printed = run("usage", "--verify", "--json")
    [difference] = json.loads(printed)["differences"]
    assert (status, difference["owner"], difference["kept"]["cost_micro_usd"]) == (1, "bob", 3171)
    assert difference["rows"]["cost_micro_usd"] == 3170

    status, printed = run("usage", "--rebuild")
    assert (status, printed.splitlines()[-1]) == (0, "1 daily sums were corrected.")
    assert run("usage", "--verify")[0] == 0


def test_an_open_request_is_no_difference(run: Run, data_dir: Path):
    """What is being generated is in no sum yet, and not missed in one."""
    with writing(data_dir) as connection:
        reserved(connection)
    assert run("usage", "--verify")[0] == 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["usage", "--period", "november"], "2026-11"),
        (["usage", "--group-by", "week"], "day, model, owner, key"),
        (["usage", "--period", "2021-11", "--from", "2021-11-01"], "either"),
        (["backup", "nowhere/copy.db"], "nowhere/copy.db cannot be written"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(run: Run, argv: list[str], words: str):
    """A wrong argument ends the command with status 2 and one line."""
    status, printed = run(*argv)
    assert (status, len(printed.splitlines())) == (EXIT_USAGE, 1)
    assert words in printed
    assert printed.startswith("tokenring: ")


@pytest.mark.parametrize("argv", [["usage"], ["usage", "--rebuild"], ["backup", "copy.db"]])
def test_a_missing_store_is_not_made(tmp_path: Path, argv: list[str], capsys: pytest.CaptureFixture[str]):
    """A directory without a store is refused, and stays as it was."""
    assert main([*argv, "--data-dir", str(tmp_path)]) == EXIT_USAGE
    assert "has no store" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("INSERT INTO migrations VALUES ('999_later', '')", "newer version (it has 999_later)"),
        ("DELETE FROM migrations", "older version"),
    ],
)
def test_another_version_s_store_is_refused(run: Run, data_dir: Path, statement: str, words: str):
    """A schema that this version does not know is not read as if it were."""
    tamper(data_dir, statement)
    status, printed = run("usage")
    assert (status, words in printed) == (EXIT_USAGE, True)


def test_a_file_that_is_no_store_is_refused(run: Run, data_dir: Path):
    """A damaged file is said to be one."""
    (data_dir / FILE_NAME).write_bytes(b"not a database" * 100)
    status, printed = run("usage")
    assert (status, "is damaged" in printed) == (EXIT_USAGE, True)


def test_the_data_directory_is_the_server_s(data_dir: Path, monkeypatch, capsys):
    """Without --data-dir the settings say where the store is, as for the server."""
    monkeypatch.setenv("TOKENRING_DATA_DIR", str(data_dir))
    assert main(["usage", "--verify"]) == 0
    monkeypatch.delenv("TOKENRING_DATA_DIR")
    (data_dir.parent / "other.toml").write_text(f'data_dir = "{data_dir}"')
    assert main(["usage", "--verify", "--config", "other.toml"]) == 0
    assert main(["usage", "--verify"]) == EXIT_USAGE
    assert "/data has no store" in capsys.readouterr().err


def test_a_backup_is_the_store(run: Run, data_dir: Path, tmp_path: Path):
    """A backup is a sound store of its own, that only its owner can read."""
    restored = tmp_path / "restored"
    restored.mkdir()
    status, printed = run("backup", str(restored / FILE_NAME), "--json")
    report = json.loads(printed)
    assert (status, report["size_bytes"]) == (0, (restored / FILE_NAME).stat().st_size)
    assert [path.name for path in restored.iterdir()] == [FILE_NAME], "nothing else is left"
    assert (restored / FILE_NAME).stat().st_mode & 0o777 == 0o600
    with beside.transaction(restored) as copy, beside.transaction(data_dir) as source:
        rows = "SELECT * FROM requests"
        assert copy.execute(rows).fetchall() == source.execute(rows).fetchall() != []


def test_a_backup_overwrites_nothing(run: Run, tmp_path: Path):
    """A file that is there is left alone."""
    (tmp_path / "copy.db").write_text("precious")
    status, printed = run("backup", "copy.db")
    assert (status, "exists already" in printed) == (EXIT_USAGE, True)
    assert (tmp_path / "copy.db").read_text() == "precious"


class Busy:
    """A source to whose store another connection commits after each page that is copied."""

    in_transaction = True

    def __init__(self, source: sqlite3.Connection, server: sqlite3.Connection) -> None:
        self.source, self.server = source, server
        self.remaining: list[int] = []

    def backup(self, target: sqlite3.Connection, *, pages: int, sleep: float) -> None:
        self.source.backup(target, pages=min(pages, 1), sleep=sleep, progress=self._copied)

    def _copied(self, _status: int, remaining: int, _total: int) -> None:
        settled(self.server, USAGE)
        self.remaining.append(remaining)


def test_a_backup_to_standard_output_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Other programs read `-` so; here it would be a file of that name, which `./-` still is."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        run("backup", "-")
    assert (exit_.value.code, (tmp_path / "-").exists()) == (EXIT_USAGE, False)
    assert run("backup", "./-")[0] == 0


def test_a_backup_beside_a_busy_server_is_one_moment(data_dir: Path, tmp_path: Path):
    """What is written while pages are copied is not in the copy, and does not make it begin anew."""
    with beside.transaction(data_dir) as source, writing(data_dir) as server:
        busy = Busy(source, server)
        before = source.execute("SELECT count(*) FROM requests").fetchone()
        beside.backup(busy, tmp_path / "copy.db")
        assert server.execute("SELECT count(*) FROM requests").fetchone() > before
    assert busy.remaining == list(range(len(busy.remaining) - 1, -1, -1))
    with closing(sqlite3.connect(tmp_path / "copy.db")) as copy:
        assert copy.execute("SELECT count(*) FROM requests").fetchone() == before


async def test_commands_beside_a_server(run: Run, data_dir: Path, tmp_path: Path):
    """With a server serving from the store, each command does what it does without."""
    database = Database(data_dir)
    await database.open()
    try:
        await database.write(lambda c: settled(c, USAGE, owner="new"))
        assert await asyncio.to_thread(run, "usage", "--verify") == (
            0,
            "Every daily sum is the sum of its rows.\n",
        )
        tamper(data_dir, "UPDATE usage_daily SET requests = 7 WHERE owner = 'new'")
        assert (await asyncio.to_thread(run, "usage", "--rebuild"))[0] == 0
        assert (await asyncio.to_thread(run, "backup", "copy.db"))[0] == 0
        await database.write(lambda c: settled(c, USAGE, owner="new"))
        sums = "SELECT requests FROM usage_daily WHERE owner = 'new'"
        assert await database.read(lambda c: c.execute(sums).fetchall()) == [(2,)]
    finally:
        await database.aclose()


def test_a_failed_backup_leaves_nothing(data_dir: Path, tmp_path: Path, monkeypatch):
    """A copy that is not sound, or not whole, does not appear under the name that was asked for."""

    def broken(source: sqlite3.Connection, part: Path) -> None:
        part.write_bytes(b"half")
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(beside, "_copy", broken)
    before = sorted(tmp_path.iterdir())
    with beside.transaction(data_dir) as source, pytest.raises(StoreRefused, match="disk is full"):
        beside.backup(source, tmp_path / "copy.db")
    assert sorted(tmp_path.iterdir()) == before
