//! Publishing keeps the order of a key, tells each caller the truth, and sends nothing twice.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use laneway::actors::port::{Outgoing, Parking, Publisher, Source};
use laneway::prelude::*;
use laneway::transport::Transport;
use laneway::{PublishError, QueueSpec};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

#[path = "support/orders.rs"]
mod support;
#[path = "support/workload.rs"]
mod workload;
use support::{ORDERS, Tally, numbered, orders, started, stop, within};
use workload::{KEY_HEADER, Numbered};

/// A message in the hands of the broker, which has not answered yet.
type Unanswered = (Numbered, oneshot::Sender<Result<(), PublishError>>);

/// The embedded broker, but for a publisher that answers when and what the test says.
#[derive(Clone)]
struct Slow {
    broker: MemoryBroker,
    sent: Arc<Mutex<Vec<Unanswered>>>,
    count: Tally,
}

impl Slow {
    fn new() -> Self {
        Self {
            broker: MemoryBroker::new(),
            sent: Arc::default(),
            count: Tally::new(),
        }
    }

    /// The oldest unanswered message of a key.
    fn take(&self, key: &str) -> Unanswered {
        let mut sent = self.sent.lock().expect("no panic");
        let at = sent.iter().position(|(message, _)| message.key == key);
        sent.remove(at.expect("a message of this key was sent"))
    }

    fn unanswered(&self) -> BTreeMap<String, usize> {
        let mut of_key = BTreeMap::new();
        for (message, _) in self.sent.lock().expect("no panic").iter() {
            *of_key.entry(message.key.clone()).or_default() += 1;
        }
        of_key
    }
}

impl Transport for Slow {
    fn source(&self, queue: &QueueSpec) -> Arc<dyn Source> {
        self.broker.source(queue)
    }
    fn parking(&self, queue: &QueueSpec) -> Option<Arc<dyn Parking>> {
        self.broker.parking(queue)
    }
    fn publisher(&self) -> Arc<dyn Publisher> {
        Arc::new(self.clone())
    }
}

impl Publisher for Slow {
    fn publish(&self, outgoing: Outgoing) -> BoxFuture<'static, Result<(), PublishError>> {
        let world = self.clone();
        async move {
            let (answer, answered) = oneshot::channel();
            let message = numbered(&outgoing.envelope);
            assert_eq!(
                outgoing.envelope.headers.text(KEY_HEADER),
                Some(&*message.key)
            );
            world.sent.lock().expect("no panic").push((message, answer));
            world.count.add();
            answered.await.expect("the test answers")
        }
        .boxed()
    }
}

async fn idle(_: Numbered, _: Context) -> Result<(), Failure> {
    Ok(())
}

fn message(key: &str, seq: u64) -> Numbered {
    Numbered {
        key: key.to_owned(),
        seq,
    }
}

/// Publishes in a task of its own; the calls are made in the order in which this is awaited.
async fn call(bus: &Bus, key: &str, seq: u64) -> tokio::task::JoinHandle<Result<(), PublishError>> {
    let (bus, message) = (bus.clone(), message(key, seq));
    let (begun, has_begun) = oneshot::channel();
    let task = tokio::spawn(async move {
        let mut publishing = Box::pin(bus.publish(&message));
        let first = (&mut publishing).now_or_never();
        begun.send(()).expect("the test waits");
        match first {
            Some(result) => result,
            None => publishing.await,
        }
    });
    has_begun.await.expect("no panic");
    task
}

