"""The schema, as numbered migrations; each is applied once, in order, and its name kept in a table.

A migration that has been released is never changed: a change is a new one, tested from the
first schema with data in it (tests/unit/store/test_migrations.py).

Times are UTC microseconds since the epoch, money is integer micro-dollars, `seq` is the order
in which rows came (the clock may step back, `seq` does not).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import orjson

from app.messages import as_kept
from app.store import schema_safety
from app.store.migrations import Migration, statements

_FIRST = """
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

-- A stream's released events, in slices as they were checkpointed; see app.stream.ring.Ring.
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

-- Full text: rows lie in the order of their conversations, so that the newest that match come first
-- without reading them all. A title is under (conversation << 32), a message under that + its seq.
CREATE VIEW searched (rowid, text) AS
    SELECT (conversation_seq << 32) + seq, text FROM messages
    UNION ALL SELECT seq << 32, title FROM conversations;
CREATE VIRTUAL TABLE search USING fts5 (
    text, content = 'searched', content_rowid = 'rowid', tokenize = 'unicode61 remove_diacritics 2'
);
CREATE TRIGGER message_added AFTER INSERT ON messages BEGIN
    INSERT INTO search (rowid, text) VALUES ((new.conversation_seq << 32) + new.seq, new.text);
END;
CREATE TRIGGER message_changed AFTER UPDATE OF text ON messages BEGIN
    INSERT INTO search (search, rowid, text)
        VALUES ('delete', (old.conversation_seq << 32) + old.seq, old.text);
    INSERT INTO search (rowid, text) VALUES ((new.conversation_seq << 32) + new.seq, new.text);
END;
CREATE TRIGGER message_removed AFTER DELETE ON messages BEGIN
    INSERT INTO search (search, rowid, text)
        VALUES ('delete', (old.conversation_seq << 32) + old.seq, old.text);
END;
CREATE TRIGGER title_added AFTER INSERT ON conversations BEGIN
    INSERT INTO search (rowid, text) VALUES (new.seq << 32, new.title);
END;
CREATE TRIGGER title_changed AFTER UPDATE OF title ON conversations BEGIN
    INSERT INTO search (search, rowid, text) VALUES ('delete', old.seq << 32, old.title);
    INSERT INTO search (rowid, text) VALUES (new.seq << 32, new.title);
END;
CREATE TRIGGER title_removed AFTER DELETE ON conversations BEGIN
    INSERT INTO search (search, rowid, text) VALUES ('delete', old.seq << 32, old.title);
END;
"""


def _m001_first(connection: sqlite3.Connection) -> None:
    for statement in statements(_FIRST):
        connection.execute(statement)


_KEYS = """
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

-- More than one while a rotated key's old secret is still valid; none of a revoked key.
CREATE TABLE key_secrets (
    seq           INTEGER PRIMARY KEY AUTOINCREMENT,
    key_seq       INTEGER NOT NULL REFERENCES keys (seq) ON DELETE CASCADE,
    digest        BLOB NOT NULL UNIQUE,  -- SHA-256 of the whole key
    created_at_us INTEGER NOT NULL,
    ends_at_us    INTEGER                -- null for the newest
);
CREATE INDEX secrets_of_key ON key_secrets (key_seq);

-- One row, another number after every change: who keeps the keys in memory looks at this only.
CREATE TABLE keys_version (number INTEGER NOT NULL);
INSERT INTO keys_version VALUES (0);
"""


def _m002_keys(connection: sqlite3.Connection) -> None:
    for statement in statements(_KEYS):
        connection.execute(statement)


_SEARCH_LATER = """
-- Rows of `searched` that are not in the index yet; see app.store.indexing. A row is in one of the two.
CREATE TABLE unindexed (rowid INTEGER PRIMARY KEY);
DROP TRIGGER message_added;
DROP TRIGGER message_changed;
DROP TRIGGER message_removed;
DROP TRIGGER title_added;
DROP TRIGGER title_changed;
DROP TRIGGER title_removed;
CREATE TRIGGER message_added AFTER INSERT ON messages BEGIN
    INSERT INTO unindexed VALUES ((new.conversation_seq << 32) + new.seq);
END;
CREATE TRIGGER message_changed AFTER UPDATE OF text ON messages BEGIN
    INSERT INTO search (search, rowid, text)
        SELECT 'delete', (old.conversation_seq << 32) + old.seq, old.text WHERE NOT EXISTS
        (SELECT 1 FROM unindexed WHERE rowid = (old.conversation_seq << 32) + old.seq);
    INSERT OR IGNORE INTO unindexed VALUES ((new.conversation_seq << 32) + new.seq);
END;
CREATE TRIGGER message_removed AFTER DELETE ON messages BEGIN
    INSERT INTO search (search, rowid, text)
        SELECT 'delete', (old.conversation_seq << 32) + old.seq, old.text WHERE NOT EXISTS
        (SELECT 1 FROM unindexed WHERE rowid = (old.conversation_seq << 32) + old.seq);
    DELETE FROM unindexed WHERE rowid = (old.conversation_seq << 32) + old.seq;
END;
CREATE TRIGGER title_added AFTER INSERT ON conversations BEGIN
    INSERT INTO unindexed VALUES (new.seq << 32);
