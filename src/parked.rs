//! Coming back: the parked messages of an endpoint, listed, shown, discarded and replayed.
//!
//! Owns [`Parked`], the operator's handle ([`Bus::parked`](crate::Bus::parked)). Promises: looking
//! removes nothing and changes no order; a replay publishes the message to the queue it came from and
//! handles nothing itself; the parked copy is acknowledged only when the broker has confirmed that
//! publish; several are replayed in the order of parking, each after the one before it is confirmed.
//! Shows no key, and no body or header unless one message is asked for.
//!
//! Every call is a *look*: a session on the parking queue that holds messages without acknowledging
//! them. Two at a time would share the messages out between them, and each would see holes. So
//! there is one at a time: a second one gets [`ParkedError::InUse`].

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures::{FutureExt as _, StreamExt as _};
use laneway_actors::port::{Ack, OpenSession, ParkedMessages, PublishError, SourceError};
use laneway_actors::{
    Delivery, Envelope, Fingerprints, HeaderValue, MessageId, OrderingKey, SessionState, header,
};
use tokio::sync::{Mutex, OwnedMutexGuard};

use crate::topology::QueueSpec;
use crate::transport::{Transport, provenance};

/// How long messages that are there may take to arrive, or to be back in the queue.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why something could not be done with parked messages.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ParkedError {
    /// The bus has no endpoint of this name.
    #[error("the bus has no endpoint `{endpoint}`")]
    UnknownEndpoint {
        /// The name.
        endpoint: String,
    },
    /// The endpoint's queue has no parking place, or its transport cannot look into one.
    #[error("endpoint `{endpoint}` has no parking place: name one with `parking(exchange, queue)`")]
    NoParking {
        /// The endpoint.
        endpoint: String,
    },
    /// Somebody else reads the parking queue: another operator, or an endpoint that consumes it.
    /// Nothing was changed.
    #[error(
        "parking queue `{queue}` is in use: another operator looks at it, or an endpoint consumes it; try again when they have finished"
    )]
    InUse {
        /// The parking queue.
        queue: String,
    },
    /// None of the messages that were looked at is this one.
    #[error(
        "`{message}` is not among the first {} messages in the parking queue",
        Parked::LIMIT
    )]
    NotFound {
        /// What was asked for.
        message: String,
    },
    /// Several copies have this message id: name one by its [`ParkedId`].
    #[error(
        "{copies} parked messages have the id `{message}`: name one by its full id in the list"
    )]
    Ambiguous {
        /// The message id.
        message: String,
        /// How many.
        copies: usize,
    },
    /// It was not parked from this endpoint's queue, so it is not replayed there.
    #[error(
        "`{message}` was not parked from this endpoint's queue; it can be shown and discarded, not replayed"
    )]
    NotOurs {
        /// The message.
        message: ParkedId,
    },
    /// The parking queue cannot be reached, or refuses.
    #[error("the parking queue cannot be read: {0}")]
    Unavailable(#[from] SourceError),
    /// The connection was lost while looking. Nothing was changed.
    #[error("the session on parking queue `{queue}` was lost; nothing was changed by it")]
    Lost {
        /// The parking queue.
        queue: String,
    },
    /// It is not known to be published, and stays parked. After [`PublishError::Unknown`] it may
    /// be in both queues.
    #[error("`{message}` stays parked: {source}")]
    NotReplayed {
        /// The message.
        message: ParkedId,
        /// Why.
        source: PublishError,
    },
    /// It was published, and the connection was lost before its parked copy was known to be removed:
    /// it may be in both queues.
    #[error(
        "`{message}` was replayed, but its parked copy may still be there: the connection was lost"
    )]
    MayBeInBoth {
        /// The message.
        message: ParkedId,
    },
    /// The connection was lost before the discarded message was known to be removed.
    #[error("whether `{message}` was discarded is unknown: the connection was lost")]
    DiscardUnknown {
        /// The message.
        message: ParkedId,
    },
}

