//! Handlers in transactions, and enqueuing in the application's own: effects, messages and marks commit together or not
//! at all, whatever a handler does. Cases D5, D12, D13, D16, D18. On both stores.
#![cfg(all(feature = "sqlite", feature = "postgres"))]

#[path = "support/effects.rs"]
mod effects;
#[path = "support/stores.rs"]
mod stores;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use laneway::actors::{Envelope, MessageId};
use laneway::durable::{Batch, TransactionError};
use laneway::prelude::*;
use laneway::store::{NewMessage, Placed, Store};
use laneway::{BusBuilder, PublishError};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use effects::{App, Handlers, Kind};
use stores::Database;

const DRAIN: Duration = Duration::from_secs(20);
const PATIENCE: Duration = Duration::from_secs(60);

/// What a handler does wrong in its first attempt, after it has written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Sin {
    None,
    Fails,
    FailsForEver,
    Panics,
    TimesOut,
    LeaksItsTransaction,
    /// A task keeps the context, and with it what belongs to the attempt.
    LeaksItsContext,
    AsksTwice,
    AsksForTheOtherDatabase,
    RollsASavepointBack,
    IgnoresAFailedStatement,
    PublishesToTheBroker,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Order {
    id: u64,
    sin: Sin,
}

impl Message for Order {
    const TYPE: &'static str = "order";
}

/// Returned by the handler of orders; to a durable queue.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Wrote {
    id: u64,
}

impl Message for Wrote {
    const TYPE: &'static str = "wrote";
}

/// Published by it; to a queue in memory.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Told {
    id: u64,
}

impl Message for Told {
    const TYPE: &'static str = "told";
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Outside;

impl Message for Outside {
    const TYPE: &'static str = "outside";
}

/// Numbers by id, and what went wrong.
#[derive(Default)]
struct Seen {
    wrote: Mutex<BTreeMap<u64, u32>>,
    told: Mutex<BTreeMap<u64, u32>>,
    wrong: Mutex<Vec<String>>,
    leaked: Mutex<Vec<Context>>,
    changed: Notify,
}

impl Seen {
    fn wrong(&self, what: impl Into<String>) {
        self.wrong.lock().expect("unharmed").push(what.into());
    }

    async fn until(&self, done: impl Fn(&Self) -> bool) {
        let reached = async {
            while !done(self) {
                self.changed.notified().await;
            }
        };
        let in_time = tokio::time::timeout(PATIENCE, reached).await;
        let wrote = self.wrote.lock().expect("unharmed").len();
        let wrong = self.wrong.lock().expect("unharmed").join("; ");
        assert!(in_time.is_ok(), "{wrote} in time; {wrong}");
    }

