//! What is not about one message at its time: declarations, messages that become due, forgetting, counting.

use std::time::Duration;

use sqlx::sqlite::SqliteRow;
use sqlx::{Connection as _, Row as _, SqliteConnection};

use super::fault::Fault;
use super::{enqueue, millis, text};
use crate::store::columns::read_past;
use crate::store::names::Names;
use crate::store::plan::KnownQueue;
use crate::store::{Counts, DeadMessage, QueueIdentity, QueueOrder, StoreError, WaitingQueue};

pub(super) async fn declare(
    connection: &mut SqliteConnection,
    names: &Names,
    queue: &QueueIdentity,
) -> Result<KnownQueue, Fault> {
    let (ordered, shards) = match queue.order {
        QueueOrder::Unordered => (false, 1),
        QueueOrder::Ordered(count) => (true, count.get() as i32),
    };
    let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
    sqlx::query(&names.fill(
        "INSERT INTO {t}queues (name, shards, ordered) VALUES (?, ?, ?) ON CONFLICT (name) DO NOTHING",
    ))
    .bind(&*queue.name)
    .bind(shards)
    .bind(ordered)
    .execute(&mut *transaction)
    .await?;
    let row =
        sqlx::query(&names.fill("SELECT number, shards, ordered FROM {t}queues WHERE name = ?"))
            .bind(&*queue.name)
            .fetch_one(&mut *transaction)
            .await?;
    let (number, has_shards, is_ordered): (i32, i32, bool) =
        (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
    if (has_shards, is_ordered) != (shards, ordered) {
        return Err(StoreError::identity_changed(&queue.name, is_ordered, has_shards).into());
    }
    for shard in 0..(if ordered { shards } else { 0 }) {
        sqlx::query(&names.fill(
            "INSERT INTO {t}leases (queue, shard) VALUES (?, ?) ON CONFLICT (queue, shard) DO NOTHING",
        ))
        .bind(number)
        .bind(shard)
        .execute(&mut *transaction)
        .await?;
    }
    transaction.commit().await?;
    Ok(KnownQueue {
        number,
        identity: queue.clone(),
    })
}

/// Returns the queues of those that have got their place.
pub(super) async fn promote_due(
    connection: &mut SqliteConnection,
    names: &Names,
    limit: u32,
) -> Result<Vec<i32>, Fault> {
    let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
    let due = sqlx::query(&text(
        names,
        "SELECT rowid, queue FROM {t}messages WHERE sequence IS NULL AND due_at <= {now} \
         ORDER BY due_at, id LIMIT ?",
    ))
    .bind(limit)
    .fetch_all(&mut *transaction)
    .await?;
    let first = enqueue::draw(&mut transaction, names, due.len()).await?;
    let mut queues = Vec::with_capacity(due.len());
    for (place, row) in (first..).zip(&due) {
        sqlx::query(
            &names.fill("UPDATE {t}messages SET sequence = ?, due_at = NULL WHERE rowid = ?"),
        )
        .bind(place)
        .bind(row.try_get::<i64, _>(0)?)
        .execute(&mut *transaction)
        .await?;
        queues.push(row.try_get(1)?);
    }
    transaction.commit().await?;
    Ok(queues)
}

/// The oldest first, in one small batch. Dead nodes that no message names any more go with them.
pub(super) async fn prune(
    connection: &mut SqliteConnection,
    names: &Names,
    window: Duration,
    limit: u32,
) -> Result<u32, Fault> {
    let done = sqlx::query(&text(
        names,
        "DELETE FROM {t}ended WHERE (queue, id) IN (SELECT queue, id FROM {t}ended \
         WHERE ended_at < {now} - ? ORDER BY ended_at LIMIT ?)",
    ))
    .bind(millis(window))
    .bind(limit)
    .execute(&mut *connection)
    .await?;
    sqlx::query(&names.fill(
        "DELETE FROM {t}nodes WHERE dead AND NOT EXISTS (SELECT 1 FROM {t}messages AS m \
         WHERE m.queue = {t}nodes.queue AND m.claim = {t}nodes.epoch)",
    ))
    .execute(connection)
    .await?;
    Ok(done.rows_affected() as u32)
}

pub(super) async fn declared(
    connection: &mut SqliteConnection,
    names: &Names,
    queue: &str,
) -> Result<Option<QueueIdentity>, Fault> {
    let row =
        sqlx::query(&names.fill("SELECT name, shards, ordered FROM {t}queues WHERE name = ?"))
            .bind(queue)
            .fetch_optional(connection)
            .await?;
    row.as_ref().map(identity).transpose()
}

/// A queue by its first columns.
fn identity(row: &SqliteRow) -> Result<QueueIdentity, Fault> {
    let (name, shards, ordered): (String, i32, bool) =
        (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
    QueueIdentity::read(name, shards, ordered).map_err(Fault::from)
}

pub(super) async fn waiting_queues(
    connection: &mut SqliteConnection,
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
    connection: &mut SqliteConnection,
    names: &Names,
    queue: i32,
) -> Result<Counts, Fault> {
    let row = sqlx::query(&names.fill(
        "SELECT count(sequence), count(*) - count(sequence), \
         (SELECT count(*) FROM {t}dead_letters WHERE queue = ?1) FROM {t}messages WHERE queue = ?1",
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
    connection: &mut SqliteConnection,
    names: &Names,
    queue: i32,
    after: i64,
    limit: u32,
) -> Result<Vec<DeadMessage>, Fault> {
    let rows = sqlx::query(&names.fill(
        "SELECT * FROM {t}dead_letters WHERE queue = ? AND number > ? ORDER BY number LIMIT ?",
    ))
    .bind(queue)
    .bind(after)
    .bind(limit)
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
