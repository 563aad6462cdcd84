//! One life of one lease: reads, hands out, counts starts, settles.
//!
//! Owns the session's task. Everything about a queue or shard that this process has in memory is in that task, in a
//! [`Feed`]; everybody else sends [`Order`]s.
//!
//! Three things are under way at the same time, at most one of each: a read, a settling, a counting of starts. What
//! comes while one is under way goes into the next as one batch, so that the number of statements does not grow with
//! the number of messages. What they can do to each other is said in [`feed`](super::feed).
//!
//! A read is followed by a counting of its own: the first attempts of all that it has brought, before any of that is
//! handed out. To the feed both are one read. The counting of starts is left with what [`ahead`](super::ahead) does not
//! count: attempts again, and messages that had one elsewhere.
//!
//! # When the database is away
//! - A read fails: it is made again. Nothing is lost.
//! - A settling fails, and whether it took place is unknown: the same one is made again, until it is answered or the
//!   lease is lost. A message that is not there any more was settled by the first try.
//! - The program drains, and its deadline is over: nothing is tried again, and the session ends as if its lease were
//!   lost. (The barrier of its close waits for the settling. Trying on for as long as the lease is not another's, a
//!   program whose database is away never ended.)
//! - A counting of starts fails: it is made again, with the attempts' numbers, so that each counts once. And once
//!   more if the outage was so long that the proof of life is too old for the start when it is counted at last.
//! - A counting of what was read fails: the same, and nothing of the read is handed out before. What was read stays
//!   true meanwhile: nobody else settles or starts anything of it under this lease. What was claimed stays claimed, for
//!   this session, which gives it back when it ends.
//! - What was counted ahead may start as long as the last renewal is not older than two and a half seconds; then it is
//!   counted again, which waits for the database. No more starts than may be unsettled ([`feed`](super::feed)).
//! - The lease cannot be renewed: nothing starts (the session's proof of life is too old), until it is renewed, or
//!   is another's. Then the session has ended, and what it had in memory is read by whoever has the lease. (With one
//!   attempt, if it was counted ahead: under a lease that is lost nothing can be taken back.)
//!
//! # The close
//! It waits for a counting that is under way (one try, bounded as each statement is): what was asked to be counted is to
//! be taken back, in this order. It does not wait for a read, of which nothing is counted. Then the session's state ends,
//! what has not begun is kept from beginning and its count taken back, and last the lease is given back. A count that
//! cannot be taken back within two seconds costs its messages an attempt each.

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use laneway_actors::port::SourceError;
use laneway_actors::{Delivery, DeliveryTag};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tracing::{error, warn};

use super::ahead::Ahead;
use super::feed::Feed;
use super::keeper::TTL;
use super::link::{Claim, Link, Order};
use super::queue::{Place, Queue};
use crate::store::{
    DeadReason, Ending, Lease, Sequence, Settlement, Start, StoreError, Stored, Window,
};

/// How often is looked for messages without a hint.
const POLL: Duration = Duration::from_secs(1);
/// How often is asked for a shard that somebody else has.
const ASK_FOR_LEASE: Duration = Duration::from_millis(250);
/// Pause before something is tried again at a database that does not answer.
const AGAIN: Duration = Duration::from_millis(200);
/// How long taking counts back may take at a close.
const TAKE_BACK: Duration = Duration::from_secs(2);
/// Messages that one statement ends or counts at most.
const MOST_AT_ONCE: usize = 1_000;
/// Retries whose time is remembered here at most; the others are found by looking.
const MOST_DUE: usize = 10_000;

pub(super) type Deliveries = mpsc::UnboundedSender<Result<Vec<Delivery>, SourceError>>;
type Work<T> = Pin<Box<dyn Future<Output = T> + Send>>;
type Found = Result<Vec<Stored>, StoreError>;
type Settling = (Vec<Then>, Result<(), StoreError>);
type Starting = (Vec<oneshot::Sender<()>>, Result<(), StoreError>);
/// What was read, and whether its first attempts are counted.
type Counting = (Vec<Stored>, Result<(), StoreError>);

