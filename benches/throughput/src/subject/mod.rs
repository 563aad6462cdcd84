//! What is measured. Every subject consumes the same queue with the same prefetch, decodes each body, runs the
//! same handler, acknowledges after success.

mod durable;
mod keyed;
mod laneway;
mod local;
#[cfg(feature = "peers")]
mod peers;
mod raw;

use std::sync::Arc;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::record::Record;
use crate::workload::Shape;

pub(crate) use durable::{Durable, Work};

/// The prefetch of every subject.
pub(crate) const PREFETCH: u16 = 512;
/// Handlers at once.
const AT_ONCE: u32 = 256;
/// Queues of a subject that has order per queue only.
const QUEUES: u32 = 32;

/// A consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
pub(crate) enum Subject {
    RawSequential,
    RawUnordered,
    /// Says something for a handler that does nothing: it runs one at a time.
    RawCumulative,
    HandWrittenHash,
    HandWrittenMap,
    Laneway,
    RuststreamLapin,
    Beavers,
    /// No broker: a bounded channel for each lane.
    LocalChannels,
    /// No broker: Laneway's lanes.
    LocalLaneway,
    /// A durable queue: a table written by hand.
    RawSql,
    /// A durable queue: Laneway's store.
    DurableLaneway,
    /// The same, with a transaction around each handler.
    DurableLanewayTransactional,
    GraphileWorker,
    GraphileWorkerKeyed,
    Riverqueue,
    Awa,
}

/// Kind of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum QueueType {
    Classic,
    Quorum,
}

/// One run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Job {
    /// The broker, or the database of this run.
    pub(crate) url: String,
    /// The name of the queue, or what the names of its queues begin with.
    pub(crate) name: String,
    pub(crate) queue_type: QueueType,
    pub(crate) subject: Subject,
    pub(crate) shape: Shape,
    /// What it does with a durable queue, if that is what it has, and not one of a broker.
    pub(crate) durable: Option<Durable>,
}

impl Job {
    /// Its queues: a key is in the one with the number that is left of it divided by how many there are.
    pub(crate) fn queues(&self) -> Vec<String> {
        match self.subject {
            Subject::Beavers => (0..QUEUES)
                .map(|number| format!("{}-{number:02}", self.name))
                .collect(),
            Subject::LocalChannels | Subject::LocalLaneway => Vec::new(),
            _ if self.durable.is_some() => Vec::new(),
            _ => vec![self.name.clone()],
        }
    }

    /// Where poison messages go.
    pub(crate) fn parked(&self) -> String {
        format!("{}-parked", self.name)
    }

    pub(crate) fn parking_exchange(&self) -> String {
        format!("{}-dlx", self.name)
    }
}

