-- Messages that are held, for whoever looks at them. (Members need no table: they are in the one process.)
CREATE INDEX {i}messages_held ON {t}messages (queue, sequence)
    WHERE sequence IS NOT NULL AND due_at = 9223372036854775807;
