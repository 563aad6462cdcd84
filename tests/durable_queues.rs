//! Durable local queues: order, retries, dead letters and holds, on both stores.
#![cfg(all(feature = "sqlite", feature = "postgres"))]

#[path = "support/stores.rs"]
mod stores;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use laneway::prelude::*;
use laneway::{HoldEnd, PoisonMode, WithKey};
use serde::{Deserialize, Serialize};
use sqlx::{Postgres, Sqlite};
use tokio::sync::Notify;

use stores::Database;

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Step {
    key: u64,
    number: u64,
}

impl Message for Step {
    const TYPE: &'static str = "step";
}

impl Keyed for Step {
    fn key(&self) -> OrderingKey {
        self.key.into()
    }
}

/// The last number of each key; none may be lower than one before.
#[derive(Clone, Default)]
struct Seen {
    last: Arc<Mutex<HashMap<u64, u64>>>,
    count: Arc<AtomicU32>,
    changed: Arc<Notify>,
}

impl Seen {
    fn take(&self, step: &Step) {
        let mut last = self.last.lock().expect("no panic under this lock");
        let before = last.insert(step.key, step.number);
        assert!(
            before.is_none_or(|before| before < step.number),
            "{step:?} after {before:?}"
        );
        self.count.fetch_add(1, Ordering::SeqCst);
        self.changed.notify_one();
    }

    fn has(&self, key: u64) -> bool {
        let last = self.last.lock().expect("no panic under this lock");
        last.contains_key(&key)
    }

    async fn reach(&self, count: u32) {
        let all = async {
            while self.count.load(Ordering::SeqCst) < count {
                self.changed.notified().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(120), all)
            .await
            .unwrap_or_else(|_| panic!("{} of {count}", self.count.load(Ordering::SeqCst)));
    }
}

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
    messages_are_handled_in_order_within_a_key,
    a_long_pause_is_spent_in_the_store_and_poison_becomes_a_dead_letter_with_its_past,
    a_held_key_survives_a_restart_and_goes_on_when_its_hold_ends,
);

async fn messages_are_handled_in_order_within_a_key(database: Database) {
    let seen = Seen::default();
    let taking = seen.clone();
    let bus = database
        .under(Bus::builder())
        .keyed::<Step>()
        .handler::<Step, _>(move |step: Step, _: Context| {
            let seen = taking.clone();
            async move {
                tokio::task::yield_now().await;
                seen.take(&step);
                Ok(())
            }
        })
        .local_queues(|q| q.durable().partitioned(16).shards(4))
        .build()
        .expect("a valid bus")
        .start()
        .await
        .expect("started");
    let publishing = (0..20).map(|key| {
        let bus = bus.clone();
        async move {
            for number in 0..100 {
                bus.publish(&Step { key, number }).await.expect("stored");
            }
        }
    });
    futures::future::join_all(publishing).await;
    seen.reach(2_000).await;
    let store = bus.store().expect("it runs");
    assert!(bus.shutdown(DRAIN).await.is_clean());
    drop(store);
    database.clean_up().await;
}

async fn a_long_pause_is_spent_in_the_store_and_poison_becomes_a_dead_letter_with_its_past(
    database: Database,
) {
    let seen = Seen::default();
    let taking = seen.clone();
    let bus = database
        .under(Bus::builder())
        .keyed::<Step>()
        .handler::<Step, _>(move |step: Step, cx: Context| {
            let seen = taking.clone();
            async move {
                if step.number == 1 {
                    let tries = "i".repeat(cx.attempt() as usize);
                    return Err(Failure::transient(format!("try {tries}")));
                }
                seen.take(&step);
                Ok(())
            }
        })
        .local_queue("step", |q| {
            q.durable()
                .partitioned(4)
                .max_delivery_attempts(3)
                .backoff(Backoff::constant(Duration::from_millis(1_100)))
        })
        .build()
        .expect("a valid bus")
        .start()
        .await
        .expect("started");
    for (key, number) in [(1, 1), (1, 2), (2, 3)] {
        bus.publish(&Step { key, number }).await.expect("stored");
    }
    seen.reach(2).await;
    let store = bus.store().expect("it runs");
    settled(&*store, "step").await;
    let dead = store.dead_letters("step", 0, 10).await.expect("read");
    let [dead] = &dead[..] else {
        panic!("{dead:?}")
    };
    assert_eq!(dead.reason, "failed");
    let past = dead.past.iter();
    let past: Vec<_> = past.map(|one| (one.attempt, &*one.detail)).collect();
    assert_eq!(past, [(1, "try i"), (2, "try ii"), (3, "try iii")]);
    let counts = store.count("step").await.expect("counted");
    assert_eq!((counts.backlog, counts.dead), (0, 1));
    assert!(bus.shutdown(DRAIN).await.is_clean());
    database.clean_up().await;
}

