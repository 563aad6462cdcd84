//! The tables of SQLite and their migrations.

use sqlx::{Connection as _, Executor as _, SqliteConnection};

use super::fault::Fault;
use crate::store::names::Names;
use crate::store::{Provision, StoreError};

/// Every migration, oldest first; never changed once released. The number is its position, from 1.
const MIGRATIONS: &[(&str, &str)] = &[
    ("queues", include_str!("migrations/0001_queues.sql")),
    ("holds", include_str!("migrations/0002_holds.sql")),
];

const TABLE: &str = "CREATE TABLE IF NOT EXISTS {t}migrations (\
     number INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP)";

/// The text of all migrations, for whoever applies them by hand.
pub(super) fn text(names: &Names) -> String {
    let mut text = format!("BEGIN IMMEDIATE;\n{};\n", names.fill(TABLE));
    for (number, (name, migration)) in (1..).zip(MIGRATIONS) {
        text.push_str(&format!("\n-- {number}: {name}\n{}", names.fill(migration)));
        text.push_str(&names.fill(&format!(
            "INSERT INTO {{t}}migrations (number, name) VALUES ({number}, '{name}');\n"
        )));
    }
    text.push_str("COMMIT;\n");
    text
}

/// Applies what is missing, or checks that nothing is. One transaction that has the write lock from its beginning:
/// what it finds missing is still missing when it writes.
pub(super) async fn provision(
    connection: &mut SqliteConnection,
    names: &Names,
    provision: Provision,
) -> Result<(), Fault> {
    if provision == Provision::Check {
        let applied = applied(connection, names).await?;
        return match MIGRATIONS.get(applied) {
            None => Ok(()),
            Some((name, _)) => Err(StoreError::refused(format!(
                "the store's tables lack migration {} ({name}): start once with `Provision::Apply`, or apply \
                 the text of `SqliteConfig::migrations` by hand",
                applied + 1
            ))
            .into()),
        };
    }
    let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
    let applied = applied(&mut transaction, names).await?;
    if applied < MIGRATIONS.len() {
        (&mut *transaction).execute(&*names.fill(TABLE)).await?;
    }
    for (number, (name, migration)) in (1_i64..).zip(MIGRATIONS).skip(applied) {
        (&mut *transaction).execute(&*names.fill(migration)).await?;
        sqlx::query(&names.fill("INSERT INTO {t}migrations (number, name) VALUES (?, ?)"))
            .bind(number)
            .bind(name)
            .execute(&mut *transaction)
            .await?;
    }
    transaction.commit().await?;
    Ok(())
}

/// How many migrations the file has.
async fn applied(connection: &mut SqliteConnection, names: &Names) -> Result<usize, Fault> {
    let exists: i64 =
        sqlx::query_scalar("SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = ?")
            .bind(names.fill("{t}migrations"))
            .fetch_one(&mut *connection)
            .await?;
    if exists == 0 {
        return Ok(0);
    }
    let applied: i64 = sqlx::query_scalar(&names.fill("SELECT count(*) FROM {t}migrations"))
        .fetch_one(connection)
        .await?;
    let applied = applied as usize;
    if applied > MIGRATIONS.len() {
        return Err(StoreError::refused(format!(
            "the store's tables have {applied} migrations, and this program knows {}: it is too old for them",
            MIGRATIONS.len()
        ))
        .into());
    }
    Ok(applied)
}
