//! Messages that are held: due never.

use sqlx::{Connection as _, SqliteConnection};

use super::claim::stored;
use super::fault::Fault;
use super::{settle, text};
use crate::store::names::Names;
use crate::store::{Endings, HoldEnding, Sequence, Stored};

const HELD: &str = "SELECT * FROM {t}messages \
     WHERE queue = ? AND sequence > ? AND due_at = {never} AND sequence IS NOT NULL \
     ORDER BY sequence LIMIT ?";

const SHARD: &str = "SELECT shard FROM {t}messages \
     WHERE queue = ? AND sequence = ? AND due_at = {never} AND sequence IS NOT NULL";

const RETRY: &str = "UPDATE {t}messages SET attempts = 0, due_at = NULL \
     WHERE queue = ? AND shard = ? AND sequence = ?";

pub(super) async fn held(
    connection: &mut SqliteConnection,
    names: &Names,
    queue: i32,
    after: Sequence,
    limit: u32,
) -> Result<Vec<Stored>, Fault> {
    let rows = sqlx::query(&text(names, HELD))
        .bind(queue)
        .bind(after.0)
        .bind(limit)
        .fetch_all(connection)
        .await?;
    rows.iter().map(|row| Ok(stored(row)?)).collect()
}

/// It looks in the transaction in which it writes, and there is one writer: of several at once, the first one ends
/// the hold, and the others find it ended.
pub(super) async fn end(
    connection: &mut SqliteConnection,
    names: &Names,
    queue: i32,
    sequence: Sequence,
    ending: HoldEnding,
) -> Result<bool, Fault> {
    let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
    let shard: Option<u32> = sqlx::query_scalar(&text(names, SHARD))
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
