"""People who sign in: each has one key, whose id and owner follow from who vouches for them.

So a person keeps conversations, usage and terms from one sign-in to the next, on each of their devices. A
sign-in gives the key one more secret that ends by itself; where a proxy vouches for every request the key
has none. An administrator lists, changes and revokes the key as any other.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from dataclasses import replace
from typing import NamedTuple

from app.core import Key, KeyTerms, Scope
from app.errors import NotFound, SignInRefused
from app.store import keys

MAX_SESSIONS = 8
"""Sign-ins of a person that are valid at once; the next ends the oldest."""
MAX_NAME_CHARS = 100


class Person(NamedTuple):
    """The id of a person's key, the owner of what they make, and a name to show."""

    key_id: str
    owner: str
    name: str


def person_of(source: str, subject: str, name: str) -> Person:
    """The person whom `source` (an issuer, or a header) calls `subject`. A name need not be unique."""
    digest = hashlib.sha256(json.dumps([source, subject]).encode()).hexdigest()
    plain = "".join(filter(str.isprintable, name)).strip()[:MAX_NAME_CHARS].strip()
    return Person(f"tr-{digest[:12]}", f"person-{digest[12:44]}", plain or "person")


def check_key(key: Key, person: Person, at_us: int) -> Key:
    """The key, where it is this person's and in force. Raises SignInRefused."""
    if key.owner != person.owner or key.status(at_us) != "active":
        raise SignInRefused(
            f"The access of this person has ended; ask an administrator about the key {key.id}."
        )
    return key


def enrol(c: sqlite3.Connection, person: Person, terms: KeyTerms, at_us: int) -> Key:
    """The person's key; where there is none a new one without a secret. Raises SignInRefused."""
    try:
        key = keys.find(c, person.key_id)
    except NotFound:
        keys.insert(c, person.key_id, person.owner, replace(terms, name=person.name), at_us)
        key = keys.find(c, person.key_id)
    return check_key(key, person, at_us)


def sign_in(
    c: sqlite3.Connection, person: Person, terms: KeyTerms, at_us: int, ends_at_us: int, scope: Scope | None
) -> keys.NewKey:
    """The person's key with a secret that ends then; a `scope` replaces the key's. Raises SignInRefused."""
    key = enrol(c, person, terms, at_us)
    if scope is not None and scope != key.terms.scope:
        keys.change(c, key.id, {"scope": scope})
    return keys.add_session(c, key.id, at_us, ends_at_us, MAX_SESSIONS)
