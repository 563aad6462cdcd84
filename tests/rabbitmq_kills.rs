//! Processes that are killed at random while messages always fail: what is parked in the end is exactly what
//! always fails, and a second copy is only where a kill fell between the confirm and the acknowledgement.
//!
//! A killed process is this test program itself, started again to run one test, [`one_life`]. Attempts are
//! counted in memory, so a message that always fails may run more often than the limit over several lives.
//! `LANEWAY_SOAK=1` makes 20 runs on each kind of queue instead of 3.
#![cfg(all(unix, feature = "rabbitmq"))]

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::FutureExt;
use laneway::prelude::*;
use laneway::testing::OrderLedger;
use serde::{Deserialize, Serialize};

#[path = "support/job.rs"]
mod job;
#[path = "support/orders.rs"]
mod orders;
#[path = "support/stand.rs"]
mod stand;
mod support;
#[path = "support/watched.rs"]
mod watched;
#[path = "support/workload.rs"]
mod workload;
use job::{History, Job};
use orders::{started, stop};
use stand::{BOTH, Name, Stand, name, soak};
use support::broker::shared_url;
use watched::{Early, Record, Watched};
use workload::Step;

const KEYS: u64 = 20;
/// Messages of each key.
const EACH: u64 = 30;
const CREDITS: u32 = 32;
/// Kills at a random moment, in each run; and one more, by the process itself, between a confirm and the
/// acknowledgement.
const KILLS: u64 = 4;

fn is_poison(seq: u64) -> bool {
    seq % 5 == 2
}

// ---- the process that is killed

/// Names the variable with which this program is one life of the process.
const LIFE: &str = "LANEWAY_TEST_LIFE";

#[derive(Debug, Serialize, Deserialize)]
struct Life {
    url: String,
    queue: String,
    quorum: bool,
    folder: PathBuf,
    number: u64,
    /// Dies when so many copies are confirmed, before the bus knows of the last one.
    dies_at_confirm: Option<u64>,
}

/// What a life writes down, a line each time, so that a SIGKILL takes none of it back.
#[derive(Clone)]
struct Notes(Arc<File>);

impl Notes {
    fn of(folder: &Path, number: u64) -> Self {
        let path = folder.join(format!("life-{number}.notes"));
        let file = OpenOptions::new().create_new(true).append(true).open(path);
        Self(Arc::new(file.expect("a new file")))
    }

    fn write(&self, what: &str, (key, seq): &Name) {
        let line = format!("{what} {key} {seq}\n");
        (&*self.0).write_all(line.as_bytes()).expect("written");
    }

    /// What a life has written: word and message, in order.
    fn read(folder: &Path, number: u64) -> Vec<(String, Name)> {
        let path = folder.join(format!("life-{number}.notes"));
        let text = fs::read_to_string(path).unwrap_or_default();
        let lines = text.lines().map(|line| {
            let [what, key, seq] = line.split(' ').collect::<Vec<_>>()[..] else {
                panic!("{line}");
            };
            let name = (key.to_owned(), seq.parse().expect("a number"));
            (what.to_owned(), name)
        });
        lines.collect()
    }
}

/// Not a test by itself: without the variable it is not a life, and ends at once.
#[test]
fn one_life() {
    if let Ok(life) = std::env::var(LIFE) {
        let life: Life = serde_json::from_str(&life).expect("it is ours");
        let runtime = tokio::runtime::Runtime::new().expect("a runtime starts");
        runtime.block_on(live(life));
    }
}

