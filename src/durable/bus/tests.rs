//! The sources of durable queues, read without an endpoint over them: what a session promises on both stores.

use std::collections::BTreeMap;
use std::future::Future;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use laneway_actors::port::{Ack, OpenSession};
use laneway_actors::{Delivery, Envelope, MessageId, OrderingKey, SessionState};
use sqlx::{Connection as _, Executor as _, PgConnection};

use super::*;
use crate::entries::Entries;
use crate::local::address::LocalQueues;
use crate::routing::Routes;
use crate::store::Ownership;
use crate::store::postgres::PostgresConfig;
use crate::store::sqlite::SqliteConfig;

/// How long any single step may take before a test fails.
const PATIENCE: Duration = Duration::from_secs(20);

const QUEUE: &str = "orders";

async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(output) => output,
        Err(_) => panic!("waited {PATIENCE:?} for {what}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_session_gives_its_messages_back_in_order_on_sqlite() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = SqliteConfig::file(folder.path().join("laneway.db"));
    a_dropped_session_gives_its_messages_back_in_order(config).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_session_gives_its_messages_back_in_order_on_postgres() {
    let url = std::env::var("LANEWAY_POSTGRES_URL")
        .unwrap_or_else(|_| "postgres://postgres@127.0.0.1:5432/test".to_owned());
    let schema = format!("laneway_{:016x}", fastrand::u64(..));
    let config = PostgresConfig::at(&url).schema(&schema);
    a_dropped_session_gives_its_messages_back_in_order(config).await;
    let mut connection = PgConnection::connect(&url)
        .await
        .expect("a PostgreSQL server; see LANEWAY_POSTGRES_URL");
    let drop = format!("DROP SCHEMA IF EXISTS {schema} CASCADE");
    connection.execute(&*drop).await.expect("dropped");
}

/// A session whose stream and control are dropped without a close ends, though deliveries of it are still about, and
/// gives its lease back. The next one gets everything that was not acknowledged, in order within each key, with no
/// attempt counted; what was acknowledged stays so.
async fn a_dropped_session_gives_its_messages_back_in_order(config: impl StoreConfig) {
    let stage = Stage::start(config).await;
    stage.enqueue(0..12).await;

    // Dropped before anybody has read from it, perhaps before it has its lease.
    let unread = stage.open(8).await;
    stage.expect_ended(unread.dropped()).await;

    let mut session = stage.open(8).await;
    // The first message of each key: its second is out only after it.
    let held = session.take(4).await;
    assert_eq!(numbers_of(&held), [0, 1, 2, 3]);
    session.acknowledge(&held[0]);
    session.acknowledge(&held[2]);
    within("the barrier", session.control.barrier())
        .await
        .expect("the session lives");
    stage.expect_ended(session.dropped()).await;
    assert_eq!(stage.counts().await, (10, 0));

    let mut next = stage.open(8).await;
    let mut found: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    for _ in 0..10 {
        let delivery = next.take(1).await.remove(0);
        assert_eq!(delivery.source_attempts(), Some(0), "none has begun");
        let number = number_of(&delivery);
        found.entry(number % KEYS).or_default().push(number);
        next.acknowledge(&delivery);
    }
    let expected = [
        (0, vec![4, 8]),
        (1, vec![1, 5, 9]),
        (2, vec![6, 10]),
        (3, vec![3, 7, 11]),
    ];
    assert_eq!(found, expected.into());
    within("the barrier", next.control.barrier())
        .await
        .expect("the session lives");
    assert_eq!(stage.counts().await, (0, 0));
    within("the session to close", next.control.close()).await;
    stage.running.stop().await;
}

/// The messages of the test have so many keys, in turn.
const KEYS: u64 = 4;

/// A started store with one ordered queue of one shard.
struct Stage {
    source: Arc<dyn Source>,
    sink: Arc<dyn DurableSink>,
    store: Arc<dyn Store>,
    running: Arc<dyn RunningStore>,
}

impl Stage {
    async fn start(config: impl StoreConfig) -> Self {
        let mut description = Description::new(config.into());
        let one = ShardCount::new(1).expect("cannot fail because it is allowed");
        let identity = QueueIdentity {
            name: QUEUE.into(),
            order: StoredOrder::Ordered(one),
        };
        let source = description.sources(&identity, 5).remove(0);
        description.queues.handled.push(identity);
        let (sink, slot) = (description.sink(), Arc::clone(&description.slot));
        let (routes, entries) = (Routes::default(), Entries::default());
        let publisher = BusPublisher::new(routes, entries, LocalQueues::default(), None);
        let running = Box::new(description).start(Arc::new(publisher)).await;
        let running = running.expect("the store starts");
        let engine = slot.engine().expect("it has started");
        Self {
            source,
            sink,
            store: Arc::clone(&engine.store),
            running,
        }
    }

    async fn enqueue(&self, numbers: std::ops::Range<u64>) {
        let messages = numbers.map(|number| ToQueue {
            queue: QUEUE.into(),
            envelope: Envelope {
                id: Some(MessageId::unique()),
                body: number.to_be_bytes().to_vec().into(),
                ..Envelope::default()
            },
            key: Some(OrderingKey::from(number % KEYS)),
            due: None,
            original: None,
        });
        let stored = self.sink.enqueue(messages.collect()).await;
        stored.expect("stored");
    }

    async fn open(&self, credits: u16) -> Reader {
        let state = SessionState::start();
        let opened = self.source.open(Arc::clone(&state), credits).await;
        let OpenSession {
            deliveries,
            control,
        } = opened.expect("the store is open");
        let batches = deliveries.map(|batch| stream::iter(batch.expect("the session lives")));
        Reader {
            deliveries: batches.flatten().boxed(),
            control,
            state,
        }
    }

    async fn owner(&self) -> Ownership {
        let owners = self.store.owners(QUEUE).await.expect("read");
        owners.into_iter().next().expect("it has one shard")
    }

    async fn expect_ended(&self, dropped: Arc<SessionState>) {
        within("the dropped session to be marked ended", dropped.ended()).await;
        // After that, and after the count of what has not begun. Nobody is told.
        let given_back = async { while self.owner().await.owner.is_some() {} };
        within("its lease to be given back", given_back).await;
    }

    /// What waits, and what is dead.
    async fn counts(&self) -> (u64, u64) {
        let counts = self.store.count(QUEUE).await.expect("counted");
        (counts.backlog, counts.dead)
    }
}

/// An open session, read one delivery at a time.
struct Reader {
    deliveries: BoxStream<'static, Delivery>,
    control: Arc<dyn laneway_actors::port::Session>,
    state: Arc<SessionState>,
}

impl Reader {
    async fn take(&mut self, count: usize) -> Vec<Delivery> {
        let taken = within("deliveries", self.deliveries.by_ref().take(count).collect());
        let taken: Vec<_> = taken.await;
        assert_eq!(taken.len(), count, "the session ended");
        taken
    }

    fn acknowledge(&self, delivery: &Delivery) {
        let (tag, multiple) = (delivery.tag(), false);
        self.control.acknowledge(&[Ack { tag, multiple }]);
    }

    /// Drops stream and control without a close.
    fn dropped(self) -> Arc<SessionState> {
        self.state
    }
}

fn number_of(delivery: &Delivery) -> u64 {
    let body = delivery.envelope().body.as_ref().try_into();
    u64::from_be_bytes(body.expect("every body of the test is a number of eight bytes"))
}

fn numbers_of(deliveries: &[Delivery]) -> Vec<u64> {
    deliveries.iter().map(number_of).collect()
}
