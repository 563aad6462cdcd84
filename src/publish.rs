//! Publishing in order per key, pipelined across keys.
//!
//! Promises (DESIGN 4.5): of one key, one message is unconfirmed at a time; when one fails, its caller
//! has the error before anything later of that key is sent; nothing is sent twice. What was waiting
//! behind a failed message is refused ([`PublishError::EarlierFailed`]): its caller may have called
//! before it could know of the failure, and sending it now would overtake the message that the other
//! caller may send again.
//!
//! A message goes to the local queues of its type, to its route, or to both.
//!
//! Messages without a key go out at once. Where a key's queue is chosen among several, [`Entries`] chooses.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use futures::future::BoxFuture;
use laneway_actors::port::{Destination, Draft, Outgoing, PublishError, Publisher};
use laneway_actors::{ContextPublisher, Encoding, Envelope, OrderingKey};
use tokio::sync::oneshot;

use crate::entries::{Entries, Resolved};
use crate::local::LocalQueues;
use crate::local::address::{Addressed, Target};
use crate::routing::Routes;

/// Publishes for a bus and its handlers.
pub(crate) struct BusPublisher {
    pub(crate) routes: Routes,
    entries: Entries,
    local: LocalQueues,
    /// None where there are local queues only.
    port: Option<Arc<dyn Publisher>>,
    gates: Arc<Gates>,
    closed: AtomicBool,
}

impl BusPublisher {
    pub(crate) fn new(
        routes: Routes,
        entries: Entries,
        local: LocalQueues,
        port: Option<Arc<dyn Publisher>>,
    ) -> Self {
        Self {
            routes,
            entries,
            local,
            port,
            gates: Arc::default(),
            closed: AtomicBool::new(false),
        }
    }

    /// Refuses everything from now on.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.local.close();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// The local subscriber queues of a type, in the order of their names.
    pub(crate) fn targets(&self, message_type: &str) -> &[Target] {
        self.local.targets(message_type)
    }

    /// Whether a local queue is a durable one.
    pub(crate) fn is_durable(&self, queue: &str) -> bool {
        self.local.is_durable(queue)
    }

    /// Where a message goes. Pure.
    pub(crate) fn addressed(&self, draft: &Draft) -> Addressed {
        let route = self.routes.get(draft.message_type).is_some();
        self.local.addressed(draft, route)
    }

    /// Whether anybody is known to handle messages of a type: here, or behind a route.
    pub(crate) fn is_handled(&self, message_type: &str) -> bool {
        !self.targets(message_type).is_empty() || self.routes.get(message_type).is_some()
    }

