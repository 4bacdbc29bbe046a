"""The command line: `serve`, `doctor`, `settings`, and the commands of the other modules here."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import errno
import os
import sys
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from app import settings as settings_module
from app.cli import doctor, flags, keys, safety, settings_table, store, top
from app.cli.chat import command as chat
from app.cli.client_options import Refused, Unreachable, Unreadable
from app.cli.flags import command, flag
from app.errors import ServingError
from app.settings import EXIT_CONFIG, Settings, SettingsError
from app.store.opening import StoreRefused

EXIT_PIPE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; `serve` has one flag per setting."""
    whole = argparse.ArgumentParser(prog="tokenring", description="A complete chat service on one node.")
    whole.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = whole.add_subparsers(dest="command", required=True)
    _add_settings(command(commands, "serve", "serve the model over HTTP"))
    examine = command(commands, "doctor", "check machine and settings, as `serve` would use them")
    flag(examine, "--json", "print one JSON object", bool)
    _add_settings(examine)
    node = command(commands, "node", "run the engine's ranks on another node than the server's")
    flag(node, "--rank", "number of this node; the server is node 0", int, required=True)
    _add_settings(node)
    show = command(commands, "settings", "list all settings with their defaults")
    flag(show, "--json", "print one JSON object", bool)
    flag(show, "--markdown", "print the Markdown table of docs/settings.md, also on a terminal", bool)
    chat.add_commands(commands)
    top.add_commands(commands)
    common = flags.common()
    for group in (keys, store, safety):
        group.add_commands(commands, common)
    return whole


class _Version(argparse.Action):
    """Prints the installed version, which is only then looked up."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        """Print it and end."""
        from importlib import metadata

        print(f"tokenring {metadata.version('tokenring')}")
        parser.exit()


def _add_settings(command: argparse.ArgumentParser) -> None:
    """Give a command one flag per setting, and the settings file."""
    command.add_argument(
        "--config", type=Path, default=None, help="settings file (default: tokenring.toml, if it exists)"
    )
    for setting in settings_module.table():
        default = "" if setting.default in ("", None) else f" (default {setting.default})"
        command.add_argument(
            setting.flag,
            dest=setting.name,
            default=argparse.SUPPRESS,
            choices=setting.choices or None,
            metavar=None if setting.choices else setting.kind.__name__.upper(),
            help=(setting.help + default).replace("%", "%%"),
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = _parsed(list(sys.argv[1:] if argv is None else argv))
    try:
        status = _run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has left, as `head` does
        _discard_output()
        return EXIT_PIPE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (SettingsError, StoreRefused, ServingError, Refused, Unreachable, Unreadable) as error:
        print(f"tokenring: {error}", file=sys.stderr)
        return EXIT_CONFIG if args.command in ("serve", "node") else EXIT_USAGE
    except OSError as error:
        if error.errno not in _FULL or args.command in ("serve", "node"):
            raise
        _discard_output()
        print(f"tokenring: output cannot be written: {error.strerror}", file=sys.stderr)
        return EXIT_USAGE
    return status


def _discard_output() -> None:
    """Have what is left of the output lead to nowhere: the interpreter flushes it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(args: argparse.Namespace) -> int:
    names = {s.name for s in settings_module.table()}
    overrides = {k: v for k, v in vars(args).items() if k in names}
    if args.command == "settings":
        print(settings_table.json_text() if args.json else settings_table.text(markdown_only=args.markdown))
        return 0
    if args.command == "doctor":
        return doctor.run(overrides, args)
    if args.command in ("chat", "top"):
        status: int = args.run(args)
        return status
    if args.command == "safety":
        return safety.run(args)
    if args.command not in ("serve", "node"):
        return store.run(args)
    _warn_of_secrets(overrides)
    settings = settings_module.load(overrides, os.environ, args.config)
    return _serve(settings) if args.command == "serve" else _run_node(settings, args.rank)


def _parsed(argv: list[str]) -> argparse.Namespace:
    """The arguments of the command. Raises SystemExit."""
    try:
        return parser().parse_args(argv)
    except SystemExit as ended:
        if ended.code == EXIT_USAGE and argv[:1] in (["serve"], ["node"]):
            raise SystemExit(EXIT_CONFIG) from None
        raise


def _warn_of_secrets(flags: Collection[str]) -> None:
    """Warn of secrets in flags: every user of the machine can read a command line."""
    for setting in settings_module.table():
        if setting.secret and setting.name in flags:
            print(
                f"tokenring: every user of this machine can read {setting.flag} (ps); set {setting.env}"
                " instead, or put it into a file",
                file=sys.stderr,
            )


def _run_node(settings: Settings, rank: int) -> int:
    from app.engine.sglang.node import keep_running
    from app.engine_factory import check_models, sglang_options

    if settings.engine != "sglang":
        raise SettingsError(f"engine: {settings.engine} has no ranks on other nodes; sglang has")
    check_models(dataclasses.replace(settings, small_model="", safety_guard_model=""))  # those run beside it
    return keep_running(sglang_options(settings), rank)


def _serve(settings: Settings) -> int:
    import uvloop

    from app.api.server import listen, serve

    try:
        sock = listen(settings)
    except SettingsError:
        doctor.print_failures(settings)
        raise
    with sock, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(settings, sock, explain=partial(doctor.print_failures, settings)))
