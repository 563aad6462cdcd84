//! Parked messages come back on a real broker, from classic and quorum queues.
#![cfg(feature = "rabbitmq")]

use std::collections::HashSet;
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use laneway::parked::{ParkedEntry, ParkedList, ParkedOrigin};
use laneway::prelude::*;
use laneway::testing::OrderLedger;
use laneway::{Parked, ParkedError};
use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};
use tokio::sync::watch;

mod support;
#[path = "support/workload.rs"]
mod workload;
use support::broker::{shared_url, unique};
use support::foreign::Foreign;
use support::proxy::Proxy;
use workload::{KEY_HEADER, Numbered, Scripted, Step};

const PATIENCE: Duration = Duration::from_secs(60);

async fn within<F: Future>(what: &str, future: F) -> F::Output {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(output) => output,
        Err(_) => panic!("waited a minute in vain for {what}"),
    }
}

/// A queue with its parking place, and a bus whose handler fails for good until it is mended.
struct Ward {
    queue: String,
    proxy: Proxy,
    broker: RabbitMq,
    bus: Bus,
    ledger: OrderLedger,
    mended: Arc<watch::Sender<bool>>,
    /// Distinct messages that were handled.
    handled: watch::Receiver<usize>,
}

impl Ward {
    async fn with(name: &str, queue_type: QueueType, messages: u64, keys: u64) -> Self {
        let url = shared_url();
        let rest = url.strip_prefix("amqp://").expect("an amqp URL");
        let (userinfo, rest) = rest.split_once('@').unwrap_or(("guest:guest", rest));
        let (address, vhost) = rest.split_once('/').unwrap_or((rest, "%2f"));
        let proxy = Proxy::to(address);
        let broker = RabbitMq::at(format!("amqp://{userinfo}@{}/{vhost}", proxy.address()));
        let queue = unique(name);
        let ledger = OrderLedger::in_memory();
        let mended = Arc::new(watch::Sender::new(false));
        let (count, handled) = watch::channel(0);
        let handler = {
            let mended = Arc::clone(&mended);
            let seen = Mutex::new(HashSet::new());
            Scripted::new(&ledger, move |message, _| {
                if !*mended.borrow() {
                    return Step::FailForGood;
                }
                let mut seen = seen.lock().expect("no panic under this lock");
                seen.insert((message.key.clone(), message.seq));
                count.send_replace(seen.len());
                Step::Succeed(Duration::ZERO)
            })
        };
        let bus = Bus::builder()
            .rabbitmq(broker.clone())
            .topology(|t| {
                t.queue(&queue, |q| {
                    q.durable()
                        .of_type(queue_type)
                        .single_active_consumer()
                        .parking(&format!("{queue}-dlx"), &format!("{queue}-parked"))
                })
            })
            .endpoint(&queue, |e| {
                e.ordered_by_header(KEY_HEADER)
                    .transport_affinity(TransportAffinity::SingleActiveConsumer)
                    .handler(handler)
            })
            .publishes::<Numbered>(|r| r.to_queue(&queue).keyed_by(|m| m.key.clone()))
            .build()
            .expect("valid");
        let bus = within("the start", bus.start()).await.expect("starts");
        workload::publish(&bus, &ledger, messages, keys).await;
        let ward = Self {
            queue,
            proxy,
            broker,
            bus,
            ledger,
            mended,
            handled,
        };
        ward.until_parked(messages).await;
        ward
    }

    fn parking(&self) -> String {
        format!("{}-parked", self.queue)
    }

    fn parked(&self) -> Parked {
        self.bus.parked(&self.queue).expect("it has one")
    }

    async fn list(&self) -> ParkedList {
        let parked = self.parked();
        within("a list", parked.list()).await.expect("listed")
    }

