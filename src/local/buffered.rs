//! A local queue in this process's memory: bounded, in order, and gone with the process.
//!
//! Owns what waits, and the one session on it. Promises what every source does: messages arrive in the order of
//! putting, each is settled at most once, and what a session leaves unsettled goes back to its place, marked
//! redelivered. The bound is that of [`slots`](super::slots).
//!
//! Like the embedded broker it needs no task and no timer. **No foreign code runs under the lock**: wakers and sessions are
//! ended after it is released.

use std::collections::{BTreeMap, VecDeque};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use futures::future::BoxFuture;
use futures::{FutureExt as _, Stream, StreamExt as _};
use laneway_actors::port::{Ack, OpenSession, Session, SessionLost, Source, SourceError};
use laneway_actors::{Delivery, DeliveryTag, Envelope, OrderingKey, SessionId, SessionState};

use super::slots::{Slot, Slots};

/// How many deliveries a batch holds at most, as in the embedded broker.
const BATCH: usize = 128;

/// A buffered queue.
pub(crate) struct BufferedQueue {
    name: Arc<str>,
    slots: Arc<Slots>,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    ready: VecDeque<Stored>,
    session: Option<Live>,
    closed: bool,
}

struct Stored {
    envelope: Envelope,
    key: Option<OrderingKey>,
    redelivered: bool,
}

/// The session that is open.
struct Live {
    state: Arc<SessionState>,
    credits: usize,
    last_tag: u64,
    unsettled: BTreeMap<u64, Stored>,
    waker: Option<Waker>,
}

impl Inner {
    fn live(&mut self, session: SessionId) -> Option<&mut Live> {
        let live = self.session.as_mut()?;
        (live.state.id() == session && !live.state.has_ended()).then_some(live)
    }

    /// Takes the waker of a session that has something to fetch.
    fn woken(&mut self) -> Option<Waker> {
        let live = self.session.as_mut()?;
        let can = !self.ready.is_empty() && live.unsettled.len() < live.credits;
        if can { live.waker.take() } else { None }
    }

    /// Ends the session, and puts what it held back in front, in order.
    fn end(&mut self, session: SessionId) -> Option<Live> {
        let mut live = self.session.take_if(|live| live.state.id() == session)?;
        let held = std::mem::take(&mut live.unsettled);
        for (_, stored) in held.into_iter().rev() {
            self.ready.push_front(Stored {
                redelivered: true,
                ..stored
            });
        }
        Some(live)
    }
}

impl BufferedQueue {
    pub(crate) fn new(name: &str, bound: usize) -> Arc<Self> {
        Arc::new(Self {
            name: name.into(),
            slots: Slots::new(bound),
            inner: Mutex::default(),
        })
    }

    pub(crate) fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// A panic under the lock is only possible in the allocator.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a place. `None`: the queue is closed.
    ///
    /// # Cancellation
    /// Dropping the future takes nothing.
    pub(crate) fn slot(&self) -> impl Future<Output = Option<Slot>> + Send + use<> {
        Arc::clone(&self.slots).wait()
    }

    /// Puts a message at the end: into a place that was waited for, or, without one, at once and beyond the bound if
    /// need be. False: the queue is closed.
    pub(crate) fn put(
        &self,
        envelope: Envelope,
        key: Option<OrderingKey>,
        slot: Option<Slot>,
    ) -> bool {
        let mut inner = self.lock();
        if inner.closed {
            drop(inner);
            return false;
        }
        match slot {
            Some(slot) => slot.fill(),
            None => self.slots.take(),
        }
        inner.ready.push_back(Stored {
            envelope,
            key,
            redelivered: false,
        });
        let waker = inner.woken();
        drop(inner);
        if let Some(waker) = waker {
            waker.wake();
        }
        true
    }

    /// Takes nothing from now on, forgets what it holds, and tells how many messages that were.
    pub(crate) fn close(&self) -> usize {
        self.slots.close();
        let mut inner = self.lock();
        inner.closed = true;
        let ready = std::mem::take(&mut inner.ready);
        let held = match &mut inner.session {
            Some(live) => std::mem::take(&mut live.unsettled),
            None => BTreeMap::new(),
        };
        drop(inner);
        ready.len() + held.len()
    }

