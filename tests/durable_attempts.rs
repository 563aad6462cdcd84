//! Attempts of durable queues: each is counted before its handler is called, the first ones many at a time and ahead; and
//! what a message that only waited loses by that, at a kill, at an orderly end, and behind a message that is kept.
//!
//! A killed process is this test program itself, started again to run one test, [`one_life`].
#![cfg(all(unix, feature = "sqlite", feature = "postgres"))]

#[path = "support/job.rs"]
mod job;
#[path = "support/lives.rs"]
mod lives;
#[path = "support/stores.rs"]
mod stores;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use laneway::BusBuilder;
use laneway::prelude::*;
use laneway::store::NewMessage;
use laneway::testing::OrderLedger;
use tokio::sync::watch;

use job::{History, Job};
use lives::{Life, Look, Loose, Place, Step, new_loose, new_step};
use stores::Database;

one_life!();

const DRAIN: Duration = Duration::from_secs(20);
const PATIENCE: Duration = Duration::from_secs(60);

/// Keys, and as many handlers at once.
const KEYS: u64 = 8;
/// Messages of each key, from 0. All of them fit into one read of one shard.
const EACH: u64 = 10;

/// Messages with so many attempts.
const COUNTED: &str = "SELECT count(*) FROM {t}messages WHERE attempts = ";

/// Runs a test on both stores.
macro_rules! on_both {
    ($($name:ident),+ $(,)?) => {
        mod sqlite { $(
            #[tokio::test(flavor = "multi_thread")]
            async fn $name() { super::$name(super::Database::sqlite()).await; }
        )+ }
        mod postgres { $(
            #[tokio::test(flavor = "multi_thread")]
            async fn $name() { super::$name(super::Database::postgres()).await; }
        )+ }
    };
}

on_both!(
    what_only_waited_at_two_kills_is_not_given_up_and_runs_in_order,
    with_one_attempt_what_waited_at_a_kill_is_not_given_up,
    a_message_that_kills_its_process_is_begun_as_often_as_it_may_and_not_more,
    an_orderly_end_leaves_what_waited_uncounted,
    what_waits_behind_a_kept_message_loses_no_attempt,
    every_attempt_is_counted_before_its_handler_is_called,
);

fn backlog() -> Vec<NewMessage> {
    let each = (0..EACH).flat_map(|number| (0..KEYS).map(move |key| new_step(key, number)));
    each.collect()
}

/// Lives of one program over a backlog.
struct Lives {
    database: Database,
    place: Place,
    folder: tempfile::TempDir,
    ledger: OrderLedger,
    look: Look,
}

impl Lives {
    async fn over(database: Database, backlog: Vec<NewMessage>) -> Self {
        let place = Place::of(&database);
        store(&place, backlog).await;
        let folder = tempfile::tempdir().expect("a folder");
        Self {
            ledger: OrderLedger::in_folder(folder.path()).expect("a folder"),
            look: place.look().await,
            database,
            place,
            folder,
        }
    }

    /// The first message of each key waits in its handler.
    fn life(&self, name: &str, attempts: u32) -> Life {
        let mut life = Life::new(&self.place, self.folder.path(), name);
        life.attempts = attempts;
        life.waits = Some(0);
        life
    }

    /// Kills it once the first of each key runs, and so many have so many attempts.
    async fn kill_with(&mut self, life: &Life, attempts: u32, messages: u64) {
        let so_far = self.history().runs.len();
        let mut job = life.start();
        job.until(self.folder.path(), "start", so_far + KEYS as usize);
        let query = format!("{COUNTED}{attempts}");
        self.look.until(&query, messages as i64).await;
        let id = job.id();
        job.signal("KILL");
        let ended = job.wait();
        assert_eq!(ended.status.code(), None, "it was killed: {ended:?}");
        self.ledger.died(id);
    }

    /// A last life, in which nothing waits and nothing is left.
    async fn finish(&mut self, mut life: Life) {
        life.waits = None;
        let job = life.start();
        self.look.until_backlog(Step::TYPE, 0).await;
        end(job);
    }

