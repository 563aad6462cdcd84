//! What is to be done, what is done, and the handlers that do it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use laneway::PublishError;
use laneway::prelude::*;
use laneway::testing::OrderLedger;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use crate::options::Options;
use crate::run::Earlier;

/// Something happened to an order.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct OrderEvent {
    /// The order: the ordering key.
    pub order: u64,
    /// Number of the event within its order, from 1.
    pub seq: u64,
}

impl Message for OrderEvent {
    const TYPE: &'static str = "order-event";
}

/// The work of this run, shared by publisher, handlers and display.
pub(crate) struct Work {
    pub ledger: OrderLedger,
    messages: u64,
    keys: u64,
    poison: u64,
    handler_ms: u64,
    began: Instant,
    /// Which events have been handled or parked.
    done: Vec<AtomicBool>,
    pub done_count: AtomicU64,
    pub parked_count: AtomicU64,
    /// Handlers running now. Each has a key of its own.
    pub running: AtomicU64,
    pub attempts: AtomicU64,
    /// When the last handler returned, in nanoseconds since `began`.
    last_end: AtomicU64,
    all_done: Notify,
    complained: Mutex<Option<Instant>>,
}

impl Work {
    pub(crate) fn new(options: &Options, ledger: OrderLedger, earlier: &Earlier) -> Self {
        let work = Self {
            ledger,
            messages: options.messages,
            keys: options.keys,
            poison: options.poison,
            handler_ms: options.handler_ms,
            began: Instant::now(),
            done: (0..options.messages)
                .map(|_| AtomicBool::new(false))
                .collect(),
            done_count: AtomicU64::new(0),
            parked_count: AtomicU64::new(0),
            running: AtomicU64::new(0),
            attempts: AtomicU64::new(0),
            last_end: AtomicU64::new(0),
            all_done: Notify::new(),
            complained: Mutex::new(None),
        };
        for event in &earlier.handled {
            work.finish(event);
        }
        for event in &earlier.parked {
            work.finish(event);
            work.parked_count.fetch_add(1, Relaxed);
        }
        work
    }

    pub(crate) fn keys(&self) -> u64 {
        self.keys
    }

    /// How many events an order has.
    pub(crate) fn events_of(&self, order: u64) -> u64 {
        self.messages / self.keys + u64::from(order < self.messages % self.keys)
    }

    /// Events are numbered round robin over the orders.
    fn number(&self, event: &OrderEvent) -> u64 {
        (event.seq - 1) * self.keys + event.order
    }

    /// Exactly `poison` of the numbers, evenly spread.
    fn is_poison(&self, number: u64) -> bool {
        let up_to = |n: u64| u128::from(n) * u128::from(self.poison) / u128::from(self.messages);
        up_to(number + 1) > up_to(number)
    }

    /// The same for an event in every run, whatever else happens.
    fn handler_time(&self, number: u64) -> Duration {
        let share = fastrand::Rng::with_seed(number).f64();
        Duration::from_millis(self.handler_ms).mul_f64(share)
    }

    /// The event was handled or parked. True the first time.
    fn finish(&self, event: &OrderEvent) -> bool {
        let number = usize::try_from(self.number(event)).unwrap_or(usize::MAX);
        let first = match self.done.get(number) {
            Some(done) => !done.swap(true, Relaxed),
            None => false, // not of this run
        };
        if first && self.done_count.fetch_add(1, Relaxed) + 1 == self.messages {
            self.all_done.notify_waiters();
        }
        first
    }

    /// Waits until every event was handled or parked.
    pub(crate) async fn all_done(&self) {
        let mut notified = std::pin::pin!(self.all_done.notified());
        notified.as_mut().enable();
        if self.done_count.load(Relaxed) < self.messages {
            notified.await;
        }
    }

    /// Says on standard error that an event could not be published, not more than once a second.
    pub(crate) fn complain(&self, error: &PublishError) {
        let mut last = self
            .complained
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if last.is_none_or(|at| at.elapsed() > Duration::from_secs(1)) {
            *last = Some(Instant::now());
            eprintln!("{error}; trying again");
        }
    }

    fn nanos(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// The time since the last handler returned.
    pub(crate) fn since_last_end(&self) -> Duration {
        Duration::from_nanos(self.nanos().saturating_sub(self.last_end.load(Relaxed)))
    }
}

/// Handles the events of the queue of orders.
pub(crate) struct Ship(pub std::sync::Arc<Work>);

impl Handler<OrderEvent> for Ship {
    type Answer = ();

    async fn handle(&self, event: OrderEvent, cx: Context) -> Result<(), Failure> {
        let work = &self.0;
        let number = work.number(&event);
        let run = work
            .ledger
            .run(&event.order.to_string(), event.seq, cx.attempt());
        work.attempts.fetch_add(1, Relaxed);
        let _running = Running::enter(work);
        let time = work.handler_time(number);
        if !time.is_zero() {
            tokio::time::sleep(time).await;
        }
        if work.is_poison(number) {
            run.end(false);
            return Err(Failure::transient("no such article"));
        }
        run.end(true);
        work.finish(&event);
        Ok(())
    }
}

/// Notes what arrives in the parking queue: a queue like any other.
pub(crate) struct NoteParked(pub std::sync::Arc<Work>);

impl Handler<OrderEvent> for NoteParked {
    type Answer = ();

    async fn handle(&self, event: OrderEvent, _: Context) -> Result<(), Failure> {
        let work = &self.0;
        work.ledger.parked(&event.order.to_string(), event.seq);
        if work.finish(&event) {
            work.parked_count.fetch_add(1, Relaxed);
        }
        Ok(())
    }
}

/// Counts a running handler, also one that is dropped.
struct Running<'a>(&'a Work);

impl<'a> Running<'a> {
    fn enter(work: &'a Work) -> Self {
        work.running.fetch_add(1, Relaxed);
        Self(work)
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Relaxed);
        self.0.last_end.store(self.0.nanos(), Relaxed);
    }
}
