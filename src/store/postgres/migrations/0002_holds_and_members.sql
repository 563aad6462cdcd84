-- Messages that are held, for whoever looks at them.
CREATE INDEX {i}messages_held ON {t}messages (queue, sequence)
    WHERE sequence IS NOT NULL AND due_at = 'infinity';
