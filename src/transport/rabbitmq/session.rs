//! One session: a channel, its consumer, and the task that watches over both.
//!
//! ```text
//!   Deliveries (stream)         ChannelSession (control)
//!        │ polled by the owner       │ acknowledge, barrier, close
//!        └────────── Shared ─────────┘
//!                      │
//!                    keep()   a task on the own runtime: probes, notices the end, closes the channel
//! ```
//!
//! Promises: the channel is closed while the consumer object is alive, because dropping that one
//! cancels it (FACTS 8), and cancelling an active single active consumer hands later messages to the
//! next consumer while earlier ones are still unsettled, or crashes the queue (FACTS 12). When the
//! session ends for whatever reason, its channel is closed, so that the broker can hand the
//! messages to somebody else.
//!
//! Does not decide what is acknowledged, and does not open another session.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use futures::{FutureExt, Stream, StreamExt};
use laneway_actors::port::{Ack, OpenSession, Session, SessionLost, SourceError};
use laneway_actors::{Delivery, SessionState};
use lapin::options::{BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::{FieldTable, ShortString};
use lapin::{Channel, Consumer};
use tokio::sync::oneshot;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::connection::{LinkError, Live, Purpose};
use super::core::Core;
use super::properties::Reader;
use super::source::{refused, unavailable};
use crate::topology::{QueueSpec, QueueType};

/// How many deliveries one batch holds at most: enough to spread the cost of a batch thin, few
/// enough that the owner can yield between two.
const BATCH: usize = 128;

/// Opens a session. To be called on the own runtime, in a task that is not aborted.
pub(super) async fn open(
    core: Arc<Core>,
    spec: &QueueSpec,
    queue: ShortString,
    state: Arc<SessionState>,
    credits: u16,
) -> Result<OpenSession, SourceError> {
    if credits == 0 {
        // The broker takes a prefetch of 0 for "no limit".
        return Err(refused(
            format!("queue `{}`: a session needs at least one credit", spec.name),
            None,
        ));
    }
    let bound = core.settings.operation_timeout;
    let live = core
        .live(Purpose::Consuming)
        .await
        .map_err(|why| match why {
            LinkError::Refused(what) => refused(what, None),
            LinkError::Unavailable(what) => unavailable(what, None),
        })?;
    let asked = Instant::now();
    let channel = match timeout(bound, live.connection.create_channel()).await {
        Ok(Ok(channel)) => channel,
        Ok(Err(why)) => {
            live.retire();
            return Err(unavailable(
                format!("queue `{}`: no channel could be opened: {why}", spec.name),
                Some(why),
            ));
        }
        Err(_) => {
            live.kill("the broker did not open a channel");
            return Err(no_answer(&spec.name, "opening a channel", bound));
        }
    };
    // A fresh tag each time: a quorum queue can crash when one is used again (LAB 4).
    let tag = consumer_tag(&state);
    let subscribing = async {
        channel
            .basic_qos(credits, BasicQosOptions::default())
            .await?;
        let options = BasicConsumeOptions::default();
        channel
            .basic_consume(queue.clone(), tag, options, FieldTable::default())
            .await
    };
    let consumer = match timeout(bound, subscribing).await {
        Ok(Ok(consumer)) => consumer,
        Ok(Err(why)) => {
            return Err(super::topology::source_error(
                &format!("queue `{}`", spec.name),
                why,
            ));
        }
        Err(_) => {
            // The subscription may come to be later, with messages for nobody: the channel's close
            // is behind it and gives them back in order. Nothing worse is done to a connection that
            // other sessions use, because it may be this one queue that does not answer.
            tokio::spawn(async move { live.close_channel(&channel, bound).await });
            return Err(no_answer(&spec.name, "subscribing", bound));
        }
    };
    state.prove(asked);
    state.require_proof_every(core.settings.heartbeat);
    info!(
        target: "laneway",
        queue = %spec.name,
        session = %state.id(),
        credits,
        "session opened"
    );
    let shared = Arc::new(Shared {
        queue: spec.name.as_str().into(),
        barrier: match (spec.queue_type, spec.single_active_consumer) {
            (QueueType::Quorum, true) => Barrier::SpareConsumer,
            _ => Barrier::RoundTrip,
        },
        proves_processing: spec.queue_type != QueueType::Quorum || spec.single_active_consumer,
        credits,
        state: Arc::clone(&state),
        channel: channel.clone(),
        name: queue,
        life: Mutex::new(Life {
            cause: None,
            closing: false,
        }),
        close: CancellationToken::new(),
        closed: CancellationToken::new(),
        barriers: Mutex::new(Barriers::default()),
        bound,
        core: Arc::clone(&core),
    });
    let keeper = Keeper {
        queue: Arc::clone(&shared.queue),
        channel,
        consumer: consumer.clone(),
        live,
        state,
        shared: Arc::downgrade(&shared),
        close: shared.close.clone(),
        shut_down: core.closing.clone(),
        heartbeat: core.settings.heartbeat,
        credits,
        bound,
    };
    core.handle().spawn(keep(keeper, shared.closed.clone()));
    let owner = Arc::new(Owner(Arc::clone(&shared)));
    Ok(OpenSession {
        deliveries: Deliveries {
            consumer,
            ended: ended(&shared.state),
            reader: Reader::new(Arc::clone(&shared.state)),
            owner: Arc::clone(&owner),
            last_batch: 1,
            cancelled: false,
            finished: false,
        }
        .boxed(),
        control: Arc::new(ChannelSession(owner)),
    })
}

fn consumer_tag(state: &SessionState) -> ShortString {
    format!("laneway-{}-{:016x}", state.id(), fastrand::u64(..)).into()
}

fn no_answer(queue: &str, doing: &str, bound: Duration) -> SourceError {
    unavailable(
        format!("queue `{queue}`: the broker did not answer to {doing} within {bound:?}"),
        None,
    )
}

fn ended(state: &Arc<SessionState>) -> BoxFuture<'static, ()> {
    let state = Arc::clone(state);
    async move { state.ended().await }.boxed()
}