    fn history(&self) -> History {
        History::read(self.folder.path())
    }

    /// How many are dead letters. All of them are `abandoned`.
    async fn abandoned(&mut self) -> i64 {
        let dead = "SELECT count(*) FROM {t}dead_letters";
        let all = self.look.number(dead).await;
        let abandoned = format!("{dead} WHERE reason = 'abandoned'");
        assert_eq!(self.look.number(&abandoned).await, all);
        all
    }

    async fn clean_up(self) {
        drop(self.look);
        self.database.clean_up().await;
    }
}

async fn store(place: &Place, messages: Vec<NewMessage>) {
    let store = place.open().await;
    store.enqueue(messages).await.expect("stored").committed();
    store.close().await;
}

fn end(job: Job) {
    job.signal("TERM");
    let ended = job.wait();
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
}

/// The attempts in which each message ran, in the order of their starts.
fn attempts_of(history: &History) -> BTreeMap<(String, u64), Vec<u64>> {
    let mut attempts: BTreeMap<_, Vec<_>> = BTreeMap::new();
    let mut runs: Vec<_> = history.runs.iter().collect();
    runs.sort_unstable_by_key(|run| run.start);
    for run in runs {
        let of = attempts.entry(run.message.clone()).or_default();
        of.push(run.attempt);
    }
    attempts
}

/// Two attempts, two kills: what ran at both is given up, and nothing else. What waited at the first loses one attempt,
/// what waited at the second does not lose another.
async fn what_only_waited_at_two_kills_is_not_given_up_and_runs_in_order(database: Database) {
    let mut lives = Lives::over(database, backlog()).await;
    let life = lives.life("one", 2);
    lives.kill_with(&life, 1, KEYS * EACH).await;
    lives.kill_with(&life, 2, KEYS).await;
    assert_eq!(lives.history().runs.len() as u64, 2 * KEYS);
    lives.finish(life).await;
    assert_eq!(lives.abandoned().await, KEYS as i64);
    let history = lives.history();
    let attempts = attempts_of(&history);
    assert_eq!(attempts.len() as u64, KEYS * EACH, "all ran");
    for ((key, number), attempts) in attempts {
        let expected = if number == 0 { vec![1, 2] } else { vec![2] };
        assert_eq!(attempts, expected, "{key}: {number}");
    }
    let counted = history.count();
    assert_eq!(
        (counted.inversions, counted.overlaps),
        (0, 0),
        "{counted:?}"
    );
    lives.clean_up().await;
}

async fn with_one_attempt_what_waited_at_a_kill_is_not_given_up(database: Database) {
    let mut lives = Lives::over(database, backlog()).await;
    let life = lives.life("one", 1);
    lives.kill_with(&life, 1, KEYS).await;
    lives.finish(life).await;
    assert_eq!(lives.abandoned().await, KEYS as i64);
    let history = lives.history();
    let attempts = attempts_of(&history);
    assert_eq!(attempts.len() as u64, KEYS * EACH, "all ran");
    assert!(attempts.values().all(|attempts| *attempts == [1]));
    assert_eq!(history.successes() as u64, KEYS * (EACH - 1));
    lives.clean_up().await;
}

async fn a_message_that_kills_its_process_is_begun_as_often_as_it_may_and_not_more(
    database: Database,
) {
    let mut lives = Lives::over(database, Vec::new()).await;
    for may in 1..=2 {
        // The first of its key, with much that waits behind it. (One before it could have ended and not be settled when it
        // kills, and be allowed no second attempt.)
        let killer = u64::from(may) * 100;
        let messages = (killer..killer + 20).map(|number| new_step(1, number));
        let messages = messages.collect();
        store(&lives.place, messages).await;
        let mut life = lives.life(&format!("may-{may}"), may);
        life.waits = None;
        life.kills = Some(killer);
        for _ in 0..may {
            let job = life.start();
            let id = job.id();
            let ended = job.wait();
            assert_eq!(ended.status.code(), None, "it killed itself: {ended:?}");
            lives.ledger.died(id);
        }
        lives.finish(life).await;
        assert_eq!(lives.abandoned().await, i64::from(may), "one each time");
        let attempts = attempts_of(&lives.history());
        let begun: Vec<_> = (1..=u64::from(may)).collect();
        assert_eq!(attempts[&("1".to_owned(), killer)], begun);
        for number in killer + 1..killer + 20 {
            assert_eq!(attempts[&("1".to_owned(), number)].len(), 1, "{number}");
        }
    }
    lives.clean_up().await;
}