/// The session's task.
pub(super) struct Session {
    queue: Arc<Queue>,
    link: Arc<Link>,
    orders: mpsc::UnboundedReceiver<Order>,
    deliveries: Deliveries,
    /// An earlier session of this source may have handed out the same messages.
    again: bool,
    feed: Feed,
    ahead: Ahead,
    to_settle: Vec<ToSettle>,
    to_start: Vec<(Start, oneshot::Sender<()>)>,
    /// When what is kept for later comes again.
    due: BTreeSet<Instant>,
    /// Whom to tell that it is closed; none as long as it is not to be.
    closing: Vec<oneshot::Sender<()>>,
    /// Cancelled with the close, and when a drain has had its time: what was read is not counted any more.
    leave_uncounted: CancellationToken,
}

/// One step of a settling.
struct ToSettle {
    settlement: Option<Settlement>,
    then: Then,
}

enum Then {
    /// Not to be left out of reads any more.
    Forget(Sequence),
    /// The answer to whoever moves a message.
    Answer {
        tag: u64,
        kept: Option<Option<Duration>>,
        done: oneshot::Sender<Result<(), StoreError>>,
    },
    /// A message that could not be read is a dead letter.
    Broken(u64),
    Barrier(oneshot::Sender<()>),
}

/// Why a session ends.
enum End {
    Closed,
    Lost(String),
}

impl Session {
    pub(super) fn new(
        queue: Arc<Queue>,
        link: Arc<Link>,
        orders: mpsc::UnboundedReceiver<Order>,
        deliveries: Deliveries,
        (credits, max_attempts): (u16, u32),
        again: bool,
    ) -> Self {
        let feed = Feed::new(credits);
        let leave_uncounted = queue.engine.give_up.child_token();
        Self {
            queue,
            link,
            orders,
            deliveries,
            again,
            ahead: Ahead::new(max_attempts, feed.most_in_memory()),
            feed,
            to_settle: Vec::new(),
            to_start: Vec::new(),
            due: BTreeSet::new(),
            closing: Vec::new(),
            leave_uncounted,
        }
    }

    pub(super) async fn run(mut self, place: Place) {
        let lost = self.link.lost.clone();
        let end = tokio::select! {
            // What is under way then is dropped: the lease fences it.
            () = lost.cancelled() => End::Lost("the lease of the queue was lost".to_owned()),
            end = self.live(place) => end,
        };
        let lease = self.link.lease.get();
        if let Some(lease) = lease {
            self.queue.engine.keeper.let_go(lease);
        }
        match end {
            End::Closed => {
                // Its supervisor has ended it already, unless there is none any more.
                self.link.state.end();
                if let Some(lease) = lease.cloned()
                    && let Err(error) = self.give_back(&lease).await
                {
                    warn!(target: "laneway", queue = %self.queue.name, %error, "a lease could not be given back; it expires");
                }
                for done in self.closing {
                    let _ = done.send(());
                }
            }
            End::Lost(what) => {
                self.link.lose();
                let error = SourceError::Unavailable { what, source: None };
                // Nobody may be listening any more.
                let _ = self.deliveries.send(Err(error));
            }
        }
    }