/// How the queue proves that it has processed the acknowledgements; see the module `rabbitmq`.
#[derive(Debug, Clone, Copy)]
enum Barrier {
    RoundTrip,
    SpareConsumer,
}

/// What the stream, the control and the keeper know of one another.
struct Shared {
    queue: Arc<str>,
    name: ShortString,
    barrier: Barrier,
    /// What the barrier follows is processed when it is answered, however much it is.
    proves_processing: bool,
    credits: u16,
    state: Arc<SessionState>,
    channel: Channel,
    life: Mutex<Life>,
    /// Asks the keeper to close the channel.
    close: CancellationToken,
    /// The channel is closed, or the connection is gone.
    closed: CancellationToken,
    barriers: Mutex<Barriers>,
    bound: Duration,
    /// Keeps the runtime alive as long as the session.
    core: Arc<Core>,
}

struct Life {
    /// Why the session was lost, for the stream's one error.
    cause: Option<String>,
    /// Closed by the owner: the end is no error.
    closing: bool,
}

#[derive(Default)]
struct Barriers {
    waiting: Vec<oneshot::Sender<()>>,
    running: bool,
}

impl Shared {
    /// Ends the session because something went wrong. The first cause is kept.
    fn lose(&self, cause: String) {
        let mut life = self.lock_life();
        if life.cause.is_none() && !life.closing && !self.state.has_ended() {
            warn!(target: "laneway", queue = %self.queue, session = %self.state.id(), %cause, "session lost");
            life.cause = Some(cause);
        }
        drop(life);
        self.state.end();
    }

