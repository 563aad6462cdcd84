//! Many writers at once: order within a key is the order of the commits, on both stores. Cases D23 and D24.
//!
//! Each transaction writes down that it enqueued, after it did so and before it commits: as long as it holds the lock
//! of a key, nobody else of that key can. So what is written down is the order of the commits.
#![cfg(all(feature = "sqlite", feature = "postgres"))]

#[path = "support/effects.rs"]
mod effects;
#[path = "support/stores.rs"]
mod stores;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use laneway::durable::{Batch, EnqueueError};
use laneway::prelude::*;
use laneway::store::StoreError;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use effects::App;
use stores::Database;

const DRAIN: Duration = Duration::from_secs(20);
const PATIENCE: Duration = Duration::from_secs(120);

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Entry {
    key: u64,
    token: u64,
}

impl Message for Entry {
    const TYPE: &'static str = "entry";
}

impl Keyed for Entry {
    fn key(&self) -> OrderingKey {
        self.key.into()
    }
}

/// Tokens of each key, in order.
type Orders = BTreeMap<u64, Vec<u64>>;

#[derive(Default)]
struct Handled {
    orders: Mutex<Orders>,
    changed: Notify,
}

struct Stand {
    database: Database,
    bus: Bus,
    app: App,
    handled: Arc<Handled>,
}

fn soaked(normal: u64) -> u64 {
    match std::env::var_os("LANEWAY_SOAK") {
        Some(_) => 20 * normal,
        None => normal,
    }
}

impl Stand {
    async fn new(database: Database) -> Self {
        let handled = Arc::new(Handled::default());
        let taking = Arc::clone(&handled);
        let bus = database
            .under(Bus::builder())
            .keyed::<Entry>()
            .handler::<Entry, _>(move |entry: Entry, _: Context| {
                let taking = Arc::clone(&taking);
                async move {
                    tokio::task::yield_now().await;
                    let mut orders = taking.orders.lock().expect("unharmed");
                    orders.entry(entry.key).or_default().push(entry.token);
                    taking.changed.notify_one();
                    Ok(())
                }
            })
            .local_queue("entry", |q| q.durable().partitioned(16).shards(3))
            .build()
            .expect("a valid bus")
            .start()
            .await
            .expect("started");
        let app = App::of(&database).await;
        let place = match database {
            Database::Sqlite(_) => "integer PRIMARY KEY AUTOINCREMENT",
            Database::Postgres { .. } => "bigserial PRIMARY KEY",
        };
        let (commits, totals) = (database.table("commits"), database.table("totals"));
        app.run(&format!(
            "CREATE TABLE {commits} (place {place}, key bigint, token bigint); \
             CREATE TABLE {totals} (key bigint PRIMARY KEY, n bigint);"
        ))
        .await;
        Self {
            database,
            bus,
            app,
            handled,
        }
    }

    /// What was written down.
    async fn committed(&self) -> Orders {
        let commits = self.database.table("commits");
        let keys = format!("SELECT key FROM {commits} ORDER BY place");
        let tokens = format!("SELECT token FROM {commits} ORDER BY place");
        let keys = self.app.numbers(&keys).await;
        let tokens = self.app.numbers(&tokens).await;
        let mut orders = Orders::new();
        for (key, token) in keys.into_iter().zip(tokens) {
            orders.entry(key as u64).or_default().push(token as u64);
        }
        orders
    }

    /// Waits until everything is handled, and compares.
    async fn end(self, messages: u64) {
        let all = async {
            while {
                let orders = self.handled.orders.lock().expect("unharmed");
                (orders.values().map(Vec::len).sum::<usize>() as u64) < messages
            } {
                self.handled.changed.notified().await;
            }
        };
        let in_time = tokio::time::timeout(PATIENCE, all).await;
        let committed = self.committed().await;
        let handled = self.handled.orders.lock().expect("unharmed").clone();
        assert!(in_time.is_ok(), "skipped: {handled:?} of {committed:?}");
        assert_eq!(handled, committed);
        let totals = self.database.table("totals");
        let totals = format!("SELECT n FROM {totals} ORDER BY key");
        let counted = committed.values().map(|tokens| tokens.len() as i64);
        let counted: Vec<_> = counted.collect();
        assert_eq!(
            self.app.numbers(&totals).await,
            counted,
            "an update was lost"
        );
        assert!(self.bus.shutdown(DRAIN).await.is_clean());
        self.app.close().await;
        self.database.clean_up().await;
    }
}

