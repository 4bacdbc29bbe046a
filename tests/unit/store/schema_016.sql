CREATE TABLE migrations (name TEXT PRIMARY KEY, applied_at TEXT NOT NULL);
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
, imported INTEGER NOT NULL DEFAULT 0);
CREATE INDEX messages_of_conversation ON messages (conversation_seq, seq);
CREATE INDEX messages_of_request ON messages (request_seq) WHERE request_seq IS NOT NULL;
CREATE INDEX messages_children ON messages (parent_seq) WHERE parent_seq IS NOT NULL;
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
, key_id TEXT NOT NULL DEFAULT 'unknown', metadata TEXT);
CREATE INDEX requests_open ON requests (state) WHERE state = 'reserved';
CREATE INDEX requests_by_key ON requests (owner, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX requests_by_day ON requests (day);
CREATE INDEX requests_unstored ON requests (settled_at_us)
    WHERE conversation_seq IS NULL AND state = 'settled' AND stream <> x'';
CREATE TABLE events (
    request_seq INTEGER NOT NULL REFERENCES requests (seq) ON DELETE CASCADE,
    first_id    INTEGER NOT NULL,
    slice       BLOB NOT NULL,
    PRIMARY KEY (request_seq, first_id)
);
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
, weight REAL NOT NULL DEFAULT 1 CHECK (weight > 0), degrade TEXT NOT NULL DEFAULT 'on' CHECK (degrade IN ('on', 'off')), grammars TEXT NOT NULL DEFAULT 'all' CHECK (grammars IN ('all', 'schemas')), safety TEXT NOT NULL DEFAULT 'standard'
    CHECK (safety IN ('observe', 'standard', 'enforce', 'strict')), resume TEXT NOT NULL DEFAULT 'asked' CHECK (resume IN ('asked', 'always')));
CREATE TABLE key_secrets (
    seq           INTEGER PRIMARY KEY AUTOINCREMENT,
    key_seq       INTEGER NOT NULL REFERENCES keys (seq) ON DELETE CASCADE,
    digest        BLOB NOT NULL UNIQUE,  -- SHA-256 of the whole key
    created_at_us INTEGER NOT NULL,
    ends_at_us    INTEGER                -- null for the newest
);
CREATE INDEX secrets_of_key ON key_secrets (key_seq);
CREATE TABLE keys_version (number INTEGER NOT NULL);
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
CREATE TABLE safety_secret (key BLOB NOT NULL);
CREATE TABLE unindexed (rowid INTEGER PRIMARY KEY);
CREATE TRIGGER message_added AFTER INSERT ON messages BEGIN
    INSERT INTO unindexed VALUES ((new.conversation_seq << 32) + new.seq);
END;
CREATE TRIGGER title_added AFTER INSERT ON conversations BEGIN
    INSERT INTO unindexed VALUES (new.seq << 32);
END;
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
CREATE INDEX messages_answers ON messages (conversation_seq, seq) WHERE request_seq IS NOT NULL;
CREATE INDEX messages_blocked ON messages (conversation_seq) WHERE status = 'blocked';
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
CREATE TABLE suspended (
    request_seq INTEGER PRIMARY KEY REFERENCES requests (seq) ON DELETE CASCADE,
    key_id      TEXT,           -- of the API key that the request was made with
    request     BLOB NOT NULL,  -- JSON: the request, its turn, and how far it was answered
    token_ids   BLOB NOT NULL   -- little-endian uint32: runs whose lengths the JSON has
);
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
