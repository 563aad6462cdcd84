//! The endpoint's permits: at most `concurrency` handlers at once, whatever lane they are in.
//!
//! Free count and waiters share one lock, so that a permit is never free while somebody waits.
//! Taking a free permit sends no message; a waiter gets its permit in a message to its lane, in the
//! order in which keys became runnable. A permit is an owned value that returns when dropped, so it
//! cannot be lost: a grant that nobody can use any more is dropped and passes on.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};

use crate::lane::LaneLink;
use crate::lane::machine::Ticket;

/// The permits of one endpoint.
pub(crate) struct Permits {
    state: Mutex<State>,
    total: u32,
}

struct State {
    free: u32,
    waiters: VecDeque<(Arc<LaneLink>, Ticket)>,
}

/// Permission to run one handler.
pub(crate) struct Permit(Arc<Permits>);

impl Permits {
    pub(crate) fn new(total: NonZeroU32) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State {
                free: total.get(),
                waiters: VecDeque::new(),
            }),
            total: total.get(),
        })
    }

    /// A permit at once, or a place in the queue: then the lane is sent the permit with the ticket.
    pub(crate) fn take_or_wait(
        self: &Arc<Self>,
        lane: &Arc<LaneLink>,
        ticket: Ticket,
    ) -> Option<Permit> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.free > 0 {
            state.free -= 1;
            Some(Permit(Arc::clone(self)))
        } else {
            state.waiters.push_back((Arc::clone(lane), ticket));
            None
        }
    }

    /// Handlers running now.
    pub(crate) fn taken(&self) -> u32 {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.total - state.free
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let waiter = {
            let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
            // Waiters whose lane is gone are passed over here. A permit sent to such a lane would be
            // dropped and come back here one call deeper, as often as there are waiters.
            let waiter = loop {
                match state.waiters.pop_front() {
                    Some((lane, _)) if !lane.is_connected() => {}
                    waiter => break waiter,
                }
            };
            if waiter.is_none() {
                state.free += 1;
            }
            waiter
        };
        if let Some((lane, ticket)) = waiter {
            // To a lane that went just now the message is dropped, and the permit in it passes on.
            lane.granted(ticket, Permit(Arc::clone(&self.0)));
        }
    }
}
