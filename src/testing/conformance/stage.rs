//! What the cases are made of: a fresh queue with its ports, a session read one delivery at a time, numbered messages.
//!
//! Owns every wait of the suite ([`within`]) and every queue it declares ([`Stage`]).

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::StreamExt as _;
use futures::stream::BoxStream;
use laneway_actors::port::{
    Ack, DeadLetter, Destination, Outgoing, ParkError, ParkedMessages, Parking, PublishError,
    Publisher, Session, SessionLost, Source, SourceError,
};
use laneway_actors::{
    Delivery, DeliveryTag, Envelope, HeaderValue, MessageId, PoisonReason, SessionState,
};

use super::{Adapter, PATIENCE};
use crate::topology::{ParkingSpec, QueueSpec, Topology};

/// A fresh queue with a parking place, and the ports over it.
pub(super) struct Stage<'a> {
    adapter: &'a dyn Adapter,
    spec: QueueSpec,
    source: Arc<dyn Source>,
    parking: Arc<dyn Parking>,
    publisher: Arc<dyn Publisher>,
}

impl<'a> Stage<'a> {
    pub(super) async fn declare(
        adapter: &'a dyn Adapter,
        describe: impl FnOnce(QueueSpec) -> QueueSpec,
    ) -> Self {
        let name = unique_name("queue");
        let topology = Topology::default().queue(&name, |queue| {
            let queue = queue.parking(&format!("{name}-dlx"), &format!("{name}-parked"));
            adapter.describe(describe(queue))
        });
        let spec = topology.queues()[0].clone();
        let transport = adapter.transport();
        let stage = Self {
            adapter,
            source: transport.source(&spec),
            parking: transport
                .parking(&spec)
                .expect("the queue was given a parking place"),
            publisher: transport.publisher(),
            spec,
        };
        assert_eq!(stage.source.name(), name);
        stage.verify().await.expect("a fresh queue can be declared");
        stage
    }

    pub(super) fn name(&self) -> &str {
        &self.spec.name
    }

    pub(super) fn parking(&self) -> &ParkingSpec {
        let parking = self.spec.parking.as_ref();
        parking.expect("every stage has a parking place")
    }

    pub(super) async fn verify(&self) -> Result<(), Vec<SourceError>> {
        within("the queue to be verified", self.source.verify()).await
    }

    pub(super) async fn open(&self, credits: u16) -> Reader {
        Reader::open(self.source.as_ref(), credits).await
    }

    pub(super) async fn cut(&self) {
        within("the connection to be cut", self.adapter.cut(self.name())).await;
    }

    pub(super) async fn send(
        &self,
        destination: Destination,
        envelope: Envelope,
    ) -> Result<(), PublishError> {
        let outgoing = Outgoing {
            destination,
            envelope,
            key: None,
        };
        within("a publish to be answered", self.publisher.publish(outgoing)).await
    }

    pub(super) async fn publish(&self, envelope: Envelope) {
        let destination = Destination::Queue(self.name().into());
        self.send(destination, envelope)
            .await
            .expect("the queue exists");
    }

    /// One after the other, each confirmed before the next is sent.
    pub(super) async fn publish_all(&self, numbers: impl IntoIterator<Item = u32>) {
        for number in numbers {
            self.publish(numbered(number)).await;
        }
    }

    pub(super) async fn expect_refused(&self, destination: Destination) {
        let refused = self.send(destination, numbered(99)).await;
        assert!(
            matches!(refused, Err(PublishError::Refused(_))),
            "surely not sent, but: {refused:?}"
        );
    }

    pub(super) async fn park(
        &self,
        delivery: &Arc<Delivery>,
        attempts: u32,
    ) -> Result<(), ParkError> {
        let letter = Arc::new(DeadLetter {
            delivery: Arc::clone(delivery),
            endpoint: "conformance".into(),
            queue: self.name().into(),
            key: None,
            reason: PoisonReason::Failed,
            place: laneway_actors::port::Place::Parking,
            detail: "no answer".to_owned(),
            attempts,
            given_up_at: UNIX_EPOCH + Duration::from_millis(GIVEN_UP_AT_MILLIS.unsigned_abs()),
        });
        within("parking to be answered", self.parking.park(letter)).await
    }