    async fn live(&mut self, place: Place) -> End {
        let lease = match self.take(place).await {
            Ok(lease) => lease,
            Err(end) => return end,
        };
        let _ = self.link.lease.set(lease.clone());
        let mut hints = self.queue.engine.store.watch(&self.queue.name);
        let mut poll = tokio::time::interval(POLL);
        poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut reading: Option<Work<Found>> = None;
        let mut settling: Option<Work<Settling>> = None;
        let mut starting: Option<Work<Starting>> = None;
        let mut counting: Option<Work<Counting>> = None;
        loop {
            if reading.is_none() {
                reading = self.next_read(&lease, place);
            }
            if settling.is_none() && !self.to_settle.is_empty() {
                settling = Some(self.settle(&lease));
            }
            if starting.is_none() && !self.to_start.is_empty() {
                starting = Some(self.start(&lease));
            }
            let settled = settling.is_none() && self.to_settle.is_empty();
            if !self.closing.is_empty() && settled && counting.is_none() {
                return End::Closed;
            }
            self.hand_out();
            let next_due = self.due.first().copied();
            tokio::select! {
                Some(order) = self.orders.recv() => self.take_orders(order),
                found = under_way(&mut reading) => {
                    reading = None;
                    match found {
                        // Not counted any more: the close would have to wait for that, and to take it back.
                        Ok(_) if !self.closing.is_empty() => {}
                        Ok(mut found) => {
                            if place == Place::Shared {
                                // Kept with the message, and no order in this queue.
                                found.iter_mut().for_each(|stored| stored.key = None);
                            }
                            let starts = self.ahead.count(&mut found);
                            match starts.is_empty() {
                                true => self.feed.arrived(found),
                                false => counting = Some(self.count(&lease, found, starts)),
                            }
                        }
                        // Messages may be claimed for this node that it does not know of.
                        Err(error) if place == Place::Shared => {
                            // Nothing begins any more that is about to be taken back.
                            self.link.state.end();
                            // An error here leaves them claimed until the lease expires.
                            let _ = self.give_back(&lease).await;
                            return End::Lost(format!("messages could not be claimed: {error}"));
                        }
                        Err(error) if error.is_retryable() => {
                            self.feed.read_failed();
                            reading = Some(Box::pin(async {
                                tokio::time::sleep(AGAIN).await;
                                Ok(Vec::new())
                            }));
                        }
                        Err(error) => return End::Lost(error.to_string()),
                    }
                }
                (found, counted) = under_way(&mut counting) => {
                    counting = None;
                    match counted {
                        Ok(()) => self.feed.arrived(found),
                        // It is closed instead, and takes back what may have been counted.
                        Err(error) if error.is_retryable() && !self.closing.is_empty() => {}
                        Err(error) => return End::Lost(error.to_string()),
                    }
                }
                (then, settled) = under_way(&mut settling) => {
                    settling = None;
                    if let Err(error) = &settled {
                        let what = error.to_string();
                        self.settled(then, settled);
                        return End::Lost(what);
                    }
                    self.settled(then, settled);
                }
                (waiting, started) = under_way(&mut starting) => {
                    starting = None;
                    match started {
                        Ok(()) => for waits in waiting {
                            // Whoever gave up meanwhile starts nothing; the attempt is counted.
                            let _ = waits.send(());
                        },
                        Err(error) => return End::Lost(error.to_string()),
                    }
                }
                () = hints.next() => self.feed.look_again(),
                _ = poll.tick() => self.feed.look_again(),
                () = at(next_due) => {
                    let now = Instant::now();
                    self.due.retain(|due| *due > now);
                    self.feed.look_again();
                }
            }
        }
    }

    /// Waits until the queue or shard is this node's.
    async fn take(&mut self, place: Place) -> Result<Lease, End> {
        let engine = Arc::clone(&self.queue.engine);
        let mut told = false;
        loop {
            let asked = Instant::now();
            let name = &self.queue.name;
            let taken = match place {
                Place::Shard(shard) => engine.store.take(name, shard, engine.me, TTL).await,
                Place::Shared => engine.store.join(name, engine.me, TTL).await.map(Some),
            };
            match taken {
                Ok(Some(lease)) => {
                    let link = Arc::clone(&self.link);
                    engine.keeper.keep(lease.clone(), link, asked);
                    return Ok(lease);
                }
                Ok(None) => {}
                Err(error) if error.is_retryable() => {
                    if !told {
                        warn!(target: "laneway", queue = %name, %error, "the queue cannot be leased; trying again");
                    }
                    told = true;
                }
                Err(error) => return Err(End::Lost(error.to_string())),
            }
            let again = tokio::time::sleep(ASK_FOR_LEASE);
            tokio::pin!(again);
            loop {
                tokio::select! {
                    () = &mut again => break,
                    Some(order) = self.orders.recv() => match order {
                        Order::Close(done) => {
                            self.closing.push(done);
                            return Err(End::Closed);
                        }
                        // Nothing was delivered, so there is nothing to settle.
                        Order::Barrier(done) => {
                            let _ = done.send(());
                        }
                        _ => {}
                    }
                }
            }
        }
    }

    fn next_read(&mut self, lease: &Lease, place: Place) -> Option<Work<Found>> {
        if !self.closing.is_empty() {
            return None;
        }
        let (store, lease) = (Arc::clone(&self.queue.engine.store), lease.clone());
        match place {
            Place::Shard(_) => {
                let window: Window = self.feed.read()?;
                Some(Box::pin(async move { store.read(&lease, &window).await }))
            }
            Place::Shared => {
                let limit = self.feed.claim()?;
                Some(Box::pin(async move { store.claim(&lease, limit).await }))
            }
        }
    }

