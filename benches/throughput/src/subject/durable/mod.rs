//! Durable queues (W7): what is measured is written once here, for any queue that can do it.
//!
//! A queue that can [`Insert`] is measured with inserts; one that runs handlers too, with drains and mixed work.

mod handling;
mod laneway;
#[cfg(feature = "peers")]
mod peers;
mod raw;

use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use self::laneway::Handlers;
use crate::Error;
use crate::database::Database;
use crate::machine::now;
use crate::record::Record;
use crate::subject::{Job, Subject};
use crate::workload::Message;

/// What a run does, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Durable {
    pub(crate) database: Database,
    pub(crate) work: Work,
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Work {
    /// One producer stores `batch` messages in each transaction, one transaction after the other.
    Insert { batch: u32 },
    /// A backlog is handled, so many at once.
    Drain { handlers: u32 },
    /// Messages are stored singly at a steady pace while they are handled.
    Mixed { handlers: u32, per_second: u32 },
}

/// A queue that messages can be stored in.
trait Insert {
    /// Stores messages in their order, in one transaction; returns after its commit.
    async fn insert(&self, messages: Vec<Message>) -> Result<(), Error>;

    /// Takes everything out again, by way of the record: what is stored is what was inserted.
    async fn read_back(&self, record: &Arc<Record>) -> Result<(), Error>;
}

/// Runs a job in its database, which is empty.
pub(super) async fn run(job: &Job, durable: Durable, record: &Arc<Record>) -> Result<(), Error> {
    use Database::{Postgres, Sqlite};
    let address = job.url.as_str();
    match (job.subject, durable.database) {
        (Subject::RawSql, Postgres) => {
            let table = raw::PostgresTable::open(address).await?;
            insert_only(&table, durable.work, record).await
        }
        (Subject::RawSql, Sqlite) => {
            let table = raw::SqliteTable::open(address).await?;
            insert_only(&table, durable.work, record).await
        }
        (Subject::DurableLaneway | Subject::DurableLanewayTransactional, Postgres) => {
            let queue = laneway::Queue::in_postgres(address, handlers_of(job.subject)).await?;
            handling::any(&queue, job, durable, record).await
        }
        (Subject::DurableLaneway | Subject::DurableLanewayTransactional, Sqlite) => {
            let queue = laneway::Queue::in_sqlite(address, handlers_of(job.subject)).await?;
            handling::any(&queue, job, durable, record).await
        }
        #[cfg(feature = "peers")]
        (Subject::Riverqueue, database) => {
            let queue = peers::riverqueue::Queue::open(database, address).await?;
            handling::any(&queue, job, durable, record).await
        }
        #[cfg(feature = "peers")]
        (Subject::GraphileWorker, Postgres) => {
            let queue = peers::graphile_worker::Queue::open(address, false, durable.work).await?;
            handling::any(&queue, job, durable, record).await
        }
        #[cfg(feature = "peers")]
        (Subject::GraphileWorkerKeyed, Postgres) => {
            let queue = peers::graphile_worker::Queue::open(address, true, durable.work).await?;
            handling::any(&queue, job, durable, record).await
        }
        #[cfg(feature = "peers")]
        (Subject::Awa, Postgres) => {
            let queue = peers::awa::Queue::open(address).await?;
            handling::any(&queue, job, durable, record).await
        }
        (subject, database) => Err(format!(
            "{} is not measured in {}, or needs a build with the feature `peers`",
            subject.name(),
            database.name()
        )
        .into()),
    }
}

fn handlers_of(subject: Subject) -> Handlers {
    match subject {
        Subject::DurableLanewayTransactional => Handlers::Transactional,
        _ => Handlers::Plain,
    }
}

async fn insert_only(queue: &impl Insert, work: Work, record: &Arc<Record>) -> Result<(), Error> {
    match work {
        Work::Insert { batch } => insert(queue, batch, record).await,
        Work::Drain { .. } | Work::Mixed { .. } => {
            Err("this subject is measured with inserts only".into())
        }
    }
}

/// Measures how long it takes to store everything, then lets the record see what is stored.
async fn insert(queue: &impl Insert, batch: u32, record: &Arc<Record>) -> Result<(), Error> {
    let batches = batches(record, batch as usize)?;
    record.begin();
    let start = Instant::now();
    for batch in batches {
        queue.insert(batch).await?;
    }
    record.measured(start.elapsed());
    queue.read_back(record).await
}

/// The messages of the plan, made before anything is measured.
fn batches(record: &Record, size: usize) -> Result<Vec<Vec<Message>>, Error> {
    let messages: Vec<_> = record.plan.messages().collect();
    let batch = |messages: &[(u32, u32)]| {
        let messages = messages.iter();
        messages
            .map(|&(key, seq)| Ok(Message::padded(key, seq, now())?))
            .collect()
    };
    messages.chunks(size).map(batch).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::database::Home;
    use crate::record::Verdict;
    use crate::subject::QueueType;
    use crate::workload::{Plan, Shape, Spread};

    async fn in_sqlite(subject: Subject, work: Work) -> Verdict {
        let folder = tempfile::tempdir().expect("a folder");
        let home = Home::create(Database::Sqlite, "", folder.path(), "bench").await;
        let home = home.expect("created");
        let shape = Shape {
            messages: 500,
            keys: 20,
            spread: Spread::Uniform,
            handler: std::time::Duration::ZERO,
            poison: false,
            slow: 0,
            seed: 7,
        };
        let durable = Durable {
            database: Database::Sqlite,
            work,
        };
        let job = Job {
            url: home.address(),
            name: "bench".to_owned(),
            queue_type: QueueType::Classic,
            subject,
            shape,
            durable: Some(durable),
        };
        let record = Record::of(Plan::of(shape));
        run(&job, durable, &record).await.expect("it runs");
        record.verdict().expect("readable")
    }

    #[tokio::test]
    async fn what_is_inserted_is_read_back_complete_and_in_order() {
        for subject in [Subject::RawSql, Subject::DurableLaneway] {
            for batch in [7, 500] {
                let verdict = in_sqlite(subject, Work::Insert { batch }).await;
                assert!(verdict.complete && verdict.ordered(), "{}", verdict.words);
                assert!(verdict.per_second > 0.0);
            }
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn laneway_handles_everything_in_order_with_plain_and_with_transactional_handlers() {
        let mixed = Work::Mixed {
            handlers: 8,
            per_second: 2_000,
        };
        for subject in [
            Subject::DurableLaneway,
            Subject::DurableLanewayTransactional,
        ] {
            for work in [Work::Drain { handlers: 8 }, mixed] {
                let verdict = in_sqlite(subject, work).await;
                assert!(verdict.complete && verdict.ordered(), "{}", verdict.words);
            }
        }
    }
}