    /// The parked messages.
    pub(super) fn parked(&self) -> Arc<dyn ParkedMessages> {
        let parked = self.adapter.transport().parked(&self.spec);
        parked.expect("the queue was given a parking place")
    }

    /// The parking queue, read like any queue.
    pub(super) fn parked_source(&self) -> Arc<dyn Source> {
        let topology = Topology::default()
            .existing_queue(&self.parking().queue, |queue| self.adapter.describe(queue));
        self.adapter.transport().source(&topology.queues()[0])
    }

    /// Takes one message out of the parking queue.
    pub(super) async fn next_parked(&self) -> Envelope {
        let source = self.parked_source();
        let mut reader = Reader::open(source.as_ref(), 1).await;
        let delivery = reader.next().await;
        reader.acknowledge(delivery.tag());
        reader.barrier().await.expect("the session lives");
        reader.close().await;
        delivery.envelope().clone()
    }

    /// Asserts that the queue holds these messages and nothing else, by a marker behind them; ends
    /// the stage. No session may be open.
    pub(super) async fn expect_exactly(self, expected: &[u32]) {
        self.publish(numbered(MARKER)).await;
        let mut session = self.open(500).await;
        let mut found = Vec::new();
        loop {
            match number_of(&session.next().await) {
                MARKER => break,
                number => found.push(number),
            }
        }
        assert_eq!(found, expected, "what the queue holds");
        self.end(session).await;
    }

    pub(super) async fn end(self, session: Reader) {
        session.close().await;
        self.clean_up().await;
    }

    pub(super) async fn clean_up(self) {
        within("the queue to be removed", self.adapter.clean_up(&self.spec)).await;
    }
}

/// An open session, read one delivery at a time.
pub(super) struct Reader {
    deliveries: BoxStream<'static, Result<Vec<Delivery>, SourceError>>,
    pub(super) control: Arc<dyn Session>,
    pub(super) state: Arc<SessionState>,
    arrived: VecDeque<Delivery>,
}

impl Reader {
    pub(super) async fn open(source: &dyn Source, credits: u16) -> Self {
        within("a session to be opened", async {
            loop {
                let state = SessionState::start();
                match source.open(Arc::clone(&state), credits).await {
                    Ok(open) => {
                        return Self {
                            deliveries: open.deliveries,
                            control: open.control,
                            state,
                            arrived: VecDeque::new(),
                        };
                    }
                    // A pause between tries, as the port asks of every caller; after a cut the
                    // broker may take a moment. It waits for no event that could be named.
                    Err(SourceError::Unavailable { .. }) => {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                    Err(error) => panic!("the session was not opened: {error}"),
                }
            }
        })
        .await
    }

    pub(super) async fn look(parked: &dyn ParkedMessages, credits: u16) -> Self {
        let state = SessionState::start();
        let opening = parked.open(Arc::clone(&state), credits);
        let open = within("the parking queue to be opened", opening).await;
        let open = open.expect("the parking queue is there");
        Self {
            deliveries: open.deliveries,
            control: open.control,
            state,
            arrived: VecDeque::new(),
        }
    }

    pub(super) async fn next(&mut self) -> Delivery {
        within("the next delivery", async {
            loop {
                if let Some(delivery) = self.arrived.pop_front() {
                    return delivery;
                }
                match self.deliveries.next().await {
                    Some(Ok(batch)) => self.arrived.extend(batch),
                    Some(Err(error)) => panic!("the session was lost: {error}"),
                    None => panic!("the session ended"),
                }
            }
        })
        .await
    }

    pub(super) async fn take(&mut self, count: usize) -> Vec<Delivery> {
        let mut taken = Vec::with_capacity(count);
        for _ in 0..count {
            taken.push(self.next().await);
        }
        taken
    }

    /// Reads to the end of the stream and returns the error it ended with. Deliveries that were on
    /// their way are skipped.
    pub(super) async fn drain(&mut self) -> Option<SourceError> {
        within("the stream to end", async {
            let mut last = None;
            while let Some(item) = self.deliveries.next().await {
                assert!(last.is_none(), "nothing follows the error");
                last = item.err();
            }
            last
        })
        .await
    }

    /// Waits until the session has noticed that it was lost.
    pub(super) async fn ended_by_itself(&mut self) {
        let error = self.drain().await;
        assert!(error.is_some(), "a lost session ends with an error");
        within("the lost session to be marked ended", self.state.ended()).await;
    }

    pub(super) fn acknowledge(&self, tag: DeliveryTag) {
        self.control.acknowledge(&[single(tag)]);
    }

    pub(super) fn acknowledge_up_to(&self, tag: DeliveryTag) {
        let multiple = true;
        self.control.acknowledge(&[Ack { tag, multiple }]);
    }

    pub(super) async fn barrier(&self) -> Result<(), SessionLost> {
        within("the barrier", self.control.barrier()).await
    }

    /// Drops the session without a close. Its deliveries may be about for longer.
    pub(super) fn dropped(self) -> Arc<SessionState> {
        self.state
    }

    pub(super) async fn close(&self) {
        within("the session to close", self.control.close()).await;
    }
}

/// The body of a marker; no case publishes so many messages.
pub(super) const MARKER: u32 = u32::MAX;

pub(super) const GIVEN_UP_AT_MILLIS: i64 = 1_700_000_000_123;

pub(super) async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(output) => output,
        Err(_) => panic!("waited {PATIENCE:?} for {what}"),
    }
}

