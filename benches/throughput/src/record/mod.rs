//! What ran, and when: two clock readings and a few stores for each run while it is measured; the order
//! ledger judges afterwards.

mod judge;

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

pub(crate) use judge::Verdict;

use crate::machine::{now, processor_time};
use crate::workload::{Effort, Message, Plan};

/// The first run of a message.
#[derive(Default)]
struct First {
    runs: AtomicU32,
    ok: AtomicU32,
    start: AtomicU64,
    end: AtomicU64,
    sent: AtomicU64,
}

/// A run, as the ledger wants it.
#[derive(Clone, Copy)]
struct Ran {
    key: u32,
    seq: u32,
    attempt: u32,
    start: u64,
    end: u64,
    ok: bool,
}

/// Records the runs of a plan's messages.
pub(crate) struct Record {
    pub(crate) plan: Plan,
    first: Vec<First>,
    /// Later runs of a message, and runs of messages that are none of the plan.
    more: Mutex<Vec<Ran>>,
    parked: Mutex<Vec<(u32, u32)>>,
    /// The processor time of this process when what is measured began.
    began: AtomicU64,
    /// The same when it ended, and how long it took, if that is not for the handlers to say.
    ended: OnceLock<(u64, Duration)>,
    /// Messages that have yet to succeed.
    missing: AtomicUsize,
    all: Notify,
}

impl Record {
    pub(crate) fn of(plan: Plan) -> Arc<Self> {
        let missing = plan.len() - plan.poisoned().len();
        Arc::new(Self {
            first: (0..plan.len()).map(|_| First::default()).collect(),
            more: Mutex::default(),
            parked: Mutex::default(),
            began: AtomicU64::new(processor_time()),
            ended: OnceLock::new(),
            missing: AtomicUsize::new(missing),
            all: Notify::new(),
            plan,
        })
    }

    /// Processor time counts from now on, and not from the making of the record.
    pub(crate) fn begin(&self) {
        self.began.store(processor_time(), Ordering::Relaxed);
    }

    /// What is measured has taken so long and ends here. The handlers that run after it are for the ledger alone.
    pub(crate) fn measured(&self, took: Duration) {
        // Measured once: a second word would not count.
        let _ = self.ended.set((processor_time(), took));
    }

    /// Microseconds of processor time, for each message of the plan: until what is measured ended, or so far.
    pub(crate) fn processor_us(&self) -> f64 {
        let ended = self.ended.get().map(|(ended, _)| *ended);
        let ended = ended.unwrap_or_else(processor_time);
        let spent = ended - self.began.load(Ordering::Relaxed);
        spent as f64 / 1e3 / self.plan.len() as f64
    }

    /// What every handler does. Says whether it succeeded.
    pub(crate) async fn handle(&self, message: &Message) -> bool {
        let mut run = self.start(message);
        match self.plan.effort(message.key, message.seq) {
            Effort::Nothing => {}
            Effort::Wait(time) => tokio::time::sleep(time).await,
            Effort::Fail => return false,
        }
        run.ok = true;
        true
    }

    /// The same for a handler that cannot wait.
    pub(crate) fn handle_now(&self, message: &Message) {
        self.start(message).ok = true;
    }

    fn start(&self, message: &Message) -> Run<'_> {
        Run {
            record: self,
            key: message.key,
            seq: message.seq,
            sent: message.sent,
            start: now(),
            ok: false,
        }
    }

    /// Waits until every message that can succeed has done so.
    pub(crate) async fn all(&self) {
        self.all.notified().await;
    }

    pub(crate) fn parked(&self, key: u32, seq: u32) {
        let mut parked = self.parked.lock().unwrap_or_else(PoisonError::into_inner);
        parked.push((key, seq));
    }

    fn ran(&self, run: &Run<'_>) {
        let end = now();
        let slot = self.plan.index(run.key, run.seq).map(|at| &self.first[at]);
        let before = slot.map_or(1, |slot| slot.runs.fetch_add(1, Ordering::Relaxed));
        match slot {
            Some(slot) if before == 0 => {
                slot.start.store(run.start, Ordering::Relaxed);
                slot.end.store(end, Ordering::Relaxed);
                slot.sent.store(run.sent, Ordering::Relaxed);
                slot.ok.store(u32::from(run.ok), Ordering::Release);
            }
            _ => {
                let mut more = self.more.lock().unwrap_or_else(PoisonError::into_inner);
                more.push(Ran {
                    key: run.key,
                    seq: run.seq,
                    attempt: before + 1,
                    start: run.start,
                    end,
                    ok: run.ok,
                });
            }
        }
        // Duplicates make it end too early, which the ledger then shows as a loss.
        if run.ok && self.missing.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.all.notify_one();
        }
    }
}

/// One run of a handler; ends when it is dropped.
struct Run<'a> {
    record: &'a Record,
    key: u32,
    seq: u32,
    sent: u64,
    start: u64,
    ok: bool,
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        self.record.ran(self);
    }
}
