//! Messages that are held: due never.

use sqlx::{Connection as _, PgConnection};

use super::claim::{COLUMNS, stored};
use super::fault::Fault;
use super::settle;
use crate::store::names::Names;
use crate::store::{Endings, HoldEnding, Sequence, Stored};

const HELD: &str = "SELECT {columns} FROM {t}messages AS m \
     WHERE m.queue = $1 AND m.sequence > $2 AND m.due_at = 'infinity' AND m.sequence IS NOT NULL \
     ORDER BY m.sequence LIMIT $3";

/// Of several at once, one gets the row; the others wait for its end, look again, and find it held no longer.
const LOCK: &str = "SELECT shard FROM {t}messages \
     WHERE queue = $1 AND sequence = $2 AND due_at = 'infinity' AND sequence IS NOT NULL FOR UPDATE";

const RETRY: &str = "UPDATE {t}messages SET attempts = 0, due_at = NULL \
     WHERE queue = $1 AND shard = $2 AND sequence = $3";

pub(super) async fn held(
    connection: &mut PgConnection,
    names: &Names,
    queue: i32,
    after: Sequence,
    limit: u32,
) -> Result<Vec<Stored>, Fault> {
    let rows = sqlx::query(&names.fill(&HELD.replace("{columns}", COLUMNS)))
        .bind(queue)
        .bind(after.0)
        .bind(i64::from(limit))
        .fetch_all(connection)
        .await?;
    rows.iter().map(|row| Ok(stored(row)?)).collect()
}

pub(super) async fn end(
    connection: &mut PgConnection,
    names: &Names,
    queue: i32,
    sequence: Sequence,
    ending: HoldEnding,
) -> Result<bool, Fault> {
    let mut transaction = connection.begin().await?;
    let shard: Option<i32> = sqlx::query_scalar(&names.fill(LOCK))
        .bind(queue)
        .bind(sequence.0)
        .fetch_optional(&mut *transaction)
        .await?;
    let Some(shard) = shard else {
        transaction.rollback().await?;
        return Ok(false);
    };
    match ending.removal(sequence) {
        None => {
            sqlx::query(&names.fill(RETRY))
                .bind(queue)
                .bind(shard)
                .bind(sequence.0)
                .execute(&mut *transaction)
                .await?;
        }
        Some(removal) => {
            // Holding has taken its claim away, if it had one.
            let rows = (queue, shard, None);
            let endings = Endings::of(std::slice::from_ref(&removal));
            settle::end(&mut transaction, names, rows, endings).await?;
        }
    }
    transaction.commit().await?;
    Ok(true)
}
