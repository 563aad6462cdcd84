//! What a test's application writes into the store's database, beside the store.

#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

use std::time::Duration;

use laneway::durable::{Batch, TransactionError};
use laneway::durable::{EnqueueError, Enqueued, HandlerTransaction, InTransaction as _};
use laneway::{Bus, Context, Message};
use sqlx::postgres::PgPoolOptions;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};
use sqlx::{Executor as _, PgPool, Postgres, Sqlite, SqlitePool, Transaction};

use super::stores::{self, Database};

/// Which database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Sqlite,
    Postgres,
}

impl Kind {
    pub fn of(database: &Database) -> Self {
        match database {
            Database::Sqlite(_) => Self::Sqlite,
            Database::Postgres { .. } => Self::Postgres,
        }
    }

    /// A statement with `?` for its parameters, as this database writes it.
    pub fn text(self, statement: &str) -> String {
        if self == Self::Sqlite {
            return statement.to_owned();
        }
        let mut parts = statement.split('?');
        let first = parts.next().unwrap_or_default().to_owned();
        (1..).zip(parts).fold(first, |text, (number, part)| {
            format!("{text}${number}{part}")
        })
    }
}

/// Connections of the application's own.
#[derive(Clone)]
pub enum App {
    Sqlite(SqlitePool),
    Postgres(PgPool),
}

/// A transaction of the application's own.
pub enum Own {
    Sqlite(Transaction<'static, Sqlite>),
    Postgres(Transaction<'static, Postgres>),
}

/// The transaction of a handler.
pub enum Handlers {
    Sqlite(HandlerTransaction<Sqlite>),
    Postgres(HandlerTransaction<Postgres>),
}

macro_rules! execute {
    ($statement:expr, $values:expr, $on:expr) => {{
        let statement = $statement;
        let mut query = sqlx::query(&statement);
        for value in $values {
            query = query.bind(*value);
        }
        query.execute($on).await.map(|done| done.rows_affected())
    }};
}

impl App {
    pub async fn of(database: &Database) -> Self {
        match database {
            Database::Sqlite(_) => {
                let options = SqliteConnectOptions::new()
                    .filename(database.file())
                    .create_if_missing(true)
                    .journal_mode(SqliteJournalMode::Wal)
                    .busy_timeout(Duration::from_secs(60));
                let pool = SqlitePoolOptions::new()
                    .max_connections(32)
                    .acquire_timeout(Duration::from_secs(60));
                Self::Sqlite(pool.connect_with(options).await.expect("opened"))
            }
            Database::Postgres { .. } => Self::at(&stores::postgres_url()).await,
        }
    }

    pub async fn at(url: &str) -> Self {
        let pool = PgPoolOptions::new()
            .max_connections(20)
            .acquire_timeout(Duration::from_secs(60));
        Self::Postgres(pool.connect(url).await.expect("a PostgreSQL server"))
    }

    /// Statements without parameters.
    pub async fn run(&self, statements: &str) {
        let done = match self {
            Self::Sqlite(pool) => pool.execute(statements).await.map(drop),
            Self::Postgres(pool) => pool.execute(statements).await.map(drop),
        };
        done.expect("executed");
    }

    /// One column of numbers.
    pub async fn numbers(&self, statement: &str) -> Vec<i64> {
        let numbers = match self {
            Self::Sqlite(pool) => sqlx::query_scalar(statement).fetch_all(pool).await,
            Self::Postgres(pool) => sqlx::query_scalar(statement).fetch_all(pool).await,
        };
        numbers.expect("read")
    }

    /// Begins a transaction, on SQLite as its writer.
    pub async fn begin(&self) -> Result<Own, sqlx::Error> {
        Ok(match self {
            Self::Sqlite(pool) => Own::Sqlite(pool.begin_with("BEGIN IMMEDIATE").await?),
            Self::Postgres(pool) => Own::Postgres(pool.begin().await?),
        })
    }

    pub async fn close(self) {
        match self {
            Self::Sqlite(pool) => pool.close().await,
            Self::Postgres(pool) => pool.close().await,
        }
    }
}

impl Own {
    pub async fn execute(&mut self, statement: &str, values: &[i64]) -> Result<u64, sqlx::Error> {
        match self {
            Self::Sqlite(own) => execute!(statement.to_owned(), values, &mut **own),
            Self::Postgres(own) => {
                execute!(Kind::Postgres.text(statement), values, &mut **own)
            }
        }
    }

    pub async fn enqueue<T: Message>(
        &mut self,
        bus: &Bus,
        message: T,
    ) -> Result<Enqueued, EnqueueError> {
        match self {
            Self::Sqlite(own) => bus.enqueue_in(own, message).await,
            Self::Postgres(own) => bus.enqueue_in(own, message).await,
        }
    }

    pub async fn enqueue_all(&mut self, bus: &Bus, batch: Batch) -> Result<Enqueued, EnqueueError> {
        match self {
            Self::Sqlite(own) => bus.enqueue_all(own, batch).await,
            Self::Postgres(own) => bus.enqueue_all(own, batch).await,
        }
    }

    pub async fn commit(self) -> Result<(), sqlx::Error> {
        match self {
            Self::Sqlite(own) => own.commit().await,
            Self::Postgres(own) => own.commit().await,
        }
    }

    pub async fn rollback(self) -> Result<(), sqlx::Error> {
        match self {
            Self::Sqlite(own) => own.rollback().await,
            Self::Postgres(own) => own.rollback().await,
        }
    }
}

impl Handlers {
    pub async fn of(cx: &Context, kind: Kind) -> Result<Self, TransactionError> {
        Ok(match kind {
            Kind::Sqlite => Self::Sqlite(cx.transaction().await?),
            Kind::Postgres => Self::Postgres(cx.transaction().await?),
        })
    }

    /// The other database.
    pub async fn other(cx: &Context, kind: Kind) -> Result<Self, TransactionError> {
        match kind {
            Kind::Sqlite => Self::of(cx, Kind::Postgres).await,
            Kind::Postgres => Self::of(cx, Kind::Sqlite).await,
        }
    }

    pub async fn execute(&mut self, statement: &str, values: &[i64]) -> Result<u64, sqlx::Error> {
        match self {
            Self::Sqlite(own) => execute!(statement.to_owned(), values, &mut **own),
            Self::Postgres(own) => {
                execute!(Kind::Postgres.text(statement), values, &mut **own)
            }
        }
    }
}