// ---- In one process

/// A run: the message's number, its attempt, and whether the handler was told that it may have run before.
type Run = (u64, u32, bool);

/// What runs, and what is waited for.
#[derive(Clone)]
struct Seen(watch::Sender<Vec<Run>>);

impl Seen {
    fn nothing() -> Self {
        Self(watch::Sender::new(Vec::new()))
    }

    fn note(&self, number: u64, cx: &Context) {
        let run = (number, cx.attempt(), cx.is_redelivered());
        self.0.send_modify(|runs| runs.push(run));
    }

    /// So many runs, in the order of their messages.
    async fn reach(&self, count: usize) -> Vec<Run> {
        let mut runs = self.0.subscribe();
        let reached = runs.wait_for(|runs| runs.len() >= count);
        let reached = tokio::time::timeout(PATIENCE, reached).await;
        let mut runs = match reached {
            Ok(runs) => runs.expect("it is kept").clone(),
            Err(_) => panic!("{count} runs in vain: {:?}", self.0.borrow()),
        };
        runs.sort_unstable();
        runs
    }
}

async fn started(builder: BusBuilder) -> Bus {
    let ready = builder.build().expect("a valid bus");
    ready.start().await.expect("started")
}

/// The handlers of the first bus never end, and are broken off. What they had begun keeps its count; all else of the same
/// read is as new for the second bus: behind them in their keys, and claimed and in a lane.
async fn an_orderly_end_leaves_what_waited_uncounted(database: Database) {
    const LOOSE: u64 = 20;
    const PARALLEL: u64 = 4;
    let bus = async |seen: &Seen, ends: bool| {
        let (steps, loose) = (seen.clone(), seen.clone());
        let until_it_may = move || async move {
            if !ends {
                std::future::pending::<()>().await;
            }
            Ok(())
        };
        started(
            database
                .under(Bus::builder())
                .keyed::<Step>()
                .handler::<Step, _>(move |step: Step, cx: Context| {
                    steps.note(step.number, &cx);
                    until_it_may()
                })
                .handler::<Loose, _>(move |Loose(number): Loose, cx: Context| {
                    loose.note(1_000 + number, &cx);
                    until_it_may()
                })
                .local_queues(|q| q.durable().max_delivery_attempts(2))
                .local_queue(Step::TYPE, lives::ordered_steps)
                .local_queue(Loose::TYPE, |q| q.max_parallel(PARALLEL as u32)),
        )
        .await
    };
    let place = Place::of(&database);
    let mut all = backlog();
    all.extend((0..LOOSE).map(new_loose));
    let (total, begun) = (all.len() as i64, (KEYS + PARALLEL) as i64);
    store(&place, all).await;
    let seen = Seen::nothing();
    let mut look = place.look().await;
    let first = bus(&seen, false).await;
    seen.reach(begun as usize).await;
    look.until(&format!("{COUNTED}1"), total).await;
    first.shutdown(Duration::ZERO).await;
    drop(first);
    assert_eq!(look.number(&format!("{COUNTED}1")).await, begun);
    assert_eq!(look.number(&format!("{COUNTED}0")).await, total - begun);
    let began: BTreeSet<_> = seen.0.borrow().iter().map(|run| run.0).collect();

    let seen = Seen::nothing();
    let second = bus(&seen, true).await;
    let runs = seen.reach(total as usize).await;
    for (number, attempt, redelivered) in runs {
        let expected = match began.contains(&number) {
            true => (2, true),
            false => (1, false),
        };
        assert_eq!((attempt, redelivered), expected, "{number}");
    }
    assert!(second.shutdown(DRAIN).await.is_clean());
    drop(look);
    database.clean_up().await;
}