    fn count(of: &Mutex<BTreeMap<u64, u32>>) -> usize {
        of.lock().expect("unharmed").len()
    }
}

async fn started(builder: BusBuilder) -> Bus {
    let ready = builder.build().expect("a valid bus");
    ready.start().await.expect("started")
}

/// The handler of orders: writes, sins, publishes, returns.
async fn take(
    order: Order,
    cx: Context,
    kind: Kind,
    insert: String,
    seen: Arc<Seen>,
) -> Result<Wrote, Failure> {
    let id = order.id;
    let mut own = Handlers::of(&cx, kind).await?;
    own.execute(&insert, &[id as i64]).await?;
    cx.publish(&Told { id }).await?;
    let sins = cx.attempt() == 1 || order.sin == Sin::FailsForEver;
    match order.sin {
        _ if !sins => {}
        Sin::None => {}
        Sin::Fails => return Err(Failure::transient("the first attempt fails")),
        Sin::FailsForEver => return Err(Failure::permanent("every attempt fails")),
        Sin::Panics => panic!("a handler may panic"),
        Sin::TimesOut => std::future::pending().await,
        Sin::LeaksItsTransaction => {
            tokio::spawn(async move {
                // The sin: it goes on longer than its handler.
                tokio::time::sleep(Duration::from_millis(300)).await;
                drop(own);
            });
            return Ok(Wrote { id });
        }
        Sin::LeaksItsContext => {
            drop(own);
            seen.leaked.lock().expect("unharmed").push(cx);
            return Err(Failure::transient("its context stays"));
        }
        Sin::AsksTwice => match Handlers::of(&cx, kind).await {
            Err(TransactionError::InUse) => return Err(Failure::transient("in use")),
            other => seen.wrong(format!("asked twice: {:?}", other.err())),
        },
        Sin::AsksForTheOtherDatabase => match Handlers::other(&cx, kind).await {
            Err(TransactionError::OtherDatabase) => return Err(Failure::transient("other")),
            other => seen.wrong(format!("the other database: {:?}", other.err())),
        },
        Sin::RollsASavepointBack => {
            own.execute("SAVEPOINT inner_one", &[]).await?;
            own.execute(&insert, &[-1]).await?;
            own.execute("ROLLBACK TO SAVEPOINT inner_one", &[]).await?;
        }
        Sin::IgnoresAFailedStatement => {
            let failed = own.execute("INSERT INTO there_is_no_such_table VALUES (1)", &[]);
            if failed.await.is_ok() {
                seen.wrong("a table that is not there");
            }
        }
        Sin::PublishesToTheBroker => match cx.publish(&Outside).await {
            Err(PublishError::Refused(_)) => return Err(Failure::transient("refused")),
            other => seen.wrong(format!("to the broker: {other:?}")),
        },
    }
    Ok(Wrote { id })
}

/// A bus where orders are handled in transactions, and what they cause looks for what they wrote.
struct Stand {
    database: Database,
    bus: Bus,
    app: App,
    seen: Arc<Seen>,
}

impl Stand {
    async fn new(database: Database) -> Self {
        // The tables are there before the first message.
        let empty = started(database.under(Bus::builder()).handler::<Told, _>(ignore)).await;
        empty.shutdown(DRAIN).await;
        let app = App::of(&database).await;
        let effects = database.table("effects");
        app.run(&format!("CREATE TABLE {effects} (id bigint)"))
            .await;
        let (kind, seen) = (Kind::of(&database), Arc::new(Seen::default()));
        let insert = format!("INSERT INTO {effects} (id) VALUES (?)");
        let taking = Arc::clone(&seen);
        let taken = move |order: Order, cx: Context| {
            take(order, cx, kind, insert.clone(), Arc::clone(&taking))
        };
        // Both look for what the order has written, on a connection of the application's own.
        let look = |what: &'static str, of: fn(&Seen) -> &Mutex<BTreeMap<u64, u32>>| {
            let (app, seen, effects) = (app.clone(), Arc::clone(&seen), effects.clone());
            move |id: u64| {
                let (app, seen) = (app.clone(), Arc::clone(&seen));
                let text = format!("SELECT count(*) FROM {effects} WHERE id = {id}");
                async move {
                    let found = app.numbers(&text).await;
                    if found != [1] {
                        seen.wrong(format!("{what} {id} found {found:?}"));
                    }
                    *of(&seen).lock().expect("unharmed").entry(id).or_default() += 1;
                    seen.changed.notify_one();
                    Ok::<_, Failure>(())
                }
            }
        };
        let (wrote, told) = (look("wrote", |s| &s.wrote), look("told", |s| &s.told));
        let broker = MemoryBroker::new();
        let bus = database
            .under(Bus::builder())
            .memory(broker)
            .topology(|t| t.queue("outside", |q| q))
            .publishes::<Outside>(|r| r.to_queue("outside"))
            .handler::<Order, _>(taken)
            .handler::<Wrote, _>(move |wrote_one: Wrote, _: Context| wrote(wrote_one.id))
            .handler::<Told, _>(move |told_one: Told, _: Context| told(told_one.id))
            .local_queue("order", |q| {
                q.durable()
                    .transactional()
                    .handler_timeout(Duration::from_secs(2))
                    .backoff(Backoff::constant(Duration::from_millis(5)))
            })
            .local_queue("wrote", |q| q.durable());
        let bus = started(bus).await;
        Self {
            database,
            bus,
            app,
            seen,
        }
    }

    async fn publish(&self, sins: impl IntoIterator<Item = Sin>) {
        for (id, sin) in (1..).zip(sins) {
            let stored = self.bus.publish(&Order { id, sin }).await;
            stored.expect("stored");
        }
    }

