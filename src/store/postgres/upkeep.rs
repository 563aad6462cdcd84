//! What is not about one message at its time: declarations, messages that become due, forgetting, counting.

use std::time::Duration;

use sqlx::postgres::PgRow;
use sqlx::{Connection as _, PgConnection, Row as _};

use super::enqueue;
use super::fault::Fault;
use super::lease::millis;
use crate::store::columns::read_past;
use crate::store::locks::locks;
use crate::store::names::Names;
use crate::store::plan::KnownQueue;
use crate::store::{Counts, DeadMessage, QueueIdentity, QueueOrder, StoreError, WaitingQueue};

pub(super) async fn declare(
    connection: &mut PgConnection,
    names: &Names,
    queue: &QueueIdentity,
) -> Result<KnownQueue, Fault> {
    let (ordered, shards) = match queue.order {
        QueueOrder::Unordered => (false, 1),
        QueueOrder::Ordered(count) => (true, count.get() as i32),
    };
    let mut transaction = connection.begin().await?;
    sqlx::query(&names.fill(
        "INSERT INTO {t}queues (name, shards, ordered) VALUES ($1, $2, $3) ON CONFLICT (name) DO NOTHING",
    ))
    .bind(&*queue.name)
    .bind(shards)
    .bind(ordered)
    .execute(&mut *transaction)
    .await?;
    let row =
        sqlx::query(&names.fill("SELECT number, shards, ordered FROM {t}queues WHERE name = $1"))
            .bind(&*queue.name)
            .fetch_one(&mut *transaction)
            .await?;
    let (number, has_shards, is_ordered): (i32, i32, bool) =
        (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
    if (has_shards, is_ordered) != (shards, ordered) {
        return Err(StoreError::identity_changed(&queue.name, is_ordered, has_shards).into());
    }
    if ordered {
        sqlx::query(&names.fill(
            "INSERT INTO {t}leases (queue, shard) SELECT $1, generate_series(0, $2 - 1) \
             ON CONFLICT (queue, shard) DO NOTHING",
        ))
        .bind(number)
        .bind(shards)
        .execute(&mut *transaction)
        .await?;
    }
    transaction.commit().await?;
    Ok(KnownQueue {
        number,
        identity: queue.clone(),
    })
}

/// One node promotes at a time, behind a lock of its own, so that what is due first gets its place first. Key locks
/// come before the draw, as in an enqueuing. Nothing else changes a scheduled row, so it needs no lock before.
///
/// It waits for the keys of open transactions, like any writer: one that stays open after its enqueuing delays
/// what is due behind it.
pub(super) async fn promote_due(
    connection: &mut PgConnection,
    names: &Names,
    lock_space: i32,
    limit: u32,
) -> Result<Vec<i32>, Fault> {
    let mut transaction = connection.begin().await?;
    let mine: bool = sqlx::query_scalar("SELECT pg_try_advisory_xact_lock($1, -2)")
        .bind(lock_space)
        .fetch_one(&mut *transaction)
        .await?;
    if !mine {
        transaction.rollback().await?;
        return Ok(Vec::new());
    }
    let due = sqlx::query(&names.fill(
        "SELECT m.queue, m.id, m.key_hash, q.ordered FROM {t}messages AS m \
         JOIN {t}queues AS q ON q.number = m.queue \
         WHERE m.sequence IS NULL AND m.due_at <= now() ORDER BY m.due_at, m.id LIMIT $1",
    ))
    .bind(i64::from(limit))
    .fetch_all(&mut *transaction)
    .await?;
    let (mut queues, mut ids, mut keys) = (Vec::<i32>::new(), Vec::<String>::new(), Vec::new());
    for row in &due {
        let (queue, key_hash, ordered): (i32, Option<i64>, bool) =
            (row.try_get(0)?, row.try_get(2)?, row.try_get(3)?);
        queues.push(queue);
        ids.push(row.try_get(1)?);
        keys.extend(key_hash.filter(|_| ordered).map(|hash| (queue, hash)));
    }
    if !ids.is_empty() {
        enqueue::lock(&mut transaction, lock_space, &locks(keys)).await?;
        sqlx::query(&names.fill(
            "UPDATE {t}messages AS m SET sequence = d.place, due_at = NULL \
             FROM (SELECT queue, id, nextval('{t}sequence') AS place FROM \
             (SELECT * FROM unnest($1::int4[], $2::text[]) WITH ORDINALITY AS u(queue, id, position) \
             ORDER BY position) AS sorted) AS d WHERE m.queue = d.queue AND m.id = d.id",
        ))
        .bind(&queues)
        .bind(ids)
        .execute(&mut *transaction)
        .await?;
    }
    transaction.commit().await?;
    Ok(queues)
}

/// The oldest first, in one small batch; two nodes at it do not wait for each other. Dead nodes that no message
/// names any more go with them; there are few.
pub(super) async fn prune(
    connection: &mut PgConnection,
    names: &Names,
    window: Duration,
    limit: u32,
) -> Result<u32, Fault> {
    let done = sqlx::query(&names.fill(
        "DELETE FROM {t}ended WHERE ctid = ANY(ARRAY(SELECT ctid FROM {t}ended \
         WHERE ended_at < clock_timestamp() - $1 * interval '1 millisecond' \
         ORDER BY ended_at LIMIT $2 FOR UPDATE SKIP LOCKED))",
    ))
    // A window beyond what PostgreSQL can subtract from a date would be an error; a century is for ever.
    .bind(millis(window).min(3_155_760_000_000))
    .bind(i64::from(limit))
    .execute(&mut *connection)
    .await?;
    sqlx::query(&names.fill(
        "DELETE FROM {t}nodes AS n WHERE n.dead AND n.expires < clock_timestamp() - interval '1 minute' \
         AND NOT EXISTS (SELECT 1 FROM {t}messages AS m WHERE m.queue = n.queue AND m.claim = n.epoch)",
    ))
    .execute(connection)
    .await?;
    Ok(done.rows_affected() as u32)
}

pub(super) async fn declared(
    connection: &mut PgConnection,
    names: &Names,
    queue: &str,
) -> Result<Option<QueueIdentity>, Fault> {
    let row =
        sqlx::query(&names.fill("SELECT name, shards, ordered FROM {t}queues WHERE name = $1"))
            .bind(queue)
            .fetch_optional(connection)
            .await?;
    row.as_ref().map(identity).transpose()
}

/// A queue by its first columns.
fn identity(row: &PgRow) -> Result<QueueIdentity, Fault> {
    let (name, shards, ordered): (String, i32, bool) =
        (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
    QueueIdentity::read(name, shards, ordered).map_err(Fault::from)
}

pub(super) async fn waiting_queues(
    connection: &mut PgConnection,
    names: &Names,
) -> Result<Vec<WaitingQueue>, Fault> {
    let rows = sqlx::query(&names.fill(
        "SELECT q.name, q.shards, q.ordered, m.backlog, m.scheduled FROM {t}queues AS q JOIN \
         (SELECT queue, count(sequence) AS backlog, count(*) - count(sequence) AS scheduled \
         FROM {t}messages GROUP BY queue) AS m ON m.queue = q.number ORDER BY q.name",
    ))
    .fetch_all(connection)
    .await?;
    let mut waiting = Vec::with_capacity(rows.len());
    for row in &rows {
        waiting.push(WaitingQueue {
            queue: identity(row)?,
            backlog: row.try_get::<i64, _>(3)?.unsigned_abs(),
            scheduled: row.try_get::<i64, _>(4)?.unsigned_abs(),
        });
    }
    Ok(waiting)
}

pub(super) async fn count(
    connection: &mut PgConnection,
    names: &Names,
    queue: i32,
) -> Result<Counts, Fault> {
    let row = sqlx::query(&names.fill(
        "SELECT count(sequence), count(*) - count(sequence), \
         (SELECT count(*) FROM {t}dead_letters WHERE queue = $1) FROM {t}messages WHERE queue = $1",
    ))
    .bind(queue)
    .fetch_one(connection)
    .await?;
    Ok(Counts {
        backlog: row.try_get::<i64, _>(0)?.unsigned_abs(),
        scheduled: row.try_get::<i64, _>(1)?.unsigned_abs(),
        dead: row.try_get::<i64, _>(2)?.unsigned_abs(),
    })
}

pub(super) async fn dead_letters(
    connection: &mut PgConnection,
    names: &Names,
    queue: i32,
    after: i64,
    limit: u32,
) -> Result<Vec<DeadMessage>, Fault> {
    let rows = sqlx::query(&names.fill(
        "SELECT * FROM {t}dead_letters WHERE queue = $1 AND number > $2 ORDER BY number LIMIT $3",
    ))
    .bind(queue)
    .bind(after)
    .bind(i64::from(limit))
    .fetch_all(connection)
    .await?;
    let mut letters = Vec::with_capacity(rows.len());
    for row in &rows {
        let past: String = row.try_get("past")?;
        letters.push(DeadMessage::read(
            row.try_get("number")?,
            super::claim::stored(row)?,
            row.try_get("reason")?,
            row.try_get("detail")?,
            read_past(&past),
        ));
    }
    Ok(letters)
}
