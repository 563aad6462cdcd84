//! What the actors of one endpoint share: its settings, handlers, permits, counters.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio_util::sync::CancellationToken;

use crate::config::EndpointConfig;
use crate::envelope::Delivery;
use crate::handler::{ContextPublisher, HandlerSet};
use crate::holds::Holds;
use crate::key::{Fingerprint, Fingerprints, OrderingKey};
use crate::lane::Crew;
use crate::observe::{Event, EventKind, Events};
use crate::outcome::{Outcome, PoisonReason};
use crate::permits::Permits;
use crate::port::Attempts;

/// Shared by the supervisor, the lanes, the attempts and the poison handler of one endpoint.
pub(crate) struct Endpoint {
    pub(crate) config: EndpointConfig,
    /// Name of the queue, or of all shards together.
    pub(crate) queue: Arc<str>,
    /// Names of the shards' queues.
    pub(crate) queues: Vec<Arc<str>>,
    pub(crate) handlers: HandlerSet,
    pub(crate) publisher: Option<Arc<dyn ContextPublisher>>,
    /// What the source does around each attempt.
    pub(crate) attempts: Option<Arc<dyn Attempts>>,
    pub(crate) permits: Arc<Permits>,
    pub(crate) events: Events,
    pub(crate) fingerprints: Fingerprints,
    /// Runs the handlers.
    pub(crate) crew: Arc<Crew>,
    pub(crate) counters: Counters,
    pub(crate) holds: Holds,
    /// Cancelled when a drain's deadline has passed.
    pub(crate) cancel: Arc<CancellationToken>,
}

/// A number that only grows.
#[derive(Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What happened since the start.
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) handled: Counter,
    pub(crate) parked: Counter,
    pub(crate) discarded: Counter,
    pub(crate) gaps: Counter,
    pub(crate) attempts: Counter,
    pub(crate) key_fallbacks: Counter,
    pub(crate) keyless: Counter,
    pub(crate) reconnects: Counter,
}

impl Endpoint {
    pub(crate) fn emit(&self, kind: EventKind) {
        self.events.emit(Event {
            endpoint: Arc::clone(&self.config.name),
            kind,
        });
    }

    /// Name of the queue that a delivery came from.
    pub(crate) fn queue_of(&self, delivery: &Delivery) -> &Arc<str> {
        match self.queues.get(delivery.session().shard()) {
            Some(queue) if !delivery.is_direct() => queue,
            _ => &self.queue,
        }
    }

    pub(crate) fn fingerprint(&self, key: Option<&OrderingKey>) -> Option<Fingerprint> {
        key.map(|key| self.fingerprints.of(key))
    }

    /// A handler's own text with every occurrence of the key replaced by its fingerprint.
    pub(crate) fn redact(&self, text: &str, key: Option<&OrderingKey>) -> String {
        match key {
            Some(key) => match std::str::from_utf8(key.as_bytes()) {
                Ok(value) if !value.is_empty() => {
                    text.replace(value, &self.fingerprints.of(key).to_string())
                }
                _ => text.to_owned(),
            },
            None => text.to_owned(),
        }
    }

    /// A message ended without effect: counted, logged, told to whoever subscribed.
    pub(crate) fn report_gap(
        &self,
        delivery: &Delivery,
        reason: PoisonReason,
        outcome: Outcome,
        attempts: u32,
    ) {
        self.counters.gaps.add(1);
        match outcome {
            Outcome::Parked => self.counters.parked.add(1),
            Outcome::Discarded => self.counters.discarded.add(1),
            Outcome::Handled | Outcome::Kept => {}
        }
        let key = self.fingerprint(delivery.key());
        let message = delivery.envelope().id.clone();
        tracing::error!(
            endpoint = %self.config.name,
            queue = %self.queue_of(delivery),
            key = key.map(tracing::field::display),
            message = message.as_ref().map(tracing::field::display),
            %reason,
            ?outcome,
            attempts,
            "gap: a message ended without effect"
        );
        self.emit(EventKind::Gap {
            key,
            message,
            reason,
            outcome,
            attempts,
        });
    }
}

tokio::task_local! {
    /// The endpoint whose handler runs in this task.
    static INSIDE: Arc<Endpoint>;
}

/// Runs a handler's future so that [`inside`] knows its endpoint.
pub(crate) fn scope<F: Future>(
    endpoint: &Arc<Endpoint>,
    handler: F,
) -> impl Future<Output = F::Output> + use<F> {
    INSIDE.scope(Arc::clone(endpoint), handler)
}

/// Whether the caller is a handler of this endpoint.
pub(crate) fn inside(endpoint: &Arc<Endpoint>) -> bool {
    INSIDE
        .try_with(|inside| Arc::ptr_eq(inside, endpoint))
        .unwrap_or(false)
}