/// Why [`Parked::replay_all`] stopped. What was not replayed is still parked, in its order.
#[derive(Debug, thiserror::Error)]
#[error("stopped after {replayed} replayed message(s): {source}")]
#[non_exhaustive]
pub struct ReplayError {
    /// How many were replayed and are no longer parked.
    pub replayed: u64,
    /// What went wrong with the next one.
    pub source: ParkedError,
}

/// Names one parked message: `<message id>~<fingerprint>`, with `#2`, `#3` behind it for further
/// equal copies, in the order of parking.
///
/// The fingerprint, under the bus's fingerprint secret, is of body, replay number, queue of origin and
/// time of parking. It tells apart messages that were given the same id and copies that were parked
/// apart, and is all there is for a message without an id. Give
/// the bus a [`fingerprint_secret`](crate::BusBuilder::fingerprint_secret) for ids that are the same in
/// every process.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ParkedId(Arc<str>);

impl AsRef<str> for ParkedId {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ParkedId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Where a message in the parking queue came from.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ParkedOrigin {
    /// The endpoint's own queue: it can be replayed.
    Ours,
    /// Another queue that shares the parking place, by its name.
    OtherQueue(String),
    /// Not parked by Laneway: it says neither why it is there nor where it came from.
    Foreign,
}

/// One parked message in a list: everything but headers and body.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ParkedEntry {
    /// What names it in the other calls.
    pub id: ParkedId,
    /// Its message id, if it has one. Copies of one message have the same.
    pub message_id: Option<MessageId>,
    /// Its type.
    pub message_type: Option<Arc<str>>,
    /// Where it came from.
    pub origin: ParkedOrigin,
    /// The endpoint that parked it.
    pub endpoint: Option<String>,
    /// Fingerprint of its key, as the process that parked it showed it in its log and events.
    pub key: Option<String>,
    /// Why, as the text of a [`PoisonReason`](crate::PoisonReason).
    pub reason: Option<String>,
    /// Attempts made; one that could call no handler counts.
    pub attempts: Option<u32>,
    /// How often it had been replayed before.
    pub replays: u32,
    /// When it was given up, by the clock of the machine that did.
    pub parked_at: Option<SystemTime>,
    /// Length of the body.
    pub body_bytes: usize,
    /// How often a quorum queue has taken it back, if it says so. **Each look adds one.**
    pub given_back: Option<u64>,
}

/// The first messages of a parking queue, in the order of parking.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ParkedList {
    /// The messages.
    pub messages: Vec<ParkedEntry>,
    /// Whether there are more than the [`LIMIT`](Parked::LIMIT).
    pub more: bool,
}

/// One parked message with everything it has. Its `Debug` form shows neither body nor header values.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ParkedMessage {
    /// What the list says of it.
    pub entry: ParkedEntry,
    /// Headers and body **may hold keys**.
    pub envelope: Envelope,
}

/// How [`Parked::replay_all`] went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Replayed {
    /// Published, and no longer parked.
    pub replayed: u64,
    /// Still parked, because they were not parked from this endpoint's queue.
    pub skipped: u64,
    /// Not reached: the skipped ones used up the [`LIMIT`](Parked::LIMIT).
    pub left: u64,
}

/// The parking places of a bus, by endpoint.
pub(crate) struct ParkedPlaces {
    fingerprints: Fingerprints,
    places: HashMap<Arc<str>, Option<Place>>,
}

#[derive(Clone)]
struct Place {
    /// The endpoint's queues, all of which park here.
    queues: Vec<Arc<str>>,
    port: Arc<dyn ParkedMessages>,
    /// One look at a time, also among endpoints with the same parking queue.
    one: Arc<Mutex<()>>,
}

impl Place {
    /// Which of the endpoint's queues a message was parked from.
    fn queue_of(&self, delivery: &Delivery) -> Option<&Arc<str>> {
        let headers = &delivery.envelope().headers;
        headers.text(provenance::REASON)?;
        let origin = headers.text(provenance::QUEUE)?;
        self.queues.iter().find(|queue| ***queue == *origin)
    }
}

