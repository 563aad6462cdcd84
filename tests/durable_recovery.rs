//! Durable queues after the end of their process, however it ended, and with more to do than fits into memory.
//!
//! A killed process is this test program itself, started again to run one test, [`one_life`]. `LANEWAY_SOAK=1` makes
//! the full counts.
#![cfg(all(unix, feature = "sqlite", feature = "postgres"))]

#[path = "support/job.rs"]
mod job;
#[path = "support/lives.rs"]
mod lives;
#[path = "support/postgres.rs"]
mod postgres_server;
#[path = "support/stores.rs"]
mod stores;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use laneway::BusBuilder;
use laneway::actors::port::MemberId;
use laneway::durable::DurableStore;
use laneway::prelude::*;
use laneway::store::postgres::PostgresConfig;
use laneway::store::sqlite::SqliteConfig;
use laneway::store::{
    DeadMessage, Ending, QueueIdentity, QueueOrder, Settlement, Shard, Store, Window,
};
use laneway::store::{NewMessage, Placed};
use laneway::testing::OrderLedger;
use serde::{Deserialize, Serialize};

use job::{History, Job};
use lives::{Life, Look, Loose, Place, Seed, Step, new_step, ordered_steps, soak};
use postgres_server::PrivatePostgres;
use std::path::Path;
use stores::Database;
use tokio::sync::{Semaphore, watch};

one_life!();

const DRAIN: Duration = Duration::from_secs(20);

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
    a_handler_that_cascades_to_its_own_and_to_another_queue_loses_nothing_and_never_waits_for_itself,
    a_partitioned_queue_with_a_backlog_is_handled_in_order_after_kills,
    a_cascade_that_was_committed_before_a_kill_runs_after_the_restart,
    a_message_that_kills_its_process_becomes_a_dead_letter_and_the_queue_goes_on,
    the_backlog_runs_before_what_arrives_during_the_start,
    ids_of_ended_messages_are_remembered_for_their_window_and_then_forgotten,
    publishing_to_an_idle_queue_waits_for_no_handler_and_its_parallelism_is_kept,
    messages_of_a_removed_handler_wait_and_become_dead_letters_once_their_queue_is_retired,
    a_handler_of_another_type_in_the_same_queue_gets_its_own_and_the_rest_are_dead_letters,
);

async fn started(builder: BusBuilder) -> Bus {
    let ready = builder.build().expect("a valid bus");
    ready.start().await.expect("started")
}

async fn stop(bus: Bus, database: Database) {
    bus.shutdown(DRAIN).await;
    drop(bus);
    database.clean_up().await;
}