/// Handles until the message behind all others has come.
async fn live(life: Life) {
    let ledger = OrderLedger::in_folder(&life.folder).expect("a folder");
    let queue_type = BOTH[usize::from(life.quorum)];
    let stand = Stand::named(&life.url, &life.queue, queue_type, ledger);
    let record = Record::new();
    // What is acknowledged was confirmed, in this life or in an earlier one.
    for earlier in 0..life.number {
        for (what, message) in Notes::read(&life.folder, earlier) {
            if what == "confirmed" {
                record.note(message, &Ok(()));
            }
        }
    }
    let notes = Notes::of(&life.folder, life.number);
    let confirms = Arc::new(AtomicU64::new(0));
    let (writes, noted) = (record.clone(), notes.clone());
    let transport = Watched::new(RabbitMq::at(&life.url), move |message, attempt| {
        let (record, notes) = (writes.clone(), noted.clone());
        let confirms = Arc::clone(&confirms);
        async move {
            notes.write("sent", &message);
            let result = attempt.await;
            record.note(message.clone(), &result);
            if result.is_ok() {
                notes.write("confirmed", &message);
                let number = confirms.fetch_add(1, Ordering::Relaxed) + 1;
                if life.dies_at_confirm.is_some_and(|last| number >= last) {
                    notes.write("died", &message);
                    kill_oneself().await;
                }
            }
            result
        }
        .boxed()
    });
    let early = Early::none();
    let (looks, records) = (early.clone(), record.clone());
    let handler = stand.handler(move |message, _| {
        looks.check(&records, &message.key, message.seq, is_poison);
        for message in looks.all() {
            notes.write("early", &message);
        }
        let time = Duration::from_millis(2).mul_f64(fastrand::f64());
        if is_poison(message.seq) {
            Step::Fail(time)
        } else {
            Step::Succeed(time)
        }
    });
    let bus = started(stand.bus(transport, |e| {
        e.concurrency(8)
            .max_in_flight(CREDITS)
            .max_delivery_attempts(3)
            .backoff(Backoff::constant(Duration::from_millis(1)))
            .handler(handler)
    }))
    .await;
    stand.until_last(&bus, 1).await;
    stop(&bus).await;
}

async fn kill_oneself() {
    let id = std::process::id().to_string();
    let _ = Command::new("kill").args(["-KILL", &id]).status();
    // Until the signal has come.
    std::future::pending::<()>().await;
}

// ---- who kills it

fn start(life: &Life) -> Job {
    let mut command = Command::new(std::env::current_exe().expect("a test has a path"));
    command
        .args(["--exact", "one_life", "--nocapture"])
        .env(LIFE, serde_json::to_string(life).expect("text"));
    Job::running(command)
}

/// Runs a life to its violent end.
fn killed(life: &Life, kill: impl FnOnce(&mut Job), ledger: &OrderLedger) {
    let mut job = start(life);
    let id = job.id();
    kill(&mut job);
    let ended = job.wait();
    assert_eq!(ended.status.code(), None, "it was killed: {ended:?}");
    ledger.died(id);
}

