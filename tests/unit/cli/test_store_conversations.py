"""`tokenring conversations`: everyone's, exported and purged beside a server."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from sqlite3 import connect

import pytest

from app.cli import store
from app.cli.main import EXIT_USAGE, main
from app.store.conversation_list import delete
from app.store.database import FILE_NAME
from app.store.opening import lock
from app.store.schema import MIGRATIONS, migrate
from tests.support.commands import without_store
from tests.support.conversing import Chats

Run = Callable[..., tuple[int, str]]
DAY_US = 86_400_000_000


@pytest.fixture
def ann(tmp_path: Path) -> Iterator[Chats]:
    """Conversations of two owners in one store; the connection is as a server's, and open."""
    with closing(connect(tmp_path / FILE_NAME, isolation_level=None)) as c:
        c.execute("PRAGMA journal_mode = WAL")
        migrate(c, MIGRATIONS)
        ann, bob = Chats(c, "ann"), Chats(c, "bob")
        ann.turn("conv_1", "knock knock", "who is there")
        ann.turn("conv_1", "the cat", "it purrs")
        bob._numbers = iter(range(100, 200))
        bob.turn("conv_2", "zebra?", "stripes")
        yield ann


@pytest.fixture
def run(ann: Chats, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Runs a command over that store: (its exit status, what it printed)."""

    def run_(*argv: str) -> tuple[int, str]:
        status = main(["conversations", *argv, "--data-dir", str(tmp_path)])
        out, err = capfdbinary.readouterr()
        return status, out.decode() + without_store(err.decode())

    return run_


def test_all_as_json(run: Run):
    """Without options, everyone's conversations are one JSON object."""
    status, printed = run("export")
    exported = json.loads(printed)
    assert (status, exported["object"]) == (0, "list")
    assert [c["id"] for c in exported["data"]] == ["conv_1", "conv_2"]
    assert [m["content"] for m in exported["data"][0]["messages"]] == [
        "knock knock",
        "who is there",
        "the cat",
        "it purrs",
    ]


def test_one_as_json(run: Run):
    """One conversation is its own object, whoever it belongs to."""
    for flags in ((), ("--json",)):
        status, printed = run("export", "--id", "conv_2", *flags)
        assert (status, json.loads(printed)["id"]) == (0, "conv_2")


def test_one_as_markdown(run: Run):
    """Markdown has the words."""
    status, printed = run("export", "--id", "conv_1", "--format", "markdown")
    assert status == 0
    assert "it purrs" in printed
    assert printed.startswith("# knock knock\n")


def test_nothing_to_export_is_an_empty_list(run: Run, ann: Chats):
    """A store without conversations exports none of them, as JSON still."""
    ann.c.execute("DELETE FROM messages")
    ann.c.execute("DELETE FROM conversations")
    status, printed = run("export")
    assert (status, json.loads(printed)) == (0, {"object": "list", "data": []})


def test_files_are_new_and_private(run: Run, tmp_path: Path):
    """With --out each conversation is a file that only its owner can read, and none is overwritten."""
    out = tmp_path / "out"
    status, printed = run("export", "--format", "markdown", "--out", str(out), "--json")
    report = json.loads(printed)
    assert (status, report["conversations"], len(report["files"])) == (0, 2, 2)
    assert sorted(path.name for path in out.iterdir()) == ["conv_1.md", "conv_2.md"]
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o600}
    status, printed = run("export", "--id", "conv_1", "--out", str(out / "conv_1.md"))
    assert (status, "File exists" in printed) == (EXIT_USAGE, True)
    assert run("export", "--id", "conv_1", "--out", str(out / "one.json"))[0] == 0
    assert json.loads((out / "one.json").read_bytes())["id"] == "conv_1"


