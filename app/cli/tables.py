"""Tables and progress of the command line, by rich: coloured on a terminal, else plain lines.

If the output goes into a pipe or a file, a row is one line with columns aligned by spaces. rich respects
NO_COLOR. It is imported late, because most commands print no table.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from app.cli.terminal import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Row = TypeVar("Row")

_PATIENCE_S = 1.0
_UNBROKEN = 1_000_000
"""Characters in a line if the output is no terminal: no line is wrapped."""


def text(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    total: Sequence[str] = (),
    left: int | None = None,
) -> str:
    """A table as lines. The first `left` columns hold words, the others numbers; None: all hold words.

    `total` is a last row, set apart.
    """
    from rich.text import Text

    on_terminal = sys.stdout.isatty()
    table = _frame(framed=on_terminal)
    for number, head in enumerate(heads):
        is_number = left is not None and number >= left
        table.add_column(Text(head), justify="right" if is_number else "left", overflow="fold")
    body = [*rows]
    for row in body:
        table.add_row(*(Text(printable(cell)) for cell in row))  # callers may have chosen it
    if total and body:
        table.add_section() if on_terminal else table.add_row(*("-" * len(cell) for cell in total))
    if total:
        table.add_row(*map(Text, total), style="bold")
    console = _console(on_terminal=on_terminal)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n")


def progress(rows: Sequence[Row]) -> Iterable[Row]:
    """The rows; if standard error is a terminal, with a progress bar there."""
    if not sys.stderr.isatty():
        return rows
    from rich.console import Console
    from rich.progress import track

    return track(rows, "judging", console=Console(stderr=True))


@contextmanager
def working(what: str) -> Iterator[None]:
    """Say on a terminal what a block does and for how long, once it takes a second; it prints nothing."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    shown = Progress(*columns, console=Console(stderr=True), transient=True)
    shown.add_task(what)
    later = threading.Timer(_PATIENCE_S, shown.start)
    later.start()
    try:
        yield
    finally:
        later.cancel()
        later.join()
        shown.stop()


def _frame(*, framed: bool) -> Table:
    from rich import box
    from rich.table import Table

    if framed:
        return Table(box=box.SIMPLE_HEAD, pad_edge=False)
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")


def _console(*, on_terminal: bool) -> Console:
    from rich.console import Console

    return Console(width=None if on_terminal else _UNBROKEN, markup=False, highlight=False, emoji=False)
