//! Which local queues a message goes to, and as what: the interface between publishing and the queues.
//!
//! Owns the map from message type to subscribers. [`LocalQueues::addressed`] is pure: it decides, and whoever
//! publishes, or commits a transaction, carries it out.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::SystemTime;

use futures::future::BoxFuture;
use laneway_actors::port::{Draft, PublishError};
use laneway_actors::{Encoding, Envelope, KeySelector, OrderingKey};

use super::buffered::BufferedQueue;
use super::settings::QueueOrder;
use super::slots::Slot;

/// The one key of a sequential queue. Of durable ones it is stored: never changed.
pub(crate) const SEQUENTIAL_KEY: &str = "sequential";

/// One subscriber queue of a message type.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) queue: Arc<str>,
    pub(crate) kind: TargetKind,
    pub(crate) order: QueueOrder,
}

/// Where a subscriber queue keeps its messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TargetKind {
    Buffered,
    Durable,
}

/// What a message is for one durable queue.
#[cfg_attr(
    not(any(feature = "postgres", feature = "sqlite")),
    expect(dead_code, reason = "a store reads it")
)]
pub(crate) struct ToQueue {
    pub(crate) queue: Arc<str>,
    pub(crate) envelope: Envelope,
    pub(crate) key: Option<OrderingKey>,
    /// Not before.
    pub(crate) due: Option<SystemTime>,
    /// The payload itself, to be lent to the claim.
    pub(crate) original: Option<Box<dyn Any + Send>>,
}

/// What a message is for one buffered queue.
pub(crate) struct ToBuffered {
    pub(crate) queue: Arc<BufferedQueue>,
    pub(crate) envelope: Envelope,
    /// Its key there: none where the queue has no order.
    pub(crate) key: Option<OrderingKey>,
}

/// Takes messages for durable queues.
pub(crate) trait DurableSink: Send + Sync {
    /// Stores all or none.
    fn enqueue(&self, batch: Vec<ToQueue>) -> BoxFuture<'static, Result<(), PublishError>>;
}

/// Where a message goes.
pub(crate) struct Addressed {
    pub(crate) durable: Vec<ToQueue>,
    /// In the order of the queues' names, which is the order in which places are waited for.
    pub(crate) buffered: Vec<ToBuffered>,
    /// Whether it goes to its route on the transport too.
    #[cfg_attr(
        not(any(feature = "postgres", feature = "sqlite")),
        allow(dead_code, reason = "a store reads it")
    )]
    pub(crate) route: bool,
}

/// The local queues of a bus, as publishers see them.
#[derive(Default)]
pub(crate) struct LocalQueues {
    by_type: HashMap<&'static str, Vec<Target>>,
    buffered: HashMap<Arc<str>, Arc<BufferedQueue>>,
    keys: HashMap<&'static str, KeySelector>,
    /// Whether any handler is a local one, also where its queue lives on the broker.
    any: bool,
    pub(crate) sink: Option<Arc<dyn DurableSink>>,
}

impl LocalQueues {
    pub(crate) fn new(keys: HashMap<&'static str, KeySelector>, any: bool) -> Self {
        Self {
            keys,
            any,
            ..Self::default()
        }
    }

    /// Adds a subscriber queue of a type; the queue itself, where it is a buffered one.
    pub(crate) fn add(
        &mut self,
        message_type: &'static str,
        target: Target,
        buffered: Option<Arc<BufferedQueue>>,
    ) {
        if let Some(queue) = buffered {
            self.buffered.insert(Arc::clone(&target.queue), queue);
        }
        let targets = self.by_type.entry(message_type).or_default();
        targets.push(target);
        targets.sort_by(|one, other| one.queue.cmp(&other.queue));
    }

    pub(crate) fn has_handlers(&self) -> bool {
        self.any
    }