/// Dead letters, once there are so many.
async fn dead_letters(store: &dyn Store, queue: &str, count: usize) -> Vec<DeadMessage> {
    let found = async {
        loop {
            // Until the queue is known here, it is an error.
            let dead = store
                .dead_letters(queue, 0, 1_000)
                .await
                .unwrap_or_default();
            if dead.len() >= count {
                return dead;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let found = tokio::time::timeout(Duration::from_secs(60), found).await;
    found.unwrap_or_else(|_| panic!("no {count} dead letters of {queue}"))
}

// ---- D1

#[derive(Serialize, Deserialize)]
struct Twig {
    number: u64,
}

impl Message for Twig {
    const TYPE: &'static str = "twig";
}

/// D1: a seed returns as many seeds as twigs, all at once; the seeds go to the queue that is being handled.
async fn a_handler_that_cascades_to_its_own_and_to_another_queue_loses_nothing_and_never_waits_for_itself(
    database: Database,
) {
    let count = if soak() { 20_000 } else { 1_200 };
    for transactional in [false, true] {
        let seeds = Tally::of(count + 1);
        let twigs = Tally::of(count);
        let (seed, twig) = (seeds.clone(), twigs.clone());
        let bus = started(
            database
                .under(Bus::builder())
                .handler::<Seed, _>(move |Seed(number): Seed, _: Context| {
                    // Number 0 is the first.
                    let more = 1..=if number == 0 { count } else { 0 };
                    seed.count(number);
                    async move {
                        let seeds: Vec<_> = more.clone().map(Seed).collect();
                        let twigs: Vec<_> = more.map(|number| Twig { number }).collect();
                        Ok((seeds, twigs))
                    }
                })
                .handler::<Twig, _>(move |message: Twig, _: Context| {
                    twig.count(message.number - 1);
                    async { Ok(()) }
                })
                .local_queues(|q| {
                    let q = q.durable();
                    if transactional { q.transactional() } else { q }
                }),
        )
        .await;
        bus.publish(&Seed(0)).await.expect("stored");
        seeds.all().await;
        twigs.all().await;
        let mut look = Place::of(&database).look().await;
        look.until_backlog(Seed::TYPE, 0).await;
        look.until_backlog(Twig::TYPE, 0).await;
        assert!(bus.shutdown(DRAIN).await.is_clean());
    }
    database.clean_up().await;
}

/// Which of so many numbers came.
#[derive(Clone)]
struct Tally {
    missing: Arc<Mutex<BTreeSet<u64>>>,
    left: watch::Sender<usize>,
}

impl Tally {
    fn of(count: u64) -> Self {
        Self {
            missing: Arc::new(Mutex::new((0..count).collect())),
            left: watch::Sender::new(count as usize),
        }
    }

    fn count(&self, number: u64) {
        let mut missing = self.missing.lock().expect("no panic");
        missing.remove(&number);
        self.left.send_replace(missing.len());
    }

    async fn all(&self) {
        let mut left = self.left.subscribe();
        let none = left.wait_for(|left| *left == 0);
        let none = tokio::time::timeout(Duration::from_secs(120), none).await;
        assert!(none.is_ok(), "{} are missing", *self.left.borrow());
    }
}

// ---- D6, D11, and messages that kill

/// What several lives of one program did.
struct Lives {
    database: Database,
    place: Place,
    folder: tempfile::TempDir,
    ledger: OrderLedger,
    look: Look,
}

impl Lives {
    /// With these steps as a backlog.
    async fn after(database: Database, backlog: &[(u64, u64)]) -> Self {
        Self::with(database, backlog, Vec::new()).await
    }

    /// And with these other messages.
    async fn with(database: Database, backlog: &[(u64, u64)], others: Vec<NewMessage>) -> Self {
        let place = Place::of(&database);
        let folder = tempfile::tempdir().expect("a folder");
        let ledger = OrderLedger::in_folder(folder.path()).expect("a folder");
        let store = place.open().await;
        for part in backlog.chunks(500) {
            let batch = part.iter().map(|(key, number)| new_step(*key, *number));
            let stored = store.enqueue(batch.collect()).await;
            stored.expect("stored").committed();
        }
        for (key, number) in backlog {
            ledger.published(&key.to_string(), *number);
        }
        if !others.is_empty() {
            store.enqueue(others).await.expect("stored").committed();
        }
        store.close().await;
        drop(store);
        let look = place.look().await;
        Self {
            database,
            place,
            folder,
            ledger,
            look,
        }
    }

    fn life(&self, name: &str) -> Life {
        Life::new(&self.place, self.folder.path(), name)
    }

    fn kill(&self, job: Job) {
        let id = job.id();
        job.signal("KILL");
        let ended = job.wait();
        assert_eq!(ended.status.code(), None, "it was killed: {ended:?}");
        self.ledger.died(id);
    }

    /// A last life, which handles everything and ends in order.
    async fn finish(&mut self, life: &Life) {
        let job = life.start();
        self.look.until_backlog(Step::TYPE, 0).await;
        self.look.until_backlog(Seed::TYPE, 0).await;
        job.signal("TERM");
        let ended = job.wait();
        assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    }

    fn history(&self) -> History {
        History::read(self.folder.path())
    }

    async fn clean_up(self) {
        drop(self.look);
        self.database.clean_up().await;
    }
}

/// D6.
async fn a_partitioned_queue_with_a_backlog_is_handled_in_order_after_kills(database: Database) {
    let (kills, each) = if soak() { (10, 500) } else { (2, 60) };
    let backlog: Vec<_> = (0..each)
        .flat_map(|number| (0..20).map(move |key| (key, number)))
        .collect();
    let mut lives = Lives::after(database, &backlog).await;
    let mut life = lives.life("one");
    life.takes = Duration::from_millis(1);
    for _ in 0..kills {
        let mut job = life.start();
        let so_far = lives.history().runs.len();
        let more = fastrand::usize(20..each as usize * 4);
        job.until(lives.folder.path(), "start", so_far + more);
        lives.kill(job);
    }
    lives.finish(&life).await;
    let history = lives.history();
    let counted = history.count();
    assert_eq!(
        (counted.lost, counted.inversions, counted.overlaps),
        (0, 0, 0),
        "{counted:?}"
    );
    // Only what ran when its process was killed, or had ended and was not settled, may run again.
    assert!(counted.duplicates <= kills * 8 * 16, "{counted:?}");
    lives.clean_up().await;
}

/// D11: the steps of a cascade cannot start, since the one before them still runs when the process is killed.
async fn a_cascade_that_was_committed_before_a_kill_runs_after_the_restart(database: Database) {
    const STEPS: u64 = 50;
    let is_postgres = matches!(database, Database::Postgres { .. });
    let mut lives = Lives::with(database, &[(0, 0)], vec![lives::new_seed(STEPS)]).await;
    if is_postgres {
        lives.place.create_effects().await;
    }
    let mut life = lives.life("one");
    // A transaction that waits would keep all others of a SQLite waiting.
    life.transactional = is_postgres;
    life.waits = Some(0);
    let mut job = life.start();
    job.until(lives.folder.path(), "start", 1);
    lives.look.until_backlog(Step::TYPE, STEPS as i64 + 1).await;
    lives.look.until_backlog(Seed::TYPE, 0).await;
    lives.kill(job);
    assert_eq!(
        lives.history().runs.len(),
        1,
        "nothing of the cascade has started"
    );
    life.let_go();
    lives.finish(&life).await;
    let history = lives.history();
    let ran = history.runs.iter().filter(|run| run.ok);
    let ran: Vec<_> = ran.map(|run| (run.message.1, run.attempt)).collect();
    assert_eq!(
        history.runs.len(),
        ran.len() + 1,
        "but for the kill each ran once"
    );
    assert_eq!(ran[0], (0, 2));
    let numbers = ran.iter().map(|(number, _)| *number);
    assert!(numbers.eq(0..=STEPS), "{ran:?}");
    // What was in memory at the kill had its first attempt counted, and lost it.
    assert!(ran.iter().all(|(_, attempt)| *attempt <= 2), "{ran:?}");
    lives.clean_up().await;
}

async fn a_message_that_kills_its_process_becomes_a_dead_letter_and_the_queue_goes_on(
    database: Database,
) {
    const KILLS: u64 = 7;
    // Of one key: what runs beside it when it kills is counted as well, which is a limit that the guide tells.
    let backlog: Vec<_> = (1..=20).map(|number| (1, number)).collect();
    let mut lives = Lives::after(database, &backlog).await;
    let mut life = lives.life("one");
    life.kills = Some(KILLS);
    for _ in 0..3 {
        let job = life.start();
        let id = job.id();
        let ended = job.wait();
        assert_eq!(ended.status.code(), None, "it killed itself: {ended:?}");
        lives.ledger.died(id);
    }
    lives.finish(&life).await;
    lives.ledger.parked("1", KILLS);
    let history = lives.history();
    let counted = history.count();
    assert_eq!((counted.lost, counted.inversions), (0, 0), "{counted:?}");
    let killed = history.runs.iter().filter(|run| run.message.1 == KILLS);
    let attempts: BTreeSet<_> = killed.map(|run| run.attempt).collect();
    assert_eq!(attempts, BTreeSet::from([1, 2, 3]));
    let store = lives.place.open().await;
    let dead = dead_letters(&*store, Step::TYPE, 1).await;
    let [dead] = &dead[..] else {
        panic!("{dead:?}")
    };
    assert_eq!((&*dead.reason, dead.message.attempts), ("abandoned", 3));
    store.close().await;
    lives.clean_up().await;
}

// ---- D15

/// D15: one key, so that every inversion shows.
async fn the_backlog_runs_before_what_arrives_during_the_start(database: Database) {
    let place = Place::of(&database);
    let store = place.open().await;
    let batch = (1..=500).map(|number| new_step(1, number)).collect();
    store.enqueue(batch).await.expect("stored").committed();
    let arrive = async |store: Arc<dyn Store>, numbers: std::ops::RangeInclusive<u64>| {
        for number in numbers {
            let stored = store.enqueue(vec![new_step(1, number)]).await;
            stored.expect("stored").committed();
        }
    };
    let arriving = if matches!(database, Database::Postgres { .. }) {
        tokio::spawn(arrive(Arc::clone(&store), 501..=600))
    } else {
        // Its file has one process, and one store in that.
        store.close().await;
        tokio::spawn(async {})
    };
    drop(store);
    let ran = Arc::new(Mutex::new(Vec::new()));
    let tally = Tally::of(700);
    let (note, count) = (Arc::clone(&ran), tally.clone());
    let bus = started(
        database
            .under(Bus::builder())
            .keyed::<Step>()
            .handler::<Step, _>(move |step: Step, _: Context| {
                note.lock().expect("no panic").push(step.number);
                count.count(step.number - 1);
                async { Ok(()) }
            })
            .local_queue(Step::TYPE, |q| ordered_steps(q.durable())),
    )
    .await;
    if let Database::Sqlite(_) = &database {
        arrive(bus.store().expect("it runs"), 501..=600).await;
    }
    arriving.await.expect("stored");
    for number in 601..=700 {
        bus.publish(&Step { key: 1, number }).await.expect("stored");
    }
    tally.all().await;
    let ran = ran.lock().expect("no panic").clone();
    assert_eq!(ran, (1..=700).collect::<Vec<_>>());
    stop(bus, database).await;
}

// ---- D19

/// D19: more than one pruning takes at once.
async fn ids_of_ended_messages_are_remembered_for_their_window_and_then_forgotten(
    database: Database,
) {
    const COUNT: u64 = 1_200;
    let window = Duration::from_secs(1);
    let tally = Tally::of(COUNT);
    let count = tally.clone();
    let builder = Bus::builder().handler::<Loose, _>(move |Loose(number): Loose, _: Context| {
        count.count(number);
        async { Ok(()) }
    });
    let builder = builder.local_queues(|q| q.durable().max_parallel(64));
    let builder = match Place::of(&database) {
        Place::Sqlite(file) => {
            let store = DurableStore::from(SqliteConfig::file(file));
            builder.store(store.remember_ids_for(window))
        }
        Place::Postgres { url, schema } => {
            let store = DurableStore::from(PostgresConfig::at(url).schema(schema));
            builder.store(store.remember_ids_for(window))
        }
    };
    let bus = started(builder).await;
    let mut look = Place::of(&database).look().await;
    let store = bus.store().expect("it runs");
    let batch: Vec<_> = (0..COUNT).map(lives::new_loose).collect();
    let mut copy = batch[0].clone();
    copy.envelope.id = Some("the same".into());
    let mut first = batch.clone();
    first[0] = copy.clone();
    store.enqueue(first).await.expect("stored").committed();
    tally.all().await;
    look.until_backlog(Loose::TYPE, 0).await;
    look.until("SELECT count(*) FROM {t}ended", 0).await;
    // It is new again.
    let placed = store.enqueue(vec![copy]).await.expect("stored").committed();
    assert!(matches!(placed[..], [Placed::At(_)]), "{placed:?}");
    look.until_backlog(Loose::TYPE, 0).await;
    drop(store);
    stop(bus, database).await;
}

// ---- D20

/// D20: once the database stays away until the process has ended, once it comes back while the process drains, with a
/// handler that keeps it from ending.
#[tokio::test(flavor = "multi_thread")]
async fn a_signal_while_the_database_is_down_starts_nothing_and_ends_and_the_rest_is_resumed() {
    const HANGS: u64 = 1_000;
    let mut server = PrivatePostgres::start().await;
    let mut backlog = vec![(99, HANGS)];
    backlog.extend((0..40).flat_map(|number| (0..20).map(move |key| (key, number))));
    let mut lives = Lives::after(Database::postgres_at(server.url()), &backlog).await;
    let mut last = lives.life("last");
    last.takes = Duration::from_millis(10);
    for comes_back in [false, true] {
        let mut life = lives.life(&format!("comes-back-{comes_back}"));
        life.takes = last.takes;
        life.waits = Some(HANGS);
        let mut job = life.start();
        let ended_before = lives.history().successes();
        job.until(lives.folder.path(), "end", ended_before + 50);
        let hangs =
            |run: &&job::HandlerRun| run.message.1 == HANGS && run.pid == u64::from(job.id());
        assert_eq!(lives.history().runs.iter().filter(hangs).count(), 1);
        server.crash();
        job.signal("TERM");
        wait_for_file(&life.told()).await;
        let since = monotonic();
        if comes_back {
            server.boot().await;
            life.let_go();
        }
        let id = job.id();
        let ended = job.wait();
        assert_eq!(ended.status.code(), Some(0), "{ended:?}");
        lives.ledger.died(id);
        let history = lives.history();
        let later = history.runs.iter().filter(|run| run.start > since);
        assert_eq!(later.count(), 0, "nothing starts after the signal");
        if !comes_back {
            server.boot().await;
        }
    }
    lives.look = lives.place.look().await;
    lives.finish(&last).await;
    let counted = lives.history().count();
    assert_eq!(
        (counted.lost, counted.inversions, counted.overlaps),
        (0, 0, 0),
        "{counted:?}"
    );
}

/// The ledger's clock, in nanoseconds.
fn monotonic() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

async fn wait_for_file(path: &Path) {
    let there = async {
        while !path.exists() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let there = tokio::time::timeout(Duration::from_secs(60), there).await;
    assert!(there.is_ok(), "{} never came", path.display());
}

// ---- D21

/// D21: no handler ends before all is published, so none can be what publishing waits for.
async fn publishing_to_an_idle_queue_waits_for_no_handler_and_its_parallelism_is_kept(
    database: Database,
) {
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let tally = Tally::of(20);
    let gate = Arc::new(Semaphore::new(0));
    let begun = watch::Sender::new(0);
    let (begins, passes, ended) = (begun.clone(), Arc::clone(&gate), tally.clone());
    let (now, at_most) = (Arc::clone(&running), Arc::clone(&most));
    let bus = started(
        database
            .under(Bus::builder())
            .handler::<Loose, _>(move |Loose(number): Loose, _: Context| {
                let (begins, gate, ended) = (begins.clone(), Arc::clone(&passes), ended.clone());
                let (running, most) = (Arc::clone(&now), Arc::clone(&at_most));
                async move {
                    let count = running.fetch_add(1, Ordering::SeqCst) + 1;
                    most.fetch_max(count, Ordering::SeqCst);
                    begins.send_modify(|begun| *begun += 1);
                    gate.acquire().await.expect("open").forget();
                    running.fetch_sub(1, Ordering::SeqCst);
                    ended.count(number);
                    Ok(())
                }
            })
            .local_queues(|q| q.durable().max_parallel(5)),
    )
    .await;
    for number in 0..20 {
        bus.publish(&Loose(number)).await.expect("stored");
    }
    let mut begun = begun.subscribe();
    begun.wait_for(|begun| *begun == 5).await.expect("there");
    // One ends, one begins.
    for count in 6..=20 {
        gate.add_permits(1);
        begun
            .wait_for(|begun| *begun == count)
            .await
            .expect("there");
    }
    gate.add_permits(5);
    tally.all().await;
    assert_eq!(most.load(Ordering::SeqCst), 5);
    stop(bus, database).await;
}

// ---- D17

/// D17: two ordered shards and a held key; nothing is marked as handled, and nothing happens by itself.
async fn messages_of_a_removed_handler_wait_and_become_dead_letters_once_their_queue_is_retired(
    database: Database,
) {
    let place = Place::of(&database);
    let store = place.open().await;
    let mut batch: Vec<_> = (0..700).map(|n| new_step(n % 20, n)).collect();
    batch.extend((0..20).map(lives::new_loose));
    store.enqueue(batch).await.expect("stored").committed();
    hold_one(&*store).await;
    store.close().await;
    drop(store);

    // Without a word about the queues: they wait, and so does another start find them.
    let other = || {
        let handles = async |_: Seed, _: Context| Ok(());
        let builder = database.under(Bus::builder()).handler::<Seed, _>(handles);
        builder.local_queues(|q| q.durable())
    };
    let bus = started(other()).await;
    let waiting = bus.store().expect("it runs").waiting_queues().await;
    let waiting = waiting.expect("answered");
    let waiting: Vec<_> = waiting
        .iter()
        .map(|one| (&*one.queue.name, one.backlog))
        .collect();
    assert_eq!(waiting, [(Loose::TYPE, 20), (Step::TYPE, 700)]);
    bus.shutdown(DRAIN).await;
    drop(bus);

    let bus = started(other().retired_queue(Step::TYPE).retired_queue("never")).await;
    let store = bus.store().expect("it runs");
    let dead = dead_letters(&*store, Step::TYPE, 700).await;
    assert_eq!(dead.len(), 700);
    for letter in &dead {
        assert_eq!(
            (&*letter.reason, letter.message.attempts),
            ("no-handler", 0)
        );
    }
    let waiting = store.waiting_queues().await.expect("answered");
    assert_eq!(waiting.len(), 1, "only the other queue waits: {waiting:?}");
    drop(store);
    stop(bus, database).await;
}

/// Holds the first step of shard 0, and with it its key.
async fn hold_one(store: &dyn Store) {
    let owner = MemberId::unique();
    let taken = store.take(Step::TYPE, Shard(0), owner, DRAIN).await;
    let lease = taken.expect("answered").expect("free");
    let read = store.read(&lease, &Window::of(1)).await.expect("read");
    let failed = Vec::new();
    let hold = [Settlement {
        sequence: read[0].sequence,
        ending: Ending::Hold { failed },
    }];
    let settled = store.settle(&lease, &hold).await.expect("settled");
    assert_eq!(settled.settled, 1);
    store.release(&lease).await.expect("released");
}

#[derive(Serialize, Deserialize)]
struct Old(u64);

impl Message for Old {
    const TYPE: &'static str = "old";
}

#[derive(Serialize, Deserialize)]
struct New(u64);

impl Message for New {
    const TYPE: &'static str = "new";
}

/// D17: a queue has messages of two types, and one of them has no handler any more.
async fn a_handler_of_another_type_in_the_same_queue_gets_its_own_and_the_rest_are_dead_letters(
    database: Database,
) {
    let place = Place::of(&database);
    let store = place.open().await;
    let queue = QueueIdentity {
        name: "audit".into(),
        order: QueueOrder::Unordered,
    };
    store.declare(&[queue]).await.expect("declared");
    let batch = (0..10).map(|number| {
        let envelope = if number % 2 == 0 {
            laneway::Envelope::of(&Old(number), Encoding::MessagePack)
        } else {
            laneway::Envelope::of(&New(number), Encoding::MessagePack)
        };
        NewMessage {
            queue: "audit".into(),
            key: None,
            envelope: envelope.expect("encoded"),
            due: None,
        }
    });
    let stored = store.enqueue(batch.collect()).await;
    stored.expect("stored").committed();
    store.close().await;
    drop(store);

    let handled = Arc::new(Mutex::new(BTreeSet::new()));
    let note = Arc::clone(&handled);
    let bus = started(
        database
            .under(Bus::builder())
            .separated::<New, _>("audit", move |New(number): New, _: Context| {
                note.lock().expect("no panic").insert(number);
                async { Ok(()) }
            })
            .local_queues(|q| q.durable()),
    )
    .await;
    let store = bus.store().expect("it runs");
    let dead = dead_letters(&*store, "audit", 5).await;
    place.look().await.until_backlog("audit", 0).await;
    for letter in &dead {
        assert_eq!(letter.message.envelope.message_type.as_deref(), Some("old"));
        assert_eq!(letter.reason, "no-handler");
    }
    let counts = store.count("audit").await.expect("counted");
    assert_eq!(counts.dead, 5);
    assert_eq!(
        *handled.lock().expect("no panic"),
        BTreeSet::from([1, 3, 5, 7, 9])
    );
    drop(store);
    stop(bus, database).await;
}
