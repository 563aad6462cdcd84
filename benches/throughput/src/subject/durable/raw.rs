//! A table, written by hand: what a durable insert costs at least.

use std::sync::Arc;

use sqlx::sqlite::SqlitePoolOptions;
use sqlx::{Executor as _, PgPool, Row as _, SqlitePool};

use super::Insert;
use crate::Error;
use crate::database::sqlite_options;
use crate::record::Record;
use crate::workload::Message;

const READ: &str = "SELECT body FROM messages ORDER BY id";

/// In PostgreSQL: each batch is one statement, and its own transaction.
pub(super) struct PostgresTable(PgPool);

impl PostgresTable {
    pub(super) async fn open(address: &str) -> Result<Self, Error> {
        let pool = PgPool::connect(address).await?;
        pool.execute(
            "CREATE TABLE messages (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text NOT NULL, \
             body bytea NOT NULL)",
        )
        .await?;
        Ok(Self(pool))
    }
}

impl Insert for PostgresTable {
    async fn insert(&self, messages: Vec<Message>) -> Result<(), Error> {
        let mut keys = Vec::with_capacity(messages.len());
        let mut bodies = Vec::with_capacity(messages.len());
        for message in &messages {
            keys.push(message.key.to_string());
            bodies.push(serde_json::to_vec(message)?);
        }
        sqlx::query(
            "INSERT INTO messages (key, body) SELECT * FROM unnest($1::text[], $2::bytea[])",
        )
        .bind(keys)
        .bind(bodies)
        .execute(&self.0)
        .await?;
        Ok(())
    }

    async fn read_back(&self, record: &Arc<Record>) -> Result<(), Error> {
        for row in sqlx::query(READ).fetch_all(&self.0).await? {
            record.handle_now(&serde_json::from_slice(row.try_get(0)?)?);
        }
        Ok(())
    }
}

/// In SQLite: each message is a statement, each batch a transaction.
pub(super) struct SqliteTable(SqlitePool);

impl SqliteTable {
    pub(super) async fn open(file: &str) -> Result<Self, Error> {
        let pool = SqlitePoolOptions::new()
            .max_connections(1)
            .connect_with(sqlite_options(file))
            .await?;
        pool.execute(
            "CREATE TABLE messages (id INTEGER PRIMARY KEY, key TEXT NOT NULL, body BLOB NOT NULL)",
        )
        .await?;
        Ok(Self(pool))
    }
}

impl Insert for SqliteTable {
    async fn insert(&self, messages: Vec<Message>) -> Result<(), Error> {
        let mut transaction = self.0.begin_with("BEGIN IMMEDIATE").await?;
        for message in &messages {
            sqlx::query("INSERT INTO messages (key, body) VALUES (?, ?)")
                .bind(message.key.to_string())
                .bind(serde_json::to_vec(message)?)
                .execute(&mut *transaction)
                .await?;
        }
        Ok(transaction.commit().await?)
    }

    async fn read_back(&self, record: &Arc<Record>) -> Result<(), Error> {
        for row in sqlx::query(READ).fetch_all(&self.0).await? {
            record.handle_now(&serde_json::from_slice(row.try_get(0)?)?);
        }
        Ok(())
    }
}
