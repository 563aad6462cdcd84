//! The ports of a durable queue: its sources, its parking, what surrounds an attempt.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::future::BoxFuture;
use futures::stream::{self, StreamExt};
use laneway_actors::port::{
    self, Ack, Attempts, DeadLetter, OpenSession, ParkError, Parking, Scope, SessionLost, Source,
    SourceError,
};
use laneway_actors::{Delivery, FailureKind, SessionState};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::engine::{Engine, Slot};
use super::link::{Claim, Link, Order};
use super::session::Session;
use crate::store::{DeadReason, Ending, Settlement, Shard, Start, StoreError};

/// A durable queue, once the store has started.
pub(super) struct Queue {
    pub(super) name: Arc<str>,
    pub(super) engine: Arc<Engine>,
}

/// What of a queue one source reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// A shard of an ordered one, alone.
    Shard(Shard),
    /// An unordered one, together with others.
    Shared,
}

/// A shard of a durable queue, or an unordered queue.
pub(crate) struct DurableSource {
    queue: Arc<str>,
    /// For logs and errors: with the shard's number where there are several.
    name: String,
    place: Place,
    slot: Arc<Slot>,
    /// Attempts that a message has.
    max_attempts: u32,
    opened_before: AtomicBool,
}

impl DurableSource {
    pub(super) fn new(
        queue: Arc<str>,
        name: String,
        place: Place,
        slot: Arc<Slot>,
        max_attempts: u32,
    ) -> Self {
        Self {
            queue,
            name,
            place,
            slot,
            max_attempts,
            opened_before: AtomicBool::new(false),
        }
    }
}

impl Source for DurableSource {
    fn name(&self) -> &str {
        &self.name
    }

    /// Its queue was declared when the store started.
    fn verify(&self) -> BoxFuture<'_, Result<(), Vec<SourceError>>> {
        Box::pin(async { Ok(()) })
    }

    /// Open at once; messages come when the lease is there.
    fn open(
        &self,
        state: Arc<SessionState>,
        credits: u16,
    ) -> BoxFuture<'_, Result<OpenSession, SourceError>> {
        Box::pin(async move {
            let engine = self.slot.engine().ok_or_else(|| SourceError::Refused {
                what: format!("the store of the queue `{}` is closed", self.queue),
                source: None,
            })?;
            let (orders, ordered) = mpsc::unbounded_channel();
            let (deliveries, mut delivered) = mpsc::unbounded_channel();
            let link = Arc::new(Link {
                state,
                lost: CancellationToken::new(),
                lease: std::sync::OnceLock::new(),
                orders,
            });
            let again = self.opened_before.swap(true, Ordering::Relaxed);
            let queue = Arc::new(Queue {
                name: Arc::clone(&self.queue),
                engine: Arc::clone(&engine),
            });
            let session = Session::new(
                queue,
                Arc::clone(&link),
                ordered,
                deliveries,
                (credits, self.max_attempts),
                again,
            );
            engine.runtime.spawn(session.run(self.place));
            Ok(OpenSession {
                deliveries: stream::poll_fn(move |cx| delivered.poll_recv(cx)).boxed(),
                control: Arc::new(Control(link)),
            })
        })
    }
}

/// The answering side.
struct Control(Arc<Link>);

impl port::Session for Control {
    fn acknowledge(&self, acks: &[Ack]) {
        self.0.tell(Order::Acknowledge(acks.to_vec()));
    }

    fn barrier(&self) -> BoxFuture<'static, Result<(), SessionLost>> {
        let link = Arc::clone(&self.0);
        Box::pin(async move { link.ask(Order::Barrier).await })
    }

    fn close(&self) -> BoxFuture<'static, ()> {
        let link = Arc::clone(&self.0);
        Box::pin(async move {
            // An error means that it has ended already.
            let _ = link.ask(Order::Close).await;
        })
    }
}

/// A session that nobody can close any more closes itself: what it has claimed would be nobody's, under a lease that is
/// renewed. After what was acknowledged before, since orders keep their order.
impl Drop for Control {
    fn drop(&mut self) {
        let (done, _) = oneshot::channel();
        self.0.tell(Order::Close(done));
    }
}

/// Moves messages to the dead letters, or keeps them in their place.
pub(crate) struct DurableParking {
    name: String,
}

impl DurableParking {
    pub(super) fn of(queue: &str) -> Arc<dyn Parking> {
        let name = format!("dead letters of {queue}");
        Arc::new(Self { name })
    }
}

impl Parking for DurableParking {
    fn name(&self) -> &str {
        &self.name
    }

    /// In one step with settling it.
    fn park(&self, letter: Arc<DeadLetter>) -> BoxFuture<'static, Result<(), ParkError>> {
        Box::pin(async move {
            let Some(claim) = Claim::of(&letter.delivery) else {
                // An embedder's own message has no row that could be moved.
                let what = "the message did not come from the durable queue";
                return Err(ParkError::Refused(what.to_owned()));
            };
            let failed = claim.past();
            let ending = match letter.place {
                port::Place::Kept(Some(after)) => Ending::Retry { after, failed },
                port::Place::Kept(None) => Ending::Hold { failed },
                _ => Ending::Dead {
                    reason: DeadReason::Poison(letter.reason),
                    detail: letter.detail.clone(),
                    failed,
                },
            };
            let sequence = claim.sequence;
            let moved = claim.link.ask(|done| Order::Move {
                tag: claim.tag,
                settlement: Settlement { sequence, ending },
                done,
            });
            match moved.await {
                Ok(Ok(())) => Ok(()),
                Err(SessionLost) | Ok(Err(StoreError::LeaseLost { .. })) => {
                    Err(ParkError::SessionEnded)
                }
                Ok(Err(error)) => Err(ParkError::Refused(error.to_string())),
            }
        })
    }
}

/// Counts attempts, and gives each a transaction where the queue is to have them.
///
/// A first attempt that its session has counted ahead begins without a word to the session, which decides with its close
/// by the same mark whether it was first ([`ahead`](super::ahead)). Every other attempt, and the first one too where
/// nothing is counted ahead, waits until the session has counted it.
pub(crate) struct DurableAttempts {
    slot: Arc<Slot>,
    transactional: bool,
}

impl DurableAttempts {
    pub(super) fn new(slot: Arc<Slot>, transactional: bool) -> Self {
        Self {
            slot,
            transactional,
        }
    }
}

impl Attempts for DurableAttempts {
    fn begin(
        &self,
        delivery: &Arc<Delivery>,
        attempt: u32,
    ) -> BoxFuture<'static, Result<Option<Arc<dyn Scope>>, SessionLost>> {
        let claim = Claim::of(delivery);
        let engine = self.slot.engine();
        let transactional = self.transactional;
        Box::pin(async move {
            let Some(claim) = claim else {
                return Ok(None);
            };
            let sequence = claim.sequence;
            if !claim.begin_counted(attempt)? {
                let start = Start { sequence, attempt };
                let link = &claim.link;
                link.ask(|done| Order::Start(start, done)).await?;
            }
            if !transactional {
                return Ok(None);
            }
            let engine = engine.ok_or(SessionLost)?;
            Ok(Some(engine.scope(Some(claim))))
        })
    }

    fn failed(&self, delivery: &Delivery, attempt: u32, kind: FailureKind, detail: &str) {
        if let Some(claim) = Claim::of(delivery) {
            claim.failed(attempt, kind, detail);
        }
    }
}
