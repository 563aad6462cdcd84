//! What is measured. Every subject consumes one queue with the same prefetch, decodes each body, runs the
//! same handler, acknowledges after success.

mod laneway;
mod raw;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::order::Effects;

/// The prefetch of every subject.
const PREFETCH: u16 = 512;

/// A consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Subject {
    /// Laneway, everything at its default.
    Laneway,
    /// `lapin`, unordered, one task per message, one awaited acknowledgement each.
    RawUnordered,
    /// `lapin` with a map of per-key queues written by hand, one awaited acknowledgement each.
    HandWrittenMap,
    /// `lapin`, one message after the other, every 64th acknowledged with `multiple`. (W2 only says
    /// something here: it runs one handler at a time.)
    RawCumulative,
}

/// One run.
pub(crate) struct Job {
    pub(crate) url: String,
    pub(crate) queue: String,
    pub(crate) quorum: bool,
    pub(crate) messages: u64,
    pub(crate) keys: u64,
    pub(crate) concurrency: u32,
    pub(crate) handler: Duration,
}

/// How it went.
pub(crate) struct Run {
    pub(crate) time: Duration,
    pub(crate) inversions: u64,
}

impl Subject {
    pub(crate) const ALL: [Self; 4] = [
        Self::RawUnordered,
        Self::HandWrittenMap,
        Self::Laneway,
        Self::RawCumulative,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Laneway => "laneway",
            Self::RawUnordered => "raw-unordered",
            Self::HandWrittenMap => "hand-written-map",
            Self::RawCumulative => "raw-sequential-multiple-64",
        }
    }

    /// Whether it promises order per key. (The sequential one keeps it by doing one thing at a time.)
    pub(crate) fn keeps_order(self) -> bool {
        self != Self::RawUnordered
    }

    pub(crate) async fn run(self, job: &Job) -> Result<Run, Box<dyn std::error::Error>> {
        let effects = Arc::new(Effects::new(job.keys, job.messages));
        let start = Instant::now();
        match self {
            Self::Laneway => laneway::run(job, &effects, start).await,
            Self::RawUnordered => raw::unordered(job, &effects, start).await,
            Self::HandWrittenMap => raw::map_of_keys(job, &effects, start).await,
            Self::RawCumulative => raw::cumulative(job, &effects, start).await,
        }
    }
}

/// What every handler does.
async fn handle(time: Duration) {
    if !time.is_zero() {
        tokio::time::sleep(time).await;
    }
}