impl Subject {
    /// The names of all, each once.
    pub(crate) fn names() -> Vec<&'static str> {
        let mut names: Vec<_> = Self::value_variants().iter().map(|it| it.name()).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::RawSequential => "raw-sequential",
            Self::RawUnordered => "raw-unordered",
            Self::RawCumulative => "raw-cumulative-64",
            Self::HandWrittenHash => "hand-written-hash",
            Self::HandWrittenMap => "hand-written-map",
            Self::Laneway | Self::LocalLaneway | Self::DurableLaneway => "laneway",
            Self::DurableLanewayTransactional => "laneway-transactional",
            Self::RuststreamLapin => "ruststream-lapin",
            Self::Beavers => "beavers",
            Self::LocalChannels => "raw-channels",
            Self::RawSql => "raw-sql",
            Self::GraphileWorker => "graphile-worker",
            Self::GraphileWorkerKeyed => "graphile-worker-keyed",
            Self::Riverqueue => "riverqueue",
            Self::Awa => "awa",
        }
    }

    /// What it is.
    pub(crate) fn description(self) -> &'static str {
        match self {
            Self::RawSequential => {
                "`lapin`, one message after the other, one awaited acknowledgement each"
            }
            Self::RawUnordered => {
                "`lapin`, a task for each message, 256 at once, one awaited acknowledgement each"
            }
            Self::RawCumulative => {
                "`lapin`, one message after the other, every 64th acknowledged with `multiple`"
            }
            Self::HandWrittenHash => "`lapin`, keys hashed to 256 serial tasks",
            Self::HandWrittenMap => "`lapin`, a map of per-key queues, 256 handlers at once",
            Self::Laneway => {
                "Laneway, `concurrency(256)`, `max_in_flight(512)`, everything else at its default"
            }
            Self::RuststreamLapin => "`ruststream-lapin`, `workers_by_key(256)`, prefetch 512",
            Self::Beavers => {
                "`beavers`, 32 ordered queues with a prefetch of 16 each (it has order per queue only)"
            }
            Self::LocalChannels => "a bounded tokio channel and a task for each of 4 lanes",
            Self::LocalLaneway => {
                "Laneway's supervisor and 4 lanes, `concurrency(512)`, `max_in_flight(512)`, fed by a source in memory"
            }
            Self::RawSql => {
                "a table of three columns, one multi-row insert for each batch (SQLite: one transaction)"
            }
            Self::DurableLaneway => {
                "Laneway, an ordered durable queue of one shard, as many lanes as handlers, everything else at its default"
            }
            Self::DurableLanewayTransactional => {
                "the same with transactional handlers and 20 connections for them"
            }
            Self::GraphileWorker => {
                "`graphile_worker`, a local queue of 100, completions in batches of 5 ms, no named queues"
            }
            Self::GraphileWorkerKeyed => "the same with a named queue for each key",
            Self::Riverqueue => "`riverqueue`, a fetch cooldown of 1 ms, one queue",
            Self::Awa => {
                "`awa`, its queue storage, one queue without deadlines, the key as ordering key"
            }
        }
    }

    /// What it does not guarantee.
    pub(crate) fn missing(self) -> &'static str {
        match self {
            Self::RawSequential | Self::RawCumulative => {
                "Order only by doing one thing at a time. No retry, no parking, no reconnecting."
            }
            Self::RawUnordered => "No order. No retry, no parking, no reconnecting.",
            Self::HandWrittenHash | Self::HandWrittenMap => {
                "Order while nothing goes wrong: no reconnecting, no drain; after a lost connection a key's \
                 messages can run again out of order or beside one another."
            }
            Self::Laneway => "Not exactly-once: what was unsettled at a crash can run again.",
            Self::RuststreamLapin => {
                "Order until a handler fails: a retry is put back into the queue, behind its successors."
            }
            Self::Beavers => {
                "No order per key beyond the order of a whole queue; a slow message holds its queue."
            }
            Self::LocalChannels => {
                "No retry, no permit that lane-mates share, no acknowledgement: a slow message holds its lane."
            }
            Self::LocalLaneway => "Nothing is durable: it is the cost of the lanes alone.",
            Self::RawSql => {
                "It is no queue: nothing is claimed, handled, retried or recognised as a copy."
            }
            Self::DurableLaneway => {
                "Not exactly-once: what was unsettled at a crash can run again."
            }
            Self::DurableLanewayTransactional => {
                "Effects outside of the handler's transaction can happen again after a crash."
            }
            Self::GraphileWorker => "No order per key.",
            Self::GraphileWorkerKeyed => {
                "One job of a key at a time, but no strict order per key: inversions are counted. A failed job \
                 lets its successors pass while it waits."
            }
            Self::Riverqueue => "No order per key.",
            Self::Awa => {
                "No order per key: jobs are claimed in the order of their queue, and run side by side."
            }
        }
    }

    /// Whether it is another library's durable queue.
    pub(crate) fn is_durable_peer(self) -> bool {
        matches!(
            self,
            Self::GraphileWorker | Self::GraphileWorkerKeyed | Self::Riverqueue | Self::Awa
        )
    }

    /// Whether it promises order per key, and is held to it.
    pub(crate) fn keeps_order(self) -> bool {
        self != Self::RawUnordered && !self.is_durable_peer()
    }

    /// Consumes everything; returns when all acknowledgements are known to be processed.
    pub(crate) async fn run(self, job: &Job, record: &Arc<Record>) -> Result<(), Error> {
        if let Some(durable) = job.durable {
            return durable::run(job, durable, record).await;
        }
        match self {
            Self::RawSequential => raw::sequential(job, record).await,
            Self::RawUnordered => raw::unordered(job, record).await,
            Self::RawCumulative => raw::cumulative(job, record).await,
            Self::HandWrittenHash => keyed::hash(job, record).await,
            Self::HandWrittenMap => keyed::map(job, record).await,
            Self::Laneway => laneway::run(job, record).await,
            Self::LocalChannels => local::channels(record).await,
            Self::LocalLaneway => local::laneway(record).await,
            #[cfg(feature = "peers")]
            Self::RuststreamLapin => peers::ruststream::run(job, record).await,
            #[cfg(feature = "peers")]
            Self::Beavers => peers::beavers::run(job, record).await,
            #[cfg(not(feature = "peers"))]
            Self::RuststreamLapin | Self::Beavers => {
                Err("built without the feature `peers`".into())
            }
            Self::RawSql
            | Self::DurableLaneway
            | Self::DurableLanewayTransactional
            | Self::GraphileWorker
            | Self::GraphileWorkerKeyed
            | Self::Riverqueue
            | Self::Awa => Err("a durable queue needs a database".into()),
        }
    }
}
