"""`tokenring keys`: make, list, change and end API keys, beside the server or before its first start."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app.api.schema.key_terms import (
    DEFAULT_OVERLAP_S,
    NULLABLE,
    TERMS,
    as_json,
    issued_as_json,
    read_new,
    read_overlap_us,
    read_terms,
)
from app.cli import tables
from app.cli.flags import Commands, command, flag
from app.cli.store import print_store_in_use, settings_of
from app.core import DEGRADING, GRAMMARS, LOCAL_OWNER, RESUMING, SAFETY_LEVELS, SCOPES, TIERS, Key, KeyTerms
from app.errors import BadRequest
from app.store import keys
from app.store.backup import make_missing, transaction
from app.store.database import FILE_NAME
from app.store.key_table import now_us
from app.store.opening import StoreRefused

EXIT_OK = 0
NEVER = "never"
NONE = "none"
"""The value of a flag that removes the limit."""
_FIRST = (
    "This was the first key: from now on every request needs one, from this machine too."
    f" Conversations stored until now belong to the owner {LOCAL_OWNER!r}; a key that is made with"
    f" `--owner {LOCAL_OWNER}` reads them."
)


_SAFETY = (
    "observe: records only; standard: as the policy says; enforce: acts where the policy only observes;"
    " strict: also blocks what is watched"
)


def add_commands(commands: Commands[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """Add `keys` and its verbs to the parser of the command line."""
    top = commands.add_parser("keys", help="create, list, change or revoke API keys")
    verbs = top.add_subparsers(dest="verb", required=True)

    create = command(verbs, "create", "create a key and print it; it is never shown again", _create, common)
    flag(create, "--name", "name of the key, for people", required=True)
    flag(create, "--owner", "keys of one owner share conversations and usage (default: the key itself)")
    _add_terms(create)
    ends = "UTC day or time, as 2026-12-31, at which the key ends (default: never)"
    flag(create, "--expires", ends, metavar="DATE", dest="expires_at")
    flag(create, "--init", "make the store where there is none", bool)
    command(verbs, "list", "list all keys, including revoked keys", _list, common)
    update = command(verbs, "update", f"change a key; the value {NONE!r} removes a limit", _update, common)
    flag(update, "--name", "name of the key, for people")
    _add_terms(update)
    anew = "give a key a new secret and print it; it is never shown again"
    rotate = command(verbs, "rotate", anew, _rotate, common)
    overlap = f"seconds for which the old secret stays valid; 0: none (default: {DEFAULT_OVERLAP_S})"
    flag(rotate, "--overlap-s", overlap, int, "SECONDS", default=DEFAULT_OVERLAP_S)
    at = "set the time at which a key ends; it can be changed later"
    expire = command(verbs, "expire", at, _expire, common)
    flag(expire, "--at", f"UTC day or time, as 2026-12-31, or {NEVER!r} (default: now)", metavar="DATE")
    revoke = command(verbs, "revoke", "revoke a key; this cannot be undone", _revoke, common)
    for verb in (update, rotate, expire, revoke):
        flag(verb, "id", "id of the key: the part before its second hyphen", metavar="ID")


def _count(text: str) -> int | str:
    """A whole number, or `NONE`. Raises ArgumentTypeError."""
    try:
        return text if text == NONE else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, or {NONE!r}; got {text!r}") from None


_TERMS: Sequence[tuple[str, str, Callable[[str], Any] | Sequence[str], str, str | None]] = (
    ("scope", "chat: use the models; admin: also manage keys and read metrics", SCOPES, "chat", None),
    ("tier", "priority while the server is full", TIERS, "standard", None),
    ("weight", "tokens relative to other keys of its tier, 0.1 to 100", float, "1", "X"),
    ("rpm", "limit of requests per minute", _count, NONE, "N"),
    ("tpm", "limit of tokens per minute", _count, NONE, "N"),
    ("max-streams", "limit of generations at the same time", _count, NONE, "N"),
    ("budget-usd", "limit of the owner's costs in US dollars per UTC month", str, NONE, "X"),
    ("models", "models that the key may use, with commas between", str, "all", "A,B"),
    ("safety", _SAFETY, SAFETY_LEVELS, "standard", None),
    ("degrade", "off: no shorter answers and no small model in degraded mode", DEGRADING, "on", None),
    ("grammars", "schemas: JSON schemas and tools; no regex, EBNF, structural tag", GRAMMARS, "all", None),
    ("resume", "always: answers whose client has left continue for resume_grace_s", RESUMING, "asked", None),
)
"""The flags of a key's terms, except its end: name, help, type or values, default of a new key, metavar."""


def _add_terms(verb: argparse.ArgumentParser) -> None:
    for name, help_, kind, default, metavar in _TERMS:
        flag(verb, f"--{name}", f"{help_} (default of a new key: {default})", kind, metavar)


