"""Keys in the store, and in memory: what is kept of a secret, rotation, revocation, what is read again."""

from __future__ import annotations

import hashlib
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest

from app.core import Key, KeyTerms, Secret
from app.errors import Conflict, NotFound
from app.store import keys
from app.store.keys import NewKey, digest_of
from app.store.schema import MIGRATIONS, migrate

NOW_US = 1_790_000_000_000_000
HOUR_US = 3_600_000_000
ALL = KeyTerms(
    name="laptop",
    scope="admin",
    tier="batch",
    weight=2.5,
    rpm=60,
    tpm=10_000,
    max_streams=3,
    budget_micro_usd=2_500_000,
    models=("a", "b"),
    expires_at_us=NOW_US + HOUR_US,
    degrade="off",
    grammars="schemas",
    resume="always",
)


@pytest.fixture
def c() -> Iterator[sqlite3.Connection]:
    """An empty store in memory."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.execute("PRAGMA foreign_keys = ON")
        migrate(connection, MIGRATIONS)
        yield connection


def everything(c: sqlite3.Connection) -> str:
    """All that the store has, as SQL."""
    return "\n".join(c.iterdump())


def digest(issued: NewKey) -> bytes:
    """What is stored of an issued key."""
    return digest_of(issued.text.encode())


def test_a_key_is_its_id_and_256_random_bits(c: sqlite3.Connection):
    """The text begins with the id, and no two are alike."""
    issued = [keys.create(c, KeyTerms("a"), NOW_US) for _ in range(20)]
    for key, text in issued:
        assert re.fullmatch(r"tr-[0-9a-f]{12}-[0-9a-f]{64}", text)
        assert text[: keys.ID_CHARS] == key.id
    assert len({text.rpartition("-")[2] for _, text in issued}) == 20


def test_only_the_hash_of_a_key_is_stored(c: sqlite3.Connection):
    """The store has the SHA-256 of the whole key, and not its secret."""
    issued = keys.create(c, KeyTerms("a"), NOW_US)
    assert issued.key.secrets == (Secret(hashlib.sha256(issued.text.encode()).digest(), None),)
    assert issued.text.rpartition("-")[2] not in everything(c)


def test_a_key_is_found_as_it_was_made(c: sqlite3.Connection):
    """All terms, the owner and the times are kept."""
    made = keys.create(c, ALL, NOW_US, "ann").key
    assert made == Key(made.id, "ann", ALL, NOW_US, None, made.secrets)
    assert keys.find(c, made.id) == made
    own = keys.create(c, KeyTerms("b"), NOW_US + 1).key
    assert own.owner == own.id
    assert keys.all_keys(c) == [made, own]


def test_terms_are_changed_alone(c: sqlite3.Connection):
    """What is given is changed, a limit can be taken away, and the rest stays."""
    made = keys.create(c, ALL, NOW_US).key
    changed = keys.change(c, made.id, {"rpm": None, "models": ("c",), "scope": "chat"})
    assert keys.find(c, made.id) == changed
    assert (changed.terms.rpm, changed.terms.models, changed.terms.scope) == (None, ("c",), "chat")
    assert (changed.terms.tpm, changed.owner, changed.secrets) == (10_000, made.owner, made.secrets)


def test_a_rotation_leaves_the_old_secret_for_the_overlap(c: sqlite3.Connection):
    """The old secret gets an end, and a second rotation neither puts it off nor takes it away early."""
    first = keys.create(c, KeyTerms("a"), NOW_US)
    second = keys.rotate(c, first.key.id, NOW_US, HOUR_US)
    assert second.key.secrets == (Secret(digest(first), NOW_US + HOUR_US), Secret(digest(second), None))
    third = keys.rotate(c, first.key.id, NOW_US + 1, 2 * HOUR_US)
    assert third.key.secrets == (
        Secret(digest(first), NOW_US + HOUR_US),
        Secret(digest(second), NOW_US + 1 + 2 * HOUR_US),
        Secret(digest(third), None),
    )


def test_a_rotation_without_overlap_ends_all_old_secrets(c: sqlite3.Connection):
    """After a leak only the new secret is left; hashes of ended ones are not kept."""
    first = keys.create(c, KeyTerms("a"), NOW_US)
    keys.rotate(c, first.key.id, NOW_US, HOUR_US)
    last = keys.rotate(c, first.key.id, NOW_US + 1, 0)
    assert last.key.secrets == (Secret(digest(last), None),)
    assert digest(first).hex() not in everything(c).lower()


def test_a_revoked_key_stays_revoked(c: sqlite3.Connection):
    """Its hashes go, it stays listed, keeps the time of the first revocation, and cannot be brought back."""
    issued = keys.create(c, ALL, NOW_US)
    revoked = keys.revoke(c, issued.key.id, NOW_US + 5)
    assert keys.revoke(c, issued.key.id, NOW_US + 9) == revoked
    assert keys.all_keys(c) == [revoked]
    assert (revoked.revoked_at_us, revoked.secrets, revoked.terms) == (NOW_US + 5, (), ALL)
    assert digest(issued).hex() not in everything(c).lower()
    with pytest.raises(Conflict, match="revoked"):
        keys.change(c, issued.key.id, {"expires_at_us": None})
    with pytest.raises(Conflict, match="revoked"):
        keys.rotate(c, issued.key.id, NOW_US, 0)


def test_an_unknown_key_is_not_found(c: sqlite3.Connection):
    """Nothing can be done to a key that there is not."""
    for act in (
        lambda: keys.find(c, "tr-0"),
        lambda: keys.change(c, "tr-0", {}),
        lambda: keys.rotate(c, "tr-0", NOW_US, 0),
        lambda: keys.revoke(c, "tr-0", NOW_US),
    ):
        with pytest.raises(NotFound) as error:
            act()
        assert error.value.code == "key_not_found"


def test_the_first_key_is_made_once(c: sqlite3.Connection):
    """Where there has been a key, revoked or not, no first one is made."""
    first = keys.create_first(c, KeyTerms("first"), NOW_US, "local")
    assert first is not None
    assert first.key.owner == "local"
    keys.revoke(c, first.key.id, NOW_US)
    assert keys.create_first(c, KeyTerms("second"), NOW_US, "local") is None
    assert len(keys.all_keys(c)) == 1


def test_every_change_has_another_version(c: sqlite3.Connection):
    """Who keeps keys in memory sees by one number that something changed."""
    versions = [keys.version(c)]
    key_id = keys.create(c, KeyTerms("a"), NOW_US).key.id
    versions.append(keys.version(c))
    keys.change(c, key_id, {"rpm": 5})
    versions.append(keys.version(c))
    keys.rotate(c, key_id, NOW_US, 0)
    versions.append(keys.version(c))
    keys.revoke(c, key_id, NOW_US)
    versions.append(keys.version(c))
    assert versions == sorted(set(versions))


@pytest.mark.parametrize(
    ("at_us", "revoked_at_us", "status"),
    [
        (NOW_US, None, "active"),
        (NOW_US + HOUR_US - 1, None, "active"),
        (NOW_US + HOUR_US, None, "expired"),
        (NOW_US, NOW_US, "revoked"),
        (NOW_US + HOUR_US, NOW_US, "revoked"),
    ],
)
def test_status(at_us: int, revoked_at_us: int | None, status: str):
    """A key is active until it expires; one that is revoked is that first."""
    assert Key("tr-0", "ann", ALL, NOW_US, revoked_at_us).status(at_us) == status


# In memory
