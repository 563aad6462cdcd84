//! A transport that is nothing but a stream of prepared messages in batches of one size: what is measured on
//! it is Laneway's own path from the source to the handler and back, without any broker.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, stream};
use laneway::actors::port::{
    Ack, OpenSession, Outgoing, Parking, PublishError, Publisher, Session, SessionLost, Source,
    SourceError,
};
use laneway::actors::{Delivery, DeliveryTag, SessionState};
use laneway::transport::Transport;
use laneway::{Envelope, QueueSpec};
use tokio::sync::Notify;

/// Messages that one session takes, in batches.
#[derive(Clone)]
pub(crate) struct Batches(Arc<Feed>);

struct Feed {
    size: usize,
    messages: Mutex<VecDeque<Envelope>>,
    unsettled: Mutex<Unsettled>,
    /// Told when something was settled, or the session closed.
    changed: Notify,
}

/// The deliveries from tag `from` on: whether each is still unsettled.
#[derive(Default)]
struct Unsettled {
    from: u64,
    open: VecDeque<bool>,
    count: usize,
    closed: bool,
}

impl Batches {
    pub(crate) fn of(size: usize, messages: impl IntoIterator<Item = Envelope>) -> Self {
        Self(Arc::new(Feed {
            size,
            messages: Mutex::new(messages.into_iter().collect()),
            unsettled: Mutex::default(),
            changed: Notify::new(),
        }))
    }

    /// Waits until every message has been taken and settled.
    #[allow(dead_code, reason = "each program that shares this file uses its part")]
    pub(crate) async fn settled(&self) {
        loop {
            let changed = self.0.changed.notified();
            if lock(&self.0.messages).is_empty() && lock(&self.0.unsettled).count == 0 {
                return;
            }
            changed.await;
        }
    }
}

impl Feed {
    /// The next batch, once there are credits for a whole one. `None` when the session was closed.
    async fn next(&self, state: &Arc<SessionState>, credits: usize) -> Option<Vec<Delivery>> {
        loop {
            let changed = self.changed.notified();
            {
                let mut unsettled = lock(&self.unsettled);
                if unsettled.closed {
                    return None;
                }
                let mut messages = lock(&self.messages);
                let size = self.size.min(messages.len());
                if size > 0 && unsettled.count + size <= credits {
                    let batch = messages.drain(..size).map(|envelope| {
                        let tag = unsettled.hand_over();
                        Delivery::new(envelope, Arc::clone(state), DeliveryTag(tag))
                    });
                    return Some(batch.collect());
                }
            }
            changed.await;
        }
    }
}

impl Unsettled {
    fn hand_over(&mut self) -> u64 {
        self.open.push_back(true);
        self.count += 1;
        self.from + self.open.len() as u64 - 1
    }

    fn settle(&mut self, ack: Ack) {
        let Some(at) = ack.tag.0.checked_sub(self.from) else {
            return;
        };
        let at = at as usize;
        let first = if ack.multiple { 0 } else { at };
        for open in self.open.range_mut(first..=at) {
            self.count -= usize::from(std::mem::take(open));
        }
        while self.open.front() == Some(&false) {
            self.open.pop_front();
            self.from += 1;
        }
    }
}

impl Session for Feed {
    fn acknowledge(&self, acks: &[Ack]) {
        {
            let mut unsettled = lock(&self.unsettled);
            acks.iter().for_each(|ack| unsettled.settle(*ack));
        }
        self.changed.notify_waiters();
    }

    fn barrier(&self) -> BoxFuture<'static, Result<(), SessionLost>> {
        std::future::ready(Ok(())).boxed()
    }

    fn close(&self) -> BoxFuture<'static, ()> {
        lock(&self.unsettled).closed = true;
        self.changed.notify_waiters();
        std::future::ready(()).boxed()
    }
}

impl Source for Batches {
    fn name(&self) -> &str {
        "batches"
    }

    fn verify(&self) -> BoxFuture<'_, Result<(), Vec<SourceError>>> {
        std::future::ready(Ok(())).boxed()
    }

    fn open(
        &self,
        state: Arc<SessionState>,
        credits: u16,
    ) -> BoxFuture<'_, Result<OpenSession, SourceError>> {
        let feed = Arc::clone(&self.0);
        let control = Arc::clone(&feed);
        let deliveries = stream::unfold((feed, state), move |(feed, state)| async move {
            let batch = feed.next(&state, usize::from(credits)).await?;
            Some((Ok(batch), (feed, state)))
        });
        let deliveries = deliveries.boxed();
        std::future::ready(Ok(OpenSession {
            deliveries,
            control,
        }))
        .boxed()
    }
}

impl Publisher for Batches {
    fn publish(&self, _: Outgoing) -> BoxFuture<'static, Result<(), PublishError>> {
        let refused = PublishError::Refused("there is nothing to publish to".to_owned());
        std::future::ready(Err(refused)).boxed()
    }
}

impl Transport for Batches {
    fn source(&self, _: &QueueSpec) -> Arc<dyn Source> {
        Arc::new(self.clone())
    }

    fn parking(&self, _: &QueueSpec) -> Option<Arc<dyn Parking>> {
        None
    }

    fn publisher(&self) -> Arc<dyn Publisher> {
        Arc::new(self.clone())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
