//! The endpoint's permits: at most `concurrency` handlers at once, whatever lane they are in.
//!
//! Free count and waiters share one lock, so that a permit is never free while somebody waits.
//! Taking a free permit sends no message; a waiter gets its permit in a message to its lane, in the
//! order in which keys became runnable. A permit is an owned value that returns when dropped, so it
//! cannot be lost: a grant that nobody can use any more is dropped and passes on.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::lane::LaneLink;
use crate::lane::machine::Ticket;

/// The permits of one endpoint.
pub(crate) struct Permits {
    state: Mutex<State>,
    total: u32,
}

struct State {
    free: u32,
    /// Taken permits with which a handler runs. The others are on their way to a lane, which may find that it
    /// does not need them any more.
    in_use: u32,
    waiters: VecDeque<(Arc<LaneLink>, Ticket)>,
}

/// Permission to run one handler.
pub(crate) struct Permit {
    permits: Arc<Permits>,
    in_use: bool,
}

impl Permit {
    fn of(permits: &Arc<Permits>) -> Self {
        Self {
            permits: Arc::clone(permits),
            in_use: false,
        }
    }

    /// A handler runs with it from now on, until it is dropped.
    pub(crate) fn use_up(&mut self) {
        if !self.in_use {
            self.in_use = true;
            self.permits.lock().in_use += 1;
        }
    }
}

impl Permits {
    pub(crate) fn new(total: NonZeroU32) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State {
                free: total.get(),
                in_use: 0,
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
        let mut state = self.lock();
        if state.free > 0 {
            state.free -= 1;
            Some(Permit::of(self))
        } else {
            state.waiters.push_back((Arc::clone(lane), ticket));
            None
        }
    }

    /// Permits that are not free: with a running handler, or on their way to a lane.
    pub(crate) fn taken(&self) -> u32 {
        self.total - self.lock().free
    }

    /// Handlers running now.
    ///
    /// Fewer than are taken: when a handler ends during a drain, its permit passes on to a lane whose key
    /// waits for it, while its own lane says that it is quiet. If that was the last one, the drain ends with the
    /// permit in the other lane's mailbox, and nothing is unfinished.
    pub(crate) fn running(&self) -> u32 {
        self.lock().in_use
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let waiter = {
            let mut state = self.permits.lock();
            if self.in_use {
                state.in_use -= 1;
            }
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
            lane.granted(ticket, Permit::of(&self.permits));
        }
    }
}