END;
CREATE TRIGGER title_changed AFTER UPDATE OF title ON conversations BEGIN
    INSERT INTO search (search, rowid, text)
        SELECT 'delete', old.seq << 32, old.title WHERE NOT EXISTS
        (SELECT 1 FROM unindexed WHERE rowid = old.seq << 32);
    INSERT OR IGNORE INTO unindexed VALUES (new.seq << 32);
END;
CREATE TRIGGER title_removed AFTER DELETE ON conversations BEGIN
    INSERT INTO search (search, rowid, text)
        SELECT 'delete', old.seq << 32, old.title WHERE NOT EXISTS
        (SELECT 1 FROM unindexed WHERE rowid = old.seq << 32);
    DELETE FROM unindexed WHERE rowid = old.seq << 32;
END;
"""


def _m004_search_later(connection: sqlite3.Connection) -> None:
    for statement in statements(_SEARCH_LATER):
        connection.execute(statement)


def _m005_weight(connection: sqlite3.Connection) -> None:
    connection.execute("ALTER TABLE keys ADD COLUMN weight REAL NOT NULL DEFAULT 1 CHECK (weight > 0)")


def _m006_degrade(connection: sqlite3.Connection) -> None:
    connection.execute(
        "ALTER TABLE keys ADD COLUMN degrade TEXT NOT NULL DEFAULT 'on' CHECK (degrade IN ('on', 'off'))"
    )


def _m007_known_keys(connection: sqlite3.Connection) -> None:
    """Take out of stored messages what only their callers knew: megabytes, read again with every turn."""
    seqs = connection.execute("SELECT seq FROM messages WHERE body IS NOT NULL ORDER BY seq").fetchall()
    for (seq,) in seqs:
        role, text, body = connection.execute(
            "SELECT role, text, body FROM messages WHERE seq = ?", (seq,)
        ).fetchone()
        stored = orjson.dumps(as_kept(role, text, body))
        if stored != body:
            connection.execute("UPDATE messages SET body = ? WHERE seq = ?", (stored, seq))


_SEARCH_BY_OWNER = """
-- No term of the index is two owners' (app.store.words), so that a search's time tells nothing of another's.
DROP TRIGGER message_changed;
DROP TRIGGER message_removed;
DROP TRIGGER title_changed;
DROP TRIGGER title_removed;
DROP TABLE search;
DROP VIEW searched;
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
-- The journal indexes them in the background, and a search what is left of them.
INSERT OR IGNORE INTO unindexed SELECT (conversation_seq << 32) + seq FROM messages;
INSERT OR IGNORE INTO unindexed SELECT seq << 32 FROM conversations;
"""


def _m008_search_by_owner(connection: sqlite3.Connection) -> None:
    for statement in statements(_SEARCH_BY_OWNER):
        connection.execute(statement)


_BRANCH_INDEXES = """
-- What a turn asks of its conversation, in time that does not go with how long that is.
CREATE INDEX messages_answers ON messages (conversation_seq, seq) WHERE request_seq IS NOT NULL;
CREATE INDEX messages_blocked ON messages (conversation_seq) WHERE status = 'blocked';
"""


def _m009_branch_indexes(connection: sqlite3.Connection) -> None:
    for statement in statements(_BRANCH_INDEXES):
        connection.execute(statement)


def _m010_grammars(connection: sqlite3.Connection) -> None:
    connection.execute(
        "ALTER TABLE keys ADD COLUMN grammars TEXT NOT NULL DEFAULT 'all'"
        " CHECK (grammars IN ('all', 'schemas'))"
    )


_SUSPENDED = """
-- Requests whose answers the next server process can go on with; see app.store.suspensions.
CREATE TABLE suspended (
    request_seq INTEGER PRIMARY KEY REFERENCES requests (seq) ON DELETE CASCADE,
    key_id      TEXT,           -- of the API key that the request was made with
    request     BLOB NOT NULL,  -- JSON: the request, its turn, and how far it was answered
    token_ids   BLOB NOT NULL   -- little-endian uint32: runs whose lengths the JSON has
);
"""


def _m012_suspended(connection: sqlite3.Connection) -> None:
    for statement in statements(_SUSPENDED):
        connection.execute(statement)


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


def _m013_ledger_keys(connection: sqlite3.Connection) -> None:
    for statement in statements(_LEDGER_KEYS):
        connection.execute(statement)


def _m014_resume(connection: sqlite3.Connection) -> None:
    connection.execute(
        "ALTER TABLE keys ADD COLUMN resume TEXT NOT NULL DEFAULT 'asked'"
        " CHECK (resume IN ('asked', 'always'))"
    )


MIGRATIONS: Sequence[Migration] = (
    Migration("001_first", _m001_first),
    Migration("002_keys", _m002_keys),
    Migration("003_safety", schema_safety.m003_safety),
    Migration("004_search_later", _m004_search_later),
    Migration("005_weight", _m005_weight),
    Migration("006_degrade", _m006_degrade),
    Migration("007_known_keys", _m007_known_keys),
    Migration("008_search_by_owner", _m008_search_by_owner),
    Migration("009_branch_indexes", _m009_branch_indexes),
    Migration("010_grammars", _m010_grammars),
    Migration("011_safety_records", schema_safety.m011_safety_records),
    Migration("012_suspended", _m012_suspended),
    Migration("013_ledger_keys", _m013_ledger_keys),
    Migration("014_resume", _m014_resume),
)