impl ParkedPlaces {
    pub(crate) fn new(fingerprints: Fingerprints) -> Self {
        Self {
            fingerprints,
            places: HashMap::new(),
        }
    }

    /// Adds an endpoint. Its queues have the same parking place.
    pub(crate) fn add(&mut self, endpoint: &str, queues: &[QueueSpec], transport: &dyn Transport) {
        let port = queues.first().and_then(|queue| transport.parked(queue));
        let place = port.map(|port| {
            let shared = self.places.values().flatten();
            let same = shared.filter(|place| place.port.name() == port.name());
            let one = same.map(|place| Arc::clone(&place.one)).next();
            Place {
                queues: queues
                    .iter()
                    .map(|queue| queue.name.as_str().into())
                    .collect(),
                one: one.unwrap_or_default(),
                port,
            }
        });
        self.places.insert(endpoint.into(), place);
    }

    /// Adds an endpoint whose queue keeps no poison messages.
    pub(crate) fn add_without(&mut self, endpoint: &str) {
        self.places.insert(endpoint.into(), None);
    }

    pub(crate) fn of(&self, endpoint: &str) -> Result<Parked, ParkedError> {
        let Some((name, place)) = self.places.get_key_value(endpoint) else {
            return Err(ParkedError::UnknownEndpoint {
                endpoint: endpoint.to_owned(),
            });
        };
        let place = place.clone().ok_or_else(|| ParkedError::NoParking {
            endpoint: endpoint.to_owned(),
        })?;
        Ok(Parked {
            endpoint: Arc::clone(name),
            place,
            fingerprints: self.fingerprints.clone(),
        })
    }
}

/// The parked messages of an endpoint. Cheap to clone.
///
/// A message is named by its [`ParkedId`], or by its message id where only one copy has that.
///
/// # Cancellation
/// Dropping a future of this handle gives back what it held. A replay that is dropped may have
/// published the message whose parked copy stays: it is in both queues then.
#[derive(Clone)]
pub struct Parked {
    endpoint: Arc<str>,
    place: Place,
    fingerprints: Fingerprints,
}

impl Parked {
    /// How many messages are looked at: the first 1,000. A call holds at most that many in memory.
    ///
    /// A constant and not a setting: a quorum queue puts what is given back *behind* what was given
    /// back before. A look that held fewer than an earlier one would leave the rest of those in
    /// front, and change the order.
    pub const LIMIT: u16 = 1_000;

    /// Name of the parking queue.
    pub fn queue(&self) -> &str {
        self.place.port.name()
    }

    /// The first messages in the order of parking, copies and foreign messages included. Removes none.
    ///
    /// # Errors
    /// [`ParkedError::InUse`], [`Unavailable`](ParkedError::Unavailable), [`Lost`](ParkedError::Lost).
    pub async fn list(&self) -> Result<ParkedList, ParkedError> {
        let mut look = self.look().await?;
        let found = self.entries(&mut look).await;
        let more = look.ready > 0;
        look.close().await;
        let messages = found?.into_iter().map(|(entry, _)| entry).collect();
        Ok(ParkedList { messages, more })
    }

    /// One message with headers and body. Removes nothing.
    ///
    /// # Errors
    /// As [`list`](Self::list), and [`NotFound`](ParkedError::NotFound) or
    /// [`Ambiguous`](ParkedError::Ambiguous).
    pub async fn show(&self, message: impl AsRef<str>) -> Result<ParkedMessage, ParkedError> {
        let mut look = self.look().await?;
        let found = self.find(&mut look, message.as_ref()).await;
        look.close().await;
        found.map(|(entry, delivery)| ParkedMessage {
            entry,
            envelope: delivery.envelope().clone(),
        })
    }

