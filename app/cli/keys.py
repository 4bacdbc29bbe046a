"""`tokenring keys`: make, list, change and end API keys, beside the server or before its first start."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
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
from app.cli.store import settings_of, tell_store
from app.core import DEGRADING, GRAMMARS, LOCAL_OWNER, RESUMING, SAFETY_LEVELS, SCOPES, TIERS, Key, KeyTerms
from app.errors import BadRequest
from app.store import keys
from app.store.backup import make_missing, opened
from app.store.database import FILE_NAME
from app.store.key_table import now_us
from app.store.opening import StoreRefused

EXIT_OK = 0
NEVER = "never"
NONE = "none"
"""The value of a flag that removes the limit."""
_FIRST = (
    "This was the first key: from now on every request needs one, from this machine too."
    f" Conversations stored until now belong to the owner {LOCAL_OWNER!r}."
)


def add_commands(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser
) -> None:
    """Add `keys` and its verbs to the parser of the command line."""
    top = commands.add_parser("keys", help="create, list, change or end API keys")
    verbs = top.add_subparsers(dest="verb", required=True)

    def verb(name: str, help_: str, *, takes_id: bool = True) -> argparse.ArgumentParser:
        parser = verbs.add_parser(
            name,
            parents=[common],
            allow_abbrev=False,
            help=help_,
            argument_default=argparse.SUPPRESS,  # terms that no flag gives are not there
        )
        if takes_id:
            parser.add_argument("id", metavar="ID", help="id of the key: the part before its second hyphen")
        return parser

    _add_create(verb("create", "create a key and print it; it is never shown again", takes_id=False))
    verb("list", "list all keys, including revoked keys", takes_id=False).set_defaults(run=_list)
    update = verb("update", f"change a key; the value {NONE!r} removes a limit")
    update.add_argument("--name", help="name of the key, for people")
    _add_terms(update)
    update.set_defaults(run=_update)
    rotate = verb("rotate", "give a key a new secret and print it; it is never shown again")
    rotate.add_argument(
        "--overlap-s",
        type=int,
        default=DEFAULT_OVERLAP_S,
        metavar="SECONDS",
        help=f"seconds for which the old secret stays valid; 0: none (default: {DEFAULT_OVERLAP_S})",
    )
    rotate.set_defaults(run=_rotate)
    expire = verb("expire", "set the time at which a key ends; it can be changed later")
    expire.add_argument(
        "--at",
        metavar="DATE",
        default=None,
        help=f"UTC day or time, as 2026-12-31, or {NEVER!r} (default: now)",
    )
    expire.set_defaults(run=_expire)
    verb("revoke", "end a key; this cannot be undone").set_defaults(run=_revoke)


def _add_create(create: argparse.ArgumentParser) -> None:
    create.add_argument("--name", required=True, help="name of the key, for people")
    create.add_argument(
        "--owner",
        help="keys of one owner share conversations and usage (default: the key itself)",
    )
    _add_terms(create)
    create.add_argument(
        "--expires",
        dest="expires_at",
        metavar="DATE",
        help="UTC day or time, as 2026-12-31, at which the key ends (default: never)",
    )
    create.add_argument(
        "--init", action="store_true", default=False, help="make the store where there is none"
    )
    create.set_defaults(run=_create)


def _add_terms(verb: argparse.ArgumentParser) -> None:
    """The flags of a key's terms, except its end."""
    verb.add_argument(
        "--scope",
        choices=SCOPES,
        help="chat: use the models; admin: also manage keys and read metrics (default of a new key: chat)",
    )
    verb.add_argument(
        "--tier", choices=TIERS, help="priority while the server is full (default of a new key: standard)"
    )
    verb.add_argument(
        "--weight",
        type=float,
        metavar="X",
        help="tokens relative to other keys of its tier, 0.1 to 100 (default of a new key: 1)",
    )
    verb.add_argument(
        "--rpm", type=_count, metavar="N", help="limit of requests per minute (default of a new key: none)"
    )
    verb.add_argument(
        "--tpm", type=_count, metavar="N", help="limit of tokens per minute (default of a new key: none)"
    )
    verb.add_argument(
        "--max-streams",
        type=_count,
        metavar="N",
        help="limit of generations at the same time (default of a new key: none)",
    )
    verb.add_argument(
        "--budget-usd",
        metavar="X",
        help="limit of the owner's costs in US dollars per UTC month (default of a new key: none)",
    )
    verb.add_argument(
        "--models",
        metavar="A,B",
        help="models that the key may use, with commas between (default of a new key: all)",
    )
    verb.add_argument(
        "--safety",
        choices=SAFETY_LEVELS,
        help="observe: records only; standard: as the policy says; enforce: acts where the policy only"
        " observes; strict: also blocks what is watched (a new key's: standard)",
    )
    verb.add_argument(
        "--degrade",
        choices=DEGRADING,
        help="off: no shorter answers and no small model in degraded mode (default of a new key: on)",
    )
    verb.add_argument(
        "--grammars",
        choices=GRAMMARS,
        help="schemas: JSON schemas and tools; no regex, EBNF, structural tag (default of a new key: all)",
    )
    verb.add_argument(
        "--resume",
        choices=RESUMING,
        help="always: answers whose client has left go on for resume_grace_s (default of a new key: asked)",
    )