def test_a_file_that_cannot_be_written_whole_is_removed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Half an export looks like an export; one that was there before stays."""

    def fills_disk(*_: object) -> Iterator[bytes]:
        yield b"half"
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "document", fills_disk)
    out = tmp_path / "one.json"
    status, printed = run("export", "--id", "conv_1", "--out", str(out))
    assert (status, "No space left" in printed, out.exists()) == (EXIT_USAGE, True, False)
    out.write_text("mine")
    assert run("export", "--id", "conv_1", "--out", str(out))[0] == EXIT_USAGE
    assert out.read_text() == "mine"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["export", "--id", "conv_9"], "conv_9"),
        (["export", "--format", "markdown", "--json"], "--out"),
        (["purge", "--id", "conv_9"], "conv_9"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(run: Run, argv: list[str], words: str):
    """What does not exist, or cannot be had, ends the command with status 2 and one line."""
    status, printed = run(*argv)
    assert (status, len(printed.splitlines())) == (EXIT_USAGE, 1)
    assert words in printed


@pytest.mark.parametrize("argv", [[], ["--id", "x", "--deleted-before", "1"], ["--deleted-before", "-1"]])
def test_a_purge_says_what_it_purges(run: Run, argv: list[str]):
    """Nothing is purged by default, or by an argument that could mean two things."""
    with pytest.raises(SystemExit) as exit_:
        run("purge", *argv)
    assert exit_.value.code == EXIT_USAGE


def test_a_purged_conversation_is_in_no_file(run: Run, ann: Chats, tmp_path: Path):
    """After a purge the text is nowhere, beside an open connection too; the counts stay."""
    status, printed = run("purge", "--id", "conv_1", "--json")
    assert (status, json.loads(printed)) == (0, {"object": "purge", "conversations": 1, "complete": True})
    files = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert [word for word in (b"knock", b"purrs") if word in files] == []
    assert b"zebra" in files
    assert ann.c.execute("SELECT requests FROM usage_daily WHERE owner = 'ann'").fetchall() == [(2,)]
    assert [c["id"] for c in json.loads(run("export")[1])["data"]] == ["conv_2"]


def test_a_purge_beside_a_server_leaves_the_file_to_it(run: Run, ann: Chats, tmp_path: Path):
    """It says so; the rows are gone, and the conversation's own is left for after the VACUUM."""
    nothing, left = (
        {"object": "purge", "conversations": 0, "complete": True},
        {"object": "purge", "conversations": 1, "complete": False},
    )
    with lock(tmp_path):
        assert json.loads(run("purge", "--deleted-before", "0", "--json")[1]) == nothing
        status, printed = run("purge", "--id", "conv_1")
        report_status, report = run("purge", "--id", "conv_1", "--json")
    assert (report_status, json.loads(report)) == (0, left)
    assert (status, printed.splitlines()[0]) == (0, "1 conversations purged.")
    assert "when it has been quiet" in printed
    assert ann.c.execute("SELECT deleted_at_us FROM conversations WHERE id = 'conv_1'").fetchall() == [(0,)]
    assert "knock" not in repr(ann.c.execute("SELECT * FROM messages").fetchall())


def test_a_purge_by_age_leaves_the_rest(run: Run, ann: Chats):
    """Of the deleted conversations those that were deleted long enough ago go; no other one does."""
    now_us = time.time_ns() // 1000
    ann.turn("conv_3", "recent", "deleted")
    delete(ann.c, "ann", "conv_1", now_us - 31 * DAY_US)
    delete(ann.c, "ann", "conv_3", now_us - 29 * DAY_US)
    status, printed = run("purge", "--deleted-before", "30")
    assert (status, printed) == (0, "1 conversations purged.\n")
    assert ann.c.execute("SELECT id FROM conversations ORDER BY seq").fetchall() == [("conv_2",), ("conv_3",)]


def test_a_conversation_that_is_answered_is_not_purged(run: Run, ann: Chats):
    """What a server is writing at the moment is left to it."""
    ann.begin("conv_1", "and then")
    status, printed = run("purge", "--id", "conv_1")
    assert (status, "is being answered" in printed) == (EXIT_USAGE, True)
    delete(ann.c, "ann", "conv_1", 1)
    assert run("purge", "--deleted-before", "0") == (0, "0 conversations purged.\n")


def test_a_reader_that_holds_the_log_is_said(run: Run, ann: Chats, tmp_path: Path):
    """While another process reads an old moment, a purge is not complete and says so."""
    with closing(connect(tmp_path / FILE_NAME, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM messages").fetchone()
        status, printed = run("purge", "--id", "conv_1")
        assert (status, "purge again" in printed) == (1, True)
    assert run("purge", "--id", "conv_1")[0] == 0


def test_a_reader_that_has_enough_is_no_error(ann: Chats, tmp_path: Path):
    """Output into a pipe that is closed ends the command without a traceback."""
    for _ in range(10):
        ann.turn("conv_1", "long " * 10_000, "answer")
    command = [sys.executable, "-m", "app", "conversations", "export", "--data-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(10)
        process.stdout.close()
        assert without_store(process.stderr.read().decode()) == ""
        assert process.wait(timeout=30) == 1
