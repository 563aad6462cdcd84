-- Messages that are held, for whoever looks at them.
CREATE INDEX {i}messages_held ON {t}messages (queue, sequence)
    WHERE sequence IS NOT NULL AND due_at = 'infinity';

-- What members of a queue's group have announced last. Old after seconds and announced again every half of one, so
-- it is not logged: it costs no disk, and a crash of the server empties it.
CREATE UNLOGGED TABLE {t}members (
    queue       integer NOT NULL,
    member      text NOT NULL,
    sequence    numeric(20, 0) NOT NULL,
    shard_count bigint NOT NULL,
    shards      bigint[] NOT NULL,
    willing     boolean NOT NULL,
    expires     timestamptz NOT NULL,
    PRIMARY KEY (queue, member)
) WITH (fillfactor = 50);
