//! Where a published message goes, as far as durable queues are concerned.

use std::any::Any;
use std::sync::Arc;
use std::time::SystemTime;

use futures::future::BoxFuture;
use laneway_actors::port::{Draft, PublishError};
use laneway_actors::{Envelope, OrderingKey};

use crate::store::NewMessage;

/// A message for one durable queue.
pub(crate) struct ToQueue {
    pub(crate) queue: Arc<str>,
    pub(crate) envelope: Envelope,
    pub(crate) key: Option<OrderingKey>,
    pub(crate) due: Option<SystemTime>,
    /// The object it was made of, to be lent to whoever claims its row here.
    pub(crate) original: Option<Box<dyn Any + Send>>,
}

impl ToQueue {
    pub(super) fn into_row(self) -> (NewMessage, Option<Box<dyn Any + Send>>) {
        let row = NewMessage {
            queue: self.queue,
            key: self.key,
            envelope: self.envelope,
            due: self.due,
        };
        (row, self.original)
    }
}

/// Something to be done after a commit: sending to queues that live in memory.
pub(crate) type AfterCommit = Box<dyn FnOnce() -> BoxFuture<'static, ()> + Send>;

/// What one published message becomes.
#[derive(Default)]
pub(crate) struct Addressed {
    pub(crate) durable: Vec<ToQueue>,
    pub(crate) after_commit: Vec<AfterCommit>,
}

/// Knows where messages go; the bus.
pub(crate) trait Addressing: Send + Sync {
    /// Where a message goes that is published in a transaction.
    ///
    /// # Errors
    /// If a transaction cannot take it along.
    fn address(&self, draft: &Draft) -> Result<Addressed, PublishError>;
}