    /// Waits until the parking queue has so many messages that nobody holds.
    async fn until_parked(&self, count: u64) {
        let parking = self.parking();
        within("parked messages", async {
            // The broker has no event for it; each turn is a round trip.
            while u64::from(self.broker.ready(&parking).await.expect("it exists")) != count {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }

    async fn until_handled(&self, count: usize) {
        let mut handled = self.handled.clone();
        let waiting = handled.wait_for(|handled| *handled >= count);
        within("handled messages", waiting)
            .await
            .expect("the handler is there");
    }

    async fn end(self) {
        let report = self.bus.shutdown(Duration::from_secs(10)).await;
        assert!(report.is_clean(), "{report:?}");
        let foreign = Foreign::connect(&shared_url()).await;
        foreign.delete(&self.queue).await;
        foreign.delete(&self.parking()).await;
        foreign
            .delete_exchange(&format!("{}-dlx", self.queue))
            .await;
    }
}

/// Asserts that a list shows these messages; `given_back` is what every look counts up.
#[track_caller]
fn expect_same(found: &[ParkedEntry], expected: &[ParkedEntry]) {
    let place = |entry: &ParkedEntry| expected.iter().position(|other| other.id == entry.id);
    let places: Vec<_> = found.iter().map(place).collect();
    let all: Vec<_> = (0..expected.len()).map(Some).collect();
    assert_eq!(places, all);
    for (found, expected) in found.iter().zip(expected) {
        let mut found = found.clone();
        found.given_back = expected.given_back;
        assert_eq!(&found, expected);
    }
}

async fn looking_removes_nothing_and_single_messages_go(queue_type: QueueType) {
    let ward = Ward::with("parked-looks", queue_type, 300, 10).await;
    let first = ward.list().await;
    assert_eq!((first.messages.len(), first.more), (300, false));
    for _ in 0..3 {
        let again = ward.list().await;
        expect_same(&again.messages, &first.messages);
    }
    let shown = ward.parked().show(&first.messages[7].id).await;
    let shown = shown.expect("shown");
    assert_eq!(shown.envelope.id, first.messages[7].message_id);
    assert!(!shown.envelope.body.is_empty());
    let gone = ward.parked().discard(&first.messages[150].id).await;
    gone.expect("discarded");
    ward.mended.send_replace(true);
    let back = ward.parked().replay(&first.messages[200].id).await;
    back.expect("replayed");
    ward.until_handled(1).await;
    let mut left = first.messages;
    left.remove(200);
    left.remove(150);
    expect_same(&ward.list().await.messages, &left);
    ward.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn looking_removes_nothing_and_single_messages_go_from_a_classic_queue() {
    looking_removes_nothing_and_single_messages_go(QueueType::Classic).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn looking_removes_nothing_and_single_messages_go_from_a_quorum_queue() {
    looking_removes_nothing_and_single_messages_go(QueueType::Quorum).await;
}

async fn a_queue_longer_than_a_look_keeps_its_order(queue_type: QueueType) {
    let ward = Ward::with("parked-long", queue_type, 0, 1).await;
    let foreign = Foreign::connect(&shared_url()).await;
    let limit = u64::from(Parked::LIMIT);
    let total = limit + 500;
    foreign.publish_numbers(&ward.parking(), 0..total).await;
    let first = ward.list().await;
    assert_eq!((first.messages.len(), first.more), (1_000, true));
    // Discarding moves the look on; what it gives back stays in front.
    for gone in [0, 500, 999] {
        let gone = ward.parked().discard(&first.messages[gone].id).await;
        gone.expect("discarded");
    }
    let again = ward.list().await;
    let ids: Vec<_> = again
        .messages
        .iter()
        .map(|entry| entry.message_id.as_ref().expect("each has one").to_string())
        .collect();
    let expected: Vec<_> = (0..limit + 3)
        .filter(|number| ![0, 500, 999].contains(number))
        .map(|number| number.to_string())
        .collect();
    assert!(ids == expected, "{ids:?}");
    let report = ward.parked().replay_all().await.expect("all are skipped");
    assert_eq!((report.skipped, report.left), (limit, total - 3 - limit));
    expect_same(&ward.list().await.messages, &again.messages);
    ward.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_classic_queue_longer_than_a_look_keeps_its_order() {
    a_queue_longer_than_a_look_keeps_its_order(QueueType::Classic).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quorum_queue_longer_than_a_look_keeps_its_order() {
    a_queue_longer_than_a_look_keeps_its_order(QueueType::Quorum).await;
}

async fn replaying_all_keeps_the_order(queue_type: QueueType) {
    let ward = Ward::with("parked-replay", queue_type, 400, 20).await;
    // Before it is mended: everything is parked again, and the replay ends all the same.
    let report = ward.parked().replay_all().await;
    let report = report.expect("replayed");
    assert_eq!((report.replayed, report.skipped, report.left), (400, 0, 0));
    ward.until_parked(400).await;
    let list = ward.list().await.messages;
    assert!(
        list.iter()
            .all(|entry| (entry.replays, entry.attempts) == (1, Some(1)))
    );
    ward.mended.send_replace(true);
    let report = ward.parked().replay_all().await.expect("replayed");
    assert_eq!(report.replayed, 400);
    ward.until_handled(400).await;
    ward.until_parked(0).await;
    let ledger = ward.ledger.clone();
    ward.end().await;
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!((figures.handled, figures.duplicates), (400, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn replaying_all_keeps_the_order_of_each_key_of_a_classic_queue() {
    replaying_all_keeps_the_order(QueueType::Classic).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replaying_all_keeps_the_order_of_each_key_of_a_quorum_queue() {
    replaying_all_keeps_the_order(QueueType::Quorum).await;
}

async fn a_connection_cut_during_a_replay_loses_nothing(queue_type: QueueType) {
    let ward = Ward::with("parked-cut", queue_type, 200, 10).await;
    ward.mended.send_replace(true);
    let parked = ward.parked();
    let replaying = tokio::spawn(async move { parked.replay_all().await });
    ward.until_handled(20).await;
    ward.proxy.cut();
    let error = within("the replay to stop", replaying).await;
    let error = error.expect("no panic").expect_err("it was cut");
    assert!(error.replayed < 200, "{error}");
    // What the broker has not taken back yet is not there to be replayed; so again until all is.
    within("the rest to be replayed", async {
        while *ward.handled.borrow() < 200 {
            match ward.parked().replay_all().await {
                Ok(_) => {}
                Err(error) => assert!(
                    matches!(
                        error.source,
                        ParkedError::InUse { .. } | ParkedError::Unavailable(_)
                    ),
                    "{error}"
                ),
            }
            tokio::task::yield_now().await;
        }
    })
    .await;
    ward.until_parked(0).await;
    let ledger = ward.ledger.clone();
    ward.end().await;
    let figures = ledger.figures().expect("in memory");
    assert_eq!((figures.handled, figures.lost), (200, 0));
    assert_eq!(figures.overlaps, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_cut_during_a_replay_loses_nothing_of_a_classic_queue() {
    a_connection_cut_during_a_replay_loses_nothing(QueueType::Classic).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_cut_during_a_replay_loses_nothing_of_a_quorum_queue() {
    a_connection_cut_during_a_replay_loses_nothing(QueueType::Quorum).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_without_its_queue_is_refused_and_leaves_everything_parked() {
    let ward = Ward::with("parked-gone", QueueType::Classic, 3, 1).await;
    let parked = ward.parked();
    let report = ward.bus.shutdown(Duration::from_secs(10)).await;
    assert!(report.is_clean(), "{report:?}");
    let foreign = Foreign::connect(&shared_url()).await;
    foreign.delete(&ward.queue).await;
    let error = parked.replay_all().await.expect_err("no queue");
    assert_eq!(error.replayed, 0);
    assert!(
        matches!(error.source, ParkedError::NotReplayed { .. }),
        "{error}"
    );
    let list = parked.list().await.expect("listed");
    assert_eq!(list.messages.len(), 3);
    ward.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn foreign_messages_and_headers_of_every_type_are_listed_and_replayed_as_they_were() {
    let ward = Ward::with("parked-foreign", QueueType::Classic, 0, 1).await;
    let foreign = Foreign::connect(&shared_url()).await;
    let bystander = unique("bystander");
    foreign.declare(&bystander, FieldTable::default()).await;
    foreign
        .publish(&ward.parking(), &[0xff, 0x00], BasicProperties::default())
        .await;
    let mut headers = FieldTable::default();
    headers.insert("price".into(), AMQPValue::Timestamp(12));
    headers.insert("narrow".into(), AMQPValue::ShortInt(7));
    let copies = AMQPValue::FieldArray(vec![long(&bystander)].into());
    headers.insert("CC".into(), copies.clone());
    headers.insert("laneway-queue".into(), long(&ward.queue));
    headers.insert("laneway-reason".into(), long("failed"));
    let properties = BasicProperties::default()
        .with_message_id("full".into())
        .with_app_id("till".into())
        .with_reply_to("answers".into())
        .with_priority(3)
        .with_headers(headers);
    foreign.publish(&ward.parking(), b"{", properties).await;
    // Published with a copy for somebody else, who has had it.
    foreign.get(&bystander).await.expect("the copy");
    let list = ward.list().await.messages;
    let origins: Vec<_> = list.iter().map(|entry| &entry.origin).collect();
    assert_eq!(origins, [&ParkedOrigin::Foreign, &ParkedOrigin::Ours]);

    let report = ward.bus.shutdown(Duration::from_secs(10)).await;
    assert!(report.is_clean(), "{report:?}");
    let report = ward.parked().replay_all().await.expect("replayed");
    assert_eq!((report.replayed, report.skipped), (1, 1));
    let back = foreign.get(&ward.queue).await.expect("it came back");
    assert_eq!(back.data, b"{");
    let properties = &back.properties;
    assert_eq!(
        properties.app_id().as_ref().map(|id| id.as_str()),
        Some("till")
    );
    assert_eq!(
        properties.reply_to().as_ref().map(|to| to.as_str()),
        Some("answers")
    );
    assert_eq!(*properties.priority(), Some(3));
    assert_eq!(*properties.delivery_mode(), Some(2));
    let headers = properties.headers().as_ref().expect("headers").inner();
    let get = |name: &str| headers.get(name);
    assert_eq!(get("price"), Some(&AMQPValue::Timestamp(12)));
    assert_eq!(get("narrow"), Some(&AMQPValue::ShortInt(7)));
    assert_eq!(get("laneway-reason"), Some(&long("failed")));
    assert_eq!(get("laneway-replay"), Some(&AMQPValue::LongLongInt(1)));
    assert_eq!(get("x-delivery-count"), None);
    assert_eq!((get("CC"), get("laneway-cc")), (None, Some(&copies)));
    assert_eq!(foreign.ready(&bystander).await, 0, "no second copy");
    foreign.delete(&bystander).await;
    ward.end().await;
}

fn long(text: &str) -> AMQPValue {
    AMQPValue::LongString(text.into())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parking_queue_that_another_program_reads_is_in_use() {
    let ward = Ward::with("parked-used", QueueType::Classic, 2, 1).await;
    let other = RabbitMq::at(shared_url());
    let topology = laneway::Topology::default().existing_queue(&ward.parking(), |q| q.durable());
    let source = laneway::transport::Transport::source(&other, &topology.queues()[0]);
    let state = laneway::actors::SessionState::start();
    let session = source.open(state, 1).await.expect("opened");
    let error = ward.parked().list().await.expect_err("in use");
    assert!(matches!(error, ParkedError::InUse { .. }), "{error}");
    session.control.close().await;
    ward.until_parked(2).await;
    ward.end().await;
}
