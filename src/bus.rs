//! The handle of a running bus: publishing, looking, operating, draining.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use laneway_actors::port::{Destination, Draft, PublishError};
use laneway_actors::{
    ContextPublisher, DrainReport, Encoding, EndpointHandle, EndpointSnapshot, EndpointState,
    Envelope, Event, Events, Fingerprint, Fingerprints, HoldEnd, Message, MessageId, OrderingKey,
    header,
};
use tokio::sync::{Mutex, broadcast};

use crate::builder::BusBuilder;
use crate::host::Host;
use crate::local::Invocables;
use crate::local::durable::{HeldMessage, RunningStore};
use crate::parked::{Parked, ParkedError, ParkedPlaces};
use crate::publish::{Bound, BusPublisher};
use crate::transport::Transport;

/// Why [`Bus::run_until`] ended without being asked to.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// An endpoint is broken; the others have drained.
    #[error("endpoint `{endpoint}` failed; see its `Failed` event and the log")]
    EndpointFailed {
        /// Its name.
        endpoint: String,
    },
}

/// Held messages that are looked through at once.
const HELD_AT_ONCE: u32 = 1_000;

/// Why a hold could not be ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HoldError {
    /// The bus has no endpoint of this name.
    #[error("there is no endpoint `{0}`")]
    NoEndpoint(String),
    /// Nothing is held under this fingerprint (any more).
    #[error("no key with the fingerprint {0} is held")]
    NotHeld(Fingerprint),
    /// The store did not answer, or refused. Whether the hold has ended is unknown.
    #[error("the store cannot end holds now: {0}")]
    Store(String),
}

/// A key that is held by a durable queue.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeldKey {
    /// Its fingerprint; `None` for a message without a key.
    pub key: Option<Fingerprint>,
    /// The message at its head.
    pub message: Option<MessageId>,
    /// Attempts made.
    pub attempts: u32,
}

/// A running bus. Cheap to clone, `Send + Sync`, works from any runtime.
///
/// Dropping the last handle without [`shutdown`](Bus::shutdown) is like a crash: nothing is drained,
/// unsettled messages come again.
#[derive(Clone)]
pub struct Bus {
    pub(crate) inner: Arc<Inner>,
}

/// What all handles of a bus share.
pub(crate) struct Inner {
    pub(crate) endpoints: Vec<EndpointHandle>,
    pub(crate) publisher: Arc<BusPublisher>,
    pub(crate) store: Option<Arc<dyn RunningStore>>,
    pub(crate) invocables: Invocables,
    pub(crate) parked: ParkedPlaces,
    pub(crate) fingerprints: Fingerprints,
    pub(crate) events: Events,
    pub(crate) drain_deadline: Duration,
    pub(crate) host: Mutex<Option<Host>>,
    /// Keeps connections open until the last handle is gone.
    pub(crate) _transport: Option<Arc<dyn Transport>>,
}

/// The state of a bus at one moment.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct BusSnapshot {
    /// Its endpoints.
    pub endpoints: Vec<EndpointSnapshot>,
}

impl BusSnapshot {
    /// Whether every endpoint is healthy ([`EndpointSnapshot::is_healthy`]).
    pub fn is_healthy(&self) -> bool {
        self.endpoints.iter().all(EndpointSnapshot::is_healthy)
    }

    /// The endpoint of a name.
    pub fn endpoint(&self, name: &str) -> Option<&EndpointSnapshot> {
        self.endpoints
            .iter()
            .find(|endpoint| &*endpoint.endpoint == name)
    }
}

/// How a shutdown went.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct ShutdownReport {
    /// Per endpoint: its name, and how its drain ended.
    pub endpoints: Vec<(String, DrainReport)>,
}

impl ShutdownReport {
    /// Whether every running attempt had finished by the deadline.
    pub fn is_clean(&self) -> bool {
        self.endpoints
            .iter()
            .all(|(_, report)| report.unfinished == 0)
    }
}

impl Bus {
    /// Begins to describe a bus.
    pub fn builder() -> BusBuilder {
        BusBuilder::new()
    }

    /// Publishes a message to everywhere its type goes: to each [local queue](BusBuilder::handler) of the type, and to
    /// its [route](BusBuilder::publishes), under the key that a rule gives it. Resolves when the broker has confirmed
    /// it, and the local queues have it; handling is not waited for. A full buffered queue is waited for
    /// ([`LocalQueueBuilder::bound`](crate::LocalQueueBuilder::bound)).
    ///
    /// Where the bus has local handlers, a message that nobody handles is no error; see [`send`](Self::send).
    ///
    /// # Errors
    /// [`PublishError`]. After [`PublishError::Unknown`] the message may have been sent; Laneway never
    /// sends one again by itself. After an error no buffered queue has it.
    ///
    /// # Cancellation
    /// Dropping the future leaves it unknown whether the message is sent, where it has a route. While it waits for a
    /// buffered queue nothing is sent yet.
    pub async fn publish<T: Message>(&self, message: &T) -> Result<(), PublishError> {
        self.publish_with(message, None).await
    }

