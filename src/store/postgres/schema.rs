//! The tables of PostgreSQL and their migrations.

use sqlx::{Connection as _, Executor as _, PgConnection};

use super::fault::Fault;
use crate::store::names::Names;
use crate::store::{Provision, StoreError};

/// Every migration, oldest first; never changed once released. The number is its position, from 1.
const MIGRATIONS: &[(&str, &str)] = &[
    ("queues", include_str!("migrations/0001_queues.sql")),
    (
        "holds and members",
        include_str!("migrations/0002_holds_and_members.sql"),
    ),
    (
        "enqueue what is new",
        include_str!("migrations/0003_enqueue_new.sql"),
    ),
];

/// The text of all migrations, for whoever applies them by hand.
pub(super) fn text(names: &Names) -> String {
    let mut text = String::from("BEGIN;\n");
    if let Some(schema) = names.schema() {
        text.push_str(&format!("CREATE SCHEMA IF NOT EXISTS {schema};\n"));
    }
    text.push_str(&names.fill(TABLE));
    text.push_str(";\n");
    for (number, (name, migration)) in (1..).zip(MIGRATIONS) {
        text.push_str(&format!("\n-- {number}: {name}\n{}", names.fill(migration)));
        text.push_str(&names.fill(&format!(
            "INSERT INTO {{t}}migrations (number, name) VALUES ({number}, '{name}');\n"
        )));
    }
    text.push_str("COMMIT;\n");
    text
}

const TABLE: &str = "CREATE TABLE IF NOT EXISTS {t}migrations (\
     number integer PRIMARY KEY, name text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())";

/// Applies what is missing, or checks that nothing is.
///
/// Applying is one transaction under an advisory lock, so that of several nodes that start at once one
/// applies, and the others wait and find it done. The lock comes before anything that looks at the tables: two
/// `CREATE … IF NOT EXISTS` at once can both find nothing and one of them fail.
pub(super) async fn provision(
    connection: &mut PgConnection,
    names: &Names,
    lock_space: i32,
    provision: Provision,
) -> Result<(), Fault> {
    if provision == Provision::Check {
        let applied = applied(connection, names).await?;
        return match MIGRATIONS.get(applied) {
            None => Ok(()),
            Some((name, _)) => Err(StoreError::refused(format!(
                "the store's tables lack migration {} ({name}): start once with `Provision::Apply`, or apply \
                 the text of `PostgresConfig::migrations` by hand",
                applied + 1
            ))
            .into()),
        };
    }
    let mut transaction = connection.begin().await?;
    // Several starters wait here, each for all before it: not within the bound of one statement.
    (&mut *transaction)
        .execute("SET LOCAL lock_timeout = 0; SET LOCAL statement_timeout = 0")
        .await?;
    sqlx::query("SELECT pg_advisory_xact_lock($1, -1)")
        .bind(lock_space)
        .execute(&mut *transaction)
        .await?;
    if let Some(schema) = names.schema() {
        // `IF NOT EXISTS` alone asks for the privilege to create even where there is nothing to create.
        let exists: bool = sqlx::query_scalar("SELECT to_regnamespace($1) IS NOT NULL")
            .bind(schema)
            .fetch_one(&mut *transaction)
            .await?;
        if !exists {
            (&mut *transaction)
                .execute(&*format!("CREATE SCHEMA {schema}"))
                .await?;
        }
    }
    let applied = applied(&mut transaction, names).await?;
    if applied < MIGRATIONS.len() {
        (&mut *transaction).execute(&*names.fill(TABLE)).await?;
    }
    for (number, (name, migration)) in (1_i32..).zip(MIGRATIONS).skip(applied) {
        (&mut *transaction).execute(&*names.fill(migration)).await?;
        sqlx::query(&names.fill("INSERT INTO {t}migrations (number, name) VALUES ($1, $2)"))
            .bind(number)
            .bind(name)
            .execute(&mut *transaction)
            .await?;
    }
    transaction.commit().await?;
    Ok(())
}

/// How many migrations the database has.
async fn applied(connection: &mut PgConnection, names: &Names) -> Result<usize, Fault> {
    let exists: bool = sqlx::query_scalar("SELECT to_regclass($1) IS NOT NULL")
        .bind(names.fill("{t}migrations"))
        .fetch_one(&mut *connection)
        .await?;
    if !exists {
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