async fn a_held_key_survives_a_restart_and_goes_on_when_its_hold_ends(database: Database) {
    let heals = Arc::new(AtomicBool::new(false));
    let start = async |seen: &Seen| {
        let (taking, heals) = (seen.clone(), Arc::clone(&heals));
        database
            .under(Bus::builder())
            .keyed::<Step>()
            .handler::<Step, _>(move |step: Step, _: Context| {
                let (seen, heals) = (taking.clone(), Arc::clone(&heals));
                async move {
                    if step.number == 1 && !heals.load(Ordering::SeqCst) {
                        return Err(Failure::permanent("no"));
                    }
                    seen.take(&step);
                    Ok(())
                }
            })
            .local_queue("step", |q| {
                q.durable().partitioned(4).poison_mode(PoisonMode::KeepKey)
            })
            .build()
            .expect("a valid bus")
            .start()
            .await
            .expect("started")
    };
    let publish = async |bus: &Bus, key, number| {
        bus.publish(&Step { key, number }).await.expect("stored");
    };
    let seen = Seen::default();
    let bus = start(&seen).await;
    for (key, number) in [(1, 1), (1, 2), (2, 3)] {
        publish(&bus, key, number).await;
    }
    seen.reach(1).await;
    bus.shutdown(DRAIN).await;

    let seen = Seen::default();
    let bus = start(&seen).await;
    for (key, number) in [(1, 4), (2, 5)] {
        publish(&bus, key, number).await;
    }
    seen.reach(1).await;
    assert!(!seen.has(1), "its key is held");
    let held = bus.held("step", 10).await.expect("read");
    let [held] = &held[..] else {
        panic!("{held:?}")
    };
    let key = held.key.expect("it has a key");
    heals.store(true, Ordering::SeqCst);
    bus.end_hold("step", key, HoldEnd::Retry)
        .await
        .expect("ended");
    seen.reach(4).await;
    assert!(bus.held("step", 10).await.expect("read").is_empty());
    bus.shutdown(DRAIN).await;
    database.clean_up().await;
}

/// Else whoever starts next would wait until they expire.
#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_gives_the_leases_back() {
    let database = Database::postgres();
    let seen = Seen::default();
    let taking = seen.clone();
    let bus = database
        .under(Bus::builder())
        .keyed::<Step>()
        .handler::<Step, _>(move |step: Step, _: Context| {
            let seen = taking.clone();
            async move {
                seen.take(&step);
                Ok(())
            }
        })
        .local_queues(|q| q.durable().partitioned(4).shards(4))
        .build()
        .expect("a valid bus")
        .start()
        .await
        .expect("started");
    // A key of each shard, by chance; one shard would do.
    for key in 0..16 {
        bus.publish(&Step { key, number: 0 }).await.expect("stored");
    }
    seen.reach(16).await;
    let pool = sqlx::PgPool::connect(&stores::postgres_url())
        .await
        .expect("opened");
    let owned = format!(
        "SELECT count(*) FROM {} WHERE owner IS NOT NULL",
        database.table("leases")
    );
    let owned = async || -> i64 {
        let count = sqlx::query_scalar(&owned).fetch_one(&pool).await;
        count.expect("counted")
    };
    assert!(owned().await > 0);
    assert!(bus.shutdown(DRAIN).await.is_clean());
    assert_eq!(owned().await, 0);
    database.clean_up().await;
}