/// How a transaction enqueues its messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Calls {
    Together,
    Single,
}

/// One transaction: enqueues, waits, writes down, waits, commits.
async fn transaction(
    stand: &Stand,
    calls: Calls,
    entries: &[Entry],
    delay: u64,
) -> Result<(), EnqueueError> {
    let commits = stand.database.table("commits");
    let totals = stand.database.table("totals");
    let mut own = stand.app.begin().await.expect("begun");
    let mut enqueued = Vec::new();
    match calls {
        Calls::Together => {
            let batch = entries.iter().cloned().fold(Batch::new(), Batch::message);
            enqueued.push(own.enqueue_all(&stand.bus, batch).await?);
        }
        Calls::Single => {
            for entry in entries {
                enqueued.push(own.enqueue(&stand.bus, entry.clone()).await?);
                // The load: others come in between.
                pause(delay).await;
            }
        }
    }
    pause(delay).await;
    for entry in entries {
        let (key, token) = (entry.key as i64, entry.token as i64);
        let insert = format!("INSERT INTO {commits} (key, token) VALUES (?, ?)");
        own.execute(&insert, &[key, token]).await.expect("written");
        let add = format!(
            "INSERT INTO {totals} VALUES (?, 1) \
             ON CONFLICT (key) DO UPDATE SET n = totals.n + 1"
        );
        own.execute(&add, &[key]).await.expect("counted");
    }
    pause(delay).await;
    own.commit().await.expect("committed");
    for enqueued in enqueued {
        enqueued.committed();
    }
    Ok(())
}

/// Not waiting for anything: the delays that the case is about.
async fn pause(millis: u64) {
    if millis > 0 {
        tokio::time::sleep(Duration::from_micros(fastrand::u64(0..millis * 1_000))).await;
    }
}

async fn eight_writers_of_a_key_commit_late(database: Database) {
    const KEYS: u64 = 2;
    const WRITERS: u64 = 8;
    let each = soaked(12);
    let stand = Stand::new(database).await;
    let writing = (0..KEYS * WRITERS).map(|writer| {
        let stand = &stand;
        async move {
            for number in 0..each {
                let entry = Entry {
                    key: writer % KEYS,
                    token: writer * each + number,
                };
                transaction(stand, Calls::Single, &[entry], 5)
                    .await
                    .expect("one key each: nothing to dead-lock on");
            }
        }
    });
    futures::future::join_all(writing).await;
    stand.end(KEYS * WRITERS * each).await;
}

/// Sixteen writers, each transaction with some of the keys in random order. A dead-lock is a conflict, and the whole
/// transaction is made again.
async fn sixteen_writers(database: Database, calls: Calls, most: usize, each: u64) -> u64 {
    const WRITERS: u64 = 16;
    let stand = Stand::new(database).await;
    let writing = (0..WRITERS).map(|writer| {
        let stand = &stand;
        async move {
            let (mut messages, mut conflicts) = (0, 0);
            for number in 0..each {
                let mut keys: Vec<u64> = (0..50).collect();
                fastrand::shuffle(&mut keys);
                keys.truncate(fastrand::usize(1..=most));
                let token = writer * each + number;
                let entries: Vec<_> = keys.into_iter().map(|key| Entry { key, token }).collect();
                loop {
                    match transaction(stand, calls, &entries, 2).await {
                        Ok(()) => break,
                        Err(EnqueueError::Store(StoreError::Conflict { .. })) => conflicts += 1,
                        Err(error) => panic!("no conflict: {error}"),
                    }
                }
                messages += entries.len() as u64;
            }
            (messages, conflicts)
        }
    });
    let written = futures::future::join_all(writing).await;
    stand
        .end(written.iter().map(|(messages, _)| messages).sum())
        .await;
    written.iter().map(|(_, conflicts)| conflicts).sum()
}

async fn one_call_for_many_keys_cannot_dead_lock(database: Database) {
    let conflicts = sixteen_writers(database, Calls::Together, 50, soaked(4)).await;
    assert_eq!(conflicts, 0);
}

async fn many_calls_of_one_key_each_lose_nothing(database: Database) {
    // How many conflicts there are is chance.
    let _ = sixteen_writers(database, Calls::Single, 4, soaked(4)).await;
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
    eight_writers_of_a_key_commit_late,
    one_call_for_many_keys_cannot_dead_lock,
    many_calls_of_one_key_each_lose_nothing,
);
