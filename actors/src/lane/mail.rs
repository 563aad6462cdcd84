//! Mail: how messages get to the lanes of one thread, many at a time.
//!
//! Lanes are woken from other threads for each message: by a permit that becomes free, by an attempt that
//! ends. With many lanes nearly every message would wake another actor across threads, and each would
//! answer the supervisor with a batch of one. So everything for the lanes of one thread goes into one
//! queue, whose carrier actor, on that thread, is woken once for whatever has gathered, and hands it on
//! locally. (With 256 lanes on two cores, 1 ms handlers and a quorum queue that took the throughput from
//! 0.86 to 1.03 of a map of per-key queues written by hand: `src/docs/architecture.md`.)
//!
//! Promises that the messages of one sender reach a lane in the order in which they were sent.
//!
//! The carrier hands each lane its part as *one* actor message: a message of its own for each letter cost
//! more than the lane's decision on it.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use actix::Supervised;
use actix::{Actor, ActorContext, Addr, ArbiterHandle, AsyncContext, Context, Handler, Message};

use super::{LaneLink, ToLane};
use crate::restart::{self, Intensity};

/// The queue in front of the lanes of one thread.
#[derive(Default)]
pub(crate) struct Mail {
    letters: Mutex<Letters>,
    carrier: OnceLock<Addr<Carrier>>,
}

/// Messages with the lanes they are for, named by their place among the lanes of the thread.
type Letters = Vec<(usize, ToLane)>;

impl Mail {
    /// Starts the carrier on the thread of the lanes, the only ones for which is posted here. Once, before anything is
    /// posted.
    pub(crate) fn start_carrier(
        self: &Arc<Self>,
        arbiter: Option<&ArbiterHandle>,
        lanes: Vec<Arc<LaneLink>>,
        intensity: Intensity,
        on_death: impl FnOnce() + Send + 'static,
    ) {
        let mail = Arc::clone(self);
        let make = move |_: &mut Context<Carrier>| Carrier {
            mail,
            batch: Letters::new(),
            parts: lanes.iter().map(|_| Vec::new()).collect(),
            lanes,
        };
        // Cannot be set twice because only the supervisor does it, where it starts the endpoint.
        let _ = self
            .carrier
            .set(restart::start(arbiter, intensity, make, on_death));
    }

    /// Posts a message for a lane. When the carrier has ended it is dropped.
    pub(super) fn post(&self, lane: usize, message: ToLane) {
        let Some(carrier) = self.carrier.get().filter(|carrier| carrier.connected()) else {
            return;
        };
        let first = {
            let mut letters = self.letters.lock().unwrap_or_else(PoisonError::into_inner);
            letters.push((lane, message));
            letters.len() == 1
        };
        if first {
            carrier.do_send(Collect);
        }
    }

    /// Messages that wait for the carrier.
    #[cfg(test)]
    pub(super) fn posted(&self) -> usize {
        let letters = self.letters.lock();
        letters.unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Ends the carrier when it has handed on everything posted before.
    pub(crate) fn close(&self) {
        if let Some(carrier) = self.carrier.get() {
            carrier.do_send(Close);
        }
    }
}

#[derive(Message)]
#[rtype(result = "()")]
struct Collect;

#[derive(Message)]
#[rtype(result = "()")]
struct Close;

/// Hands on what was posted.
struct Carrier {
    mail: Arc<Mail>,
    lanes: Vec<Arc<LaneLink>>,
    /// Emptied and used again, so that no batch allocates.
    batch: Letters,
    /// The batch by lane, each part in the order of posting.
    parts: Vec<Vec<ToLane>>,
}

impl Carrier {
    fn hand_on(&mut self) {
        {
            let mut letters = self
                .mail
                .letters
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            std::mem::swap(&mut self.batch, &mut letters);
        }
        for (lane, message) in self.batch.drain(..) {
            self.parts[lane].push(message);
        }
        for (lane, part) in self.lanes.iter().zip(&mut self.parts) {
            if !part.is_empty() {
                lane.deliver(std::mem::take(part));
            }
        }
    }
}

impl Actor for Carrier {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Context<Self>) {
        // After a restart something may lie there whose `Collect` is lost.
        ctx.notify(Collect);
    }
}

impl Supervised for Carrier {}

impl Handler<Collect> for Carrier {
    type Result = ();

    fn handle(&mut self, _: Collect, _: &mut Context<Self>) {
        self.hand_on();
    }
}

impl Handler<Close> for Carrier {
    type Result = ();

    fn handle(&mut self, _: Close, ctx: &mut Context<Self>) {
        self.hand_on();
        ctx.stop();
    }
}
