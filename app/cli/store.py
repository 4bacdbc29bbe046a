"""The commands over the store. Each opens the database itself; the server may run meanwhile."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app import settings
from app.cli import tables
from app.cli.flags import Commands, add_period, command, flag
from app.errors import BadRequest
from app.metering.usage import groups_of, period_of, sums_as_json, text_of, usage_report
from app.store.backup import backup, connected, conversations, transaction
from app.store.conversations import no_conversation
from app.store.database import FILE_NAME
from app.store.events import num_erased
from app.store.export import FORMATS, document
from app.store.opening import StoreRefused, holder
from app.store.purge import deleted_before, purge_now
from app.store.usage import UsageDifference, UsageSums, differences, rebuild

EXIT_OK = 0
EXIT_DIFFERENT = 1
EXIT_INCOMPLETE = 1
_DAY_US = 86_400_000_000
_LEFT_TO_SERVER = (
    "Copies may be in the database file until the server writes it anew (VACUUM), when it has been quiet"
    " for one to two minutes: nothing written."
)
ALL = "all"
_SHOWN: Mapping[str, Sequence[str]] = {"key": ("key", "key_name", "owner")}
"""Columns of a group that has more than one."""
_COLUMNS = ("requests", "input_tokens", "cached_tokens", "output_tokens")


def add_commands(commands: Commands[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of the command line."""
    usage = command(commands, "usage", "show requests, tokens and costs of all keys", _usage, common)
    add_period(usage)
    groups = "any of day,model,owner,key,metadata.NAME, with commas between"
    flag(usage, "--group-by", groups, metavar="NAMES", default="")
    check = usage.add_mutually_exclusive_group()
    compare = "compare the daily sums with the rows of the ledger; exit status 1 if they differ"
    flag(check, "--verify", compare, bool)
    flag(check, "--rebuild", "compare as --verify does, and correct the sums that differ", bool)
    copy = "copy the store to a new file; the server may run meanwhile"
    file = command(commands, "backup", copy, _backup, common)
    flag(file, "file", "path of the copy; it must not exist yet", _new_file, "FILE")
    top = commands.add_parser("conversations", help="export or purge conversations")
    verbs = top.add_subparsers(dest="verb", required=True)
    export_ = command(verbs, "export", "write conversations as JSON or Markdown", _export, common)
    flag(export_, "--id", f"id of one conversation (default: {ALL})", default=ALL)
    flag(export_, "--format", "format of the export (default: json)", tuple(FORMATS), default="json")
    out = f"new file, or with {ALL} a directory for one file each (default: standard output)"
    flag(export_, "--out", out, Path)
    erase = "delete conversations permanently; their token counts stay in the ledger"
    which = command(verbs, "purge", erase, _purge, common).add_mutually_exclusive_group(required=True)
    flag(which, "--id", "id of one conversation, whether it was deleted before or not")
    old = "all conversations that were deleted more than this number of days ago"
    flag(which, "--deleted-before", old, _days, "DAYS")


def run(args: argparse.Namespace) -> int:
    """Run a command over the store; returns its exit status.

    Raises StoreRefused, SettingsError, ServingError.
    """
    data_dir = settings_of(args).data_dir
    if (data_dir / FILE_NAME).exists():
        print_store_in_use(data_dir, changes_keys=args.command == "keys")
    status: int = args.run(args, data_dir)
    return status


def settings_of(args: argparse.Namespace) -> settings.Settings:
    """The settings of a command over the store. Raises SettingsError."""
    flags = {} if args.data_dir is None else {"data_dir": args.data_dir}
    return settings.load(flags, os.environ, args.config)


def print_store_in_use(data_dir: Path, *, changes_keys: bool = False) -> None:
    """Say on standard error which store a command uses, and which server runs on it."""
    server = holder(data_dir)
    if server is None:
        text = "no server runs on it"
        text += "; one on another store does not see its keys" if changes_keys else ""
    else:
        text = "a server runs on it" + (f" (process {server.pid})" if server.pid else "")
        text += " and sees a change within a second" if changes_keys else ""
    print(f"tokenring: the store is {(data_dir / FILE_NAME).absolute()}; {text}", file=sys.stderr)