    /// These have taken effect, and nothing else; what they caused came once and found it.
    async fn assert_effects(&self, expected: &[u64]) {
        let seen = &self.seen;
        let all = |seen: &Seen| {
            Seen::count(&seen.wrote) >= expected.len() && Seen::count(&seen.told) >= expected.len()
        };
        seen.until(all).await;
        let store = self.bus.store().expect("it runs");
        for queue in ["order", "wrote"] {
            settled(&*store, queue).await;
        }
        let wrong = seen.wrong.lock().expect("unharmed").clone();
        assert!(wrong.is_empty(), "{wrong:?}");
        let effects = self.database.table("effects");
        let effects = format!("SELECT id FROM {effects} ORDER BY id");
        let effects = self.app.numbers(&effects).await;
        let ids: Vec<_> = expected.iter().map(|id| *id as i64).collect();
        assert_eq!(effects, ids);
        let once: BTreeMap<_, _> = expected.iter().map(|id| (*id, 1)).collect();
        assert_eq!(*seen.wrote.lock().expect("unharmed"), once);
        assert_eq!(*seen.told.lock().expect("unharmed"), once);
    }

    async fn end(self) {
        assert!(self.bus.shutdown(DRAIN).await.is_clean());
        self.app.close().await;
        self.database.clean_up().await;
    }
}

/// A table of the store.
fn stores_own(database: &Database, table: &str) -> String {
    match Kind::of(database) {
        Kind::Sqlite => format!("laneway_{table}"),
        Kind::Postgres => database.table(table),
    }
}

async fn ignore(_: Told, _: Context) -> Result<(), Failure> {
    Ok(())
}

/// Waits until a queue is empty. The store tells nobody when it is.
async fn settled(store: &dyn Store, queue: &str) {
    let empty = async {
        while store.count(queue).await.expect("counted").backlog > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let in_time = tokio::time::timeout(PATIENCE, empty).await;
    in_time.expect("the queue is empty in time");
}

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
    whatever_a_handler_does_its_effects_come_once,
    what_a_handler_causes_comes_after_its_commit_or_never,
    two_transactions_of_the_caller_are_both_delivered,
    a_hint_after_a_rollback_changes_no_other_message,
    a_pause_of_two_seconds_is_kept_and_attempts_are_1_2_3,
    a_broken_row_hides_no_other_one,
    an_id_is_a_copy_in_its_own_queue_only,
);

async fn whatever_a_handler_does_its_effects_come_once(database: Database) {
    let stand = Stand::new(database).await;
    let sins = [
        Sin::None,
        Sin::Fails,
        Sin::Panics,
        Sin::TimesOut,
        Sin::LeaksItsTransaction,
        Sin::LeaksItsContext,
        Sin::AsksTwice,
        Sin::AsksForTheOtherDatabase,
        Sin::RollsASavepointBack,
        Sin::IgnoresAFailedStatement,
        Sin::PublishesToTheBroker,
    ];
    stand.publish(sins).await;
    stand.assert_effects(&(1..=11).collect::<Vec<_>>()).await;
    // On SQLite others wait for the one that times out, and may time out with it.
    let store = stand.bus.store().expect("it runs");
    assert_eq!(store.count("order").await.expect("counted").dead, 0);
    let leaked = std::mem::take(&mut *stand.seen.leaked.lock().expect("unharmed"));
    for cx in &leaked {
        let asked = Handlers::of(cx, Kind::of(&stand.database)).await;
        assert!(matches!(asked, Err(TransactionError::Ended)));
    }
    stand.end().await;
}

/// D12: never missing, and nothing after a rollback.
async fn what_a_handler_causes_comes_after_its_commit_or_never(database: Database) {
    let stand = Stand::new(database).await;
    let sin = |id| match id {
        id if id % 5 == 0 => Sin::FailsForEver,
        id if id % 3 == 0 => Sin::Fails,
        _ => Sin::None,
    };
    stand.publish((1..=60).map(sin)).await;
    let expected: Vec<u64> = (1..=60).filter(|id| id % 5 != 0).collect();
    stand.assert_effects(&expected).await;
    let store = stand.bus.store().expect("it runs");
    assert_eq!(store.count("order").await.expect("counted").dead, 12);
    stand.end().await;
}