    /// Hands out what may run.
    fn hand_out(&mut self) {
        if !self.closing.is_empty() {
            return;
        }
        let mut batch = Vec::new();
        while let Some((tag, mut stored)) = self.feed.next() {
            if let Some(why) = stored.broken.take() {
                self.bury(tag, &stored, why);
                continue;
            }
            let first = self.ahead.hand_out(stored.sequence);
            let claim = Claim::new(Arc::clone(&self.link), tag, stored.sequence, first);
            let lent = &self.queue.engine.lent;
            let original = lent.take(&self.queue.name, stored.sequence, stored.id());
            let mut delivery = Delivery::new(
                stored.envelope,
                Arc::clone(&self.link.state),
                DeliveryTag(tag),
            )
            .with_key(stored.key)
            .with_attempts(stored.attempts)
            .redelivered(self.again || stored.attempts > 0)
            .with_native(Arc::new(Arc::new(claim)));
            if let Some(original) = original {
                delivery = delivery.with_decoded(original);
            }
            batch.push(delivery);
        }
        if !batch.is_empty() {
            // Nobody listens any more: the session is about to be closed, or has ended.
            let _ = self.deliveries.send(Ok(batch));
        }
    }

    /// A row that cannot be read is a dead letter at once.
    fn bury(&mut self, tag: u64, stored: &Stored, why: String) {
        error!(
            target: "laneway",
            queue = %self.queue.name,
            sequence = stored.sequence.0,
            why,
            "gap: a stored message cannot be read and becomes a dead letter"
        );
        let ending = Ending::Dead {
            reason: DeadReason::Broken,
            detail: why,
            failed: Vec::new(),
        };
        self.feed.buried(tag);
        self.to_settle.push(ToSettle {
            settlement: Some(Settlement {
                sequence: stored.sequence,
                ending,
            }),
            then: Then::Broken(tag),
        });
    }

    /// Takes this order and all that are there.
    fn take_orders(&mut self, first: Order) {
        self.take_order(first);
        while let Ok(order) = self.orders.try_recv() {
            self.take_order(order);
        }
    }

    fn take_order(&mut self, order: Order) {
        match order {
            Order::Acknowledge(acks) => {
                for ack in acks {
                    for tag in self.feed.named(ack.tag.0, ack.multiple) {
                        let Some(sequence) = self.ended(tag) else {
                            continue;
                        };
                        self.to_settle.push(ToSettle {
                            settlement: Some(Settlement {
                                sequence,
                                ending: Ending::Handled,
                            }),
                            then: Then::Forget(sequence),
                        });
                    }
                }
            }
            Order::Start(start, done) => self.to_start.push((start, done)),
            Order::Move {
                tag,
                settlement,
                done,
            } => {
                let kept = match &settlement.ending {
                    Ending::Retry { after, .. } => Some(Some(*after)),
                    Ending::Hold { .. } => Some(None),
                    _ => None,
                };
                self.to_settle.push(ToSettle {
                    settlement: Some(settlement),
                    then: Then::Answer { tag, kept, done },
                });
            }
            Order::Committed(tag) => self.is_gone(tag),
            Order::Barrier(done) => self.to_settle.push(ToSettle {
                settlement: None,
                then: Then::Barrier(done),
            }),
            Order::Close(done) => {
                self.leave_uncounted.cancel();
                self.closing.push(done);
            }
        }
    }

    /// A message that was out has ended, and is about to be settled. `None` if it was not out.
    fn ended(&mut self, tag: u64) -> Option<Sequence> {
        let sequence = self.feed.ended(tag)?.sequence;
        self.ahead.ended(sequence);
        Some(sequence)
    }

    fn settle(&mut self, lease: &Lease) -> Work<Settling> {
        let count = self.to_settle.len().min(MOST_AT_ONCE);
        let (settlements, then): (Vec<_>, Vec<_>) = self
            .to_settle
            .drain(..count)
            .map(|step| (step.settlement, step.then))
            .unzip();
        let settlements: Vec<_> = settlements.into_iter().flatten().collect();
        let (store, lease) = (Arc::clone(&self.queue.engine.store), lease.clone());
        let name = Arc::clone(&self.queue.name);
        let give_up = self.queue.engine.give_up.clone();
        Box::pin(async move {
            if settlements.is_empty() {
                return (then, Ok(()));
            }
            let mut tries = Tries::new(name, "settled", give_up);
            loop {
                match store.settle(&lease, &settlements).await {
                    Err(error) if error.is_retryable() && tries.pause(&error).await => {}
                    answered => return (then, answered.map(|_| ())),
                }
            }
        })
    }