    /// Where a message goes that is published in a transaction. Pure.
    ///
    /// # Errors
    /// [`PublishError::Refused`] for one that a transaction cannot take along.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) fn addressed_in_transaction(
        &self,
        draft: &Draft,
    ) -> Result<Addressed, PublishError> {
        let (message_type, addressed) = (draft.message_type, self.addressed(draft));
        if addressed.route {
            return Err(PublishError::Refused(format!(
                "messages of type `{message_type}` go to the transport, which a transaction cannot reach without an outbox, and that does not exist yet; publish it outside of the transaction, or keep the type in a local queue"
            )));
        }
        if !self.is_handled(message_type) && !self.local.has_handlers() {
            return Err(PublishError::NoDestination(message_type.to_owned()));
        }
        Ok(addressed)
    }

    /// Sends a message to everywhere its type goes.
    ///
    /// The places in buffered queues are taken first, and filled last, which cannot fail: so after an error no buffered
    /// queue has it. Between the durable queues, which have it all or none, and the route there is no such tie.
    pub(crate) fn publish_draft(
        &self,
        draft: Draft,
        bound: Bound,
    ) -> BoxFuture<'static, Result<(), PublishError>> {
        let fail = |error| -> BoxFuture<'static, _> { Box::pin(async move { Err(error) }) };
        if self.is_closed() {
            return fail(PublishError::ShutDown);
        }
        let message_type = draft.message_type;
        if !self.is_handled(message_type) && !self.local.has_handlers() {
            return fail(PublishError::NoDestination(message_type.to_owned()));
        }
        let Addressed {
            durable, buffered, ..
        } = self.addressed(&draft);
        let route = self.routes.get(message_type).map(|route| {
            let destination = route.destination.clone();
            self.send(destination, &route.key_header, draft.envelope, draft.key)
        });
        if durable.is_empty() && buffered.is_empty() {
            return route.unwrap_or_else(|| Box::pin(async { Ok(()) }));
        }
        let stored = match &self.local.sink {
            Some(sink) if !durable.is_empty() => Some(sink.enqueue(durable)),
            _ => None,
        };
        Box::pin(async move {
            let mut slots = Vec::new();
            for item in buffered.iter().filter(|_| bound == Bound::Hard) {
                let slot = item.queue.slot().await;
                slots.push(slot.ok_or(PublishError::ShutDown)?);
            }
            if let Some(stored) = stored {
                stored.await?;
            }
            if let Some(route) = route {
                route.await?;
            }
            LocalQueues::put(buffered, slots)
        })
    }

    /// Stamps the key and sends.
    pub(crate) fn send(
        &self,
        destination: Destination,
        key_header: &str,
        mut envelope: Envelope,
        key: Option<OrderingKey>,
    ) -> BoxFuture<'static, Result<(), PublishError>> {
        if self.is_closed() {
            return Box::pin(async { Err(PublishError::ShutDown) });
        }
        let resolved = self.resolve(destination, key_header, &mut envelope, key.as_ref());
        let Resolved { destination, gate } = match resolved {
            Ok(resolved) => resolved,
            Err(error) => return Box::pin(async move { Err(error) }),
        };
        let Some(port) = self.port.clone() else {
            let what = "not sent: the bus has no transport";
            return Box::pin(async { Err(PublishError::Refused(what.to_owned())) });
        };
        let outgoing = Outgoing {
            destination,
            envelope,
            key,
        };
        let Some(gate) = gate else {
            return Box::pin(async move { port.publish(outgoing).await });
        };
        let gates = Arc::clone(&self.gates);
        Box::pin(async move {
            let turn = gates.enter(&gate).await?;
            let result = port.publish(outgoing).await;
            match &result {
                Ok(()) => turn.pass_on(),
                // Dropped like a cancelled one: what waits behind it is refused.
                Err(_) => drop(turn),
            }
            result
        })
    }

    /// Stamps the key into the header that carries it there, and finds the queue of the key.
    fn resolve(
        &self,
        destination: Destination,
        key_header: &str,
        envelope: &mut Envelope,
        key: Option<&OrderingKey>,
    ) -> Result<Resolved, PublishError> {
        let entry = self.entries.find(&destination);
        let entry = entry.map_err(|why| PublishError::Refused(format!("not sent: {why}")))?;
        if let Some(key) = key {
            let known = entry.and_then(|entry| entry.key_header());
            envelope.set_key(known.map_or(key_header, |known| known), key);
        }
        match entry {
            Some(entry) => entry.resolve(envelope, key),
            None => Ok(Resolved {
                destination,
                gate: key.cloned(),
            }),
        }
    }
}

impl ContextPublisher for BusPublisher {
    fn publish(
        &self,
        message_type: &'static str,
        envelope: Envelope,
        key: Option<OrderingKey>,
    ) -> BoxFuture<'static, Result<(), PublishError>> {
        let draft = Draft {
            message_type,
            envelope,
            key,
        };
        // A handler that waited for a place could wait for itself.
        self.publish_draft(draft, Bound::Soft)
    }

    fn encoding(&self, message_type: &'static str) -> Encoding {
        let of_route = self.routes.get(message_type).map(|route| route.encoding);
        let of_queue = || self.local.encoding(message_type);
        of_route.or_else(of_queue).unwrap_or_default()
    }

    fn key_of(&self, message_type: &'static str, message: &dyn Any) -> Option<OrderingKey> {
        let route = self.routes.get(message_type);
        let of_route = route.and_then(|route| route.key_of(message));
        of_route.or_else(|| self.local.key_of(message_type, message))
    }
}

/// Whether a message waits for a place in a bounded queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bound {
    /// It waits: it comes from outside.
    Hard,
    /// It does not: it comes from a handler.
    Soft,
}

/// One gate per key with an unconfirmed message.
#[derive(Default)]
struct Gates {
    waiting: Mutex<HashMap<OrderingKey, VecDeque<oneshot::Sender<Turn>>>>,
}