    /// Removes this one message for good, and no other copy of it.
    ///
    /// # Errors
    /// As [`show`](Self::show), and [`DiscardUnknown`](ParkedError::DiscardUnknown).
    pub async fn discard(&self, message: impl AsRef<str>) -> Result<ParkedEntry, ParkedError> {
        let mut look = self.look().await?;
        let result = async {
            let (entry, delivery) = self.find(&mut look, message.as_ref()).await?;
            if !look.remove(&delivery).await {
                return Err(ParkedError::DiscardUnknown { message: entry.id });
            }
            self.log(&entry, "a parked message was discarded");
            Ok(entry)
        }
        .await;
        look.close().await;
        result
    }

    /// Publishes one message to the queue it came from, where it is handled behind what is there, and
    /// removes its parked copy. Earlier messages of its key that are parked too are overtaken.
    ///
    /// # Errors
    /// As [`show`](Self::show), and [`NotOurs`](ParkedError::NotOurs),
    /// [`NotReplayed`](ParkedError::NotReplayed), [`MayBeInBoth`](ParkedError::MayBeInBoth).
    pub async fn replay(&self, message: impl AsRef<str>) -> Result<ParkedEntry, ParkedError> {
        let mut look = self.look().await?;
        let result = async {
            let (entry, delivery) = self.find(&mut look, message.as_ref()).await?;
            self.send_back(&mut look, &entry, &delivery).await?;
            Ok(entry)
        }
        .await;
        look.close().await;
        result
    }

    /// Replays every message of this endpoint's queue that is parked now, in the order of parking, which
    /// is the order of each key; each is confirmed before the next is sent. What is parked meanwhile,
    /// also a replayed message that failed again, stays.
    ///
    /// # Errors
    /// At the first failure, with how many were replayed before it; the rest stays parked, in order.
    pub async fn replay_all(&self) -> Result<Replayed, ReplayError> {
        let mut so_far = Replayed::default();
        match self.replay_each(&mut so_far).await {
            Ok(()) => Ok(so_far),
            Err(source) => Err(ReplayError {
                replayed: so_far.replayed,
                source,
            }),
        }
    }

    async fn replay_each(&self, so_far: &mut Replayed) -> Result<(), ParkedError> {
        let mut look = self.look().await?;
        let result = self.replay_from(&mut look, so_far).await;
        look.close().await;
        result
    }

    async fn replay_from(&self, look: &mut Look, so_far: &mut Replayed) -> Result<(), ParkedError> {
        let mut names = Names::new(self);
        while so_far.replayed + so_far.skipped < look.expected {
            let batch = look.next().await?;
            if batch.is_empty() {
                break;
            }
            for delivery in batch {
                if so_far.replayed + so_far.skipped == look.expected {
                    return Ok(());
                }
                let entry = names.entry(&delivery);
                if entry.origin == ParkedOrigin::Ours {
                    self.send_back(look, &entry, &delivery).await?;
                    so_far.replayed += 1;
                } else {
                    so_far.skipped += 1;
                }
            }
        }
        so_far.left = look.expected - so_far.replayed - so_far.skipped;
        Ok(())
    }

    /// Publishes, and only when that is confirmed removes the parked copy.
    async fn send_back(
        &self,
        look: &mut Look,
        entry: &ParkedEntry,
        delivery: &Arc<Delivery>,
    ) -> Result<(), ParkedError> {
        let Some(queue) = self.place.queue_of(delivery).map(Arc::clone) else {
            return Err(ParkedError::NotOurs {
                message: entry.id.clone(),
            });
        };
        if look.state.has_ended() {
            // Its parked copy could not be removed, so it would only be doubled.
            return Err(look.lost());
        }
        let replay = i64::from(entry.replays) + 1;
        let copy = Arc::clone(delivery);
        let sent = self.place.port.send_back(copy, queue, replay).await;
        sent.map_err(|source| ParkedError::NotReplayed {
            message: entry.id.clone(),
            source,
        })?;
        if !look.remove(delivery).await {
            return Err(ParkedError::MayBeInBoth {
                message: entry.id.clone(),
            });
        }
        self.log(entry, "a parked message was replayed");
        Ok(())
    }