    /// The subscriber queues of a type, in the order of their names.
    pub(crate) fn targets(&self, message_type: &str) -> &[Target] {
        self.by_type.get(message_type).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn is_durable(&self, queue: &str) -> bool {
        let mut targets = self.by_type.values().flatten();
        targets.any(|target| &*target.queue == queue && target.kind == TargetKind::Durable)
    }

    /// How messages of a type are encoded that have no route.
    pub(crate) fn encoding(&self, message_type: &str) -> Option<Encoding> {
        let subscribed = self.by_type.contains_key(message_type);
        subscribed.then_some(Encoding::MessagePack)
    }

    pub(crate) fn key_of(&self, message_type: &str, message: &dyn Any) -> Option<OrderingKey> {
        self.keys.get(message_type)?(message)
    }

    /// Where a message goes, and as what. A sequential queue has one key; a partitioned one takes that of the message;
    /// one without order keeps it where it stores messages, and forgets it where it does not.
    pub(crate) fn addressed(&self, draft: &Draft, route: bool) -> Addressed {
        let mut addressed = Addressed {
            durable: Vec::new(),
            buffered: Vec::new(),
            route,
        };
        for target in self.targets(draft.message_type) {
            let (queue, envelope) = (Arc::clone(&target.queue), draft.envelope.clone());
            let key = match target.order {
                QueueOrder::Sequential => Some(SEQUENTIAL_KEY.into()),
                QueueOrder::Partitioned(_) | QueueOrder::Unordered => draft.key.clone(),
            };
            match (target.kind, self.buffered.get(&queue)) {
                (TargetKind::Buffered, Some(queue)) => addressed.buffered.push(ToBuffered {
                    queue: Arc::clone(queue),
                    envelope,
                    // With a key a lane would keep an order that nobody asked for.
                    key: key.filter(|_| target.order != QueueOrder::Unordered),
                }),
                _ => addressed.durable.push(ToQueue {
                    queue,
                    envelope,
                    key,
                    due: None,
                    original: None,
                }),
            }
        }
        addressed
    }

    /// Puts messages into their buffered queues: into places that were waited for, one for each, or, where there are
    /// none, at once and beyond the bound if need be.
    ///
    /// # Errors
    /// [`PublishError::ShutDown`].
    pub(crate) fn put(batch: Vec<ToBuffered>, slots: Vec<Slot>) -> Result<(), PublishError> {
        let mut slots = slots.into_iter();
        let mut taken = true;
        for item in batch {
            taken &= item.queue.put(item.envelope, item.key, slots.next());
        }
        taken.then_some(()).ok_or(PublishError::ShutDown)
    }

    /// Closes the buffered queues; what waits in them is lost, and logged.
    pub(crate) fn close(&self) {
        for queue in self.buffered.values() {
            let lost = queue.close();
            if lost > 0 {
                tracing::warn!(
                    endpoint = %queue.name(),
                    lost,
                    "messages that waited in a buffered queue are lost with this process; `durable()` would keep them"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queues(of: &[(&str, TargetKind, QueueOrder)]) -> LocalQueues {
        let mut queues = LocalQueues::new(HashMap::new(), true);
        for (name, kind, order) in of {
            let target = Target {
                queue: (*name).into(),
                kind: *kind,
                order: *order,
            };
            let buffered = *kind == TargetKind::Buffered;
            let queue = buffered.then(|| BufferedQueue::new(name, 10));
            queues.add("paid", target, queue);
        }
        queues
    }

    fn draft(message_type: &'static str) -> Draft {
        Draft {
            message_type,
            envelope: Envelope::default(),
            key: Some("account".into()),
        }
    }

    #[test]
    fn each_subscriber_gets_the_message_under_the_key_that_its_order_needs() {
        use QueueOrder::{Partitioned, Sequential, Unordered};
        use TargetKind::{Buffered, Durable};
        let queues = queues(&[
            ("f", Durable, Unordered),
            ("e", Durable, Partitioned(2)),
            ("d", Durable, Sequential),
            ("c", Buffered, Unordered),
            ("b", Buffered, Partitioned(2)),
            ("a", Buffered, Sequential),
        ]);
        let (own, one) = (Some("account".into()), Some(SEQUENTIAL_KEY.into()));
        let addressed = queues.addressed(&draft("paid"), true);
        let durable = addressed.durable.into_iter();
        let durable: Vec<_> = durable.map(|to| (to.queue.to_string(), to.key)).collect();
        let expected = [("d", one.clone()), ("e", own.clone()), ("f", own.clone())];
        assert_eq!(durable, expected.map(|(name, key)| (name.to_owned(), key)));
        let buffered = addressed.buffered.into_iter();
        let buffered: Vec<_> = buffered
            .map(|to| (to.queue.name().to_string(), to.key))
            .collect();
        let expected = [("a", one), ("b", own), ("c", None)];
        assert_eq!(buffered, expected.map(|(name, key)| (name.to_owned(), key)));
        assert!(addressed.route);
    }

    /// The fields of everything that is logged.
    struct Collector(Arc<std::sync::Mutex<String>>);

    impl tracing::field::Visit for Collector {
        fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
            let mut output = self.0.lock().expect("no panic");
            output.push_str(&format!("{}={value:?} ", field.name()));
        }
    }

    impl tracing::Subscriber for Collector {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }
        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
        fn event(&self, event: &tracing::Event<'_>) {
            event.record(&mut Collector(Arc::clone(&self.0)));
        }
        fn enter(&self, _: &tracing::span::Id) {}
        fn exit(&self, _: &tracing::span::Id) {}
    }

    #[test]
    fn what_is_lost_at_a_shutdown_is_logged_once_with_its_number() {
        let (name, order) = ("mail", QueueOrder::Unordered);
        let queues = queues(&[
            (name, TargetKind::Buffered, order),
            ("b", TargetKind::Buffered, order),
        ]);
        for _ in 0..3 {
            let mut addressed = queues.addressed(&draft("paid"), false).buffered;
            addressed.retain(|to| **to.queue.name() == *name);
            LocalQueues::put(addressed, Vec::new()).expect("open");
        }
        let output = Arc::default();
        tracing::subscriber::with_default(Collector(Arc::clone(&output)), || {
            queues.close();
            queues.close();
        });
        let output = output.lock().expect("no panic");
        assert_eq!(output.matches("lost=3").count(), 1, "{output}");
        assert_eq!(output.matches("endpoint=mail").count(), 1, "{output}");
        assert_eq!(
            output.matches("lost=").count(),
            1,
            "only what lost something: {output}"
        );
        let closed = LocalQueues::put(queues.addressed(&draft("paid"), false).buffered, Vec::new());
        assert!(matches!(closed, Err(PublishError::ShutDown)));
    }

    #[test]
    fn a_type_without_subscribers_goes_nowhere() {
        let addressed = queues(&[]).addressed(&draft("other"), false);
        assert!(addressed.durable.is_empty() && addressed.buffered.is_empty());
        assert!(!addressed.route);
    }
}