    fn end(&self, state: &SessionState) {
        // Before what it held is given back: nobody receives a message that an older session believes to hold.
        state.end();
        let mut inner = self.lock();
        let ended = inner.end(state.id());
        // Another session may be open by now, for which there is something again.
        let waker = inner.woken();
        drop(inner);
        let wakers = ended.and_then(|live| live.waker).into_iter().chain(waker);
        wakers.for_each(Waker::wake);
    }

    fn poll_fetch(
        &self,
        state: &Arc<SessionState>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Vec<Delivery>>> {
        let mut guard = self.lock();
        let inner = &mut *guard;
        let Some(live) = inner
            .session
            .as_mut()
            .filter(|live| live.state.id() == state.id() && !state.has_ended())
        else {
            return Poll::Ready(None);
        };
        let room = live.credits.saturating_sub(live.unsettled.len()).min(BATCH);
        let count = room.min(inner.ready.len());
        if count == 0 {
            let old = live.waker.replace(cx.waker().clone());
            drop(guard);
            drop(old);
            return Poll::Pending;
        }
        let mut batch = Vec::with_capacity(count);
        for stored in inner.ready.drain(..count) {
            live.last_tag += 1;
            let tag = DeliveryTag(live.last_tag);
            let delivery = Delivery::new(stored.envelope.clone(), Arc::clone(state), tag)
                .redelivered(stored.redelivered)
                .with_key(stored.key.clone());
            batch.push(delivery);
            live.unsettled.insert(tag.0, stored);
        }
        Poll::Ready(Some(batch))
    }

    fn acknowledge(&self, state: &SessionState, acks: &[Ack]) {
        let mut inner = self.lock();
        let Some(live) = inner.live(state.id()) else {
            return;
        };
        let mut ended = Vec::new();
        for ack in acks {
            ended.extend(live.unsettled.remove(&ack.tag.0));
            while ack.multiple
                && let Some(first) = live.unsettled.first_entry()
                && *first.key() < ack.tag.0
            {
                ended.push(first.remove());
            }
        }
        let waker = inner.woken();
        drop(inner);
        self.slots.release(ended.len());
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// The queue as a source.
pub(crate) struct BufferedSource(pub(crate) Arc<BufferedQueue>);

impl Source for BufferedSource {
    fn name(&self) -> &str {
        &self.0.name
    }

    fn verify(&self) -> BoxFuture<'_, Result<(), Vec<SourceError>>> {
        async { Ok(()) }.boxed()
    }

    fn open(
        &self,
        state: Arc<SessionState>,
        credits: u16,
    ) -> BoxFuture<'_, Result<OpenSession, SourceError>> {
        async move {
            let queue = Arc::clone(&self.0);
            let before = {
                let inner = queue.lock();
                inner.session.as_ref().map(|live| Arc::clone(&live.state))
            };
            // One session at a time: an endpoint opens another one only when the first is of no use any more.
            if let Some(before) = before {
                queue.end(&before);
            }
            queue.lock().session = Some(Live {
                state: Arc::clone(&state),
                credits: usize::from(credits),
                last_tag: 0,
                unsettled: BTreeMap::new(),
                waker: None,
            });
            let life = Arc::new(Life { queue, state });
            let deliveries = Deliveries(Arc::clone(&life)).boxed();
            let control = Arc::new(BufferedSession(life));
            Ok(OpenSession {
                deliveries,
                control,
            })
        }
        .boxed()
    }
}

/// Shared by both halves of a session; the last one to go ends it.
struct Life {
    queue: Arc<BufferedQueue>,
    state: Arc<SessionState>,
}

impl Drop for Life {
    fn drop(&mut self) {
        self.queue.end(&self.state);
    }
}

struct Deliveries(Arc<Life>);

impl Stream for Deliveries {
    type Item = Result<Vec<Delivery>, SourceError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let life = &self.0;
        let fetched = life.queue.poll_fetch(&life.state, cx);
        fetched.map(|batch| batch.map(Ok))
    }
}

struct BufferedSession(Arc<Life>);

impl Session for BufferedSession {
    fn acknowledge(&self, acks: &[Ack]) {
        self.0.queue.acknowledge(&self.0.state, acks);
    }