    fn lock_life(&self) -> MutexGuard<'_, Life> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_barriers(&self) -> MutexGuard<'_, Barriers> {
        self.barriers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the broker something that it answers only when it has processed what came before.
    async fn prove_processed(&self) -> Result<(), lapin::Error> {
        match self.barrier {
            Barrier::RoundTrip => round_trip(&self.channel, self.credits).await,
            Barrier::SpareConsumer => {
                let tag = consumer_tag(&self.state);
                let spare = self
                    .channel
                    .basic_consume(
                        self.name.clone(),
                        tag.clone(),
                        BasicConsumeOptions::default(),
                        FieldTable::default(),
                    )
                    .await?;
                // It waits behind the session's own consumer, so it has nothing in hand. Its
                // cancellation goes through the queue's log too, behind the acknowledgements that
                // the answer to the first command set free.
                self.channel
                    .basic_cancel(tag, BasicCancelOptions::default())
                    .await?;
                drop(spare);
                Ok(())
            }
        }
    }

    /// Answers all who wait, a group at a time: who asks while a question is under way waits for the
    /// next one, because acknowledgements may have been queued in between.
    async fn run_barriers(self: Arc<Self>) {
        loop {
            let group = {
                let mut barriers = self.lock_barriers();
                if barriers.waiting.is_empty() {
                    barriers.running = false;
                    return;
                }
                std::mem::take(&mut barriers.waiting)
            };
            let answer = tokio::select! {
                biased;
                () = self.state.ended() => None,
                answer = timeout(self.bound, self.prove_processed()) => Some(answer),
            };
            match answer {
                Some(Ok(Ok(()))) => {
                    for waiting in group {
                        // Who does not wait any more need not be told.
                        let _ = waiting.send(());
                    }
                }
                Some(Ok(Err(why))) => self.lose(format!("a barrier failed: {why}")),
                Some(Err(_)) => self.lose(format!(
                    "the broker did not answer to a barrier within {:?}",
                    self.bound
                )),
                // Dropping the senders says that the session was lost.
                None => drop(group),
            }
        }
    }
}

/// A question to the broker that changes nothing: the prefetch for later consumers, as it is.
async fn round_trip(channel: &Channel, credits: u16) -> Result<(), lapin::Error> {
    channel.basic_qos(credits, BasicQosOptions::default()).await
}

/// Why a channel is gone, and what to do about it where a setting is at fault.
fn channel_lost(why: &lapin::Error) -> String {
    let text = format!("the channel was lost: {why}");
    if text.contains("delivery acknowledgement") && text.contains("timed out") {
        return format!(
            "{text}. The endpoint's `ack_timeout` is longer than the broker's `consumer_timeout`: lower the one or raise the other"
        );
    }
    text
}

/// Held by the stream and the control: when both are gone, nobody can settle, and the session closes.
struct Owner(Arc<Shared>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.close.cancel();
    }
}

/// What the keeper needs. It holds the consumer until the channel is closed, and not the core: that
/// one would never be dropped.
struct Keeper {
    queue: Arc<str>,
    channel: Channel,
    consumer: Consumer,
    live: Arc<Live>,
    state: Arc<SessionState>,
    shared: std::sync::Weak<Shared>,
    close: CancellationToken,
    shut_down: CancellationToken,
    heartbeat: Duration,
    credits: u16,
    bound: Duration,
}

/// Proves the session alive until it ends, then closes its channel.
async fn keep(keeper: Keeper, closed: CancellationToken) {
    // Also when the runtime is shut down: nobody may wait for ever for `closed`.
    let closed = closed.drop_guard();
    let lost = watch_over(&keeper).await;
    if let Some(cause) = lost {
        match keeper.shared.upgrade() {
            Some(shared) => shared.lose(cause),
            None => keeper.state.end(),
        }
    } else if let Some(shared) = keeper.shared.upgrade() {
        // Before the close is sent, so that its consequences are not taken for a loss.
        if !keeper.state.has_ended() {
            shared.lock_life().closing = true;
        }
    }
    let closing = tokio::spawn(async move {
        keeper
            .live
            .close_channel(&keeper.channel, keeper.bound)
            .await;
        // Only now: the channel is closed, so this cancels nothing any more.
        drop(keeper.consumer);
    });
    // It may go on, but who closes does not wait for ever.
    let answered = timeout(keeper.bound, closing).await.is_ok();
    keeper.state.end();
    debug!(
        target: "laneway",
        queue = %keeper.queue,
        session = %keeper.state.id(),
        answered,
        "session closed"
    );
    drop(closed);
}