def _count(text: str) -> int | str:
    """A whole number, or `NONE`. Raises ArgumentTypeError."""
    try:
        return text if text == NONE else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, or {NONE!r}; got {text!r}") from None


def _key_fields(args: argparse.Namespace) -> dict[str, Any]:
    """What flags say of a key, as JSON has it."""
    fields = {name: value for name, value in vars(args).items() if name in (*TERMS, "owner")}
    fields |= {name: None for name in NULLABLE if fields.get(name) == NONE}
    if fields.get("models") is not None:
        fields["models"] = [name.strip() for name in fields["models"].split(",")]
    return fields


def _create(args: argparse.Namespace, data_dir: Path) -> int:
    at_us = now_us()
    terms, owner = read_new(_key_fields(args), at_us)
    if not (data_dir / FILE_NAME).exists():
        _make_store(args, data_dir)
    with opened(data_dir, write=True) as connection:
        is_first = keys.create_first(connection, terms, at_us, owner)
        issued = is_first or keys.create(connection, terms, at_us, owner)
    _warn(args, issued.key.terms, data_dir)
    return _tell(args, issued, at_us, [_FIRST] if is_first else [])


def _make_store(args: argparse.Namespace, data_dir: Path) -> None:
    """Make the store that the command was told to make. Raises StoreRefused where it was not."""
    if args.data_dir is None and not args.init:
        raise StoreRefused(
            f"There is no store in {data_dir.absolute()}, and a key in another store than the server's opens"
            " nothing. Name the server's with --data-dir, or make a new one with --init."
        )
    make_missing(data_dir)
    tell_store(data_dir, changes_keys=True)


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
    with opened(data_dir, write=True) as connection:
        key = keys.change(connection, args.id, terms)
    _warn(args, key.terms, data_dir)
    return _say(args, key, at_us, _table([as_json(key, at_us)]))


def _rotate(args: argparse.Namespace, data_dir: Path) -> int:
    at_us, overlap_us = now_us(), read_overlap_us({"overlap_s": args.overlap_s})
    with opened(data_dir, write=True) as connection:
        issued = keys.rotate(connection, args.id, at_us, overlap_us)
    ends = "is no longer valid" if not args.overlap_s else f"stays valid for {args.overlap_s:,} s more"
    return _tell(args, issued, at_us, [f"The old secret {ends}."])


def _tell(args: argparse.Namespace, issued: keys.NewKey, at_us: int, notes: Sequence[str]) -> int:
    """Print the key on standard output, for scripts, and remarks about it on standard error."""
    if args.json:
        print(json.dumps(issued_as_json(issued, at_us)))
        return EXIT_OK
    print(issued.text, flush=True)
    lines = [f"Key {issued.key.id}, {issued.key.terms.name!r}. It is not shown again.", *notes]
    print("\n".join(lines), file=sys.stderr)
    return EXIT_OK


def _list(args: argparse.Namespace, data_dir: Path) -> int:
    at_us = now_us()
    with opened(data_dir) as connection:
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
    with opened(data_dir, write=True) as connection:
        key = keys.change(connection, args.id, terms)
    ends_at_us = key.terms.expires_at_us
    when = "does not expire" if ends_at_us is None else f"ends at {_text_of(ends_at_us // 1_000_000)}"
    return _say(args, key, at_us, f"{key.id} {when}.")


def _revoke(args: argparse.Namespace, data_dir: Path) -> int:
    at_us = now_us()
    with opened(data_dir, write=True) as connection:
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
    if key["weight"] != 1:
        limits.append(f"weight {key['weight']:g}")
    if key["safety"] != "standard":
        limits.append(f"{key['safety']} safety")
    if key["degrade"] == "off":
        limits.append("never degraded")
    if key["grammars"] == "schemas":
        limits.append("schemas only")
    if key["resume"] == "always":
        limits.append("always resumable")
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
