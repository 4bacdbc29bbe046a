"""API keys: whose each is, what it may do, and the hashes of its secrets, never a secret itself.

A key is `tr-<12 hex>-<64 hex>`: its readable id, by which it is found, and 256 random bits. Stored
is the plain SHA-256 of the whole. A slow hash is for secrets that people choose and others can
guess; none of 2^256 can be guessed, and every request would pay for it. A keyed hash would have to
have its key beside the store.

The server reads changes within the period of app.store.key_table. Streams of a revoked key run to their end.

All functions but `digest_of` are units (app.store.database).
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any, NamedTuple

from app.core import Key, KeyTerms, Secret
from app.errors import Conflict, NotFound

ID_CHARS = len("tr-") + 12


class NewKey(NamedTuple):
    """A key, and the text that its holder sends, which is shown this once."""

    key: Key
    text: str


_TERMS = tuple(field.name for field in fields(KeyTerms))
_NAMES = ", ".join(_TERMS)
_PLACES = ", ".join("?" * len(_TERMS))
_SELECT = f"SELECT seq, id, owner, created_at_us, revoked_at_us, {_NAMES} FROM keys"  # noqa: S608  # our own names


def digest_of(text: bytes) -> bytes:
    """The digest of a key, which is stored and compared instead of it."""
    return hashlib.sha256(text).digest()


def create(c: sqlite3.Connection, terms: KeyTerms, at_us: int, owner: str | None = None) -> NewKey:
    """A new key; it owns what it makes, unless another owner is given."""
    key_id = f"tr-{secrets.token_hex(6)}"
    text = _add_secret(c, insert(c, key_id, owner or key_id, terms, at_us), key_id, at_us)
    return NewKey(find(c, key_id), text)


def insert(c: sqlite3.Connection, key_id: str, owner: str, terms: KeyTerms, at_us: int) -> int:
    """Insert a key without a secret; returns its row."""
    cursor = c.execute(
        f"INSERT INTO keys (id, owner, created_at_us, {_NAMES}) VALUES (?, ?, ?, {_PLACES})",  # noqa: S608  # same
        (key_id, owner, at_us, *_columns(terms)),
    )
    assert cursor.lastrowid is not None
    _changed(c)
    return cursor.lastrowid


def create_first(
    c: sqlite3.Connection, terms: KeyTerms, at_us: int, owner: str | None = None
) -> NewKey | None:
    """A new key where there has never been one; None where there has."""
    if c.execute("SELECT 1 FROM keys LIMIT 1").fetchone() is not None:
        return None
    return create(c, terms, at_us, owner)


def all_keys(c: sqlite3.Connection) -> list[Key]:
    """Every key that there ever was, in the order in which they were created."""
    of_key: dict[int, list[Secret]] = {}
    for key_seq, *secret in c.execute("SELECT key_seq, digest, ends_at_us FROM key_secrets ORDER BY seq"):
        of_key.setdefault(key_seq, []).append(Secret(*secret))
    return [_key(row, of_key.get(row[0], [])) for row in c.execute(f"{_SELECT} ORDER BY seq").fetchall()]


def names_of(c: sqlite3.Connection) -> dict[str, str]:
    """The names of all keys, by their ids."""
    return dict(c.execute("SELECT id, name FROM keys").fetchall())


def find(c: sqlite3.Connection, key_id: str) -> Key:
    """The key of that id. Raises NotFound."""
    row = c.execute(f"{_SELECT} WHERE id = ?", (key_id,)).fetchone()
    if row is None:
        raise NotFound(f"There is no key {key_id!r}.", code="key_not_found")
    secret_rows = c.execute(
        "SELECT digest, ends_at_us FROM key_secrets WHERE key_seq = ? ORDER BY seq", row[:1]
    )
    return _key(row, [Secret(*secret) for secret in secret_rows])


def change(c: sqlite3.Connection, key_id: str, changes: Mapping[str, Any]) -> Key:
    """Change some of a key's terms, by their names. Raises NotFound; Conflict when it is revoked."""
    key = _not_revoked(c, key_id)
    terms = replace(key.terms, **changes)
    c.execute(
        f"UPDATE keys SET ({_NAMES}) = ({_PLACES}) WHERE id = ?",  # noqa: S608  # same
        (*_columns(terms), key_id),
    )
    _changed(c)
    return replace(key, terms=terms)