/// A handler in a transaction: fails in its first attempt after it has written, and else writes and goes on with the next
/// number.
macro_rules! steps_in_transactions {
    ($database:ty, $insert:expr) => {
        async |step: Step, cx: Context| {
            let mut transaction = cx.transaction::<$database>().await?;
            sqlx::query($insert)
                .bind(step.number as i64)
                .execute(&mut *transaction)
                .await?;
            drop(transaction);
            if cx.attempt() == 1 {
                return Err(Failure::transient("the first attempt of each fails"));
            }
            let number = step.number + 1;
            Ok((number <= 5).then(|| WithKey::new(Step { number, ..step }, step.key)))
        }
    };
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handlers_writes_its_messages_and_its_mark_commit_together_on_sqlite() {
    let database = Database::sqlite();
    let bus = database
        .under(Bus::builder())
        .handler::<Step, _>(steps_in_transactions!(
            Sqlite,
            "INSERT INTO effects VALUES (?)"
        ))
        .local_queues(|q| {
            q.durable()
                .transactional()
                .backoff(Backoff::constant(Duration::from_millis(1)))
        })
        .build()
        .expect("a valid bus")
        .start()
        .await
        .expect("started");
    let url = format!("sqlite:{}", database.file().display());
    let pool = sqlx::SqlitePool::connect(&url).await.expect("opened");
    sqlx::query("CREATE TABLE effects (number integer)")
        .execute(&pool)
        .await
        .expect("created");
    bus.publish(&Step { key: 1, number: 1 })
        .await
        .expect("stored");
    let store = bus.store().expect("it runs");
    settled(&*store, "step").await;
    bus.shutdown(DRAIN).await;
    let effects: Vec<i64> = sqlx::query_scalar("SELECT number FROM effects ORDER BY rowid")
        .fetch_all(&pool)
        .await
        .expect("read");
    assert_eq!(effects, [1, 2, 3, 4, 5]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handlers_writes_its_messages_and_its_mark_commit_together_on_postgres() {
    let database = Database::postgres();
    let table = database.table("effects");
    let insert: &'static str = format!("INSERT INTO {table} VALUES ($1)").leak();
    let bus = database
        .under(Bus::builder())
        .handler::<Step, _>(steps_in_transactions!(Postgres, insert))
        .local_queues(|q| {
            q.durable()
                .transactional()
                .backoff(Backoff::constant(Duration::from_millis(1)))
        })
        .build()
        .expect("a valid bus")
        .start()
        .await
        .expect("started");
    let pool = sqlx::PgPool::connect(&stores::postgres_url())
        .await
        .expect("opened");
    sqlx::query(&format!("CREATE TABLE {table} (number bigint)"))
        .execute(&pool)
        .await
        .expect("created");
    bus.publish(&Step { key: 1, number: 1 })
        .await
        .expect("stored");
    let store = bus.store().expect("it runs");
    settled(&*store, "step").await;
    bus.shutdown(DRAIN).await;
    let mut effects: Vec<i64> = sqlx::query_scalar(&format!("SELECT number FROM {table}"))
        .fetch_all(&pool)
        .await
        .expect("read");
    effects.sort_unstable();
    assert_eq!(effects, [1, 2, 3, 4, 5]);
    database.clean_up().await;
}

/// Waits until a queue is empty. The store tells nobody when it is.
async fn settled(store: &dyn laneway::store::Store, queue: &str) {
    let empty = async {
        while store.count(queue).await.expect("counted").backlog > 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), empty)
        .await
        .expect("the queue is empty in time");
}

static DECODED: AtomicU32 = AtomicU32::new(0);

/// Counts how often it is decoded.
#[derive(Serialize)]
struct Original(u64);

impl Message for Original {
    const TYPE: &'static str = "original";
}

impl<'de> Deserialize<'de> for Original {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        DECODED.fetch_add(1, Ordering::SeqCst);
        <(u64,)>::deserialize(from).map(|(number,)| Self(number))
    }
}

/// Whoever polls in the moment between a commit and its hint finds the row without the object, and decodes it: that can
/// happen, and not each time.
#[tokio::test(flavor = "multi_thread")]
async fn the_object_that_was_enqueued_is_lent_to_the_handler_without_being_decoded() {
    const MESSAGES: u64 = 50;
    let database = Database::sqlite();
    let (seen, taking) = (Seen::default(), Seen::default());
    let taking = Seen {
        count: Arc::clone(&seen.count),
        changed: Arc::clone(&seen.changed),
        ..taking
    };
    let bus = database
        .under(Bus::builder())
        .handler::<Original, _>(move |original: Original, _: Context| {
            let seen = taking.clone();
            async move {
                seen.take(&Step {
                    key: original.0,
                    number: 0,
                });
                Ok(())
            }
        })
        .local_queues(|q| q.durable())
        .build()
        .expect("a valid bus")
        .start()
        .await
        .expect("started");
    let url = format!("sqlite:{}", database.file().display());
    let pool = sqlx::SqlitePool::connect(&url).await.expect("opened");
    for number in 0..MESSAGES {
        let begun = pool.begin_with("BEGIN IMMEDIATE").await;
        let mut transaction = begun.expect("begun");
        let enqueued = bus.enqueue_in(&mut transaction, Original(number)).await;
        let enqueued = enqueued.expect("enqueued");
        transaction.commit().await.expect("committed");
        enqueued.committed();
    }
    seen.reach(MESSAGES as u32).await;
    assert!(u64::from(DECODED.load(Ordering::SeqCst)) < MESSAGES);
    bus.shutdown(DRAIN).await;
}