    fn barrier(&self) -> BoxFuture<'static, Result<(), SessionLost>> {
        let ended = self.0.state.has_ended();
        async move { if ended { Err(SessionLost) } else { Ok(()) } }.boxed()
    }

    fn close(&self) -> BoxFuture<'static, ()> {
        let life = Arc::clone(&self.0);
        async move { life.queue.end(&life.state) }.boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(queue: &BufferedQueue, bodies: impl IntoIterator<Item = u8>) {
        for body in bodies {
            let envelope = Envelope {
                body: vec![body].into(),
                ..Envelope::default()
            };
            assert!(queue.put(envelope, Some("key".into()), None));
        }
    }

    async fn open(queue: &Arc<BufferedQueue>, credits: u16) -> OpenSession {
        let source = BufferedSource(Arc::clone(queue));
        let opened = source.open(SessionState::start(), credits).await;
        opened.expect("opens")
    }

    /// What is there now: (tag, body, redelivered).
    fn fetched(session: &mut OpenSession) -> Vec<(u64, u8, bool)> {
        let batch = session.deliveries.next().now_or_never().flatten();
        let batch = batch.map(|batch| batch.expect("no error"));
        let all = batch.into_iter().flatten().map(|delivery| {
            assert_eq!(delivery.key(), Some(&"key".into()));
            let body = delivery.envelope().body[0];
            (delivery.tag().0, body, delivery.is_redelivered())
        });
        all.collect()
    }

    fn ack(tag: u64, multiple: bool) -> Ack {
        Ack {
            tag: DeliveryTag(tag),
            multiple,
        }
    }

    #[tokio::test]
    async fn messages_arrive_in_order_within_the_credits() {
        let queue = BufferedQueue::new("q", 10);
        put(&queue, 1..=4);
        let mut session = open(&queue, 3).await;
        assert_eq!(
            fetched(&mut session),
            [(1, 1, false), (2, 2, false), (3, 3, false)]
        );
        assert_eq!(fetched(&mut session), []);
        session.control.acknowledge(&[ack(2, true)]);
        put(&queue, [5]);
        assert_eq!(fetched(&mut session), [(4, 4, false), (5, 5, false)]);
    }

    #[tokio::test]
    async fn what_a_session_leaves_comes_again_in_its_order() {
        let queue = BufferedQueue::new("q", 10);
        put(&queue, 1..=4);
        let mut first = open(&queue, 3).await;
        fetched(&mut first);
        first.control.acknowledge(&[ack(2, false)]);
        first.control.close().await;
        first.control.acknowledge(&[ack(1, false)]);
        assert!(first.control.barrier().await.is_err());
        assert!(first.deliveries.next().await.is_none(), "it has ended");
        let mut second = open(&queue, 10).await;
        assert_eq!(
            fetched(&mut second),
            [(1, 1, true), (2, 3, true), (3, 4, false)]
        );
        // A late drop of the first one changes nothing.
        drop(first);
        second.control.acknowledge(&[ack(3, true)]);
        assert!(second.control.barrier().await.is_ok());
        drop(second);
        assert_eq!(queue.close(), 0);
    }

    #[tokio::test]
    async fn a_message_wakes_the_session_that_waits() {
        let queue = BufferedQueue::new("q", 10);
        let mut session = open(&queue, 1).await;
        let waiting = tokio::spawn(async move {
            let batch = session.deliveries.next().await;
            (batch.expect("goes on").expect("no error").len(), session)
        });
        tokio::task::yield_now().await;
        put(&queue, [1]);
        let (count, _session) = waiting.await.expect("no panic");
        assert_eq!(count, 1);
    }

    #[tokio::test]
    async fn a_place_is_free_when_its_message_is_settled_and_not_before() {
        let queue = BufferedQueue::new("q", 1);
        let slot = queue.slot().await.expect("free");
        assert!(queue.put(Envelope::default(), Some("key".into()), Some(slot)));
        let mut session = open(&queue, 5).await;
        let batch = session.deliveries.next().await;
        assert_eq!(batch.expect("goes on").expect("no error").len(), 1);
        let mut waiting = Box::pin(queue.slot());
        assert!((&mut waiting).now_or_never().is_none());
        session.control.acknowledge(&[ack(1, false)]);
        assert!(waiting.await.is_some());
    }

    #[tokio::test]
    async fn closing_tells_what_is_lost_and_takes_nothing_more() {
        let queue = BufferedQueue::new("q", 10);
        put(&queue, 1..=4);
        let mut session = open(&queue, 2).await;
        fetched(&mut session);
        assert_eq!(queue.close(), 4);
        assert_eq!(queue.close(), 0);
        assert!(!queue.put(Envelope::default(), None, None));
        assert!(queue.slot().await.is_none());
    }
}
