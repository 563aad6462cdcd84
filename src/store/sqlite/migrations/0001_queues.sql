-- One row: the last place that was given. There is one writer, so nobody contends for it.
CREATE TABLE {t}counter (last INTEGER NOT NULL);
INSERT INTO {t}counter (last) VALUES (0);

CREATE TABLE {t}queues (
    number  INTEGER PRIMARY KEY,
    name    TEXT NOT NULL UNIQUE,
    shards  INTEGER NOT NULL,
    ordered INTEGER NOT NULL
);

-- Unsettled messages. Times are milliseconds since 1970.
CREATE TABLE {t}messages (
    queue          INTEGER NOT NULL,
    id             TEXT NOT NULL,
    shard          INTEGER NOT NULL,
    -- Null until a scheduled message becomes due.
    sequence       INTEGER,
    key            BLOB,
    key_hash       INTEGER,
    digest         INTEGER NOT NULL,
    -- Without a sequence: when it gets one. With one: when its retry may run.
    due_at         INTEGER,
    attempts       INTEGER NOT NULL DEFAULT 0,
    -- Epoch of the node that has claimed it; unordered queues only.
    claim          INTEGER,
    message_type   TEXT,
    content_type   TEXT,
    headers        TEXT,
    correlation_id TEXT,
    causation_id   TEXT,
    sent_at        INTEGER,
    past           TEXT NOT NULL DEFAULT '',
    body           BLOB NOT NULL,
    PRIMARY KEY (queue, id)
);

CREATE UNIQUE INDEX {i}messages_in_order ON {t}messages (queue, shard, sequence);
CREATE INDEX {i}messages_waiting ON {t}messages (queue, shard, key_hash, sequence)
    WHERE sequence IS NOT NULL AND due_at IS NOT NULL;
CREATE INDEX {i}messages_scheduled ON {t}messages (due_at) WHERE sequence IS NULL;

-- One row per shard of an ordered queue, made when the queue is declared. When they expire is known to the one
-- process that has the file.
CREATE TABLE {t}leases (
    queue INTEGER NOT NULL,
    shard INTEGER NOT NULL,
    owner TEXT,
    epoch INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (queue, shard)
) WITHOUT ROWID;

-- Those who share an unordered queue. A dead one is kept as long as messages may name it. AUTOINCREMENT: an epoch
-- is never given again, not even after the highest was removed.
CREATE TABLE {t}nodes (
    epoch INTEGER PRIMARY KEY AUTOINCREMENT,
    queue INTEGER NOT NULL,
    owner TEXT NOT NULL,
    dead  INTEGER NOT NULL DEFAULT 0
);

-- Ids of messages that have ended.
CREATE TABLE {t}ended (
    queue    INTEGER NOT NULL,
    id       TEXT NOT NULL,
    digest   INTEGER NOT NULL,
    ended_at INTEGER NOT NULL,
    PRIMARY KEY (queue, id)
) WITHOUT ROWID;

CREATE INDEX {i}ended_at ON {t}ended (ended_at);

CREATE TABLE {t}dead_letters (
    number         INTEGER PRIMARY KEY AUTOINCREMENT,
    queue          INTEGER NOT NULL,
    id             TEXT NOT NULL,
    shard          INTEGER NOT NULL,
    sequence       INTEGER,
    key            BLOB,
    key_hash       INTEGER,
    digest         INTEGER NOT NULL,
    attempts       INTEGER NOT NULL,
    message_type   TEXT,
    content_type   TEXT,
    headers        TEXT,
    correlation_id TEXT,
    causation_id   TEXT,
    sent_at        INTEGER,
    past           TEXT NOT NULL,
    body           BLOB NOT NULL,
    reason         TEXT NOT NULL,
    detail         TEXT NOT NULL,
    dead_at        INTEGER NOT NULL
);

CREATE INDEX {i}dead_letters_of_queue ON {t}dead_letters (queue, number);