    fn settled(&mut self, then: Vec<Then>, result: Result<(), StoreError>) {
        for then in then {
            match then {
                Then::Forget(sequence) => self.feed.committed(sequence),
                Then::Answer { tag, kept, done } => {
                    if result.is_ok() {
                        match kept {
                            Some(after) => {
                                if let Some(sequence) = self.feed.kept(tag) {
                                    self.ahead.ended(sequence);
                                }
                                if let Some(after) = after
                                    && self.due.len() < MOST_DUE
                                {
                                    self.due.insert(Instant::now() + after);
                                }
                            }
                            None => self.is_gone(tag),
                        }
                    }
                    let _ = done.send(result.clone());
                }
                Then::Broken(tag) => self.is_gone(tag),
                Then::Barrier(done) => {
                    if result.is_ok() {
                        let _ = done.send(());
                    }
                }
            }
        }
    }

    fn is_gone(&mut self, tag: u64) {
        if let Some(sequence) = self.ended(tag) {
            self.feed.committed(sequence);
        }
    }

    /// Counts the first attempts of what was read.
    fn count(&self, lease: &Lease, found: Vec<Stored>, starts: Vec<Start>) -> Work<Counting> {
        let counting = self.counted(lease, starts, self.leave_uncounted.clone());
        Box::pin(async move { (found, counting.await) })
    }

    fn start(&mut self, lease: &Lease) -> Work<Starting> {
        let (starts, waiting): (Vec<_>, Vec<_>) = self.to_start.drain(..).unzip();
        let counting = self.counted(lease, starts, self.queue.engine.give_up.clone());
        Box::pin(async move { (waiting, counting.await) })
    }

    /// Counts attempts, until that is answered or given up.
    fn counted(
        &self,
        lease: &Lease,
        starts: Vec<Start>,
        give_up: CancellationToken,
    ) -> impl Future<Output = Result<(), StoreError>> + Send + use<> {
        let (store, lease) = (Arc::clone(&self.queue.engine.store), lease.clone());
        let mut tries = Tries::new(Arc::clone(&self.queue.name), "counted as started", give_up);
        async move {
            for part in starts.chunks(MOST_AT_ONCE) {
                if tries.given_up() {
                    return Err(StoreError::unavailable("given up"));
                }
                loop {
                    match store.start(&lease, part).await {
                        Err(error) if error.is_retryable() && tries.pause(&error).await => {}
                        Err(error) => return Err(error),
                        Ok(()) => break,
                    }
                }
            }
            Ok(())
        }
    }

    /// Gives the lease back, and before that uncounted what has not begun. The session's state has ended.
    async fn give_back(&mut self, lease: &Lease) -> Result<(), StoreError> {
        let store = &self.queue.engine.store;
        let never_began = self.ahead.take_back();
        let uncounting = async {
            for part in never_began.chunks(MOST_AT_ONCE) {
                store.uncount(lease, part).await?;
            }
            Ok::<_, StoreError>(())
        };
        let uncounted = tokio::time::timeout(TAKE_BACK, uncounting).await;
        let uncounted =
            uncounted.unwrap_or_else(|_| Err(StoreError::timed_out("uncount", TAKE_BACK)));
        if let Err(error) = uncounted {
            warn!(target: "laneway", queue = %self.queue.name, messages = never_began.len(), %error, "messages that have not begun could not be given back uncounted; each has an attempt less");
        }
        store.release(lease).await
    }
}

/// Tries at a database that does not answer; told once.
struct Tries {
    queue: Arc<str>,
    what: &'static str,
    told: bool,
    give_up: CancellationToken,
}

impl Tries {
    fn new(queue: Arc<str>, what: &'static str, give_up: CancellationToken) -> Self {
        Self {
            queue,
            what,
            told: false,
            give_up,
        }
    }

    fn given_up(&self) -> bool {
        self.give_up.is_cancelled()
    }

    /// Whether to try again.
    async fn pause(&mut self, error: &StoreError) -> bool {
        let Self {
            queue,
            what,
            told,
            give_up,
        } = self;
        if !*told {
            warn!(target: "laneway", %queue, %error, "messages cannot be {what}; trying again");
        }
        *told = true;
        tokio::select! {
            () = tokio::time::sleep(AGAIN) => true,
            () = give_up.cancelled() => false,
        }
    }
}

/// What is under way; never resolves if nothing is.
async fn under_way<T>(under: &mut Option<Work<T>>) -> T {
    match under {
        Some(under) => under.await,
        None => std::future::pending().await,
    }
}

async fn at(when: Option<Instant>) {
    match when {
        Some(when) => tokio::time::sleep_until(when.into()).await,
        None => std::future::pending().await,
    }
}
