"""Commands and flags of argparse, a line each, and the flags that several commands have."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Commands = argparse._SubParsersAction  # noqa: SLF001  # argparse has no public name for what holds commands


def command(
    commands: Commands[argparse.ArgumentParser],
    name: str,
    help_: str,
    run: Callable[..., int] | None = None,
    *parents: argparse.ArgumentParser,
) -> argparse.ArgumentParser:
    """Add a command; `run` is what its arguments are handed to."""
    parser = commands.add_parser(name, parents=parents, allow_abbrev=False, help=help_)
    if run is not None:
        parser.set_defaults(run=run)
    return parser


def flag(
    parser: argparse._ActionsContainer,
    name: str,
    help_: str,
    kind: Callable[[str], Any] | Sequence[str] | None = None,
    metavar: str | None = None,
    **options: Any,
) -> None:
    """Add a flag or an argument: of a type, of one of several values, or one without a value (`bool`)."""
    if kind is bool:
        options |= {"action": "store_true"}
    elif callable(kind):
        options |= {"type": kind, "metavar": metavar}
    else:
        options |= {"choices": kind, "metavar": metavar}
    parser.add_argument(name, help=help_, **options)


def common(*, data_dir: bool = True) -> argparse.ArgumentParser:
    """The flags of all commands that print a result; `data_dir` is for those over a store."""
    parser = argparse.ArgumentParser(add_help=False)
    if data_dir:
        flag(parser, "--data-dir", "data directory of the server (default: by the settings)", Path)
    flag(parser, "--config", "settings file (default: tokenring.toml, if it exists)", Path)
    flag(parser, "--json", "print the result as one JSON object", bool)
    return parser


def add_period(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name UTC days."""
    flag(parser, "--period", "UTC month or day, as 2026-11 or 2026-11-20 (default: this month)")
    days = "first UTC day, as 2026-11-20; in place of --period"
    flag(parser, "--from", days, metavar="DAY", dest="first")
    flag(parser, "--to", "last UTC day, with --from (default: today)", metavar="DAY", dest="last")