/// D13: nobody is told of the first one's commit.
async fn two_transactions_of_the_caller_are_both_delivered(database: Database) {
    let stand = Stand::new(database).await;
    for (id, hint) in [(1, false), (2, true), (3, false)] {
        let mut own = stand.app.begin().await.expect("begun");
        let order = Order { id, sin: Sin::None };
        let enqueued = own.enqueue(&stand.bus, order).await.expect("enqueued");
        own.commit().await.expect("committed");
        if hint {
            enqueued.committed();
        }
    }
    stand.assert_effects(&[1, 2, 3]).await;
    stand.end().await;
}

/// What is enqueued in a transaction that is rolled back never existed, also if the hint is given all the same.
async fn a_hint_after_a_rollback_changes_no_other_message(database: Database) {
    let stand = Stand::new(database).await;
    let mut own = stand.app.begin().await.expect("begun");
    let (never, sin) = (99, Sin::None);
    let order = Order { id: never, sin };
    let enqueued = own.enqueue(&stand.bus, order).await.expect("enqueued");
    own.rollback().await.expect("rolled back");
    enqueued.committed();
    stand.publish([Sin::None, Sin::None]).await;
    stand.assert_effects(&[1, 2]).await;
    stand.end().await;
}

/// D5.
async fn a_pause_of_two_seconds_is_kept_and_attempts_are_1_2_3(database: Database) {
    let attempts = Arc::new(Mutex::new(Vec::new()));
    let made = Arc::clone(&attempts);
    let bus = database
        .under(Bus::builder())
        .handler::<Wrote, _>(move |_: Wrote, cx: Context| {
            let made = Arc::clone(&made);
            async move {
                made.lock().expect("unharmed").push(cx.attempt());
                Err::<(), _>(Failure::transient("not yet"))
            }
        })
        .local_queue("wrote", |q| {
            q.durable()
                .max_delivery_attempts(3)
                .backoff(Backoff::constant(Duration::from_secs(2)))
        });
    let bus = started(bus).await;
    bus.publish(&Wrote { id: 1 }).await.expect("stored");
    let store = bus.store().expect("it runs");
    settled(&*store, "wrote").await;
    assert_eq!(*attempts.lock().expect("unharmed"), [1, 2, 3]);
    let dead = store.dead_letters("wrote", 0, 10).await.expect("read");
    let past = dead.iter().flat_map(|dead| &dead.past);
    assert_eq!(past.map(|one| one.attempt).collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!(dead.len(), 1);
    assert!(bus.shutdown(DRAIN).await.is_clean());
    drop(store);
    database.clean_up().await;
}

/// D16: one among the dead letters, one in the queue.
async fn a_broken_row_hides_no_other_one(database: Database) {
    let bus = database
        .under(Bus::builder())
        .handler::<Wrote, _>(|wrote: Wrote, _: Context| async move {
            match wrote.id {
                0..10 => Err(Failure::permanent("poison")),
                _ => Ok(()),
            }
        })
        .local_queue("wrote", |q| q.durable());
    let bus = started(bus).await;
    let app = App::of(&database).await;
    let store = bus.store().expect("it runs");
    for id in 0..3 {
        bus.publish(&Wrote { id }).await.expect("stored");
    }
    settled(&*store, "wrote").await;
    let letters = stores_own(&database, "dead_letters");
    app.run(&format!(
        "UPDATE {letters} SET headers = '{{', past = 'not JSON' \
         WHERE number = (SELECT min(number) FROM {letters})"
    ))
    .await;
    // In one transaction with the breaking of the first, so that nobody reads it before.
    let mut own = app.begin().await.expect("begun");
    let batch = (10..13).fold(Batch::new(), |batch, id| batch.message(Wrote { id }));
    let enqueued = own.enqueue_all(&bus, batch).await.expect("enqueued");
    let messages = stores_own(&database, "messages");
    let text = format!(
        "UPDATE {messages} SET headers = '{{' \
         WHERE sequence = (SELECT min(sequence) FROM {messages})"
    );
    assert_eq!(own.execute(&text, &[]).await.expect("broken"), 1);
    own.commit().await.expect("committed");
    enqueued.committed();
    settled(&*store, "wrote").await;
    let dead = store.dead_letters("wrote", 0, 10).await.expect("read");
    let shown = dead.iter();
    let shown: Vec<_> = shown
        .map(|dead| (&*dead.reason, dead.message.broken.is_some()))
        .collect();
    let expected = [
        ("permanent", true),
        ("permanent", false),
        ("permanent", false),
        ("broken", true),
    ];
    assert_eq!(shown, expected);
    assert!(bus.shutdown(DRAIN).await.is_clean());
    drop(store);
    app.close().await;
    database.clean_up().await;
}

/// D18, and the same id with another body.
async fn an_id_is_a_copy_in_its_own_queue_only(database: Database) {
    let runs = Arc::new(Mutex::new(Vec::new()));
    let counting = |queue: &'static str| {
        let runs = Arc::clone(&runs);
        move |wrote: Wrote, _: Context| {
            runs.lock().expect("unharmed").push((queue, wrote.id));
            async { Ok::<_, Failure>(()) }
        }
    };
    let bus = database
        .under(Bus::builder())
        .separated::<Wrote, _>("one", counting("one"))
        .separated::<Wrote, _>("two", counting("two"))
        .local_queues(|q| q.durable());
    let bus = started(bus).await;
    let store = bus.store().expect("it runs");
    let message = |queue: &str, id: u64| NewMessage {
        queue: queue.into(),
        key: None,
        envelope: Envelope {
            id: Some(MessageId::from("the same")),
            ..Envelope::of(&Wrote { id }, Encoding::Json).expect("encoded")
        },
        due: None,
    };
    let enqueue = async |batch: Vec<NewMessage>| {
        let enqueued = store.enqueue(batch).await.expect("enqueued");
        enqueued.committed()
    };
    let placed = enqueue(vec![message("one", 1), message("two", 1)]).await;
    assert!(placed.iter().all(|placed| matches!(placed, Placed::At(_))));
    for _ in 0..2 {
        // Before it has ended, perhaps, and surely after.
        assert_eq!(enqueue(vec![message("one", 1)]).await, [Placed::Duplicate]);
        settled(&*store, "one").await;
    }
    settled(&*store, "two").await;
    assert_eq!(enqueue(vec![message("one", 2)]).await, [Placed::IdReused]);
    settled(&*store, "one").await;
    let mut runs = runs.lock().expect("unharmed").clone();
    runs.sort_unstable();
    assert_eq!(runs, [("one", 1), ("two", 1)]);
    let dead = store.dead_letters("one", 0, 10).await.expect("read");
    let reasons: Vec<_> = dead.iter().map(|dead| &*dead.reason).collect();
    assert_eq!(reasons, ["id reused"]);
    assert!(bus.shutdown(DRAIN).await.is_clean());
    drop(store);
    database.clean_up().await;
}