def _key_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a key that flags give, as JSON has them."""
    named = (*TERMS, "owner")
    fields = {name: value for name, value in vars(args).items() if name in named and value is not None}
    fields |= {name: None for name in NULLABLE if fields.get(name) == NONE}
    if fields.get("models") is not None:
        fields["models"] = [name.strip() for name in fields["models"].split(",")]
    return fields


def _create(args: argparse.Namespace, data_dir: Path) -> int:
    at_us = now_us()
    terms, owner = read_new(_key_fields(args), at_us)
    if not (data_dir / FILE_NAME).exists():
        _make_store(args, data_dir)
    with transaction(data_dir, write=True) as connection:
        first = keys.create_first(connection, terms, at_us, owner)
        issued = first or keys.create(connection, terms, at_us, owner)
    _warn(args, issued.key.terms, data_dir)
    return _tell(args, issued, at_us, [_FIRST] if first else [])


def _make_store(args: argparse.Namespace, data_dir: Path) -> None:
    """Make the store if the command names or requests one. Raises StoreRefused otherwise."""
    if args.data_dir is None and not args.init:
        raise StoreRefused(
            f"There is no store in {data_dir.absolute()}, and a key in another store than the server's opens"
            " nothing. Name the server's with --data-dir, or make a new one with --init."
        )
    make_missing(data_dir)
    print_store_in_use(data_dir, changes_keys=True)


def _warn(args: argparse.Namespace, terms: KeyTerms, data_dir: Path) -> None:
    """Say on standard error what a key names that is not there."""
    if terms.models is None and terms.budget_micro_usd is None:
        return
    from app.doctor.key_terms import remarks  # late: most keys name nothing

    for remark in remarks(terms, settings_of(args), data_dir):
        print(f"tokenring: warning: {remark}", file=sys.stderr)


def _update(args: argparse.Namespace, data_dir: Path) -> int:
    at_us = now_us()
    terms = read_terms(_key_fields(args), at_us)
    if not terms:
        raise BadRequest("Nothing to change: give at least one flag, as --weight 2.")
    with transaction(data_dir, write=True) as connection:
        key = keys.change(connection, args.id, terms)
    _warn(args, key.terms, data_dir)
    return _say(args, key, at_us, _table([as_json(key, at_us)]))


def _rotate(args: argparse.Namespace, data_dir: Path) -> int:
    at_us, overlap_us = now_us(), read_overlap_us({"overlap_s": args.overlap_s})
    with transaction(data_dir, write=True) as connection:
        issued = keys.rotate(connection, args.id, at_us, overlap_us)
    ends = "is no longer valid" if not args.overlap_s else f"stays valid for {args.overlap_s:,} s more"
    return _tell(args, issued, at_us, [f"The old secret {ends}."])


def _tell(args: argparse.Namespace, issued: keys.NewKey, at_us: int, notes: Sequence[str]) -> int:
    """Print the key on standard output, for scripts, and remarks about it on standard error."""
    try:
        print(json.dumps(issued_as_json(issued, at_us)) if args.json else issued.text, flush=True)
    except OSError:
        lost = f"nobody has the secret of key {issued.key.id}: rotate the key for another, or revoke it"
        print(f"tokenring: {lost}", file=sys.stderr)
        raise
    if args.json:
        return EXIT_OK
    lines = [f"Key {issued.key.id}, {issued.key.terms.name!r}. It is not shown again.", *notes]
    print("\n".join(lines), file=sys.stderr)
    return EXIT_OK


def _list(args: argparse.Namespace, data_dir: Path) -> int:
    at_us = now_us()
    with transaction(data_dir) as connection:
        rows = [as_json(key, at_us) for key in keys.all_keys(connection)]
    if args.json:
        print(json.dumps({"object": "list", "data": rows}))
    else:
        print(_table(rows))
    return EXIT_OK


def _expire(args: argparse.Namespace, data_dir: Path) -> int:
    at_us = now_us()
    terms: Mapping[str, Any] = {"expires_at_us": at_us}
    if args.at is not None:
        terms = read_terms({"expires_at": None if args.at == NEVER else args.at}, at_us)
    with transaction(data_dir, write=True) as connection:
        key = keys.change(connection, args.id, terms)
    ends_at_us = key.terms.expires_at_us
    when = "does not expire" if ends_at_us is None else f"ends at {_text_of(ends_at_us // 1_000_000)}"
    return _say(args, key, at_us, f"{key.id} {when}.")


def _revoke(args: argparse.Namespace, data_dir: Path) -> int:
    at_us = now_us()
    with transaction(data_dir, write=True) as connection:
        key = keys.revoke(connection, args.id, at_us)
    return _say(args, key, at_us, f"{key.id} is revoked.")


def _say(args: argparse.Namespace, key: Key, at_us: int, line: str) -> int:
    print(json.dumps(as_json(key, at_us)) if args.json else line)
    return EXIT_OK


def _table(listed: Sequence[Mapping[str, Any]]) -> str:
    """A table with one line for each key."""
    heads = ("id", "name", "owner", "scope", "status", "tier", "limits", "models", "expires")
    return tables.text(heads, [_row(key) for key in listed])


def _row(key: Mapping[str, Any]) -> Sequence[str]:
    limits = [f"{name} {key[name]:,}" for name in ("rpm", "tpm", "max_streams") if key[name] is not None]
    if key["budget_usd"] is not None:
        limits.append(f"${key['budget_usd']:,} a month")
    special = {
        f"weight {key['weight']:g}": key["weight"] != 1,
        f"{key['safety']} safety": key["safety"] != "standard",
        "never degraded": key["degrade"] == "off",
        "schemas only": key["grammars"] == "schemas",
        "always resumable": key["resume"] == "always",
    }
    limits += (text for text, applies in special.items() if applies)
    return (
        key["id"],
        key["name"],
        "its own" if key["owner"] == key["id"] else key["owner"],
        key["scope"],
        key["status"],
        key["tier"],
        ", ".join(limits) or "none",
        "all" if key["models"] is None else ",".join(key["models"]),
        NEVER if key["expires_at"] is None else _text_of(key["expires_at"]),
    )


def _text_of(unix_s: int) -> str:
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%dT%H:%MZ}"
