//! Durable queues after the end of their process, however it ended, and with more to do than fits into memory.
//!
//! A killed process is this test program itself, started again to run one test, [`one_life`]. `LANEWAY_SOAK=1` makes
//! the full counts.
#![cfg(all(unix, feature = "sqlite", feature = "postgres"))]

#[path = "support/job.rs"]
mod job;
#[path = "support/lives.rs"]
mod lives;
#[path = "support/stores.rs"]
mod stores;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use laneway::BusBuilder;
use laneway::actors::port::MemberId;
use laneway::prelude::*;
use laneway::store::{
    DeadMessage, Ending, QueueIdentity, QueueOrder, Settlement, Shard, Store, Window,
};
use serde::{Deserialize, Serialize};

use lives::{Loose, Place, Seed, Step, new_step};
use stores::Database;

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
        laneway::store::NewMessage {
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