    fn log(&self, entry: &ParkedEntry, what: &str) {
        tracing::info!(
            endpoint = %self.endpoint,
            parking = self.queue(),
            key = entry.key,
            message = %entry.id,
            "{what}"
        );
    }

    /// Everything within the limit.
    async fn entries(
        &self,
        look: &mut Look,
    ) -> Result<Vec<(ParkedEntry, Arc<Delivery>)>, ParkedError> {
        let mut names = Names::new(self);
        let mut all = Vec::new();
        loop {
            let batch = look.next().await?;
            if batch.is_empty() {
                return Ok(all);
            }
            all.extend(batch.into_iter().map(|one| (names.entry(&one), one)));
        }
    }

    async fn find(
        &self,
        look: &mut Look,
        message: &str,
    ) -> Result<(ParkedEntry, Arc<Delivery>), ParkedError> {
        let mut all = self.entries(look).await?;
        if let Some(index) = all
            .iter()
            .position(|(entry, _)| entry.id.as_ref() == message)
        {
            return Ok(all.swap_remove(index));
        }
        all.retain(|(entry, _)| {
            let id = entry.message_id.as_ref();
            id.is_some_and(|id| id.as_str() == message)
        });
        let message = message.to_owned();
        let copies = all.len();
        match all.pop() {
            Some(found) if copies == 1 => Ok(found),
            Some(_) => Err(ParkedError::Ambiguous { message, copies }),
            None => Err(ParkedError::NotFound { message }),
        }
    }

    fn in_use(&self) -> ParkedError {
        ParkedError::InUse {
            queue: self.queue().to_owned(),
        }
    }

    async fn look(&self) -> Result<Look, ParkedError> {
        let one = Arc::clone(&self.place.one).try_lock_owned();
        let one = one.map_err(|_| self.in_use())?;
        let port = Arc::clone(&self.place.port);
        let count = port.count().await?;
        if count.sessions > 0 {
            return Err(self.in_use());
        }
        let state = SessionState::start();
        let session = port.open(Arc::clone(&state), Self::LIMIT).await?;
        Ok(Look {
            port,
            state,
            session,
            expected: u64::from(count.ready),
            ready: 0,
            received: 0,
            removed: 0,
            _one: one,
        })
    }
}

impl fmt::Debug for Parked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parked")
            .field("endpoint", &self.endpoint)
            .field("queue", &self.queue())
            .finish_non_exhaustive()
    }
}

/// A session on the parking queue. Dropping it gives everything back that was not removed.
struct Look {
    port: Arc<dyn ParkedMessages>,
    state: Arc<SessionState>,
    session: OpenSession,
    /// How many were there when it began.
    expected: u64,
    /// How many were left in the queue when it was last asked.
    ready: u32,
    received: u64,
    removed: u64,
    _one: OwnedMutexGuard<()>,
}

impl Look {
    /// The next messages, in order; empty at the end of the queue, or when the limit is reached.
    async fn next(&mut self) -> Result<Vec<Arc<Delivery>>, ParkedError> {
        let patience = Instant::now() + PATIENCE;
        loop {
            let count = self.port.count().await?;
            if count.sessions > 1 {
                return Err(ParkedError::InUse {
                    queue: self.port.name().to_owned(),
                });
            }
            self.ready = count.ready;
            // Behind everything that the queue had sent when it was counted.
            let fenced = self.session.control.barrier().await;
            fenced.map_err(|_| self.lost())?;
            let mut batch = Vec::new();
            loop {
                match self.session.deliveries.next().now_or_never() {
                    Some(Some(Ok(more))) => batch.extend(more.into_iter().map(Arc::new)),
                    Some(Some(Err(_)) | None) => return Err(self.lost()),
                    None => break,
                }
            }
            self.received += batch.len() as u64;
            let full = self.received - self.removed >= u64::from(Parked::LIMIT);
            let end = count.ready == 0 && self.received >= self.expected;
            // Each turn is two round trips to the broker, so this does not spin. Messages that do
            // not come at all were taken by somebody else, or have expired.
            if !batch.is_empty() || full || end || Instant::now() > patience {
                return Ok(batch);
            }
        }
    }

