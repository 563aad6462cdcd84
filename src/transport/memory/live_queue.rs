//! A queue in use: the state machine behind its lock, the sessions on it, and who is waiting.
//!
//! Owns the lock, the wakers and the end of sessions. Decides nothing about messages: that is
//! [`Queue`].
//!
//! **No foreign code runs under the lock**, except the counting of a cloned waker. Waking, dropping a waker and ending a
//! [`SessionState`] may each drop the last reference to a task, and the task may own a session of
//! this very queue, whose drop takes the lock. Therefore they all happen after the lock is released,
//! and a session is marked ended *before* what it held is given back: nobody receives a message
//! that an older session still believes to hold.

use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use laneway_actors::port::Ack;
use laneway_actors::{Envelope, SessionState};
use tokio::sync::Notify;

use super::queue::{ConsumerId, Fetched, Full, Queue, QueueStatus, UnknownTag};
use super::topology::Arguments;

/// How many deliveries a batch holds at most: enough to make the cost of a hand-over small, few
/// enough to let lanes start before a long backlog is copied.
const BATCH: usize = 128;

/// How a session ended.
#[derive(Debug, Clone)]
pub(super) enum End {
    /// By its owner.
    Closed,
    /// By something else, with what happened.
    Lost(String),
}

/// A queue, its lock and its waiters.
pub(super) struct LiveQueue {
    name: Arc<str>,
    arguments: Arguments,
    inner: Mutex<Inner>,
    changed: Notify,
}

struct Inner {
    queue: Queue,
    sessions: Vec<Slot>,
    /// How many `wait_until` are running. Nobody is notified while there are none: it would cost
    /// each publish a lock.
    watchers: usize,
}

struct Slot {
    consumer: ConsumerId,
    state: Arc<SessionState>,
    waker: Option<Waker>,
    end: Option<End>,
}

impl Inner {
    fn slot(&mut self, consumer: ConsumerId) -> Option<&mut Slot> {
        self.sessions
            .iter_mut()
            .find(|slot| slot.consumer == consumer)
    }

    /// Wakers of sessions that have something to fetch now.
    fn woken(&mut self) -> Vec<Waker> {
        let sessions = &mut self.sessions;
        self.queue
            .take_woken()
            .filter_map(|consumer| {
                let slot = sessions.iter_mut().find(|slot| slot.consumer == consumer)?;
                slot.waker.take()
            })
            .collect()
    }
}

impl LiveQueue {
    pub(super) fn new(name: &str, arguments: Arguments) -> Arc<Self> {
        let mut queue = Queue::new(arguments.single_active_consumer);
        queue.limit_length(arguments.max_length());
        Arc::new(Self {
            name: name.into(),
            arguments,
            inner: Mutex::new(Inner {
                queue,
                sessions: Vec::new(),
                watchers: 0,
            }),
            changed: Notify::new(),
        })
    }

    pub(super) fn name(&self) -> &Arc<str> {
        &self.name
    }

    pub(super) fn arguments(&self) -> &Arguments {
        &self.arguments
    }

    /// A panic under the lock cannot leave the state half changed in a way that matters more than
    /// going on: the only panics possible there are of the allocator.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state under the lock, then wakes whom it concerns.
    fn change<R>(&self, change: impl FnOnce(&mut Inner) -> R) -> R {
        let mut inner = self.lock();
        let result = change(&mut inner);
        self.release(inner);
        result
    }

    fn release(&self, mut inner: MutexGuard<'_, Inner>) {
        let wakers = inner.woken();
        let watched = inner.watchers > 0;
        drop(inner);
        wakers.into_iter().for_each(Waker::wake);
        if watched {
            self.changed.notify_waiters();
        }
    }

    pub(super) fn publish(&self, message: Arc<Envelope>) -> Result<(), Full> {
        self.change(|inner| inner.queue.publish(message))
    }

    /// Publishes to all of `queues` or, when one is full, to none; then it is named. The queues must
    /// be distinct and sorted by name, which is the order of locking.
    pub(super) fn publish_to_all(
        queues: &[Arc<Self>],
        message: &Arc<Envelope>,
    ) -> Result<(), Arc<str>> {
        let mut locked: Vec<_> = queues.iter().map(|queue| (queue, queue.lock())).collect();
        if let Some((full, _)) = locked.iter().find(|(_, inner)| inner.queue.is_full()) {
            return Err(Arc::clone(&full.name));
        }
        for (_, inner) in &mut locked {
            // Cannot be full: asked above, under the same locks.
            let _ = inner.queue.publish(Arc::clone(message));
        }
        // All locks are released before the first waker runs.
        let wakers: Vec<_> = locked
            .into_iter()
            .map(|(queue, mut inner)| (queue, inner.woken(), inner.watchers > 0))
            .collect();
        for (queue, wakers, watched) in wakers {
            wakers.into_iter().for_each(Waker::wake);
            if watched {
                queue.changed.notify_waiters();
            }
        }
        Ok(())
    }