#[tokio::test(flavor = "multi_thread")]
async fn one_message_of_a_key_is_unconfirmed_at_a_time_and_keys_do_not_wait_for_each_other() {
    let slow = Slow::new();
    let bus = started(orders(slow.clone(), |e| e.handler(idle))).await;
    let mut calls = Vec::new();
    for seq in 1..=3 {
        for key in ["a", "b", "c"] {
            calls.push(call(&bus, key, seq).await);
        }
    }
    let one_each = || BTreeMap::from(["a", "b", "c"].map(|key| (key.to_owned(), 1)));
    assert_eq!(slow.unanswered(), one_each());
    for seq in 1..=3 {
        for (number, key) in ["a", "b", "c"].iter().enumerate() {
            let (sent, answer) = slow.take(key);
            assert_eq!(sent.seq, seq);
            answer.send(Ok(())).expect("somebody waits");
            if seq < 3 {
                let so_far = seq * 3 + number as u64 + 1;
                slow.count.until("the next of the key", so_far).await;
            }
        }
    }
    for call in calls {
        within("the confirm", call)
            .await
            .expect("no panic")
            .expect("confirmed");
    }
    stop(&bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_failure_nothing_that_waited_is_sent_and_its_callers_are_told() {
    for failure in [
        PublishError::Refused("full".to_owned()),
        PublishError::Unknown("no answer".to_owned()),
    ] {
        let unknown = matches!(failure, PublishError::Unknown(_));
        let slow = Slow::new();
        let bus = started(orders(slow.clone(), |e| e.handler(idle))).await;
        let first = call(&bus, "a", 1).await;
        let waiting = [call(&bus, "a", 2).await, call(&bus, "a", 3).await];
        let other = call(&bus, "b", 1).await;
        let (_, answer) = slow.take("a");
        answer.send(Err(failure)).expect("somebody waits");
        let error = within("the failure", first)
            .await
            .expect("no panic")
            .expect_err("failed");
        assert_eq!(
            matches!(error, PublishError::Unknown(_)),
            unknown,
            "{error}"
        );
        for call in waiting {
            let result = within("the refusal", call).await.expect("no panic");
            assert!(
                matches!(result, Err(PublishError::EarlierFailed)),
                "{result:?}"
            );
        }
        // Whoever calls after the failure was told begins anew; the first was never sent again.
        let again = call(&bus, "a", 1).await;
        let (sent, answer) = slow.take("a");
        assert_eq!(sent.seq, 1);
        answer.send(Ok(())).expect("somebody waits");
        within("the confirm", again)
            .await
            .expect("no panic")
            .expect("confirmed");
        let (_, answer) = slow.take("b");
        answer.send(Ok(())).expect("somebody waits");
        within("the other key", other)
            .await
            .expect("no panic")
            .expect("confirmed");
        assert_eq!(slow.count.get(), 3);
        stop(&bus).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_goes_away_in_the_middle_refuses_what_waited_behind_it() {
    let slow = Slow::new();
    let bus = started(orders(slow.clone(), |e| e.handler(idle))).await;
    let first = call(&bus, "a", 1).await;
    let second = call(&bus, "a", 2).await;
    first.abort();
    let result = within("the refusal", second).await.expect("no panic");
    assert!(
        matches!(result, Err(PublishError::EarlierFailed)),
        "{result:?}"
    );
    stop(&bus).await;
}

#[derive(Debug, Serialize, Deserialize)]
struct Homeless;

impl Message for Homeless {
    const TYPE: &'static str = "homeless";
}

#[tokio::test(flavor = "multi_thread")]
async fn a_type_without_destination_is_refused_by_name_for_the_bus_and_for_handlers() {
    let broker = MemoryBroker::new();
    let refused = Tally::new();
    let count = refused.clone();
    let bus = started(orders(broker.clone(), |e| {
        e.handler(move |_: Numbered, cx: Context| {
            let count = count.clone();
            async move {
                let error = cx.publish(&Homeless).await.expect_err("nowhere to go");
                assert!(matches!(error, PublishError::NoDestination(name) if name == "homeless"));
                count.add();
                Ok(())
            }
        })
    }))
    .await;
    let error = bus.publish(&Homeless).await.expect_err("nowhere to go");
    assert!(error.to_string().contains("homeless"), "{error}");
    bus.publish(&message("a", 1)).await.expect("published");
    refused.until("the handler's refusal", 1).await;
    stop(&bus).await;
    for result in [
        bus.publish(&message("a", 2)).await,
        bus.publish_keyed(&message("a", 2), "b").await,
        bus.publish_to_queue(ORDERS, &message("a", 2), None).await,
    ] {
        assert!(matches!(result, Err(PublishError::ShutDown)), "{result:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_message_is_reported_as_not_sent() {
    let broker = MemoryBroker::new();
    let bus = started(orders(broker.clone(), |e| e.handler(idle))).await;
    let nowhere = bus
        .publish_to_queue("nowhere", &message("a", 1), None)
        .await;
    assert!(
        matches!(nowhere, Err(PublishError::Refused(_))),
        "{nowhere:?}"
    );
    broker.make_unreachable();
    let unreachable = bus.publish(&message("a", 1)).await;
    assert!(
        matches!(unreachable, Err(PublishError::Refused(_))),
        "{unreachable:?}"
    );
    within("the shutdown", bus.shutdown(Duration::from_secs(20))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consequence_carries_the_conversation_and_names_its_cause() {
    let broker = MemoryBroker::new();
    let bus = Bus::builder()
        .memory(broker.clone())
        .topology(|t| {
            t.queue(ORDERS, |q| q.single_active_consumer())
                .queue("next", |q| q)
        })
        .endpoint(ORDERS, |e| {
            e.discard_poison()
                .handler(|message: Numbered, cx: Context| async move {
                    let next = Numbered {
                        seq: message.seq + 1,
                        ..message
                    };
                    cx.publish_keyed(&next, "chosen").await?;
                    Ok(())
                })
        })
        .publishes::<Numbered>(|r| {
            r.to_queue("next")
                .key_header("their-key")
                .keyed_by(|m| m.key.clone())
        });
    let bus = started(bus).await;
    bus.publish_to_queue(ORDERS, &message("first", 1), None)
        .await
        .expect("published");
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    let [next] = &broker.messages("next")[..] else {
        panic!("one consequence");
    };
    let cause = next.causation_id.as_deref().expect("its cause");
    assert_eq!(
        next.correlation_id.as_deref(),
        Some(cause),
        "it began the conversation"
    );
    assert_eq!(next.headers.text("their-key"), Some("chosen"));
    assert!(next.id.as_ref().is_some_and(|id| id.as_str() != cause));
    assert_eq!(numbered(next).seq, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_message_gets_an_id_of_its_own() {
    let broker = MemoryBroker::new();
    let bus = started(
        Bus::builder()
            .memory(broker.clone())
            .topology(|t| t.queue("out", |q| q))
            .publishes::<Numbered>(|r| r.to_queue("out").encoding(Encoding::MessagePack)),
    )
    .await;
    futures::stream::iter(0..500)
        .for_each_concurrent(50, |seq| {
            let bus = bus.clone();
            async move { bus.publish(&message("same", seq)).await.expect("published") }
        })
        .await;
    stop(&bus).await;
    let messages = broker.messages("out");
    let ids: std::collections::HashSet<_> = messages
        .iter()
        .map(|m| m.id.clone().expect("an id"))
        .collect();
    assert_eq!(ids.len(), 500);
    assert!(
        messages
            .iter()
            .all(|m| m.content_type.as_deref() == Some("application/msgpack"))
    );
}
