-- Stores a batch in one statement and one round trip, if all of it is new. Anything else is the error LW001, which takes
-- everything back. The locks come first, then the places, then the look at the ended ids; `store/postgres/enqueue.rs` says
-- why. It is VOLATILE, so that each of its statements sees what was committed before it began (manual, 38.7).
CREATE FUNCTION {t}enqueue_new(
    p_patience_ms integer, p_lock_space integer, p_slots integer[], p_shared boolean[],
    p_queues integer[], p_ids text[], p_shards integer[], p_keys bytea[], p_key_hashes bigint[], p_digests bigint[],
    p_dues bigint[], p_message_types text[], p_content_types text[], p_headers text[], p_correlation_ids text[],
    p_causation_ids text[], p_sent_at bigint[], p_bodies bytea[]
) RETURNS TABLE (stored_queue integer, stored_id text, stored_sequence bigint)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    stored integer;
BEGIN
    -- The caller gives up after so long, and what it gave up must not be stored later: nobody commits here but this.
    PERFORM set_config('lock_timeout', p_patience_ms::text, true);
    FOR n IN 1 .. coalesce(array_length(p_slots, 1), 0) LOOP
        IF p_shared[n] THEN
            PERFORM pg_advisory_xact_lock_shared(p_lock_space, p_slots[n]);
        ELSE
            PERFORM pg_advisory_xact_lock(p_lock_space, p_slots[n]);
        END IF;
    END LOOP;
    -- That bound is one for each lock. `statement_timestamp()` is when the statement arrived.
    IF clock_timestamp() > statement_timestamp() + p_patience_ms * interval '1 millisecond' THEN
        RAISE EXCEPTION USING ERRCODE = 'lock_not_available', MESSAGE = 'the keys of the batch were not free in time';
    END IF;
    -- The places are drawn outside the sorted inner query, hence in the order of the batch.
    RETURN QUERY INSERT INTO {t}messages AS m (queue, id, shard, sequence, key, key_hash, digest, due_at,
            message_type, content_type, headers, correlation_id, causation_id, sent_at, body)
        SELECT b.queue, b.id, b.shard, CASE WHEN b.due IS NULL THEN nextval('{t}sequence') END, b.key, b.key_hash,
            b.digest, to_timestamp(b.due / 1000.0), b.message_type, b.content_type, b.headers, b.correlation_id,
            b.causation_id, b.sent_at, b.body
        FROM (SELECT * FROM unnest(p_queues, p_ids, p_shards, p_keys, p_key_hashes, p_digests, p_dues,
                p_message_types, p_content_types, p_headers, p_correlation_ids, p_causation_ids, p_sent_at, p_bodies)
            WITH ORDINALITY AS n (queue, id, shard, key, key_hash, digest, due, message_type, content_type, headers,
                correlation_id, causation_id, sent_at, body, position)
            ORDER BY position) AS b
        ON CONFLICT (queue, id) DO NOTHING
        RETURNING m.queue, m.id, m.sequence;
    GET DIAGNOSTICS stored = ROW_COUNT;
    -- One look by the index for each id, whatever the table's size was when this was planned: hence `OFFSET 0`.
    IF stored < array_length(p_ids, 1) OR EXISTS (
        SELECT FROM unnest(p_queues, p_ids) AS n (queue, id)
        WHERE EXISTS (SELECT FROM {t}ended AS e WHERE e.queue = n.queue AND e.id = n.id OFFSET 0)
    ) THEN
        RAISE EXCEPTION USING ERRCODE = 'LW001', MESSAGE = 'a message of the batch is not new';
    END IF;
END
$$;