/// Returns when the session is to be closed; with a cause if it was lost.
async fn watch_over(keeper: &Keeper) -> Option<String> {
    // Four probes in a heartbeat: a proof stays fresh although one probe may be slow.
    let mut ticks = interval(keeper.heartbeat / 4);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let ordered = async {
        tokio::select! {
            () = keeper.close.cancelled() => {}
            () = keeper.shut_down.cancelled() => {}
            () = keeper.state.ended() => {}
        }
    };
    let probing = async {
        loop {
            ticks.tick().await;
            let asked = Instant::now();
            let answer = timeout(
                keeper.heartbeat,
                round_trip(&keeper.channel, keeper.credits),
            );
            match answer.await {
                // The time of the question counts: the answer may have lain in a buffer while this
                // process was stopped.
                Ok(Ok(())) => keeper.state.prove(asked),
                Ok(Err(why)) => return channel_lost(&why),
                Err(_) => {
                    // New sessions get another connection; the other sessions on this one find out
                    // for themselves.
                    keeper.live.retire();
                    return format!(
                        "the broker has not answered for a heartbeat ({:?})",
                        keeper.heartbeat
                    );
                }
            }
        }
    };
    tokio::select! {
        biased;
        () = ordered => None,
        () = keeper.live.dead.cancelled() => Some("the connection was lost".to_owned()),
        cause = probing => Some(cause),
    }
}

/// The answering side.
struct ChannelSession(Arc<Owner>);

impl Session for ChannelSession {
    fn acknowledge(&self, acks: &[Ack]) {
        let shared = &self.0.0;
        // One at a time, also if two threads should call: the order of the frames is the order of
        // the acknowledgements.
        let life = shared.lock_life();
        if shared.state.has_ended() {
            return;
        }
        for ack in acks {
            if ack.tag.0 == 0 {
                // To the broker 0 means "everything"; no delivery of a source has this tag.
                continue;
            }
            let options = BasicAckOptions {
                multiple: ack.multiple,
            };
            let acknowledging = std::pin::pin!(shared.channel.basic_ack(ack.tag.0, options));
            // The first poll queues the frame; waiting for it to be written would cost 20 µs each
            // and tell nothing about the broker (FACTS 6).
            let mut context = Context::from_waker(Waker::noop());
            if let Poll::Ready(Err(why)) = acknowledging.poll(&mut context) {
                let closing = life.closing;
                drop(life);
                if !closing {
                    shared.lose(channel_lost(&why));
                }
                return;
            }
        }
    }

    /// Each single one is a frame to write, and as much work for the queue as one with `multiple`. But what was
    /// gathered in vain goes out at once, and a quorum queue's channel can lose acknowledgements beyond 32 that come at
    /// once when it is closed: only where the barrier proves that they were processed (FACTS 6, 41).
    fn gathers_acknowledgements(&self) -> bool {
        self.0.0.proves_processing
    }

    fn barrier(&self) -> BoxFuture<'static, Result<(), SessionLost>> {
        let shared = &self.0.0;
        if shared.state.has_ended() {
            return futures::future::ready(Err(SessionLost)).boxed();
        }
        let (answer, answered) = oneshot::channel();
        let mut barriers = shared.lock_barriers();
        barriers.waiting.push(answer);
        if !barriers.running {
            barriers.running = true;
            let running = Arc::clone(shared).run_barriers();
            shared.core.handle().spawn(running);
        }
        drop(barriers);
        async move { answered.await.map_err(|_| SessionLost) }.boxed()
    }

    fn close(&self) -> BoxFuture<'static, ()> {
        let shared = &self.0.0;
        shared.close.cancel();
        let closed = shared.closed.clone();
        async move { closed.cancelled().await }.boxed()
    }
}

