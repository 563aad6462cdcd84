//! Publishing in order per key, pipelined across keys.
//!
//! Promises (DESIGN 4.5): of one key, one message is unconfirmed at a time; when one fails, its caller
//! has the error before anything later of that key is sent; nothing is sent twice. What was waiting
//! behind a failed message is refused ([`PublishError::EarlierFailed`]): its caller may have called
//! before it could know of the failure, and sending it now would overtake the message that the other
//! caller may send again.
//!
//! Messages without a key go out at once. Where a key's queue is chosen among several, [`Entries`] chooses.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use futures::future::BoxFuture;
use laneway_actors::port::{Destination, Outgoing, PublishError, Publisher};
use laneway_actors::{ContextPublisher, Encoding, Envelope, OrderingKey};
use tokio::sync::oneshot;

use crate::entries::{Entries, Resolved};
use crate::routing::Routes;

/// Publishes for a bus and its handlers.
pub(crate) struct BusPublisher {
    pub(crate) routes: Routes,
    entries: Entries,
    port: Arc<dyn Publisher>,
    gates: Arc<Gates>,
    closed: AtomicBool,
}

impl BusPublisher {
    pub(crate) fn new(routes: Routes, entries: Entries, port: Arc<dyn Publisher>) -> Self {
        Self {
            routes,
            entries,
            port,
            gates: Arc::default(),
            closed: AtomicBool::new(false),
        }
    }

    /// Refuses everything from now on.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Stamps the key and sends.
    pub(crate) fn send(
        &self,
        destination: Destination,
        key_header: &str,
        mut envelope: Envelope,
        key: Option<OrderingKey>,
    ) -> BoxFuture<'static, Result<(), PublishError>> {
        if self.closed.load(Ordering::Acquire) {
            return Box::pin(async { Err(PublishError::ShutDown) });
        }
        let resolved = self.resolve(destination, key_header, &mut envelope, key.as_ref());
        let Resolved { destination, gate } = match resolved {
            Ok(resolved) => resolved,
            Err(error) => return Box::pin(async move { Err(error) }),
        };
        let port = Arc::clone(&self.port);
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
        match self.routes.get(message_type) {
            Some(route) => self.send(route.destination.clone(), &route.key_header, envelope, key),
            None => {
                let error = PublishError::NoDestination(message_type.to_owned());
                Box::pin(async move { Err(error) })
            }
        }
    }

    fn encoding(&self, message_type: &'static str) -> Encoding {
        self.routes
            .get(message_type)
            .map_or(Encoding::default(), |route| route.encoding)
    }

    fn key_of(&self, message_type: &'static str, message: &dyn Any) -> Option<OrderingKey> {
        self.routes.get(message_type)?.key_of(message)
    }
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
