//! The address of a lane: for the endpoint's own actors, and for direct senders.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use actix::Addr;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::mail::Mail;
use super::post::Post;
use super::snapshot::{AskLane, LaneSnapshot};
use super::{Lane, ToLane};
use crate::endpoint::Endpoint;
use crate::envelope::Delivery;
use crate::key::{LaneCount, LaneIndex};
use crate::lane::machine::Ticket;
use crate::permits::Permit;

/// The one address of a lane that everybody in the endpoint shares. (Each clone of an `Addr` is
/// another sender to its mailbox; here nobody clones one.)
pub(crate) struct LaneLink {
    index: LaneIndex,
    /// Its place among the lanes of its thread.
    place: usize,
    mail: Arc<Mail>,
    addr: std::sync::OnceLock<Addr<Lane>>,
    tracks: AtomicUsize,
}

impl LaneLink {
    pub(crate) fn new(index: LaneIndex, place: usize, mail: &Arc<Mail>) -> Arc<Self> {
        Arc::new(Self {
            index,
            place,
            mail: Arc::clone(mail),
            addr: std::sync::OnceLock::new(),
            tracks: AtomicUsize::new(0),
        })
    }

    /// Connects the link to its actor, once, before anything is told.
    pub(crate) fn connect(&self, addr: Addr<Lane>) {
        // Cannot be set twice because only the supervisor does it, where it starts the lane.
        let _ = self.addr.set(addr);
    }

    pub(crate) fn index(&self) -> LaneIndex {
        self.index
    }

    /// Tells the lane something. To a lane that has stopped it says nothing.
    pub(crate) fn tell(&self, message: ToLane) {
        if self.is_connected() {
            self.mail.post(self.place, message);
        }
    }

    /// The last step of the messages' way, on the lane's own thread.
    pub(super) fn deliver(&self, messages: Vec<ToLane>) {
        if let Some(addr) = self.addr.get() {
            addr.do_send(Post(messages));
        }
    }

    /// Whether the lane can still be told anything.
    pub(crate) fn is_connected(&self) -> bool {
        self.addr.get().is_some_and(Addr::connected)
    }

    pub(crate) fn granted(&self, ticket: Ticket, permit: Permit) {
        self.tell(ToLane::Granted(ticket, permit));
    }

    pub(crate) async fn snapshot(&self) -> LaneSnapshot {
        match self.addr.get() {
            Some(addr) => addr.send(AskLane).await.unwrap_or_default(),
            None => LaneSnapshot::default(),
        }
    }

    #[cfg(test)]
    pub(crate) async fn left(&self) -> Vec<String> {
        let addr = self.addr.get().expect("it was started");
        addr.send(super::snapshot::AskLeft)
            .await
            .expect("it is there")
    }

    /// Messages that wait for the carrier, of all lanes of the thread.
    #[cfg(test)]
    pub(crate) fn posted(&self) -> usize {
        self.mail.posted()
    }

    pub(super) fn publish_load(&self, tracks: usize) {
        self.tracks.store(tracks, Ordering::Relaxed);
    }

    /// Keys with anything in the lane, a moment ago.
    pub(crate) fn tracks(&self) -> usize {
        self.tracks.load(Ordering::Relaxed)
    }
}

/// What direct senders of one lane share.
pub(crate) struct LaneGate {
    pub(crate) slots: Arc<Semaphore>,
    pub(crate) draining: Arc<AtomicBool>,
}

/// The address of one lane, for programs that send messages to lanes themselves.
///
/// The lane runs a message's handler like any other's: in order within the key, with the endpoint's
/// policy. Cheap to clone; works from any thread and runtime.
#[derive(Clone)]
pub struct LaneAddr {
    pub(crate) link: Arc<LaneLink>,
    pub(crate) gate: Arc<LaneGate>,
    pub(crate) count: LaneCount,
    pub(crate) endpoint: Arc<Endpoint>,
}

/// Why a delivery was not taken. It is handed back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The key belongs to another lane.
    #[error("the key belongs to lane {right:?}, not to this one")]
    WrongLane {
        /// The lane it belongs to.
        right: LaneIndex,
        /// The delivery.
        delivery: Box<Delivery>,
    },
    /// The endpoint drains or has stopped: nothing new starts.
    #[error("the endpoint is draining")]
    Draining(Box<Delivery>),
    /// All slots are taken (`try_send` only).
    #[error("all slots of the lane are taken")]
    Full(Box<Delivery>),
    /// The delivery has no key, so it belongs to no lane.
    #[error("the delivery has no ordering key")]
    Keyless(Box<Delivery>),
    /// The delivery came from a source; only a direct one may be sent ([`Delivery::direct`]).
    #[error("the delivery belongs to a source")]
    NotDirect(Box<Delivery>),
}

impl LaneAddr {
    /// Which lane this is.
    pub fn index(&self) -> LaneIndex {
        self.link.index()
    }

    /// Sends a delivery, waiting for one of the lane's slots (`lane_depth`). The slot is free again
    /// when the delivery has ended.
    ///
    /// From inside a handler of the same endpoint it does not wait: the slots may be taken by messages
    /// that wait for this very handler. The bound is exceeded instead.
    ///
    /// # Errors
    /// [`SendError`], with the delivery.
    ///
    /// # Cancellation
    /// Dropping the future sends nothing; the delivery is dropped.
    pub async fn send(&self, delivery: Delivery) -> Result<(), SendError> {
        let delivery = self.check(delivery)?;
        if crate::endpoint::inside(&self.endpoint) {
            return self.hand_over(delivery, None);
        }
        match Arc::clone(&self.gate.slots).acquire_owned().await {
            Ok(slot) => self.hand_over(delivery, Some(slot)),
            Err(_) => Err(SendError::Draining(Box::new(delivery))),
        }
    }

    /// Sends a delivery if a slot is free.
    ///
    /// # Errors
    /// [`SendError`], with the delivery.
    pub fn try_send(&self, delivery: Delivery) -> Result<(), SendError> {
        let delivery = self.check(delivery)?;
        match Arc::clone(&self.gate.slots).try_acquire_owned() {
            Ok(slot) => self.hand_over(delivery, Some(slot)),
            Err(tokio::sync::TryAcquireError::NoPermits) => {
                Err(SendError::Full(Box::new(delivery)))
            }
            Err(tokio::sync::TryAcquireError::Closed) => {
                Err(SendError::Draining(Box::new(delivery)))
            }
        }
    }

    fn check(&self, delivery: Delivery) -> Result<Delivery, SendError> {
        if !delivery.is_direct() {
            return Err(SendError::NotDirect(Box::new(delivery)));
        }
        let Some(key) = delivery.key() else {
            return Err(SendError::Keyless(Box::new(delivery)));
        };
        let right = LaneIndex::of(key, self.count);
        if right != self.index() {
            let delivery = Box::new(delivery);
            return Err(SendError::WrongLane { right, delivery });
        }
        Ok(delivery)
    }

    fn hand_over(
        &self,
        mut delivery: Delivery,
        slot: Option<OwnedSemaphorePermit>,
    ) -> Result<(), SendError> {
        if self.gate.draining.load(Ordering::Acquire) {
            return Err(SendError::Draining(Box::new(delivery)));
        }
        delivery.slot = slot;
        self.link.tell(ToLane::Direct(Arc::new(delivery)));
        Ok(())
    }
}

impl std::fmt::Debug for LaneAddr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LaneAddr")
            .field("endpoint", &self.endpoint.config.name)
            .field("index", &self.index())
            .finish_non_exhaustive()
    }
}
