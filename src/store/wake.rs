//! The hint that a queue has something new.
//!
//! Promises that a hint given after a look is seen by the next wait, and that any number of hints between
//! two looks are one. It does not promise that every new message comes with a hint: whoever waits also
//! looks from time to time by itself (polling is the truth).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;

/// Gives hints. Waits for nothing.
pub(crate) trait Wake: Send + Sync {
    fn wake(&self, queue: &str);
}

/// Waits for hints about one queue.
#[derive(Debug, Clone)]
pub struct Wakeup(watch::Receiver<u64>);

impl Wakeup {
    /// Resolves when there was a hint since the last time it resolved, at once if there was one already.
    /// Cancelling it forgets no hint.
    pub async fn next(&mut self) {
        if self.0.changed().await.is_err() {
            // The store is gone, and with it every hint. Whoever waits has a time-out of its own.
            std::future::pending::<()>().await;
        }
    }
}

/// Hints within this process.
#[derive(Debug, Default)]
pub(crate) struct LocalWakes(Mutex<HashMap<Arc<str>, watch::Sender<u64>>>);

impl LocalWakes {
    pub(crate) fn watch(&self, queue: &str) -> Wakeup {
        let mut queues = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = queues
            .entry(queue.into())
            .or_insert_with(|| watch::Sender::new(0));
        Wakeup(sender.subscribe())
    }

    /// A hint for every queue: after a time in which hints may have been lost.
    #[cfg(feature = "postgres")]
    pub(crate) fn wake_all(&self) {
        let queues = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for sender in queues.values() {
            sender.send_modify(|count| *count += 1);
        }
    }
}

impl Wake for LocalWakes {
    fn wake(&self, queue: &str) {
        let queues = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sender) = queues.get(queue) {
            sender.send_modify(|count| *count += 1);
        }
    }
}
