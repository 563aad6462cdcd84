//! Durable queues under the engine, without a bus.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use laneway_actors::port::{Draft, PublishError};
use laneway_actors::{
    Backoff, Context, Encoding, EndpointHandle, EndpointSettings, EndpointSpec, Envelope, Failure,
    HandlerSet, KeySource, Message, OrderingKey, PoisonMode, ShardCount,
};
use serde::{Deserialize, Serialize};
use sqlx::Sqlite;
use tokio::sync::Notify;

use super::*;
use crate::host::Host;
use crate::store::sqlite::SqliteConfig;

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Order {
    key: u32,
    number: u32,
}

impl Message for Order {
    const TYPE: &'static str = "order";
}

/// Everything goes to the queue of its type.
struct ByType;

impl Addressing for ByType {
    fn address(&self, draft: &Draft) -> Result<Addressed, PublishError> {
        let to = ToQueue {
            queue: draft.message_type.into(),
            envelope: draft.envelope.clone(),
            key: draft.key.clone(),
            due: None,
            original: None,
        };
        Ok(Addressed {
            durable: vec![to],
            after_commit: Vec::new(),
        })
    }
}

struct Stand {
    handle: DurableHandle,
    running: Running,
    host: Host,
    endpoint: EndpointHandle,
}

fn ordered() -> QueueIdentity {
    QueueIdentity {
        name: Order::TYPE.into(),
        order: QueueOrder::Ordered(ShardCount::new(1).expect("one is allowed")),
    }
}

async fn stand(
    file: &std::path::Path,
    transactional: bool,
    settle: impl FnOnce(&mut EndpointSettings),
    handlers: HandlerSet,
) -> Stand {
    let durable = Durable::new(SqliteConfig::file(file));
    let queue = ordered();
    let mut settings = EndpointSettings::named(Order::TYPE);
    settings.ordering = Some(KeySource {
        given: true,
        ..KeySource::default()
    });
    settings.ack_timeout = None;
    settings.source_keeps = Some(Duration::from_millis(500));
    settle(&mut settings);
    let spec = EndpointSpec {
        parking: Some(Durable::parking(&queue.name)),
        attempts: Some(durable.attempts(transactional)),
        ..EndpointSpec::sharded(
            settings,
            Arc::clone(&queue.name),
            durable.sources(&queue),
            handlers,
        )
    };
    let handle = durable.handle();
    let running = durable
        .start(vec![queue], Arc::new(ByType))
        .await
        .expect("the store starts");
    let (host, mut endpoints) = Host::start(vec![spec]).await.expect("the endpoint starts");
    Stand {
        handle,
        running,
        host,
        endpoint: endpoints.remove(0),
    }
}

impl Stand {
    async fn publish(&self, orders: impl IntoIterator<Item = (u32, u32)>) {
        let batch = orders.into_iter().map(|(key, number)| {
            let order = Order { key, number };
            ToQueue {
                queue: Order::TYPE.into(),
                envelope: Envelope::of(&order, Encoding::MessagePack).expect("it can be encoded"),
                key: Some(OrderingKey::from(u64::from(key))),
                due: None,
                original: None,
            }
        });
        self.handle.enqueue(batch.collect()).await.expect("stored");
    }

    async fn stop(mut self) {
        self.endpoint.drain(Duration::from_secs(10)).await;
        self.host.stop().await;
        self.running.stop().await;
    }
}

#[derive(Clone, Default)]
struct Seen {
    last: Arc<Mutex<HashMap<u32, u32>>>,
    count: Arc<AtomicU32>,
    changed: Arc<Notify>,
}

impl Seen {
    fn take(&self, order: &Order) {
        let before = self
            .last
            .lock()
            .expect("no panic")
            .insert(order.key, order.number);
        assert!(
            before.is_none_or(|before| before < order.number),
            "{order:?} after {before:?}"
        );
        self.count.fetch_add(1, Ordering::SeqCst);
        self.changed.notify_one();
    }

