CREATE SEQUENCE {t}sequence;

CREATE TABLE {t}queues (
    number  integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name    text NOT NULL UNIQUE,
    shards  integer NOT NULL,
    ordered boolean NOT NULL
);

-- Unsettled messages. Rows come and go at the rate of the messages, so vacuum is told to come by number of
-- rows and not by share of the table, and pages keep room for the one update of a start.
CREATE TABLE {t}messages (
    queue          integer NOT NULL,
    id             text NOT NULL,
    shard          integer NOT NULL,
    -- Null until a scheduled message becomes due.
    sequence       bigint,
    key            bytea,
    key_hash       bigint,
    digest         bigint NOT NULL,
    -- Without a sequence: when it gets one. With one: when its retry may run.
    due_at         timestamptz,
    attempts       integer NOT NULL DEFAULT 0,
    -- Epoch of the node that has claimed it; unordered queues only.
    claim          bigint,
    message_type   text,
    content_type   text,
    headers        text,
    correlation_id text,
    causation_id   text,
    sent_at        bigint,
    past           text NOT NULL DEFAULT '',
    body           bytea NOT NULL,
    PRIMARY KEY (queue, id)
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000);

CREATE UNIQUE INDEX {i}messages_in_order ON {t}messages (queue, shard, sequence);
CREATE INDEX {i}messages_waiting ON {t}messages (queue, shard, key_hash, sequence)
    WHERE sequence IS NOT NULL AND due_at IS NOT NULL;
CREATE INDEX {i}messages_scheduled ON {t}messages (due_at) WHERE sequence IS NULL;

-- One row per shard of an ordered queue, made when the queue is declared.
CREATE TABLE {t}leases (
    queue   integer NOT NULL,
    shard   integer NOT NULL,
    owner   text,
    epoch   bigint NOT NULL DEFAULT 0,
    expires timestamptz NOT NULL DEFAULT '-infinity',
    PRIMARY KEY (queue, shard)
) WITH (fillfactor = 50);

-- Those who share an unordered queue. A dead one is kept as long as messages may name it.
CREATE TABLE {t}nodes (
    epoch   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue   integer NOT NULL,
    owner   text NOT NULL,
    expires timestamptz NOT NULL,
    dead    boolean NOT NULL DEFAULT false
) WITH (fillfactor = 50);

CREATE INDEX {i}nodes_of_queue ON {t}nodes (queue);

-- Ids of messages that have ended.
CREATE TABLE {t}ended (
    queue    integer NOT NULL,
    id       text NOT NULL,
    digest   bigint NOT NULL,
    ended_at timestamptz NOT NULL,
    PRIMARY KEY (queue, id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000);

CREATE INDEX {i}ended_at ON {t}ended (ended_at);

CREATE TABLE {t}dead_letters (
    number         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue          integer NOT NULL,
    id             text NOT NULL,
    shard          integer NOT NULL,
    sequence       bigint,
    key            bytea,
    key_hash       bigint,
    digest         bigint NOT NULL,
    attempts       integer NOT NULL,
    message_type   text,
    content_type   text,
    headers        text,
    correlation_id text,
    causation_id   text,
    sent_at        bigint,
    past           text NOT NULL,
    body           bytea NOT NULL,
    reason         text NOT NULL,
    detail         text NOT NULL,
    dead_at        timestamptz NOT NULL
);

CREATE INDEX {i}dead_letters_of_queue ON {t}dead_letters (queue, number);
