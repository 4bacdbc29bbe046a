"""The process of the command line: what is set before anything is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from app import __main__ as entry
from app.cli import main as command_line
from app.store.backup import make_missing, transaction
from app.store.keys import all_keys
from tests.support.commands import without_store
from tests.support.servers import ROOT


@pytest.mark.parametrize(("own", "used"), [(None, "1"), ("4", "4")])
def test_a_matrix_product_takes_one_core(monkeypatch: pytest.MonkeyPatch, own: str | None, used: str):
    """Before NumPy is imported, which reads it once; the operator's own number wins."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", own or "")
    if own is None:
        monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    seen: list[str | None] = []

    def main() -> int:
        seen.append(os.environ.get("OPENBLAS_NUM_THREADS"))
        return 0

    monkeypatch.setattr(command_line, "main", main)
    monkeypatch.setattr(os, "_exit", seen.append)
    entry.run()
    assert seen == [used, 0]


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_as_good_as_none(closed: str):
    """As a script or a service manager may leave them: nothing is shown, and nothing fails."""
    command = f"exec {sys.executable} -m app top --url http://127.0.0.1:1 {closed}"
    ended = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("command", ["usage --verify", "keys create --name x --json"])
def test_output_that_cannot_be_written_is_an_error_of_its_own(command: str, tmp_path: Path):
    """Not status 1, which says something of the ledger; a key that nobody has is named."""
    make_missing(tmp_path)
    line = f"exec {sys.executable} -m app {command} --data-dir {tmp_path} >/dev/full"
    ended = subprocess.run(["sh", "-c", line], cwd=ROOT, capture_output=True, text=True, check=False)
    *lines, last = without_store(ended.stderr).splitlines()
    assert (ended.returncode, last) == (2, "tokenring: output cannot be written: No space left on device")
    with transaction(tmp_path) as connection:
        made = [key.id for key in all_keys(connection)]
    assert [line.split(":")[1] for line in lines] == [f" nobody has the secret of key {id_}" for id_ in made]


def test_ctrl_c_while_modules_are_imported_is_no_error(monkeypatch: pytest.MonkeyPatch):
    """The first second of a command is its imports."""
    ended: list[int] = []

    def end(status: int) -> None:
        ended.append(status)
        raise SystemExit

    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "main", interrupted)
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(SystemExit):
        entry.run()
    assert ended == [130]
