"""Tables and progress of the command line: plain lines in a pipe, fitted and coloured on a terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from app.cli import tables

ROOT = Path(__file__).parents[3]
HEADS = ("id", "name", "requests")
ROWS = [("tr-1", "[bold]red[/] :smile:", "12"), ("tr-2", "", "7")]
SHOW = "from app.cli import tables; print(tables.text({heads}, {rows}, left=2, total=('', '', '19')))"
COUNT = "from app.cli import tables; print(sum(tables.progress(range(30))))"


def on_terminal(code: str, environment: Mapping[str, str] | None = None) -> str:
    """What Python prints that has a terminal for its output."""
    ours, theirs = pty.openpty()
    environ = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "FORCE_COLOR"}}
    environ |= {"TERM": "xterm-256color", "COLUMNS": "40", **(environment or {})}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environ, stdout=theirs, stderr=theirs):
        os.close(theirs)
        pieces = []
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # Linux: the other end is closed
                break
            if not piece:
                break
            pieces.append(piece)
    os.close(ours)
    return b"".join(pieces).decode()


def test_a_table_in_a_pipe_is_aligned_by_spaces():
    """Words to the left, numbers to the right, two spaces between, nothing at a line's end."""
    assert tables.text(HEADS, ROWS, left=2, total=("", "", "19")).splitlines() == [
        "id    name                  requests",
        "tr-1  [bold]red[/] :smile:        12",
        "tr-2                               7",
        "                                  --",
        "                                  19",
    ]


def test_a_table_without_rows_has_its_heads():
    """An empty list is seen to be one."""
    assert tables.text(("id", "name"), []) == "id  name"


def test_a_row_in_a_pipe_is_never_broken():
    """Whatever reads it takes a line for a row."""
    assert len(tables.text(("text",), [("word " * 2_000,)]).splitlines()) == 2


def test_a_table_on_a_narrow_terminal_loses_no_text():
    """A cell too wide is folded; brackets and colons are text."""
    name = "x" * 50
    printed = on_terminal(SHOW.format(heads=HEADS, rows=[("tr-1", name, "1"), ROWS[0]]))
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed)
    assert plain.count("x") == len(name)
    assert ":smile:" in plain
    assert max(map(len, plain.splitlines())) <= 40


@pytest.mark.parametrize(("environment", "colours"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours_are_left_out_where_no_color_is_set(environment: Mapping[str, str], colours: bool):
    """The bar of a progress is coloured on a terminal unless `NO_COLOR` is set."""
    printed = on_terminal(COUNT, environment)
    assert bool(re.search(r"\x1b\[(3|4)8?;?[0-9;]*m", printed)) is colours


def test_progress_on_a_terminal_is_a_bar():
    """The rows pass through it, and at its end all are counted."""
    printed = on_terminal(COUNT)
    assert "judging" in printed
    assert "100%" in printed
    assert "435" in printed


def test_progress_in_a_pipe_says_nothing():
    """A log file gets no bar."""
    done = subprocess.run([sys.executable, "-c", COUNT], cwd=ROOT, capture_output=True, check=True, text=True)
    assert (done.stdout, done.stderr) == ("435\n", "")


def test_a_cell_cannot_drive_the_terminal():
    """A caller chooses names and metadata: an escape sequence in them is shown, not obeyed."""
    assert tables.text(("name",), [("a\x1b]0;gone\x07\x9b2Jb",)]).splitlines()[-1] == "a]0;gone2Jb"


WORK = """
import threading
from app.cli import tables
tables._PATIENCE_S = {after}
with tables.working("copying"):
    [each.join() for each in threading.enumerate() if {joins} and isinstance(each, threading.Timer)]
"""


def test_work_that_takes_long_is_shown_on_a_terminal():
    """What is done and for how long; the line is cleared afterwards."""
    shown = on_terminal(WORK.format(after=0, joins=True))  # the timer's thread draws it
    assert re.search(r"copying.*0:00:00", shown)


def test_quick_work_and_work_without_a_terminal_show_nothing():
    """Neither on a terminal within the first second, nor in a pipe at all."""
    assert on_terminal(WORK.format(after=60, joins=False)) == ""
    code = WORK.format(after=0, joins=True)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")