/// Unique among all runs, because a broker may outlive them.
pub(super) fn unique_name(kind: &str) -> String {
    format!("laneway-conformance-{kind}-{}", MessageId::unique())
}

pub(super) fn single(tag: DeliveryTag) -> Ack {
    let multiple = false;
    Ack { tag, multiple }
}

pub(super) fn numbered(number: u32) -> Envelope {
    Envelope {
        id: Some(MessageId::unique()),
        body: number.to_be_bytes().to_vec().into(),
        ..Envelope::default()
    }
}

pub(super) fn number_in(envelope: &Envelope) -> u32 {
    let bytes = envelope.body.as_ref().try_into();
    u32::from_be_bytes(bytes.expect("every body of the suite is a number of four bytes"))
}

pub(super) fn number_of(delivery: &Delivery) -> u32 {
    number_in(delivery.envelope())
}

pub(super) fn numbers_of(deliveries: &[Delivery]) -> Vec<u32> {
    deliveries.iter().map(number_of).collect()
}

/// A message that says everything a message can say.
pub(super) fn full_envelope() -> Envelope {
    let mut envelope = Envelope {
        message_type: Some("order-shipped".into()),
        content_type: Some("application/json".into()),
        correlation_id: Some("correlation-1".into()),
        causation_id: Some("cause-1".into()),
        // Whole seconds: AMQP's time stamps have no more.
        sent_at: Some(SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000)),
        ..numbered(7)
    };
    let headers = &mut envelope.headers;
    headers.insert("text", "grün");
    headers.insert("integer", -7_000_000_000);
    headers.insert("true", HeaderValue::Bool(true));
    headers.insert("false", HeaderValue::Bool(false));
    headers.insert("float", HeaderValue::Float(0.25));
    // No UTF-8, and with a zero byte.
    headers.insert("bytes", HeaderValue::Bytes(vec![0xff, 0x00, 0xfe]));
    envelope
}

/// Asserts that `found` is `sent`, with all its headers; further headers are allowed.
pub(super) fn assert_same_message(found: &Envelope, sent: &Envelope) {
    assert_eq!(found.body, sent.body);
    assert_eq!(found.id, sent.id);
    assert_eq!(found.message_type, sent.message_type);
    assert_eq!(found.content_type, sent.content_type);
    assert_eq!(found.correlation_id, sent.correlation_id);
    assert_eq!(found.causation_id, sent.causation_id);
    assert_eq!(found.sent_at, sent.sent_at);
    for (name, value) in sent.headers.iter() {
        assert_eq!(found.headers.get(name), Some(value), "header `{name}`");
    }
}

/// Asserts that one of the errors is a refusal whose text contains all the names.
pub(super) fn assert_refused_naming(errors: &[SourceError], names: &[&str]) {
    let named = errors.iter().any(|error| {
        let text = error.to_string();
        matches!(error, SourceError::Refused { .. }) && names.iter().all(|name| text.contains(name))
    });
    assert!(named, "a refusal naming {names:?}, but: {errors:?}");
}