    /// Like [`publish`](Self::publish), under this key.
    ///
    /// # Errors
    /// See [`publish`](Self::publish).
    pub async fn publish_keyed<T: Message>(
        &self,
        message: &T,
        key: impl Into<OrderingKey>,
    ) -> Result<(), PublishError> {
        self.publish_with(message, Some(key.into())).await
    }

    async fn publish_with<T: Message>(
        &self,
        message: &T,
        key: Option<OrderingKey>,
    ) -> Result<(), PublishError> {
        let publisher = &self.inner.publisher;
        let envelope = Envelope::of(message, publisher.encoding(T::TYPE))
            .map_err(|error| PublishError::Encode(error.to_string()))?;
        let draft = Draft {
            message_type: T::TYPE,
            envelope,
            key: key.or_else(|| publisher.key_of(T::TYPE, message)),
        };
        publisher.publish_draft(draft, Bound::Hard).await
    }

    /// Like [`publish`](Self::publish), for a message that somebody must handle.
    ///
    /// # Errors
    /// [`PublishError::NoHandler`] where its type has neither a local handler nor a route; see
    /// [`publish`](Self::publish).
    pub async fn send<T: Message>(&self, message: &T) -> Result<(), PublishError> {
        self.handled::<T>()?;
        self.publish_with(message, None).await
    }

    /// Like [`send`](Self::send), under this key.
    ///
    /// # Errors
    /// See [`send`](Self::send).
    pub async fn send_keyed<T: Message>(
        &self,
        message: &T,
        key: impl Into<OrderingKey>,
    ) -> Result<(), PublishError> {
        self.handled::<T>()?;
        self.publish_with(message, Some(key.into())).await
    }

    fn handled<T: Message>(&self) -> Result<(), PublishError> {
        let handled = self.inner.publisher.is_handled(T::TYPE);
        let error = || PublishError::NoHandler(T::TYPE.to_owned());
        handled.then_some(()).ok_or_else(error)
    }

    /// Publishes a message, as JSON, to a queue that no route names. The key goes into the header
    /// `laneway-key`; to a sharded queue and to a consistent-hash exchange (by its name) into the header by
    /// which they are ordered, and it chooses the queue.
    ///
    /// # Errors
    /// See [`publish`](Self::publish).
    pub async fn publish_to_queue<T: Message>(
        &self,
        queue: &str,
        message: &T,
        key: Option<OrderingKey>,
    ) -> Result<(), PublishError> {
        let envelope = Envelope::of(message, Encoding::Json)
            .map_err(|error| PublishError::Encode(error.to_string()))?;
        let destination = Destination::Queue(queue.into());
        self.inner
            .publisher
            .send(destination, header::ORDERING_KEY, envelope, key)
            .await
    }

    /// The state of every endpoint now.
    pub async fn snapshot(&self) -> BusSnapshot {
        let asked = self.inner.endpoints.iter().map(EndpointHandle::snapshot);
        BusSnapshot {
            endpoints: futures::future::join_all(asked).await,
        }
    }

    /// Ends the hold of a key ([`PoisonMode::BlockKey`](crate::PoisonMode::BlockKey)): its head is parked, or
    /// runs again with its attempts counted anew, or is discarded; then its key goes on.
    ///
    /// # Errors
    /// [`HoldError`].
    pub async fn end_hold(
        &self,
        endpoint: &str,
        key: Fingerprint,
        end: HoldEnd,
    ) -> Result<(), HoldError> {
        let handle = self.endpoint(endpoint);
        let handle = handle.ok_or_else(|| HoldError::NoEndpoint(endpoint.to_owned()))?;
        if handle.end_hold(key, end).await {
            return Ok(());
        }
        if let Some(store) = self.store_of(endpoint) {
            let is_it = |held: &HeldMessage| self.fingerprint(held) == Some(key);
            let mut after = 0;
            loop {
                let page = store.held(endpoint, after, HELD_AT_ONCE).await;
                let page = page.map_err(HoldError::Store)?;
                let Some(last) = page.last() else { break };
                after = last.sequence;
                if let Some(held) = page.iter().find(|held| is_it(held)) {
                    let ended = store.end_hold(endpoint, held.sequence, end).await;
                    return match ended.map_err(HoldError::Store)? {
                        true => Ok(()),
                        false => Err(HoldError::NotHeld(key)),
                    };
                }
            }
        }
        Err(HoldError::NotHeld(key))
    }

