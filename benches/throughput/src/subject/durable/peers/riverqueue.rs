//! `riverqueue`, in PostgreSQL and SQLite.

use std::sync::Arc;
use std::time::Duration;

use riverqueue::migrate::{PostgresMigrator, SqliteMigrator};
use riverqueue::sqlx::postgres::PgPoolOptions;
use riverqueue::sqlx::sqlite::{
    SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous,
};
use riverqueue::{
    BoxError, Client, ClientBuilder, Job, JobArgs, QueueConfig, RunHandle, WorkContext,
    WorkOutcome, Workers,
};

use super::CONNECTIONS;
use crate::Error;
use crate::database::Database;
use crate::record::Record;
use crate::subject::durable::Insert;
use crate::subject::durable::handling::{Handle, read_back};
use crate::workload::Message;

/// "Throughput is limited by this value": the least that is allowed.
const COOLDOWN: Duration = Duration::from_millis(1);

impl JobArgs for Message {
    const KIND: &'static str = "bench_message";
}

#[derive(Clone)]
enum Pool {
    Postgres(riverqueue::sqlx::PgPool),
    Sqlite(riverqueue::sqlx::SqlitePool),
}

impl Pool {
    fn client(&self) -> ClientBuilder {
        match self.clone() {
            Self::Postgres(pool) => Client::builder(pool),
            Self::Sqlite(pool) => Client::builder(pool),
        }
        .fetch_cooldown(COOLDOWN)
    }
}

pub(crate) struct Queue {
    pool: Pool,
    /// Inserts only.
    inserting: Client,
}

impl Queue {
    pub(crate) async fn open(database: Database, address: &str) -> Result<Self, Error> {
        let pool = match database {
            Database::Postgres => {
                let pool = PgPoolOptions::new()
                    .max_connections(CONNECTIONS)
                    .connect(address)
                    .await?;
                PostgresMigrator::new(pool.clone()).migrate_up().await?;
                Pool::Postgres(pool)
            }
            Database::Sqlite => {
                let options = SqliteConnectOptions::new()
                    .filename(address)
                    .create_if_missing(true)
                    .journal_mode(SqliteJournalMode::Wal)
                    .synchronous(SqliteSynchronous::Full)
                    .busy_timeout(Duration::from_secs(5));
                let pool = SqlitePoolOptions::new()
                    .max_connections(5)
                    .connect_with(options)
                    .await?;
                SqliteMigrator::new(pool.clone()).migrate_up().await?;
                Pool::Sqlite(pool)
            }
        };
        let inserting = pool.client().build()?;
        Ok(Self { pool, inserting })
    }
}

impl Insert for Queue {
    async fn insert(&self, mut messages: Vec<Message>) -> Result<(), Error> {
        match (messages.pop(), messages.is_empty()) {
            (Some(only), true) => {
                self.inserting.insert(only).await?;
            }
            (last, _) => {
                messages.extend(last);
                self.inserting.insert_many(messages).await?;
            }
        }
        Ok(())
    }

    async fn read_back(&self, record: &Arc<Record>) -> Result<(), Error> {
        read_back(self, record).await
    }
}

impl Handle for Queue {
    type Running = RunHandle;

    async fn start(&self, handlers: u32, record: &Arc<Record>) -> Result<RunHandle, Error> {
        let record = Arc::clone(record);
        let mut workers = Workers::new();
        workers.add_fn(move |_: WorkContext, job: Job<Message>| {
            record.handle_now(&job.args);
            async { Ok::<_, BoxError>(WorkOutcome::Complete) }
        })?;
        let client = self
            .pool
            .client()
            .workers(workers)
            .queue("default", QueueConfig::new(handlers as usize))
            .build()?;
        let mut running = client.start()?;
        running.wait_ready().await?;
        Ok(running)
    }

    async fn stop(&self, mut running: RunHandle) -> Result<(), Error> {
        Ok(running.stop().await?)
    }
}