def rotate(c: sqlite3.Connection, key_id: str, at_us: int, overlap_us: int) -> NewKey:
    """Give a key a new secret; those before it end after the overlap, or when they would have.

    Raises NotFound; Conflict when it is revoked.
    """
    _not_revoked(c, key_id)
    (seq,) = c.execute("SELECT seq FROM keys WHERE id = ?", (key_id,)).fetchone()
    ends_at_us = at_us + overlap_us
    c.execute(
        "UPDATE key_secrets SET ends_at_us = min(coalesce(ends_at_us, ?), ?) WHERE key_seq = ?",
        (ends_at_us, ends_at_us, seq),
    )
    c.execute("DELETE FROM key_secrets WHERE key_seq = ? AND ends_at_us <= ?", (seq, at_us))
    text = _add_secret(c, seq, key_id, at_us)
    _changed(c)
    return NewKey(find(c, key_id), text)


def add_session(c: sqlite3.Connection, key_id: str, at_us: int, ends_at_us: int, max_sessions: int) -> NewKey:
    """Give a key one more secret, which ends by itself; of those that do, the newest ones stay.

    Raises NotFound; Conflict when it is revoked.
    """
    _not_revoked(c, key_id)
    (seq,) = c.execute("SELECT seq FROM keys WHERE id = ?", (key_id,)).fetchone()
    text = _add_secret(c, seq, key_id, at_us, ends_at_us)
    c.execute(
        "DELETE FROM key_secrets WHERE key_seq = ?1 AND ends_at_us IS NOT NULL AND (ends_at_us <= ?2"
        " OR seq NOT IN (SELECT seq FROM key_secrets WHERE key_seq = ?1 AND ends_at_us IS NOT NULL"
        " ORDER BY seq DESC LIMIT ?3))",
        (seq, at_us, max_sessions),
    )
    _changed(c)
    return NewKey(find(c, key_id), text)


def revoke(c: sqlite3.Connection, key_id: str, at_us: int) -> Key:
    """Revoke a key permanently; a revoked key keeps its time of revocation. Raises NotFound."""
    c.execute("UPDATE keys SET revoked_at_us = coalesce(revoked_at_us, ?) WHERE id = ?", (at_us, key_id))
    c.execute("DELETE FROM key_secrets WHERE key_seq = (SELECT seq FROM keys WHERE id = ?)", (key_id,))
    _changed(c)
    return find(c, key_id)


def version(c: sqlite3.Connection) -> int:
    """A number that is another one after every change of a key."""
    (number,) = c.execute("SELECT number FROM keys_version").fetchone()
    assert isinstance(number, int)
    return number


def _not_revoked(c: sqlite3.Connection, key_id: str) -> Key:
    key = find(c, key_id)
    if key.revoked_at_us is not None:
        raise Conflict(f"The key {key_id} is revoked permanently; create another one.")
    return key


def _add_secret(
    c: sqlite3.Connection, key_seq: int, key_id: str, at_us: int, ends_at_us: int | None = None
) -> str:
    text = f"{key_id}-{secrets.token_hex(32)}"
    c.execute(
        "INSERT INTO key_secrets (key_seq, digest, created_at_us, ends_at_us) VALUES (?, ?, ?, ?)",
        (key_seq, digest_of(text.encode()), at_us, ends_at_us),
    )
    return text


def _changed(c: sqlite3.Connection) -> None:
    c.execute("UPDATE keys_version SET number = number + 1")


def _columns(terms: KeyTerms) -> list[Any]:
    row = asdict(terms)
    row["models"] = None if terms.models is None else json.dumps(terms.models)
    return list(row.values())


def _key(row: tuple[Any, ...], secret_rows: list[Secret]) -> Key:
    _, key_id, owner, created_at_us, revoked_at_us, *values = row
    terms = dict(zip(_TERMS, values, strict=True))
    if terms["models"] is not None:
        terms["models"] = tuple(json.loads(terms["models"]))
    return Key(key_id, owner, KeyTerms(**terms), created_at_us, revoked_at_us, tuple(secret_rows))