/// SQLite has one writer: sixteen handlers that each keep it for a while wait for one another, and none fails.
#[tokio::test(flavor = "multi_thread")]
async fn sixteen_handlers_share_the_one_writer_of_sqlite() {
    let database = Database::sqlite();
    let attempts = Arc::new(Mutex::new(Vec::new()));
    let made = Arc::clone(&attempts);
    let bus = database
        .under(Bus::builder())
        .handler::<Wrote, _>(move |_: Wrote, cx: Context| {
            let made = Arc::clone(&made);
            async move {
                let own = cx.transaction::<sqlx::Sqlite>().await?;
                // What the case is about: it has the writer so long.
                tokio::time::sleep(Duration::from_millis(100)).await;
                drop(own);
                made.lock().expect("unharmed").push(cx.attempt());
                Ok(())
            }
        })
        .local_queues(|q| q.durable().transactional().max_parallel(16));
    let bus = started(bus).await;
    for id in 0..48 {
        bus.publish(&Wrote { id }).await.expect("stored");
    }
    let store = bus.store().expect("it runs");
    settled(&*store, "wrote").await;
    assert_eq!(*attempts.lock().expect("unharmed"), [1; 48]);
    assert_eq!(store.count("wrote").await.expect("counted").dead, 0);
    assert!(bus.shutdown(DRAIN).await.is_clean());
}
