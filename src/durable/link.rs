//! What a delivery of a durable queue carries, and how everybody else speaks to the session it belongs to.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use laneway_actors::port::{Ack, SessionLost};
use laneway_actors::{Delivery, FailureKind, SessionState};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::ahead::First;
use super::keeper::UNASKED;
use crate::store::{FailedAttempt, Lease, Sequence, Settlement, Start, StoreError};

/// The way to one session.
pub(super) struct Link {
    /// Ended by the supervisor too, before it closes a session in an orderly way: what is to be settled and given back
    /// then still is.
    pub(super) state: Arc<SessionState>,
    /// The lease is another's: nothing of the session can be settled any more.
    pub(super) lost: CancellationToken,
    /// The right to settle, once it is there.
    pub(super) lease: OnceLock<Lease>,
    pub(super) orders: mpsc::UnboundedSender<Order>,
}

/// What a session is asked to do. One that has ended drops its orders, and with them what would answer.
pub(super) enum Order {
    /// These have ended.
    Acknowledge(Vec<Ack>),
    /// Counts an attempt that is about to start.
    Start(Start, oneshot::Sender<()>),
    /// Moves a message to the dead letters, or keeps it.
    Move {
        tag: u64,
        settlement: Settlement,
        done: oneshot::Sender<Result<(), StoreError>>,
    },
    /// The message was settled by its handler's own transaction.
    Committed(u64),
    /// Answers when everything acknowledged before is committed.
    Barrier(oneshot::Sender<()>),
    /// Gives the rest back, and answers when that is done.
    Close(oneshot::Sender<()>),
}

impl Link {
    /// The lease is known to be another's.
    pub(super) fn lose(&self) {
        self.lost.cancel();
        self.state.end();
    }

    /// Sends an order and waits for its answer.
    pub(super) async fn ask<T>(
        &self,
        order: impl FnOnce(oneshot::Sender<T>) -> Order,
    ) -> Result<T, SessionLost> {
        let (done, answer) = oneshot::channel();
        self.tell(order(done));
        tokio::select! {
            // An answer that is there already counts.
            biased;
            answer = answer => answer.map_err(|_| SessionLost),
            () = self.lost.cancelled() => Err(SessionLost),
        }
    }

    pub(super) fn tell(&self, order: Order) {
        // An error means that the session has ended: whoever waits for an answer learns it from that.
        let _ = self.orders.send(order);
    }
}

/// A message of a durable queue in the hands of the lanes.
pub(super) struct Claim {
    pub(super) link: Arc<Link>,
    pub(super) tag: u64,
    pub(super) sequence: Sequence,
    /// Its first attempt, if that was counted before it was handed out.
    first: Option<Arc<First>>,
    /// Attempts that failed here and are not in the store yet.
    past: Mutex<Vec<FailedAttempt>>,
}

impl Claim {
    pub(super) fn new(
        link: Arc<Link>,
        tag: u64,
        sequence: Sequence,
        first: Option<Arc<First>>,
    ) -> Self {
        Self {
            link,
            tag,
            sequence,
            first,
            past: Mutex::default(),
        }
    }

    /// That of a delivery; `None` if it did not come from a durable queue.
    pub(super) fn of(delivery: &Delivery) -> Option<Arc<Self>> {
        delivery.native::<Arc<Self>>().cloned()
    }

    /// Whether the attempt of this number is counted already, and may begin without a word of the database. Its count
    /// stays then. Where the lease was not renewed lately, the attempt is counted once more, which changes nothing in
    /// the store and begins nothing here until the database has answered: what a node that is cut off still begins
    /// runs beside its successor.
    ///
    /// # Errors
    /// [`SessionLost`]: the session was closed first, and takes the count back. The attempt must not start.
    pub(super) fn begin_counted(&self, attempt: u32) -> Result<bool, SessionLost> {
        self.begin_unasked(attempt, UNASKED)
    }

    /// The same, if the last proof of life is at most so old.
    fn begin_unasked(&self, attempt: u32, age: Duration) -> Result<bool, SessionLost> {
        match &self.first {
            Some(first) if attempt <= 1 => match first.begin() {
                true => Ok(self.link.state.was_proven_within(age)),
                false => Err(SessionLost),
            },
            _ => Ok(false),
        }
    }

    pub(super) fn failed(&self, attempt: u32, kind: FailureKind, detail: &str) {
        let kind = match kind {
            FailureKind::Permanent => "permanent",
            FailureKind::Panicked => "panicked",
            FailureKind::TimedOut => "timed-out",
            FailureKind::Undecodable => "undecodable",
            FailureKind::NoHandler => "no-handler",
            _ => "failed",
        };
        let past = &mut self.past.lock().unwrap_or_else(PoisonError::into_inner);
        past.push(FailedAttempt::now(attempt, kind, detail));
    }

    /// What failed so far. It stays here, in case that storing it fails.
    pub(super) fn past(&self) -> Vec<FailedAttempt> {
        let past = self.past.lock().unwrap_or_else(PoisonError::into_inner);
        past.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_fresh_proof_a_counted_attempt_asks_the_database_and_has_begun() {
        let first = Arc::new(First::default());
        let link = Link {
            state: SessionState::start(),
            lost: CancellationToken::new(),
            lease: OnceLock::new(),
            orders: mpsc::unbounded_channel().0,
        };
        let claim = Claim::new(Arc::new(link), 1, Sequence(1), Some(Arc::clone(&first)));
        let hour = Duration::from_secs(3600);
        assert!(matches!(claim.begin_unasked(1, Duration::ZERO), Ok(false)));
        assert!(!first.take_back(), "its count stays");
        assert!(matches!(claim.begin_unasked(1, hour), Ok(true)));
        assert!(matches!(claim.begin_unasked(2, hour), Ok(false)));
    }
}