def _days(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise argparse.ArgumentTypeError(f"expected a number of days, got {text!r}")
    return int(text)


def _new_file(text: str) -> Path:
    if text == "-":
        raise argparse.ArgumentTypeError("name a file: a store cannot be copied to standard output")
    return Path(text)


def _usage(args: argparse.Namespace, data_dir: Path) -> int:
    if args.verify or args.rebuild:
        return _verify(args, data_dir)
    period = period_of(args.period, args.first, args.last, datetime.now(UTC).date())
    group_by = groups_of(args.group_by)
    with tables.working("adding up the ledger"), transaction(data_dir) as connection:
        report = usage_report(connection, period, group_by)
    _print(args, report, _usage_table(report, group_by))
    return EXIT_OK


def _verify(args: argparse.Namespace, data_dir: Path) -> int:
    with tables.working("comparing all rows"), transaction(data_dir) as connection:
        mismatches = differences(connection)
    if args.rebuild:
        for day in sorted({difference.day for difference in mismatches}):
            with transaction(data_dir, write=True) as connection:  # a day at a time: a server waits meanwhile
                rebuild(connection, day)
    report = {
        "object": "usage.verification",
        "balanced": not mismatches,
        "rebuilt": bool(args.rebuild and mismatches),
        "differences": [_difference_as_json(difference) for difference in mismatches],
    }
    lines = [_difference_as_text(difference) for difference in mismatches]
    if not mismatches:
        lines.append("Every daily sum is the sum of its rows.")
    elif args.rebuild:
        lines.append(f"{len(mismatches)} daily sums were corrected.")
    else:
        lines.append(f"{len(mismatches)} daily sums are not those of their rows; --rebuild corrects them.")
    _print(args, report, lines)
    return EXIT_DIFFERENT if mismatches and not args.rebuild else EXIT_OK


def _backup(args: argparse.Namespace, data_dir: Path) -> int:
    with tables.working("copying the store"), transaction(data_dir, older=True) as connection:
        size_bytes = backup(connection, args.file)
    report = {"object": "backup", "file": str(args.file), "size_bytes": size_bytes}
    _print(args, report, [f"{args.file}: {size_bytes} bytes, checked."])
    return EXIT_OK


def _export(args: argparse.Namespace, data_dir: Path) -> int:
    if args.json and args.out is None and args.format != "json":
        raise BadRequest("--json needs --format json, or --out.")
    with transaction(data_dir) as connection:
        ids = [(id_, owner) for id_, owner in conversations(connection) if args.id in (ALL, id_)]
        if args.id != ALL and not ids:
            raise no_conversation(args.id)
        documents = ((id_, document(connection, owner, id_, FORMATS[args.format])) for id_, owner in ids)
        if args.out is None:
            _write_out(documents, as_list=args.id == ALL and args.format == "json")
            return EXIT_OK
        with tables.working("writing conversations"):
            files = _write_files(documents, args)
    report = {"object": "export", "conversations": len(files), "files": [str(path) for path in files]}
    _print(args, report, [f"{len(files)} conversations exported to {args.out}."])
    return EXIT_OK


def _write_out(documents: Iterable[tuple[str, Iterable[bytes]]], *, as_list: bool) -> None:
    """Write documents to standard output: one JSON object, a list of objects, or Markdown texts."""
    out = sys.stdout.buffer
    out.write(b'{"object": "list", "data": [' if as_list else b"")
    for number, (_, chunks) in enumerate(documents):
        out.write((b",\n" if as_list else b"\n") if number else b"")
        out.writelines(chunks)
    out.write(b"]}\n" if as_list else b"\n")
    out.flush()


def _write_files(documents: Iterable[tuple[str, Iterable[bytes]]], args: argparse.Namespace) -> list[Path]:
    """Write one new file, or a directory with one file for each conversation, of mode 0600."""
    files = []
    for id_, chunks in documents:
        path = args.out / f"{id_}{FORMATS[args.format].suffix}" if args.id == ALL else args.out
        try:
            if args.id == ALL:
                args.out.mkdir(parents=True, exist_ok=True)
            _write_whole(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), path, chunks)
        except OSError as exc:
            raise StoreRefused(f"{path} cannot be written: {exc.strerror}.") from exc
        files.append(path)
    return files


def _write_whole(descriptor: int, path: Path, chunks: Iterable[bytes]) -> None:
    """Write and close a new file; what cannot be written whole is removed. Raises OSError."""
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(chunks)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _purge(args: argparse.Namespace, data_dir: Path) -> int:
    served = holder(data_dir) is not None
    with tables.working("purging"), connected(data_dir, write=True) as connection:
        if args.id is None:
            ids = deleted_before(connection, time.time_ns() // 1000 - args.deleted_before * _DAY_US, "id")
        else:
            ids = [args.id]
        emptied = purge_now(connection, ids, vacuum=not served)
        to_vacuum = served and bool(ids or num_erased(connection))
    lines = [f"{len(ids)} conversations purged."]
    if ids and served:
        lines.append(_LEFT_TO_SERVER)
    if not emptied:
        lines = ["Another process uses the store, so the text may still be in its log: purge again."]
    complete = emptied and not to_vacuum
    _print(args, {"object": "purge", "conversations": len(ids), "complete": complete}, lines)
    return EXIT_OK if emptied else EXIT_INCOMPLETE


def _print(args: argparse.Namespace, report: Mapping[str, Any], lines: Sequence[str]) -> None:
    print(json.dumps(report) if args.json else "\n".join(lines))


def _usage_table(report: Mapping[str, Any], group_by: Sequence[str]) -> list[str]:
    """The lines of a usage report: heading, then the table of groups with its total."""
    names = list(dict.fromkeys(n for name in group_by for n in _SHOWN.get(name, (name,))))
    heads = [*names, *(name.removesuffix("_tokens") for name in _COLUMNS), "USD"]
    rows = [
        [*("-" if group[name] is None else group[name] for name in names), *_numbers(group)]
        for group in report["groups"]
    ]
    total = [""] * len(names) + _numbers(report)
    table = tables.text(heads, rows, total=total, left=len(names))
    return [f"Usage from {report['from']} to {report['to']} (UTC)", table]


def _numbers(sums: Mapping[str, Any]) -> list[str]:
    whole, micro = divmod(sums["cost_micro_usd"], 1_000_000)
    return [*(str(sums[name]) for name in _COLUMNS), f"{whole}.{micro:06}"]


def _difference_as_json(difference: UsageDifference) -> dict[str, Any]:
    return {
        "day": text_of(difference.day),
        "model": difference.model,
        "owner": difference.owner,
        "key": difference.key_id,
        "kept": difference.kept and sums_as_json(difference.kept),
        "rows": difference.rows and sums_as_json(difference.rows),
    }


def _difference_as_text(difference: UsageDifference) -> str:
    pairs = zip(
        UsageSums._fields, difference.kept or UsageSums(), difference.rows or UsageSums(), strict=True
    )
    wrong = ", ".join(f"{name} is {kept}, its rows say {rows}" for name, kept, rows in pairs if kept != rows)
    return f"{text_of(difference.day)} {difference.model} {difference.owner} {difference.key_id}: {wrong}"