    pub(super) fn open(&self, state: Arc<SessionState>, credits: u16) -> ConsumerId {
        self.change(|inner| {
            let consumer = inner.queue.open(credits);
            inner.sessions.push(Slot {
                consumer,
                state,
                waker: None,
                end: None,
            });
            consumer
        })
    }

    /// The next batch of a session, or how it ended.
    pub(super) fn poll_fetch(
        &self,
        consumer: ConsumerId,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Vec<Fetched>, End>> {
        let mut inner = self.lock();
        let Inner {
            queue, sessions, ..
        } = &mut *inner;
        let Some(slot) = sessions.iter_mut().find(|slot| slot.consumer == consumer) else {
            return Poll::Ready(Err(End::Closed));
        };
        if let Some(end) = &slot.end {
            return Poll::Ready(Err(end.clone()));
        }
        // Marked ended, but not ended here yet: whoever marked it is on the way.
        if !slot.state.has_ended() {
            let batch = queue.fetch(consumer, BATCH);
            if !batch.is_empty() {
                return Poll::Ready(Ok(batch));
            }
        }
        let old = match &slot.waker {
            Some(waker) if waker.will_wake(cx.waker()) => None,
            _ => slot.waker.replace(cx.waker().clone()),
        };
        drop(inner);
        drop(old);
        Poll::Pending
    }

    pub(super) fn acknowledge(&self, consumer: ConsumerId, acks: &[Ack]) -> Result<(), UnknownTag> {
        self.change(|inner| match inner.slot(consumer) {
            Some(slot) if slot.end.is_none() && !slot.state.has_ended() => {
                inner.queue.acknowledge(consumer, acks)
            }
            _ => Ok(()),
        })
    }

    /// Ends a session; the first end counts.
    pub(super) fn end(&self, consumer: ConsumerId, state: &SessionState, end: End) {
        state.end();
        self.end_all(&[consumer], &end);
    }

    /// Ends every session that is open now, as one event.
    pub(super) fn lose_all(&self, what: &str) {
        let open: Vec<_> = {
            let inner = self.lock();
            let open = inner.sessions.iter().filter(|slot| slot.end.is_none());
            open.map(|slot| (slot.consumer, Arc::clone(&slot.state)))
                .collect()
        };
        let (consumers, states): (Vec<_>, Vec<_>) = open.into_iter().unzip();
        for state in states {
            state.end();
        }
        self.end_all(&consumers, &End::Lost(what.to_owned()));
    }

    fn end_all(&self, consumers: &[ConsumerId], end: &End) {
        let wakers: Vec<_> = self.change(|inner| {
            inner.queue.end(consumers);
            consumers
                .iter()
                .filter_map(|consumer| {
                    let slot = inner.slot(*consumer)?;
                    slot.end.get_or_insert_with(|| end.clone());
                    slot.waker.take()
                })
                .collect()
        });
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Forgets a session that has ended and that nobody looks at any more.
    pub(super) fn forget(&self, consumer: ConsumerId) {
        let mut inner = self.lock();
        let index = inner
            .sessions
            .iter()
            .position(|slot| slot.consumer == consumer);
        let forgotten = index.map(|index| inner.sessions.swap_remove(index));
        drop(inner);
        drop(forgotten);
    }

    pub(super) fn limit_length(&self, max: Option<usize>) {
        self.change(|inner| inner.queue.limit_length(max));
    }

    pub(super) fn status(&self) -> QueueStatus {
        self.lock().queue.status()
    }

    pub(super) fn messages(&self) -> Vec<Arc<Envelope>> {
        self.lock().queue.messages()
    }

    pub(super) async fn wait_until(&self, condition: impl Fn(QueueStatus) -> bool) {
        let _watching = Watching::start(self);
        loop {
            // Enabled before looking, so that a change between looking and waiting is not missed.
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if condition(self.status()) {
                return;
            }
            changed.await;
        }
    }
}

/// Counts a running `wait_until`, also when it is dropped half-way.
struct Watching<'a>(&'a LiveQueue);

impl<'a> Watching<'a> {
    fn start(queue: &'a LiveQueue) -> Self {
        queue.lock().watchers += 1;
        Self(queue)
    }
}

impl Drop for Watching<'_> {
    fn drop(&mut self) {
        self.0.lock().watchers -= 1;
    }
}