    async fn reach(&self, count: u32) {
        let all = async {
            while self.count.load(Ordering::SeqCst) < count {
                self.changed.notified().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), all)
            .await
            .unwrap_or_else(|_| panic!("{} of {count}", self.count.load(Ordering::SeqCst)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_are_handled_in_order_within_a_key() {
    let folder = tempfile::tempdir().expect("a folder");
    let seen = Seen::default();
    let mut handlers = HandlerSet::new();
    let taking = seen.clone();
    handlers.add::<Order>(move |order: Order, _: Context| {
        let seen = taking.clone();
        async move {
            tokio::task::yield_now().await;
            seen.take(&order);
            Ok(())
        }
    });
    let stand = stand(&folder.path().join("db"), false, |_| {}, handlers).await;
    for round in 0..10 {
        stand
            .publish((0..50).flat_map(|key| (0..10).map(move |n| (key, round * 10 + n))))
            .await;
    }
    seen.reach(5_000).await;
    let store = stand.handle.store().expect("running");
    stand.endpoint.drain(Duration::from_secs(10)).await;
    let counts = store.count(Order::TYPE).await.expect("counted");
    assert_eq!((counts.backlog, counts.dead), (0, 0));
    stand.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handlers_writes_its_messages_and_its_mark_commit_together() {
    let folder = tempfile::tempdir().expect("a folder");
    let seen = Seen::default();
    let mut handlers = HandlerSet::new();
    let taking = seen.clone();
    handlers.add::<Order>(move |order: Order, cx: Context| {
        let seen = taking.clone();
        async move {
            let mut transaction = cx.transaction::<Sqlite>().await?;
            sqlx::query("CREATE TABLE IF NOT EXISTS effects (number integer)")
                .execute(&mut *transaction)
                .await?;
            sqlx::query("INSERT INTO effects VALUES (?)")
                .bind(order.number)
                .execute(&mut *transaction)
                .await?;
            drop(transaction);
            if cx.attempt() == 1 {
                return Err(Failure::transient("the first attempt of each fails"));
            }
            seen.take(&order);
            Ok((order.number < 5).then(|| {
                let next = order.number + 1;
                laneway_actors::WithKey::new(
                    Order {
                        number: next,
                        ..order
                    },
                    u64::from(order.key),
                )
            }))
        }
    });
    let file = folder.path().join("db");
    let backoff = |settings: &mut EndpointSettings| {
        settings.backoff = Backoff::constant(Duration::from_millis(1));
    };
    let stand = stand(&file, true, backoff, handlers).await;
    stand.publish([(1, 1)]).await;
    seen.reach(5).await;
    stand.stop().await;
    let pool = sqlx::SqlitePool::connect(&format!("sqlite:{}", file.display()))
        .await
        .expect("opened");
    let effects: Vec<i64> = sqlx::query_scalar("SELECT number FROM effects ORDER BY rowid")
        .fetch_all(&pool)
        .await
        .expect("read");
    assert_eq!(effects, [1, 2, 3, 4, 5]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_pause_is_kept_in_the_store_and_a_poison_message_becomes_a_dead_letter_with_its_past()
 {
    let folder = tempfile::tempdir().expect("a folder");
    let seen = Seen::default();
    let mut handlers = HandlerSet::new();
    let taking = seen.clone();
    handlers.add::<Order>(move |order: Order, cx: Context| {
        let seen = taking.clone();
        async move {
            if order.number == 1 {
                return Err(Failure::transient(format!(
                    "try {}",
                    "i".repeat(cx.attempt() as usize)
                )));
            }
            seen.take(&order);
            Ok(())
        }
    });
    let settings = |settings: &mut EndpointSettings| {
        settings.backoff = Backoff::constant(Duration::from_millis(600));
        settings.max_delivery_attempts = 3;
    };
    let stand = stand(&folder.path().join("db"), false, settings, handlers).await;
    stand.publish([(1, 1), (1, 2), (2, 3)]).await;
    seen.reach(2).await;
    let store = stand.handle.store().expect("running");
    let dead = store.dead_letters(Order::TYPE, 0, 10).await.expect("read");
    let [dead] = &dead[..] else {
        panic!("{dead:?}")
    };
    assert_eq!(dead.reason, "failed");
    let past: Vec<_> = dead
        .past
        .iter()
        .map(|failed| (failed.attempt, &*failed.detail))
        .collect();
    assert_eq!(past, [(1, "try i"), (2, "try ii"), (3, "try iii")]);
    stand.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_held_key_survives_a_restart_and_goes_on_when_its_hold_ends() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("db");
    let heals = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let settings = |settings: &mut EndpointSettings| settings.poison_mode = PoisonMode::KeepKey;
    let handlers = |seen: &Seen| {
        let (taking, heals) = (seen.clone(), Arc::clone(&heals));
        let mut handlers = HandlerSet::new();
        handlers.add::<Order>(move |order: Order, _: Context| {
            let (seen, heals) = (taking.clone(), Arc::clone(&heals));
            async move {
                if order.number == 1 && !heals.load(Ordering::SeqCst) {
                    return Err(Failure::permanent("no"));
                }
                seen.take(&order);
                Ok(())
            }
        });
        handlers
    };
    let seen = Seen::default();
    let first = stand(&file, false, settings, handlers(&seen)).await;
    first.publish([(1, 1), (1, 2), (2, 3)]).await;
    seen.reach(1).await;
    first.stop().await;
    let seen = Seen::default();
    let second = stand(&file, false, settings, handlers(&seen)).await;
    second.publish([(2, 4), (1, 5)]).await;
    seen.reach(1).await;
    assert_eq!(seen.last.lock().expect("no panic").get(&1), None);
    let store = second.handle.store().expect("running");
    let held = store
        .held(Order::TYPE, crate::store::Sequence(0), 10)
        .await
        .expect("read");
    assert_eq!(held.len(), 1);
    heals.store(true, Ordering::SeqCst);
    let ended = store
        .end_hold(
            Order::TYPE,
            held[0].sequence,
            crate::store::HoldEnding::Retry,
        )
        .await
        .expect("answered");
    assert!(ended);
    seen.reach(4).await;
    second.stop().await;
}
