//! Whether the effects of each key came in order: cheap enough to run inside what is measured, and the
//! same for every subject.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;

/// Counts effects, and those that came after a later one of their key.
pub(crate) struct Effects {
    last: Vec<AtomicU64>,
    done: AtomicU64,
    inversions: AtomicU64,
    expected: u64,
    all: Notify,
}

impl Effects {
    pub(crate) fn new(keys: u64, expected: u64) -> Self {
        Self {
            last: (0..keys).map(|_| AtomicU64::new(0)).collect(),
            done: AtomicU64::new(0),
            inversions: AtomicU64::new(0),
            expected,
            all: Notify::new(),
        }
    }

    /// An effect of number `seq` (from 1) of a key.
    pub(crate) fn record(&self, key: u64, seq: u64) {
        let before = self.last[key as usize].fetch_max(seq, Ordering::AcqRel);
        if before >= seq {
            self.inversions.fetch_add(1, Ordering::Relaxed);
        }
        if self.done.fetch_add(1, Ordering::AcqRel) + 1 == self.expected {
            self.all.notify_one();
        }
    }

    /// Waits until every message has had its effect.
    pub(crate) async fn all(&self) {
        self.all.notified().await;
    }

    pub(crate) fn inversions(&self) -> u64 {
        self.inversions.load(Ordering::Relaxed)
    }
}
