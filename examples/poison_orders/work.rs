//! What has happened so far: times, counts, and what became of each poison event. The handlers and the
//! events of the bus write it; the rounds wait for it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use laneway::prelude::*;
use laneway::testing::{OrderLedger, Run};
use laneway::{Event, EventKind, Fingerprint, HoldOver, MessageId, Outcome, PoisonReason};
use tokio::sync::broadcast::{Receiver, error::RecvError};
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

use crate::events::OrderEvent;
use crate::plan::{Defect, Plan, WINDOW};

/// When nothing has been handled, held, parked or replayed for so long, nothing will come.
const SILENCE: Duration = Duration::from_secs(60);

/// The run ends early: a signal came, or [`Work::trouble`] says what went wrong.
#[derive(Debug)]
pub(crate) struct Stopped;

/// How often things have happened.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counts {
    /// Events that a handler has handled, replayed ones apart.
    pub handled: u64,
    /// Times that a key began to be held.
    pub held: u64,
    /// Events that were parked.
    pub parked: u64,
    /// Replayed events that a handler has handled.
    pub replayed: u64,
}

/// What became of a poison event.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fate {
    pub defect: Defect,
    /// How long it held its key, altogether.
    pub held: Duration,
    pub parked_as: Option<PoisonReason>,
    pub is_handled: bool,
}

#[derive(Default)]
struct Record {
    /// By the number of the event.
    fates: BTreeMap<u64, Fate>,
    numbers: HashMap<MessageId, u64>,
    /// Parked events that are no poison, or that were parked before.
    unexpected: u64,
    held_keys: HashSet<Fingerprint>,
}

/// The work of a run, shared by all who do it.
pub(crate) struct Work {
    pub plan: Plan,
    pub ledger: OrderLedger,
    began: Instant,
    /// For each event, in nanoseconds since `began`: when its publishing began.
    sent: Vec<AtomicU64>,
    /// For each event, in nanoseconds: from then to its effect; zero before that.
    took: Vec<AtomicU64>,
    /// How many more events of healthy orders may be under way.
    pub window: Semaphore,
    counts: watch::Sender<Counts>,
    record: Mutex<Record>,
    /// Cancelled by a signal, or by trouble.
    pub stop: CancellationToken,
    trouble: OnceLock<String>,
}

impl Work {
    pub(crate) fn new(plan: Plan, ledger: OrderLedger) -> Self {
        let fate = |(number, defect)| {
            let fate = Fate {
                defect,
                held: Duration::ZERO,
                parked_as: None,
                is_handled: false,
            };
            (number, fate)
        };
        let record = Record {
            fates: plan.poison().into_iter().map(fate).collect(),
            ..Record::default()
        };
        let zeros = || (0..plan.messages()).map(|_| AtomicU64::new(0)).collect();
        Self {
            sent: zeros(),
            took: zeros(),
            ledger,
            began: Instant::now(),
            window: Semaphore::new(WINDOW as usize),
            counts: watch::Sender::default(),
            record: Mutex::new(record),
            stop: CancellationToken::new(),
            trouble: OnceLock::new(),
            plan,
        }
    }

    fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn nanos(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    // ---- what happens

    pub(crate) fn publishing(&self, number: u64) {
        self.sent[number as usize].store(self.nanos(), Relaxed);
    }

    pub(crate) fn published(&self, event: &OrderEvent) {
        self.ledger.published(&event.order.to_string(), event.seq);
    }

    /// Makes a poison event known by its message id.
    pub(crate) fn is_called(&self, number: u64, id: MessageId) {
        self.record().numbers.insert(id, number);
    }

    /// Records a run of a handler.
    pub(crate) fn run(&self, event: &OrderEvent, place: u64, cx: &Context) -> Run {
        let order = event.order.to_string();
        self.ledger.run(&order, place, cx.attempt())
    }

    pub(crate) fn met_poison(&self, number: u64, cx: &Context) {
        if let Some(id) = cx.message_id() {
            self.is_called(number, id.clone());
        }
    }

    /// An event was handled where it stood in its order.
    pub(crate) fn handled(&self, number: u64) {
        let index = number as usize;
        let took = self.nanos() - self.sent[index].load(Relaxed);
        let first = self.took[index].compare_exchange(0, took.max(1), Relaxed, Relaxed);
        if first.is_ok() {
            if self.plan.is_healthy(number) {
                self.window.add_permits(1);
            }
            self.counts.send_modify(|counts| counts.handled += 1);
        }
    }

    /// A replayed event was handled.
    pub(crate) fn replayed(&self, number: u64) {
        let first = match self.record().fates.get_mut(&number) {
            Some(fate) => !std::mem::replace(&mut fate.is_handled, true),
            None => false, // no poison: nothing that was to be parked
        };
        if first {
            self.counts.send_modify(|counts| counts.replayed += 1);
        }
    }

    /// Writes down what a bus reports, until it is gone.
    pub(crate) async fn watch(self: Arc<Self>, mut events: Receiver<Event>) {
        loop {
            match events.recv().await {
                Ok(event) => self.note(event.kind),
                Err(RecvError::Lagged(missed)) => {
                    self.fail(format!("missed {missed} events"));
                }
                Err(RecvError::Closed) => return,
            }
        }
    }

    fn note(&self, kind: EventKind) {
        match kind {
            EventKind::Gap {
                message,
                reason,
                outcome: Outcome::Parked,
                ..
            } => self.parked(message.as_ref(), reason),
            EventKind::Held { .. } => self.counts.send_modify(|counts| counts.held += 1),
            EventKind::HoldEnded {
                message,
                why,
                after,
                ..
            } => {
                if matches!(why, HoldOver::TooLong | HoldOver::TooMany) {
                    self.fail("a hold reached its bound".to_owned());
                }
                let mut record = self.record();
                let number = message.and_then(|id| record.numbers.get(&id).copied());
                if let Some(fate) = number.and_then(|number| record.fates.get_mut(&number)) {
                    fate.held += after;
                }
            }
            EventKind::Disconnected { reason, .. } => eprintln!("disconnected: {reason}"),
            _ => {}
        }
    }

    fn parked(&self, message: Option<&MessageId>, reason: PoisonReason) {
        let mut record = self.record();
        let number = message.and_then(|id| record.numbers.get(id).copied());
        let fate = number.and_then(|number| Some((number, record.fates.get_mut(&number)?)));
        match fate {
            Some((number, fate)) if fate.parked_as.is_none() => {
                fate.parked_as = Some(reason);
                let event = self.plan.event(number);
                let order = event.order.to_string();
                self.ledger.parked(&order, event.seq);
                // It is to be replayed, so it is lost if that does not happen.
                let place = self.plan.replay_place(&event);
                self.ledger.published(&order, place);
            }
            _ => record.unexpected += 1,
        }
        drop(record);
        self.counts.send_modify(|counts| counts.parked += 1);
    }

    /// Keys that a snapshot has shown as held.
    pub(crate) fn saw_held(&self, keys: impl IntoIterator<Item = Fingerprint>) {
        self.record().held_keys.extend(keys);
    }

    /// Ends the run: something went wrong. The first cause is kept.
    pub(crate) fn fail(&self, what: String) -> Stopped {
        // An error means that there is an earlier cause already.
        let _ = self.trouble.set(what);
        self.stop.cancel();
        Stopped
    }

    // ---- what is asked

    /// Waits until the counts have got so far.
    ///
    /// # Errors
    /// When the run is to end early; also when nothing has happened for [`SILENCE`].
    pub(crate) async fn until(
        &self,
        what: &str,
        reached: impl Fn(&Counts) -> bool,
    ) -> Result<(), Stopped> {
        let mut counts = self.counts.subscribe();
        while !reached(&counts.borrow_and_update()) {
            tokio::select! {
                changed = tokio::time::timeout(SILENCE, counts.changed()) => if changed.is_err() {
                    let what = format!("waited for {what}, and nothing happened for {SILENCE:?}");
                    return Err(self.fail(what));
                },
                () = self.stop.cancelled() => return Err(Stopped),
            }
        }
        Ok(())
    }

    pub(crate) fn counts(&self) -> Counts {
        *self.counts.borrow()
    }

    /// Whether a signal has ended the run before everything was done.
    pub(crate) fn is_interrupted(&self) -> bool {
        let counts = self.counts();
        let all_ended = counts.handled + counts.parked >= self.plan.messages();
        let is_complete = all_ended && counts.replayed >= counts.parked;
        self.stop.is_cancelled() && self.trouble().is_none() && !is_complete
    }

    pub(crate) fn trouble(&self) -> Option<&str> {
        self.trouble.get().map(String::as_str)
    }

    pub(crate) fn held_keys(&self) -> u64 {
        self.record().held_keys.len() as u64
    }

    /// What became of the poison event with this message id.
    pub(crate) fn fate(&self, id: Option<&MessageId>) -> Option<Fate> {
        let record = self.record();
        let number = record.numbers.get(id?)?;
        record.fates.get(number).copied()
    }

    /// Whether nothing was parked but poison, each event for its reason; and all of it, in a complete run.
    pub(crate) fn parked_as_expected(&self, is_complete: bool) -> bool {
        let record = self.record();
        let mut fates = record.fates.values();
        record.unexpected == 0
            && fates.all(|fate| match fate.parked_as {
                Some(reason) => reason == fate.defect.reason(),
                None => !is_complete,
            })
    }

    /// Times from publish to effect of the events of healthy orders in a round.
    pub(crate) fn healthy_times(&self, round: usize) -> Vec<Duration> {
        let numbers = self.plan.rounds[round].numbers.clone();
        let healthy = numbers.filter(|number| self.plan.is_healthy(*number));
        healthy
            .map(|number| Duration::from_nanos(self.took[number as usize].load(Relaxed)))
            .collect()
    }
}