    /// Acknowledges one message; whether that is known to be processed.
    async fn remove(&mut self, delivery: &Delivery) -> bool {
        self.session.control.acknowledge(&[Ack {
            tag: delivery.tag(),
            multiple: false,
        }]);
        let removed = self.session.control.barrier().await.is_ok();
        self.removed += u64::from(removed);
        removed
    }

    fn lost(&self) -> ParkedError {
        ParkedError::Lost {
            queue: self.port.name().to_owned(),
        }
    }

    /// Gives everything back, and waits until it is: the next look shall see it.
    async fn close(self) {
        let lost = self.state.has_ended();
        self.session.control.close().await;
        let kept = self.received - self.removed;
        let patience = Instant::now() + PATIENCE;
        while !lost && Instant::now() < patience {
            match self.port.count().await {
                Ok(count) if count.sessions > 0 || u64::from(count.ready) < kept => {}
                // An error: who looks next is told.
                _ => return,
            }
        }
    }
}

/// Gives names to messages, in the order of parking.
struct Names<'a> {
    parked: &'a Parked,
    seen: HashMap<String, u32>,
}

impl<'a> Names<'a> {
    fn new(parked: &'a Parked) -> Self {
        Self {
            parked,
            seen: HashMap::new(),
        }
    }

    fn entry(&mut self, delivery: &Delivery) -> ParkedEntry {
        let envelope = delivery.envelope();
        let headers = &envelope.headers;
        let text = |name: &str| headers.text(name).map(str::to_owned);
        let number = |name: &str| match headers.get(name) {
            Some(HeaderValue::Integer(number)) => u64::try_from(*number).ok(),
            _ => None,
        };
        let small = |name: &str| number(name).and_then(|number| u32::try_from(number).ok());
        let replays = small(header::REPLAY).unwrap_or(0);
        let reason = text(provenance::REASON);
        let origin = match text(provenance::QUEUE) {
            _ if self.parked.place.queue_of(delivery).is_some() => ParkedOrigin::Ours,
            Some(queue) if reason.is_some() => ParkedOrigin::OtherQueue(queue),
            _ => ParkedOrigin::Foreign,
        };
        ParkedEntry {
            id: self.name(envelope, replays),
            message_id: envelope.id.clone(),
            message_type: envelope.message_type.clone(),
            origin,
            endpoint: text(provenance::ENDPOINT),
            // Only what looks like one: anybody can write headers.
            key: text(provenance::FINGERPRINT).filter(|shown| {
                shown.len() == 16 && shown.bytes().all(|byte| byte.is_ascii_hexdigit())
            }),
            reason,
            attempts: small(provenance::ATTEMPTS),
            replays,
            parked_at: number(provenance::PARKED_AT)
                .and_then(|millis| UNIX_EPOCH.checked_add(Duration::from_millis(millis))),
            body_bytes: envelope.body.len(),
            given_back: number("x-delivery-count"),
        }
    }

    fn name(&mut self, envelope: &Envelope, replays: u32) -> ParkedId {
        let mut content = envelope.body.to_vec();
        content.extend(replays.to_le_bytes());
        // Of copies that were parked apart each keeps its name when another one goes.
        for name in [provenance::QUEUE, provenance::PARKED_AT] {
            match envelope.headers.get(name) {
                Some(HeaderValue::Text(text)) => content.extend(text.as_bytes()),
                Some(HeaderValue::Integer(number)) => content.extend(number.to_le_bytes()),
                _ => {}
            }
        }
        let fingerprint = self.parked.fingerprints.of(&OrderingKey::new(content));
        let id = envelope.id.as_ref().map_or("", MessageId::as_str);
        let name = format!("{id}~{fingerprint}");
        let copy = self.seen.entry(name.clone()).or_default();
        *copy += 1;
        ParkedId(match copy {
            1 => name.into(),
            number => format!("{name}#{number}").into(),
        })
    }
}
