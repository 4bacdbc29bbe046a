"""The migrations of what safety keeps; app.store.schema has them all in order."""

from __future__ import annotations

import secrets
import sqlite3

from app.store.migrations import statements

_SAFETY = """
-- What the screens decided; see app.store.safety_events. There is no text here, so an event outlives what it
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

-- One row, made at random: who has the store can say of a text whether an event is about it.
CREATE TABLE safety_secret (key BLOB NOT NULL);

ALTER TABLE keys ADD COLUMN safety TEXT NOT NULL DEFAULT 'standard' CHECK (safety IN ('standard', 'strict'));
"""


def m003_safety(connection: sqlite3.Connection) -> None:
    """Make the table of safety events, its secret, and the level of a key."""
    for statement in statements(_SAFETY):
        connection.execute(statement)
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


def m011_safety_records(connection: sqlite3.Connection) -> None:
    """Make the tables of safety records, and let a key have a looser level."""
    for statement in statements(_SAFETY_RECORDS):
        connection.execute(statement)