/// The arriving side.
struct Deliveries {
    consumer: Consumer,
    ended: BoxFuture<'static, ()>,
    reader: Reader,
    owner: Arc<Owner>,
    /// How many the last batch had: room for so many is made for the next one. (Room for the most there can be, each
    /// time, was a large part of all memory work: deliveries are some 350 bytes each, and most batches are small.)
    last_batch: usize,
    /// The consumer has ended; only the session's end is waited for.
    cancelled: bool,
    finished: bool,
}

impl Deliveries {
    /// The next batch; empty if none can come any more from this consumer.
    fn poll_batch(&mut self, context: &mut Context<'_>) -> Poll<Vec<Delivery>> {
        let shared = &self.owner.0;
        let mut batch = Vec::new();
        while batch.len() < BATCH {
            match self.consumer.poll_next_unpin(context) {
                Poll::Ready(Some(Ok(delivery))) => {
                    if batch.is_empty() {
                        batch.reserve(self.last_batch);
                    }
                    batch.push(self.reader.read(delivery));
                }
                Poll::Ready(Some(Err(why))) => {
                    let cause = channel_lost(&why);
                    shared.lose(cause.clone());
                    // Whoever noticed before knows no more than that the channel is closed.
                    shared.lock_life().cause = Some(cause);
                    return Poll::Ready(Vec::new());
                }
                Poll::Ready(None) => {
                    self.cancelled = true;
                    if !shared.lock_life().closing {
                        // The queue was deleted, or its process crashed (FACTS 4).
                        shared.lose("the broker cancelled the consumer".to_owned());
                    }
                    return Poll::Ready(Vec::new());
                }
                Poll::Pending if batch.is_empty() => return Poll::Pending,
                Poll::Pending => break,
            }
        }
        // A lost channel first hands out what it had in its buffer (FACTS 4): none of it can be
        // settled, and the broker gives it to somebody else.
        if !shared.channel.status().connected() {
            if !shared.lock_life().closing {
                shared.lose("the channel was lost".to_owned());
            }
            return Poll::Ready(Vec::new());
        }
        self.last_batch = batch.len();
        Poll::Ready(batch)
    }
}

/// What the broker said when it closed the channel, if it did. Whoever noticed first, an acknowledgement or a
/// probe, perhaps knows only that the channel is closed; the reason comes to the consumer, behind the
/// deliveries in its buffer (FACTS 4), none of which can be settled any more.
fn why_it_ended(consumer: &mut Consumer, context: &mut Context<'_>) -> Option<String> {
    loop {
        match consumer.poll_next_unpin(context) {
            Poll::Ready(Some(Ok(_))) => {}
            Poll::Ready(Some(Err(why))) => return Some(channel_lost(&why)),
            Poll::Ready(None) | Poll::Pending => return None,
        }
    }
}

impl Stream for Deliveries {
    type Item = Result<Vec<Delivery>, SourceError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.finished {
            return Poll::Ready(None);
        }
        loop {
            if this.ended.poll_unpin(context).is_ready() {
                this.finished = true;
                let why = why_it_ended(&mut this.consumer, context);
                let shared = &this.owner.0;
                let life = shared.lock_life();
                let cause = match (why, &life.cause) {
                    _ if life.closing => return Poll::Ready(None),
                    (Some(why), _) => why,
                    (None, Some(cause)) => cause.clone(),
                    (None, None) => "it was ended by its owner".to_owned(),
                };
                let what = format!("queue `{}`: the session was lost: {cause}", shared.queue);
                return Poll::Ready(Some(Err(unavailable(what, None))));
            }
            if this.cancelled {
                return Poll::Pending;
            }
            match this.poll_batch(context) {
                Poll::Ready(batch) if batch.is_empty() => {
                    // The session has ended, or the keeper is about to mark it so.
                    this.cancelled = true;
                }
                Poll::Ready(batch) => return Poll::Ready(Some(Ok(batch))),
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}