fn random_kills_park_exactly_the_poison(queue_type: QueueType, seed: u64) {
    println!("{queue_type:?}, seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime starts");
    let folder = tempfile::tempdir().expect("a folder");
    let ledger = OrderLedger::in_folder(folder.path()).expect("a folder");
    let new = Stand::new(&shared_url(), "kills", queue_type);
    let stand = Stand::named(&new.url, &new.queue, queue_type, ledger.clone());
    let mut life = Life {
        url: stand.url.clone(),
        queue: stand.queue.clone(),
        quorum: queue_type == QueueType::Quorum,
        folder: folder.path().to_owned(),
        number: 0,
        dies_at_confirm: None,
    };
    runtime.block_on(async {
        // Declares the queue.
        let idle = stand.handler(|_, _| Step::Hang);
        let bus = started(stand.bus(RabbitMq::at(&stand.url), |e| e.handler(idle))).await;
        stop(&bus).await;
        stand.publish(EACH * KEYS, KEYS).await;
    });
    let by_itself = random.u64(..=KILLS);
    for number in 0..=KILLS {
        life.number = number;
        life.dies_at_confirm = (number == by_itself).then(|| random.u64(1..8));
        let more = random.usize(5..100);
        let moment = Duration::from_micros(random.u64(..3_000));
        let kill = |job: &mut Job| {
            if number != by_itself {
                let so_far = History::read(folder.path()).runs.len();
                job.until(folder.path(), "start", so_far + more);
                // The fault itself: its moment.
                std::thread::sleep(moment);
                job.signal("KILL");
            }
        };
        killed(&life, kill, &ledger);
    }
    life.number = KILLS + 1;
    life.dies_at_confirm = None;
    let last = start(&life);
    // Only now: it shall be behind what the killed ones have had in hand.
    runtime.block_on(stand.send_last(1));
    let ended = last.wait();
    assert!(ended.status.success(), "{ended:?}");

    let (copies, figures) = runtime.block_on(stand.parked_and_figures());
    let poison: BTreeSet<Name> = (0..KEYS)
        .flat_map(|key| (1..=EACH).map(move |seq| name(key, seq)))
        .filter(|(_, seq)| is_poison(*seq))
        .collect();
    assert_eq!(copies.keys().cloned().collect::<BTreeSet<_>>(), poison);
    judge(folder.path(), &copies);
    let good = EACH * KEYS - poison.len() as u64 + 1;
    assert_eq!(figures.handled, good, "{figures}");
    let unsettled = u64::from(CREDITS) * (KILLS + 1);
    assert!(figures.duplicates <= unsettled, "{figures}");
    println!(
        "{} copies of {}, {} duplicates, {} attempts",
        copies.values().sum::<u32>(),
        poison.len(),
        figures.duplicates,
        figures.attempts
    );
}

/// Compares the copies with what the lives have written down.
fn judge(folder: &Path, copies: &BTreeMap<Name, u32>) {
    // In how many lives a message was sent to the parking place, and in how many of them it was confirmed.
    let mut sent: BTreeMap<Name, u32> = BTreeMap::new();
    let mut confirmed: BTreeMap<Name, u32> = BTreeMap::new();
    let mut died = 0;
    for number in 0..=KILLS + 1 {
        let mut of_life = BTreeSet::new();
        for (what, message) in Notes::read(folder, number) {
            match what.as_str() {
                "sent" => {
                    *sent.entry(message.clone()).or_default() += 1;
                    assert!(of_life.insert(message), "sent twice in life {number}");
                }
                "confirmed" => *confirmed.entry(message).or_default() += 1,
                // It was confirmed, surely not acknowledged, and so it was parked again.
                "died" => {
                    died += 1;
                    assert!(copies[&message] >= 2, "{message:?}");
                }
                // A message ran before a poison predecessor was parked.
                other => panic!("{other} {message:?}"),
            }
        }
    }
    assert!(
        died >= 1,
        "a process dies between a confirm and the acknowledgement"
    );
    let mut second = 0;
    for (message, copies) in copies {
        // What was confirmed is kept. Each copy more than one is of a life that had sent the message, once,
        // and that was killed before the broker had the acknowledgement: it came again.
        let range = confirmed.get(message).copied().unwrap_or(0)..=sent[message];
        assert!(
            range.contains(copies),
            "{copies} copies of {message:?}: {range:?}"
        );
        second += u64::from(copies - 1);
    }
    // A key has one message at its head, so no kill can leave more second copies than there are keys, or
    // unsettled messages.
    assert!(second <= (KILLS + 1) * KEYS.min(u64::from(CREDITS)));
}

fn runs(queue_type: QueueType) {
    for _ in 0..if soak() { 20 } else { 3 } {
        random_kills_park_exactly_the_poison(queue_type, fastrand::u64(..));
    }
}

#[test]
fn what_is_parked_on_a_classic_queue_is_exactly_the_poison_whenever_the_process_is_killed() {
    runs(QueueType::Classic);
}

#[test]
fn what_is_parked_on_a_quorum_queue_is_exactly_the_poison_whenever_the_process_is_killed() {
    runs(QueueType::Quorum);
}
