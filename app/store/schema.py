"""The schema, as numbered migrations; each is applied once, in order, and its name kept in a table.

A migration that has been released is never changed: a change is a new one, tested from the schema of version
0.1.0 with data in it (tests/unit/store/test_schema.py). The first makes that schema; a store from before is
refused.

Times are UTC microseconds since the epoch, money is integer micro-dollars, `seq` is the order
in which rows were added (the clock may step back, `seq` does not).
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Callable, Sequence
from typing import NamedTuple

from app.store.words import register

_VERSION_0_1 = """
CREATE TABLE conversations (
    seq            INTEGER PRIMARY KEY AUTOINCREMENT,
    id             TEXT NOT NULL UNIQUE,
    owner          TEXT NOT NULL,
    title          TEXT NOT NULL,
    model          TEXT NOT NULL,
    created_at_us  INTEGER NOT NULL,
    updated_at_us  INTEGER NOT NULL,
    deleted_at_us  INTEGER,
    total_tokens   INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX conversations_of_owner ON conversations (owner, seq) WHERE deleted_at_us IS NULL;
CREATE INDEX conversations_deleted ON conversations (deleted_at_us) WHERE deleted_at_us IS NOT NULL;

-- A conversation is a tree of messages; a regenerated or edited turn is another child of its parent.
CREATE TABLE messages (
    seq              INTEGER PRIMARY KEY AUTOINCREMENT,
    id               TEXT NOT NULL UNIQUE,
    conversation_seq INTEGER NOT NULL REFERENCES conversations (seq) ON DELETE CASCADE,
    parent_seq       INTEGER REFERENCES messages (seq) ON DELETE CASCADE,
    role             TEXT NOT NULL,
    text             TEXT NOT NULL,   -- what is searched: the content, or its text parts
    body             BLOB,            -- the whole message as JSON, where it is more than role and text
    created_at_us    INTEGER NOT NULL,
    status           TEXT NOT NULL,   -- complete, in_progress, cancelled, interrupted, failed, deleted
    finish_reason    TEXT,
    request_seq      INTEGER REFERENCES requests (seq),  -- of answers
    choice           INTEGER NOT NULL DEFAULT 0,
    -- Of answers, little-endian uint32: the answer's ids, and those of its prompt after what it shares
    -- with the sequence of message `base_seq` (all of them where that is null).
    answer_ids       BLOB,
    prompt_ids       BLOB,
    base_seq         INTEGER
);
CREATE INDEX messages_of_conversation ON messages (conversation_seq, seq);
CREATE INDEX messages_of_request ON messages (request_seq) WHERE request_seq IS NOT NULL;
CREATE INDEX messages_children ON messages (parent_seq) WHERE parent_seq IS NOT NULL;

-- The ledger: one row a request, reserved before its first token is released, settled once.
CREATE TABLE requests (
    seq                 INTEGER PRIMARY KEY AUTOINCREMENT,
    id                  TEXT NOT NULL UNIQUE,
    owner               TEXT NOT NULL,
    model               TEXT NOT NULL,
    conversation_seq    INTEGER,         -- kept when the conversation is purged: the counts stay
    state               TEXT NOT NULL CHECK (state IN ('reserved', 'settled')),
    idempotency_key     TEXT,
    fingerprint         BLOB,
    created_at_us       INTEGER NOT NULL,
    day                 INTEGER NOT NULL,  -- of created_at_us in UTC, as 20261121
    settled_at_us       INTEGER,
    max_tokens          INTEGER NOT NULL,  -- reserved for the answer, over all choices
    prompt_tokens       INTEGER NOT NULL,
    cached_tokens       INTEGER NOT NULL DEFAULT 0,
    completion_tokens   INTEGER NOT NULL DEFAULT 0,
    reasoning_tokens    INTEGER NOT NULL DEFAULT 0,
    withheld_tokens     INTEGER NOT NULL DEFAULT 0,
    input_micro_usd_per_1k  INTEGER NOT NULL,
    cached_micro_usd_per_1k INTEGER NOT NULL,
    output_micro_usd_per_1k INTEGER NOT NULL,
    cost_micro_usd      INTEGER NOT NULL DEFAULT 0,
    outcome             TEXT,            -- a finish reason, or an error's code
    reconciled          INTEGER NOT NULL DEFAULT 0,  -- settled at its checkpoint, after a crash
    rerendered          TEXT,            -- why history was not spliced from stored ids, if it was not
    stream              BLOB NOT NULL    -- JSON: what it takes to write the stream's frames again;
                                         -- empty once the request's events are forgotten
);
CREATE INDEX requests_open ON requests (state) WHERE state = 'reserved';
CREATE INDEX requests_by_key ON requests (owner, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX requests_by_day ON requests (day);
CREATE INDEX requests_unstored ON requests (settled_at_us)
    WHERE conversation_seq IS NULL AND state = 'settled' AND stream <> x'';

-- A stream's released events, in segments as they were checkpointed; see app.stream.ring.Ring.
CREATE TABLE events (
    request_seq INTEGER NOT NULL REFERENCES requests (seq) ON DELETE CASCADE,
    first_id    INTEGER NOT NULL,
    slice       BLOB NOT NULL,
    PRIMARY KEY (request_seq, first_id)
);

-- Sums of settled requests, kept by the transaction that settles them.
CREATE TABLE usage_daily (
    day               INTEGER NOT NULL,
    model             TEXT NOT NULL,
    owner             TEXT NOT NULL,
    requests          INTEGER NOT NULL,
    prompt_tokens     INTEGER NOT NULL,
    cached_tokens     INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    reasoning_tokens  INTEGER NOT NULL,
    withheld_tokens   INTEGER NOT NULL,
    cost_micro_usd    INTEGER NOT NULL,
    PRIMARY KEY (day, model, owner)
) WITHOUT ROWID;

-- API keys; see app.store.keys. A null limit is none. Keys are revoked, never deleted.
CREATE TABLE keys (
    seq              INTEGER PRIMARY KEY AUTOINCREMENT,
    id               TEXT NOT NULL UNIQUE,
    owner            TEXT NOT NULL,
    name             TEXT NOT NULL,
    scope            TEXT NOT NULL CHECK (scope IN ('chat', 'admin')),
    tier             TEXT NOT NULL CHECK (tier IN ('interactive', 'standard', 'batch')),
    rpm              INTEGER,
    tpm              INTEGER,
    max_streams      INTEGER,
    budget_micro_usd INTEGER,          -- of a UTC month
    models           TEXT,             -- a JSON array of names; null for all
    created_at_us    INTEGER NOT NULL,
    expires_at_us    INTEGER,
    revoked_at_us    INTEGER
);
ALTER TABLE keys ADD COLUMN safety TEXT NOT NULL DEFAULT 'standard' CHECK (safety IN ('standard', 'strict'));
ALTER TABLE keys ADD COLUMN weight REAL NOT NULL DEFAULT 1 CHECK (weight > 0);
ALTER TABLE keys ADD COLUMN degrade TEXT NOT NULL DEFAULT 'on' CHECK (degrade IN ('on', 'off'));
ALTER TABLE keys ADD COLUMN grammars TEXT NOT NULL DEFAULT 'all' CHECK (grammars IN ('all', 'schemas'));

-- More than one while a rotated key's old secret is still valid; none of a revoked key.
CREATE TABLE key_secrets (
    seq           INTEGER PRIMARY KEY AUTOINCREMENT,
    key_seq       INTEGER NOT NULL REFERENCES keys (seq) ON DELETE CASCADE,
    digest        BLOB NOT NULL UNIQUE,  -- SHA-256 of the whole key
    created_at_us INTEGER NOT NULL,
    ends_at_us    INTEGER                -- null for the newest
);
CREATE INDEX secrets_of_key ON key_secrets (key_seq);

-- One row, another number after every change: the server, which keeps the keys in memory, looks at this only.
CREATE TABLE keys_version (number INTEGER NOT NULL);
INSERT INTO keys_version VALUES (0);

-- Decisions of the screens; see app.store.safety_events. There is no text here, so an event outlives what it
-- is about: nothing refers to it, and it refers to nothing.
CREATE TABLE safety_events (
    seq         INTEGER PRIMARY KEY AUTOINCREMENT,
    at_us       INTEGER NOT NULL,
    request_id  TEXT NOT NULL,
    owner       TEXT NOT NULL,
    key_id      TEXT,              -- null without a stored key
    model       TEXT NOT NULL,
    subject     TEXT NOT NULL CHECK (subject IN ('prompt', 'answer')),
    stage       TEXT NOT NULL,
    action      TEXT NOT NULL,
    category    TEXT,              -- null where a span of the hard list, or strikes, decided
    score       REAL NOT NULL,
    threshold   REAL NOT NULL,
    scores      TEXT NOT NULL,     -- JSON: probability by category
    policy_hash TEXT NOT NULL,
    lag_tokens  INTEGER NOT NULL DEFAULT 0,
    text_hmac   BLOB               -- of the text that was judged, with the key below
);
CREATE INDEX safety_events_of_request ON safety_events (request_id);

-- One row, made at random: whoever has the store can say of a text whether an event is about it.
CREATE TABLE safety_secret (key BLOB NOT NULL);

-- Rows of `searched` that are not in the index yet; see app.store.indexing. A row is in one of the two.
CREATE TABLE unindexed (rowid INTEGER PRIMARY KEY);
CREATE TRIGGER message_added AFTER INSERT ON messages BEGIN
    INSERT INTO unindexed VALUES ((new.conversation_seq << 32) + new.seq);
END;
CREATE TRIGGER title_added AFTER INSERT ON conversations BEGIN
    INSERT INTO unindexed VALUES (new.seq << 32);
END;

-- Full text: rows lie in the order of their conversations, so that the newest that match are first without
-- reading them all. A title is under (conversation << 32), a message under that + its seq. No term of the
-- index is two owners' (app.store.words), so that a search's time tells nothing of another's.
CREATE VIEW searched (rowid, text) AS
    SELECT (m.conversation_seq << 32) + m.seq, owner_words(c.owner, m.text)
        FROM messages AS m JOIN conversations AS c ON c.seq = m.conversation_seq
    UNION ALL SELECT seq << 32, owner_words(owner, title) FROM conversations;
CREATE VIRTUAL TABLE search USING fts5 (
    text, content = 'searched', content_rowid = 'rowid', tokenize = 'ascii'
);
CREATE TRIGGER message_changed AFTER UPDATE OF text ON messages BEGIN
    INSERT INTO search (search, rowid, text)
        SELECT 'delete', (old.conversation_seq << 32) + old.seq, owner_words(owner, old.text)
        FROM conversations WHERE seq = old.conversation_seq AND NOT EXISTS
        (SELECT 1 FROM unindexed WHERE rowid = (old.conversation_seq << 32) + old.seq);
    INSERT OR IGNORE INTO unindexed VALUES ((new.conversation_seq << 32) + new.seq);
END;
CREATE TRIGGER message_removed AFTER DELETE ON messages BEGIN
    INSERT INTO search (search, rowid, text)
        SELECT 'delete', (old.conversation_seq << 32) + old.seq, owner_words(owner, old.text)
        FROM conversations WHERE seq = old.conversation_seq AND NOT EXISTS
        (SELECT 1 FROM unindexed WHERE rowid = (old.conversation_seq << 32) + old.seq);
    DELETE FROM unindexed WHERE rowid = (old.conversation_seq << 32) + old.seq;
END;
CREATE TRIGGER title_changed AFTER UPDATE OF title ON conversations BEGIN
    INSERT INTO search (search, rowid, text)
        SELECT 'delete', old.seq << 32, owner_words(old.owner, old.title) WHERE NOT EXISTS
        (SELECT 1 FROM unindexed WHERE rowid = old.seq << 32);
    INSERT OR IGNORE INTO unindexed VALUES (new.seq << 32);
END;
CREATE TRIGGER title_removed BEFORE DELETE ON conversations BEGIN
    -- While the owner can be looked up; left to the foreign key, the messages would go after it.
    DELETE FROM messages WHERE conversation_seq = old.seq;
    INSERT INTO search (search, rowid, text)
        SELECT 'delete', old.seq << 32, owner_words(old.owner, old.title) WHERE NOT EXISTS
        (SELECT 1 FROM unindexed WHERE rowid = old.seq << 32);
    DELETE FROM unindexed WHERE rowid = old.seq << 32;
END;

-- What a turn asks of its conversation, in time that does not grow with the conversation's length.
CREATE INDEX messages_answers ON messages (conversation_seq, seq) WHERE request_seq IS NOT NULL;
CREATE INDEX messages_blocked ON messages (conversation_seq) WHERE status = 'blocked';
"""


def _version_0_1(connection: sqlite3.Connection) -> None:
    _run(connection, _VERSION_0_1)
    connection.execute("INSERT INTO safety_secret VALUES (?)", (secrets.token_bytes(32),))


_SAFETY_RECORDS = """
-- A key's level may be looser than the policy, too. A check cannot be changed: the column is made anew.
ALTER TABLE keys ADD COLUMN safety_level TEXT NOT NULL DEFAULT 'standard'
    CHECK (safety_level IN ('observe', 'standard', 'enforce', 'strict'));
UPDATE keys SET safety_level = safety;
ALTER TABLE keys DROP COLUMN safety;
ALTER TABLE keys RENAME COLUMN safety_level TO safety;

-- What the policy makes of traffic, without text; see app.store.safety_records.
CREATE TABLE safety_records (
    seq         INTEGER PRIMARY KEY,
    at_us       INTEGER NOT NULL,
    day         INTEGER NOT NULL,  -- of at_us in UTC, as 20261121
    key_id      TEXT NOT NULL,     -- empty without a stored key
    subject     TEXT NOT NULL CHECK (subject IN ('prompt', 'answer')),
    stage       TEXT NOT NULL,
    action      TEXT,              -- what the policy says; null for nothing
    done        TEXT,              -- what was done; null for nothing
    category    TEXT,
    score       REAL NOT NULL,
    threshold   REAL NOT NULL,
    policy_hash TEXT NOT NULL,
    length      TEXT NOT NULL,
    role        TEXT NOT NULL,
    script      TEXT NOT NULL,
    again       INTEGER NOT NULL,  -- whether an earlier turn of the conversation was recorded
    watched     INTEGER NOT NULL,  -- whether the policy says that the prompt is watched
    readings    TEXT NOT NULL      -- JSON: stage, slices, whether it only watches, probability by category
);
CREATE INDEX safety_records_of_day ON safety_records (day);

-- How many texts were read, of which the records are some.
CREATE TABLE safety_totals (
    day         INTEGER NOT NULL,
    key_id      TEXT NOT NULL,
    subject     TEXT NOT NULL,
    policy_hash TEXT NOT NULL,
    length      TEXT NOT NULL,
    role        TEXT NOT NULL,
    script      TEXT NOT NULL,
    texts       INTEGER NOT NULL,
    PRIMARY KEY (day, key_id, subject, policy_hash, length, role, script)
) WITHOUT ROWID;
"""

_SUSPENDED = """
-- Requests whose answers the next server process can continue; see app.store.suspensions.
CREATE TABLE suspended (
    request_seq INTEGER PRIMARY KEY REFERENCES requests (seq) ON DELETE CASCADE,
    key_id      TEXT,           -- of the API key that the request was made with
    request     BLOB NOT NULL,  -- JSON: the request, its turn, and how far it was answered
    token_ids   BLOB NOT NULL   -- little-endian uint32: runs whose lengths the JSON has
);
"""

_LEDGER_KEYS = """
-- The id of the key that a request was made with: 'none' without a stored key, 'unknown' in older rows.
ALTER TABLE requests ADD COLUMN key_id TEXT NOT NULL DEFAULT 'unknown';
ALTER TABLE requests ADD COLUMN metadata TEXT;  -- JSON: the caller's own names and values; null without any
UPDATE requests SET key_id = (SELECT coalesce(key_id, 'none') FROM suspended WHERE request_seq = requests.seq)
    WHERE seq IN (SELECT request_seq FROM suspended);
ALTER TABLE usage_daily RENAME TO usage_daily_by_owner;
CREATE TABLE usage_daily (
    day               INTEGER NOT NULL,
    model             TEXT NOT NULL,
    owner             TEXT NOT NULL,
    key_id            TEXT NOT NULL,
    requests          INTEGER NOT NULL,
    prompt_tokens     INTEGER NOT NULL,
    cached_tokens     INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    reasoning_tokens  INTEGER NOT NULL,
    withheld_tokens   INTEGER NOT NULL,
    cost_micro_usd    INTEGER NOT NULL,
    PRIMARY KEY (day, model, owner, key_id)
) WITHOUT ROWID;
INSERT INTO usage_daily SELECT day, model, owner, 'unknown', requests, prompt_tokens, cached_tokens,
    completion_tokens, reasoning_tokens, withheld_tokens, cost_micro_usd FROM usage_daily_by_owner;
DROP TABLE usage_daily_by_owner;
"""


def _index_anew(connection: sqlite3.Connection) -> None:
    """Empty the index, whose words were other ones, and have all rows indexed again, while serving.

    Freed pages are not overwritten here, which would write as much as the index has; VACUUM does it.
    """
    connection.execute("PRAGMA secure_delete=OFF")
    connection.execute("INSERT INTO search (search) VALUES ('delete-all')")
    connection.execute("PRAGMA secure_delete=ON")
    connection.execute(
        "INSERT OR IGNORE INTO unindexed SELECT (conversation_seq << 32) + seq FROM messages"
        " UNION ALL SELECT seq << 32 FROM conversations"
    )


class Migration(NamedTuple):
    """One step of the schema: statements, or a function that does more."""

    name: str
    step: str | Callable[[sqlite3.Connection], None]


MIGRATIONS: Sequence[Migration] = (
    Migration("010_grammars", _version_0_1),
    Migration("011_safety_records", _SAFETY_RECORDS),
    Migration("012_suspended", _SUSPENDED),
    Migration("013_ledger_keys", _LEDGER_KEYS),
    Migration(
        "014_resume",
        "ALTER TABLE keys ADD COLUMN resume TEXT NOT NULL DEFAULT 'asked'"
        " CHECK (resume IN ('asked', 'always'));",
    ),
    # True for a message of an import, which no screen has read yet.
    Migration("015_imports", "ALTER TABLE messages ADD COLUMN imported INTEGER NOT NULL DEFAULT 0;"),
    Migration("016_letter_words", _index_anew),
)


_BEFORE = """
001_first 002_keys 003_safety 004_search_later 005_weight 006_degrade 007_known_keys 008_search_by_owner
009_branch_indexes
"""
BEFORE_0_1 = frozenset(_BEFORE.split())
"""Migrations that stores of 0.1.0 have had one by one, before that of the first name above."""


def _run(connection: sqlite3.Connection, script: str) -> None:
    """Execute each statement of a script; `executescript` would commit the transaction around it."""
    pending = ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            connection.execute(pending)
            pending = ""


def applied(connection: sqlite3.Connection) -> list[str]:
    """The migrations that the file has had, in order; none for an empty file."""
    table = connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'migrations'").fetchone()
    if table is None:
        return []
    return [name for (name,) in connection.execute("SELECT name FROM migrations ORDER BY rowid")]


def migrate(connection: sqlite3.Connection, migrations: Sequence[Migration]) -> None:
    """Apply what is missing, each migration in a transaction of its own with its name.

    The connection can write to the index's tables afterwards (app.store.words).
    """
    register(connection)
    connection.execute(
        "CREATE TABLE IF NOT EXISTS migrations (name TEXT PRIMARY KEY, applied_at TEXT NOT NULL)"
    )
    done = set(applied(connection))
    for migration in migrations:
        if migration.name in done:
            continue
        connection.execute("BEGIN IMMEDIATE")
        try:
            if isinstance(migration.step, str):
                _run(connection, migration.step)
            else:
                migration.step(connection)
            connection.execute("INSERT INTO migrations VALUES (?, datetime('now'))", (migration.name,))
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:  # some faults end it
                connection.execute("ROLLBACK")
            raise