/// The right to send the next message of a key. Dropped without [`pass_on`](Turn::pass_on), because the
/// message failed or its caller went away, it refuses everybody who waits.
struct Turn {
    gates: Arc<Gates>,
    key: Option<OrderingKey>,
}

impl Gates {
    /// Waits until no message of the key is unconfirmed. The order of the calls' first polls is kept.
    async fn enter(self: &Arc<Self>, key: &OrderingKey) -> Result<Turn, PublishError> {
        let turn = || Turn {
            gates: Arc::clone(self),
            key: Some(key.clone()),
        };
        let receiver = {
            let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            match waiting.get_mut(key) {
                None => {
                    waiting.insert(key.clone(), VecDeque::new());
                    return Ok(turn());
                }
                Some(queue) => {
                    let (sender, receiver) = oneshot::channel();
                    queue.push_back(sender);
                    receiver
                }
            }
        };
        receiver.await.map_err(|_| PublishError::EarlierFailed)
    }
}

impl Turn {
    /// The message is confirmed: the next one may go.
    fn pass_on(mut self) {
        let Some(key) = self.key.take() else {
            return;
        };
        let mut turn = Turn {
            gates: Arc::clone(&self.gates),
            key: Some(key.clone()),
        };
        loop {
            let next = {
                let mut waiting = turn
                    .gates
                    .waiting
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner);
                match waiting.get_mut(&key).and_then(VecDeque::pop_front) {
                    Some(next) => next,
                    None => {
                        waiting.remove(&key);
                        turn.key = None;
                        return;
                    }
                }
            };
            match next.send(turn) {
                Ok(()) => return,
                // That caller went away without having sent anything: the next one.
                Err(unused) => turn = unused,
            }
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(key) = self.key.take() {
            let refused = self
                .gates
                .waiting
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .remove(&key);
            // Dropping the senders, outside the lock, tells them.
            drop(refused);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    fn key() -> OrderingKey {
        "key".into()
    }

    #[tokio::test]
    async fn one_message_of_a_key_is_unconfirmed_at_a_time() {
        let (gates, key) = (Arc::new(Gates::default()), key());
        let first = gates.enter(&key).await.expect("free");
        let mut second = Box::pin(gates.enter(&key));
        let mut third = Box::pin(gates.enter(&key));
        assert!((&mut second).now_or_never().is_none());
        assert!((&mut third).now_or_never().is_none());
        assert!(
            gates
                .enter(&OrderingKey::from("other"))
                .now_or_never()
                .is_some()
        );
        first.pass_on();
        let second = second.await.expect("its turn");
        assert!((&mut third).now_or_never().is_none());
        second.pass_on();
        third.await.expect("its turn").pass_on();
        assert!(gates.enter(&key).now_or_never().is_some());
    }

    #[tokio::test]
    async fn what_waits_behind_a_failed_message_is_refused() {
        let (gates, key) = (Arc::new(Gates::default()), key());
        let first = gates.enter(&key).await.expect("free");
        let mut second = Box::pin(gates.enter(&key));
        assert!((&mut second).now_or_never().is_none());
        drop(first);
        assert!(matches!(second.await, Err(PublishError::EarlierFailed)));
        assert!(gates.enter(&key).now_or_never().is_some());
    }

    #[tokio::test]
    async fn a_caller_that_goes_away_while_waiting_does_not_hold_up_the_next() {
        let (gates, key) = (Arc::new(Gates::default()), key());
        let first = gates.enter(&key).await.expect("free");
        let mut second = Box::pin(gates.enter(&key));
        let mut third = Box::pin(gates.enter(&key));
        assert!((&mut second).now_or_never().is_none());
        assert!((&mut third).now_or_never().is_none());
        drop(second);
        first.pass_on();
        third.await.expect("its turn").pass_on();
    }

    #[tokio::test]
    async fn a_turn_given_to_a_caller_that_goes_away_refuses_the_rest() {
        let (gates, key) = (Arc::new(Gates::default()), key());
        let first = gates.enter(&key).await.expect("free");
        let mut second = Box::pin(gates.enter(&key));
        let mut third = Box::pin(gates.enter(&key));
        assert!((&mut second).now_or_never().is_none());
        assert!((&mut third).now_or_never().is_none());
        first.pass_on();
        // The turn lies in the channel; its caller never looks.
        drop(second);
        assert!(matches!(third.await, Err(PublishError::EarlierFailed)));
    }
}
