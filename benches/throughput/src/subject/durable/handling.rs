//! Queues that run handlers: drains and mixed work.

use std::sync::Arc;
use std::time::Duration;

use super::{Durable, Insert, Work, batches, insert};
use crate::Error;
use crate::database::analyze;
use crate::machine::now;
use crate::record::Record;
use crate::subject::Job;
use crate::workload::Message;

/// How many are stored at once before a drain.
const FILL: usize = 1_000;
/// Producers of the mixed work; each has keys of its own.
const PRODUCERS: u32 = 8;
/// Handlers at once where nothing is measured.
#[cfg(feature = "peers")]
const READERS: u32 = 64;

/// A queue that runs handlers.
pub(super) trait Handle: Insert {
    /// Its handlers while they run.
    type Running;

    /// Starts so many handlers at once, each of which does [`Record::handle_now`]; returns when they look for work.
    async fn start(&self, handlers: u32, record: &Arc<Record>) -> Result<Self::Running, Error>;

    /// Returns when everything that was handled is known to be stored as done.
    async fn stop(&self, running: Self::Running) -> Result<(), Error>;
}

/// Any work.
pub(super) async fn any(
    queue: &impl Handle,
    job: &Job,
    durable: Durable,
    record: &Arc<Record>,
) -> Result<(), Error> {
    match durable.work {
        Work::Insert { batch } => insert(queue, batch, record).await,
        Work::Drain { handlers } => {
            for batch in batches(record, FILL)? {
                queue.insert(batch).await?;
            }
            analyze(durable.database, &job.url).await?;
            record.begin();
            handle(queue, handlers, record).await
        }
        Work::Mixed {
            handlers,
            per_second,
        } => mixed(queue, handlers, per_second, record).await,
    }
}

/// Takes everything out, for queues that hand nothing out but to handlers.
#[cfg(feature = "peers")]
pub(super) async fn read_back(queue: &impl Handle, record: &Arc<Record>) -> Result<(), Error> {
    handle(queue, READERS, record).await
}

/// Handles what is stored, all of it.
async fn handle(queue: &impl Handle, handlers: u32, record: &Arc<Record>) -> Result<(), Error> {
    let running = queue.start(handlers, record).await?;
    record.all().await;
    queue.stop(running).await
}

/// Stores messages at a steady pace while they are handled. A key's messages come from one producer, which waits
/// for each commit: they are stored in their order.
async fn mixed(
    queue: &impl Handle,
    handlers: u32,
    per_second: u32,
    record: &Arc<Record>,
) -> Result<(), Error> {
    record.begin();
    let running = queue.start(handlers, record).await?;
    let start = tokio::time::Instant::now();
    let producer = |number: u32| async move {
        for (at, (key, seq)) in record.plan.messages().enumerate() {
            if key % PRODUCERS == number {
                // By the clock, and not after the one before: who is late catches up.
                let due = Duration::from_secs_f64(at as f64 / f64::from(per_second));
                tokio::time::sleep_until(start + due).await;
                queue
                    .insert(vec![Message::padded(key, seq, now())?])
                    .await?;
            }
        }
        Ok::<_, Error>(())
    };
    futures::future::try_join_all((0..PRODUCERS).map(producer)).await?;
    record.all().await;
    queue.stop(running).await
}
