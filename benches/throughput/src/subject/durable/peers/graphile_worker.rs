//! `graphile_worker`, without named queues and with one for each key.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use graphile_worker::{
    IntoTaskHandlerResult, JobSpec, JobSpecBuilder, LocalQueueConfig, TaskHandler, Worker,
    WorkerContext, WorkerOptions, WorkerStart, WorkerUtils,
};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::{CONNECTIONS, STOP};
use crate::Error;
use crate::record::Record;
use crate::subject::durable::handling::{Handle, read_back};
use crate::subject::durable::{Insert, Work};
use crate::workload::Message;

impl TaskHandler for Message {
    const IDENTIFIER: &'static str = "bench_message";

    async fn run(self, context: WorkerContext) -> impl IntoTaskHandlerResult {
        let record = context.get_ext::<Shared>().ok_or("no record")?;
        record.0.handle_now(&self);
        Ok::<(), &str>(())
    }
}

/// The record, as state of a worker.
#[derive(Clone)]
struct Shared(Arc<Record>);

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Shared")
    }
}

pub(crate) struct Queue {
    address: String,
    is_keyed: bool,
    /// Whether a worker fetches many jobs at once.
    has_local_queue: bool,
    utils: WorkerUtils,
}

impl Queue {
    pub(crate) async fn open(address: &str, is_keyed: bool, work: Work) -> Result<Self, Error> {
        // Starting a worker makes the tables.
        let worker = options(address).init().await?;
        Ok(Self {
            address: address.to_owned(),
            is_keyed,
            has_local_queue: !matches!(work, Work::Mixed { .. }),
            utils: worker.create_utils(),
        })
    }

    fn spec(&self, message: &Message) -> JobSpec {
        match self.is_keyed {
            true => JobSpecBuilder::new()
                .queue_name(format!("key-{}", message.key))
                .build(),
            false => JobSpec::default(),
        }
    }
}

/// The "throughput-oriented worker" of its documentation, but for the number of handlers and the local queue.
fn options(address: &str) -> WorkerOptions {
    WorkerOptions::default()
        .database_url(address)
        .max_pg_conn(CONNECTIONS)
        .poll_interval(Duration::from_millis(500))
        .complete_job_batch_delay(Duration::from_millis(5))
        .fail_job_batch_delay(Duration::from_millis(5))
        .listen_os_shutdown_signals(false)
        .shutdown_grace_period(STOP)
        .define_job::<Message>()
}

/// Jobs that a worker fetches at once.
const LOCAL: usize = 100;

impl Insert for Queue {
    async fn insert(&self, mut messages: Vec<Message>) -> Result<(), Error> {
        match (messages.pop(), messages.is_empty()) {
            (Some(only), true) => {
                let spec = self.spec(&only);
                self.utils.add_job(only, spec).await?;
            }
            (last, _) => {
                messages.extend(last);
                let specs: Vec<_> = messages.iter().map(|message| self.spec(message)).collect();
                let jobs: Vec<_> = messages.into_iter().zip(&specs).collect();
                self.utils.add_jobs(&jobs).await?;
            }
        }
        Ok(())
    }

    async fn read_back(&self, record: &Arc<Record>) -> Result<(), Error> {
        read_back(self, record).await
    }
}

pub(crate) struct Running {
    worker: Arc<Worker>,
    task: JoinHandle<Result<(), Error>>,
}

impl Handle for Queue {
    type Running = Running;

    async fn start(&self, handlers: u32, record: &Arc<Record>) -> Result<Running, Error> {
        let (started, mut starts) = mpsc::unbounded_channel();
        let mut options = options(&self.address);
        if self.has_local_queue {
            let local = LocalQueueConfig::default()
                .with_size(LOCAL)
                .with_ttl(Duration::from_secs(60));
            options = options.local_queue(local);
        }
        let worker = options
            .concurrency(handlers as usize)
            .add_extension(Shared(Arc::clone(record)))
            .on(WorkerStart, move |_| {
                let _ = started.send(());
                async {}
            })
            .init()
            .await?;
        let worker = Arc::new(worker);
        let runs = Arc::clone(&worker);
        let task = tokio::spawn(async move { Ok(runs.run().await?) });
        starts.recv().await.ok_or("the worker did not start")?;
        Ok(Running { worker, task })
    }

    async fn stop(&self, running: Running) -> Result<(), Error> {
        running.worker.request_shutdown();
        running.task.await?
    }
}