    /// The keys that a durable queue holds ([`PoisonMode::KeepKey`](crate::PoisonMode::KeepKey)), on whatever node,
    /// the one held longest in the queue's order first; at most `limit`. Holds of other endpoints are in their
    /// [snapshots](Self::snapshot).
    ///
    /// # Errors
    /// [`HoldError`].
    pub async fn held(&self, endpoint: &str, limit: u32) -> Result<Vec<HeldKey>, HoldError> {
        if self.endpoint(endpoint).is_none() {
            return Err(HoldError::NoEndpoint(endpoint.to_owned()));
        }
        let Some(store) = self.store_of(endpoint) else {
            return Ok(Vec::new());
        };
        let held = store.held(endpoint, 0, limit).await;
        let held = held.map_err(HoldError::Store)?.into_iter();
        Ok(held
            .map(|held| HeldKey {
                key: self.fingerprint(&held),
                message: held.message,
                attempts: held.attempts,
            })
            .collect())
    }

    /// The store, if the endpoint is a durable queue.
    fn store_of(&self, endpoint: &str) -> Option<&Arc<dyn RunningStore>> {
        let durable = self.inner.publisher.is_durable(endpoint);
        self.inner.store.as_ref().filter(|_| durable)
    }

    fn fingerprint(&self, held: &HeldMessage) -> Option<Fingerprint> {
        let key = held.key.as_ref();
        key.map(|key| self.inner.fingerprints.of(key))
    }

    /// Everything that happens from now on, at every endpoint. A subscriber that falls behind by more than
    /// 1,024 events misses the oldest, and is told how many.
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.inner.events.subscribe()
    }

    /// The messages that an endpoint has parked: to list, show, discard and replay them.
    ///
    /// # Errors
    /// [`ParkedError::UnknownEndpoint`], or [`ParkedError::NoParking`] for an endpoint whose queue has
    /// no parking place.
    pub fn parked(&self, endpoint: &str) -> Result<Parked, ParkedError> {
        self.inner.parked.of(endpoint)
    }

    /// The handle of an endpoint, to send messages to its lanes directly.
    pub fn endpoint(&self, name: &str) -> Option<&EndpointHandle> {
        self.inner
            .endpoints
            .iter()
            .find(|endpoint| endpoint.name() == name)
    }

    /// Runs until `signal` resolves, then drains; see [`shutdown_signal`](crate::shutdown_signal). A second
    /// signal is not waited for: the drain ends by its deadline.
    ///
    /// # Errors
    /// When an endpoint failed for good; the others have drained then.
    pub async fn run_until(
        &self,
        signal: impl Future<Output = ()>,
    ) -> Result<ShutdownReport, RunError> {
        let failures = self.inner.endpoints.iter().map(|endpoint| {
            let mut state = endpoint.state();
            let name = endpoint.name().to_owned();
            Box::pin(async move {
                // An error means that the endpoint has stopped; how, its last state tells.
                let _ = state
                    .wait_for(|state| {
                        matches!(state, EndpointState::Failed | EndpointState::Stopped)
                    })
                    .await;
                (name, *state.borrow())
            })
        });
        let failed = async {
            let mut waiting: futures::stream::FuturesUnordered<_> = failures.collect();
            use futures::StreamExt;
            while let Some((name, state)) = waiting.next().await {
                if state == EndpointState::Failed {
                    return name;
                }
            }
            std::future::pending().await
        };
        let broken = tokio::select! {
            () = signal => None,
            name = failed => Some(name),
        };
        let report = self.shutdown(self.inner.drain_deadline).await;
        match broken {
            None => Ok(report),
            Some(endpoint) => Err(RunError::EndpointFailed { endpoint }),
        }
    }

    /// Drains every endpoint: starts nothing new, lets what runs finish until the deadline, then aborts it;
    /// settles, closes, stops. Publishing goes on until the handlers have ended. A second call waits for
    /// the first.
    pub async fn shutdown(&self, deadline: Duration) -> ShutdownReport {
        if let Some(store) = &self.inner.store {
            store.give_up_after(deadline);
        }
        let drains = self.inner.endpoints.iter().map(|endpoint| async move {
            (endpoint.name().to_owned(), endpoint.drain(deadline).await)
        });
        let endpoints = futures::future::join_all(drains).await;
        self.inner.publisher.close();
        // Held while stopping, so that a second call returns only when everything has stopped.
        let mut host = self.inner.host.lock().await;
        if let Some(mut host) = host.take() {
            host.stop().await;
            if let Some(store) = &self.inner.store {
                store.stop().await;
            }
        }
        ShutdownReport { endpoints }
    }
}

impl std::fmt::Debug for Bus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bus")
            .field("endpoints", &self.inner.endpoints)
            .finish_non_exhaustive()
    }
}
