//! `awa`, with its queue storage.

use std::sync::Arc;
use std::time::Duration;

use awa::{
    Client, InsertOpts, InsertParams, JobArgs, JobContext, JobResult, QueueConfig, QueueStorage,
    QueueStorageConfig, insert_with, migrations,
};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;

use super::{CONNECTIONS, STOP};
use crate::Error;
use crate::record::Record;
use crate::subject::durable::Insert;
use crate::subject::durable::handling::{Handle, read_back};
use crate::workload::Message;

const QUEUE: &str = "bench";

impl JobArgs for Message {
    fn kind() -> &'static str {
        "bench_message"
    }
}

pub(crate) struct Queue {
    pool: PgPool,
    storage: QueueStorage,
}

impl Queue {
    pub(crate) async fn open(address: &str) -> Result<Self, Error> {
        let pool = PgPoolOptions::new()
            .max_connections(CONNECTIONS)
            .connect(address)
            .await?;
        migrations::run(&pool).await?;
        // The first worker to start in a fresh database turns its queue storage on.
        let client = Client::builder(pool.clone())
            .queue(QUEUE, QueueConfig::default())
            .register::<Message, _, _>(|_, _: &JobContext| async { Ok(JobResult::Completed) })
            .build()?;
        client.start().await?;
        client.shutdown(STOP).await;
        let storage = QueueStorage::new(QueueStorageConfig::default())?;
        Ok(Self { pool, storage })
    }

    fn options(message: &Message) -> InsertOpts {
        InsertOpts {
            queue: QUEUE.to_owned(),
            ordering_key: Some(message.key.to_string().into_bytes()),
            ..InsertOpts::default()
        }
    }
}

impl Insert for Queue {
    async fn insert(&self, messages: Vec<Message>) -> Result<(), Error> {
        if let [only] = messages.as_slice() {
            insert_with(&self.pool, only, Self::options(only)).await?;
            return Ok(());
        }
        let jobs = messages.iter().map(|message| {
            Ok(InsertParams {
                kind: <Message as JobArgs>::kind().to_owned(),
                args: serde_json::to_value(message)?,
                opts: Self::options(message),
            })
        });
        let jobs: Vec<_> = jobs.collect::<Result<_, Error>>()?;
        self.storage.enqueue_params_copy(&self.pool, &jobs).await?;
        Ok(())
    }

    async fn read_back(&self, record: &Arc<Record>) -> Result<(), Error> {
        read_back(self, record).await
    }
}

impl Handle for Queue {
    type Running = Client;

    async fn start(&self, handlers: u32, record: &Arc<Record>) -> Result<Client, Error> {
        let record = Arc::clone(record);
        // A queue without deadlines takes the short path of its storage.
        let queue = QueueConfig {
            max_workers: handlers,
            poll_interval: Duration::from_millis(50),
            deadline_duration: Duration::ZERO,
            ..QueueConfig::default()
        };
        let client = Client::builder(self.pool.clone())
            .queue(QUEUE, queue)
            .register::<Message, _, _>(move |message, _: &JobContext| {
                record.handle_now(&message);
                async { Ok(JobResult::Completed) }
            })
            .build()?;
        client.start().await?;
        Ok(client)
    }

    async fn stop(&self, running: Client) -> Result<(), Error> {
        running.shutdown(STOP).await;
        Ok(())
    }
}
