//! Outbox: how what ended in the lanes of one thread gets to the supervisor, much at a time.
//!
//! The way back of [`Mail`](super::Mail). A message of each lane for each of its passes woke the supervisor for
//! one or two outcomes; now the lanes of a thread put them into one queue, and only who finds it empty sends a
//! message, on which the supervisor collects whatever has gathered.
//!
//! What the order of messages to the supervisor promised still holds: *what a lane has told as ended is settled
//! before anything that the lane sends afterwards is looked at* (that it is quiet, above all: then its session is
//! acknowledged and closed). Either the queue was empty: then the message that has it collected was sent first, by
//! this lane. Or another lane had found it empty, and sent its message before this lane could run, because both
//! run on one thread. Outcomes can only be seen *earlier* than before, with those of another lane of the thread;
//! lanes share no key, and the order of one lane's outcomes stays.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use actix::Addr;

use crate::supervisor::{EndpointSupervisor, FromLane, Settled};

/// The queue behind the lanes of one thread.
#[derive(Default)]
pub(crate) struct Outbox(Mutex<VecDeque<Settled>>);

impl Outbox {
    /// Puts in what ended, in order, and leaves `settled` empty. Only from the lanes' own thread.
    pub(super) fn put(
        self: &Arc<Self>,
        settled: &mut Vec<Settled>,
        supervisor: &Addr<EndpointSupervisor>,
    ) {
        let first = {
            let mut queue = self.lock();
            let first = queue.is_empty();
            queue.extend(settled.drain(..));
            first
        };
        if first {
            supervisor.do_send(FromLane::Settled(Arc::clone(self)));
        }
    }

    /// Moves everything to the end of `settled`.
    pub(crate) fn collect(&self, settled: &mut VecDeque<Settled>) {
        let mut queue = self.lock();
        if settled.is_empty() {
            std::mem::swap(&mut *queue, settled);
        } else {
            settled.append(&mut queue);
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Settled>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