/// They are read together and counted, forgotten when the first is kept for its pause, and read again after it.
async fn what_waits_behind_a_kept_message_loses_no_attempt(database: Database) {
    let seen = Seen::nothing();
    let note = seen.clone();
    let place = Place::of(&database);
    let messages = (0..EACH).map(|number| new_step(1, number));
    store(&place, messages.collect()).await;
    let bus = started(
        database
            .under(Bus::builder())
            .keyed::<Step>()
            .handler::<Step, _>(move |step: Step, cx: Context| {
                note.note(step.number, &cx);
                let fails = step.number == 0 && cx.attempt() == 1;
                async move {
                    match fails {
                        // As long as a pause must be to be spent in the store.
                        true => Err(Failure::retry_after(Duration::from_secs(1), "later")),
                        false => Ok(()),
                    }
                }
            })
            .local_queues(|q| q.durable().max_delivery_attempts(2))
            .local_queue(Step::TYPE, lives::ordered_steps),
    )
    .await;
    let runs = seen.reach(EACH as usize + 1).await;
    let mut expected = vec![(0, 1, false), (0, 2, true)];
    expected.extend((1..EACH).map(|number| (number, 1, false)));
    assert_eq!(runs, expected);
    assert!(bus.shutdown(DRAIN).await.is_clean());
    database.clean_up().await;
}

/// Each handler looks into its own row. Every third message fails once: its first attempt is counted ahead, its second by
/// itself.
async fn every_attempt_is_counted_before_its_handler_is_called(database: Database) {
    const COUNT: u64 = 60;
    let place = Place::of(&database);
    store(&place, Vec::new()).await;
    // A connection that reads, and one question at a time.
    let look = Arc::new(tokio::sync::Mutex::new(place.look().await));
    let seen = Seen::nothing();
    let wrong = Arc::new(Mutex::new(Vec::new()));
    let handle = {
        let (seen, wrong) = (seen.clone(), Arc::clone(&wrong));
        move |number: u64, cx: Context| {
            let (seen, wrong, look) = (seen.clone(), Arc::clone(&wrong), Arc::clone(&look));
            async move {
                let id = cx.message_id().expect("it has one").to_string();
                let query =
                    format!("SELECT CAST(attempts AS bigint) FROM {{t}}messages WHERE id = '{id}'");
                let counted = look.lock().await.number(&query).await;
                if counted != i64::from(cx.attempt()) {
                    let attempt = cx.attempt();
                    let mut wrong = wrong.lock().expect("no panic");
                    wrong.push(format!(
                        "{counted} attempts of {number} in attempt {attempt}"
                    ));
                }
                seen.note(number, &cx);
                match number.is_multiple_of(3) && cx.attempt() == 1 {
                    true => Err(Failure::transient("the first attempt")),
                    false => Ok(()),
                }
            }
        }
    };
    let (steps, loose) = (handle.clone(), handle);
    let bus = started(
        database
            .under(Bus::builder())
            .keyed::<Step>()
            .handler::<Step, _>(move |step: Step, cx: Context| steps(step.number, cx))
            .handler::<Loose, _>(move |Loose(number): Loose, cx: Context| loose(number, cx))
            .local_queues(|q| {
                let q = q.durable().max_delivery_attempts(2);
                q.backoff(Backoff::constant(Duration::from_millis(1)))
            })
            .local_queue(Step::TYPE, lives::ordered_steps),
    )
    .await;
    for number in 0..COUNT {
        let key = number % KEYS;
        bus.publish(&Step { key, number }).await.expect("stored");
        let number = COUNT + number;
        bus.publish(&Loose(number)).await.expect("stored");
    }
    let again = (0..2 * COUNT)
        .filter(|number| number.is_multiple_of(3))
        .count();
    seen.reach(2 * COUNT as usize + again).await;
    assert!(bus.shutdown(DRAIN).await.is_clean());
    let wrong = wrong.lock().expect("no panic").clone();
    assert!(wrong.is_empty(), "{wrong:?}");
    database.clean_up().await;
}
