//! The PoisonHandler actor: park, confirm, acknowledge, barrier, and only then tell the lane to release
//! its key (invariant 6).
//!
//! ```text
//! lane ── ParkingJob ──► poison ── park ──► parking place        confirmed durably, or again after a pause
//!                          │
//!                          └── acknowledge + barrier ──► supervisor ──► source
//!                                                           │
//! lane ◄── Parked{settled} ─────────────────────────────────┘
//! ```
//! Why in this order: acknowledged before the confirm, a crash loses the message. Released before the
//! barrier, the acknowledgement may never reach the broker; the message would come again, after its
//! successor had run. What remains: a crash between confirm and acknowledgement leaves a second copy
//! in the parking place.
//!
//! Jobs are tasks of their own; a panic of this actor does not touch them.

use std::sync::Arc;
use std::time::Duration;

use actix::{Actor, Addr, Context, Handler, Message, Supervised};

use crate::endpoint::Endpoint;
use crate::envelope::Delivery;
use crate::lane::machine::Ticket;
use crate::lane::{LaneLink, ToLane};
use crate::observe::EventKind;
use crate::outcome::Outcome;
use crate::policy::Backoff;
use crate::port::{DeadLetter, ParkError, Parking};
use crate::supervisor::{EndpointSupervisor, SettleWithBarrier};

/// Pauses between tries to park a message.
const PARKING_BACKOFF: Backoff = Backoff {
    first: Duration::from_millis(200),
    ceiling: Duration::from_secs(10),
    factor: 2.0,
    jitter: 0.1,
};

/// Brings one poison message to its end.
#[derive(Message)]
#[rtype(result = "()")]
pub(crate) struct ParkingJob {
    pub(crate) lane: Arc<LaneLink>,
    pub(crate) ticket: Ticket,
    pub(crate) delivery: Arc<Delivery>,
    pub(crate) outcome: Outcome,
    /// What to park; `None` if it only remains to be settled.
    pub(crate) letter: Option<Arc<DeadLetter>>,
}

/// The actor that coordinates parking for one endpoint.
pub(crate) struct PoisonHandler {
    endpoint: Arc<Endpoint>,
    parking: Option<Arc<dyn Parking>>,
    supervisor: Addr<EndpointSupervisor>,
}

impl PoisonHandler {
    pub(crate) fn new(
        endpoint: Arc<Endpoint>,
        parking: Option<Arc<dyn Parking>>,
        supervisor: Addr<EndpointSupervisor>,
    ) -> Self {
        Self {
            endpoint,
            parking,
            supervisor,
        }
    }
}

impl Actor for PoisonHandler {
    type Context = Context<Self>;
}

impl Supervised for PoisonHandler {}

impl Handler<ParkingJob> for PoisonHandler {
    type Result = ();

    fn handle(&mut self, job: ParkingJob, _: &mut Context<Self>) {
        let endpoint = Arc::clone(&self.endpoint);
        let parking = self.parking.clone();
        let supervisor = self.supervisor.clone();
        actix::spawn(async move {
            if let (Some(letter), Some(parking)) = (job.letter, parking) {
                tokio::select! {
                    parked = park_until_confirmed(&endpoint, &*parking, letter) => {
                        if !parked {
                            job.lane.tell(ToLane::ParkingEnded(job.ticket));
                            return;
                        }
                    }
                    // Given up with the drain: the message is unsettled and comes again.
                    () = endpoint.cancel.cancelled() => return,
                }
            }
            let settle = SettleWithBarrier {
                delivery: job.delivery,
                outcome: job.outcome,
            };
            // An error means that the supervisor has stopped, and with it the session.
            let settled = supervisor.send(settle).await.unwrap_or(false);
            job.lane.tell(ToLane::Parked {
                ticket: job.ticket,
                settled,
            });
        });
    }
}

/// Whether it is parked; if not, its session has ended.
async fn park_until_confirmed(
    endpoint: &Endpoint,
    parking: &dyn Parking,
    letter: Arc<DeadLetter>,
) -> bool {
    let mut tries = 0;
    while let Err(error) = parking.park(Arc::clone(&letter)).await {
        if matches!(error, ParkError::SessionEnded) {
            return false;
        }
        tries += 1;
        let retry_in = PARKING_BACKOFF.pause(tries, fastrand::f64());
        let key = endpoint.fingerprint(letter.delivery.key());
        let message = letter.delivery.envelope().id.clone();
        tracing::error!(
            endpoint = %endpoint.config.name,
            queue = %letter.queue,
            parking = parking.name(),
            key = key.map(tracing::field::display),
            message = message.as_ref().map(tracing::field::display),
            %error,
            ?retry_in,
            "parking failed; the key is held"
        );
        endpoint.emit(EventKind::ParkingFailed {
            key,
            message,
            error: error.to_string(),
            retry_in,
        });
        tokio::time::sleep(retry_in).await;
    }
    true
}
