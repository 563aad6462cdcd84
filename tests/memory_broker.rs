//! What the embedded broker promises beyond the ports: the faults it plays, and that it needs no
//! runtime, loses nothing and keeps order while sessions come and go.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use futures::{FutureExt as _, StreamExt as _};
use laneway::actors::port::{
    Ack, DeadLetter, Destination, OpenSession, Outgoing, ParkError, PublishError, SessionLost,
    Source, SourceError,
};
use laneway::actors::{Delivery, DeliveryTag, Envelope, PoisonReason, SessionState};
use laneway::topology::{QueueSpec, Topology};
use laneway::transport::Transport;
use laneway::transport::memory::{ExchangeKind, MemoryBroker};

const QUEUE: &str = "orders";

fn broker_with(describe: impl FnOnce(QueueSpec) -> QueueSpec) -> (MemoryBroker, QueueSpec) {
    let topology = Topology::default().queue(QUEUE, describe);
    let spec = topology.queues()[0].clone();
    let broker = MemoryBroker::new();
    broker.declare_queue(&spec).expect("the broker is empty");
    (broker, spec)
}

/// Publishing is done when it returns, so no runtime is needed to wait for it.
fn publish_to(
    broker: &MemoryBroker,
    destination: Destination,
    number: u32,
) -> Result<(), PublishError> {
    let outgoing = Outgoing {
        destination,
        envelope: Envelope {
            body: number.to_be_bytes().to_vec().into(),
            ..Envelope::default()
        },
        key: None,
    };
    let publisher = broker.publisher();
    let published = publisher.publish(outgoing).now_or_never();
    published.expect("the embedded broker answers at once")
}

fn publish(broker: &MemoryBroker, number: u32) -> Result<(), PublishError> {
    publish_to(broker, Destination::Queue(QUEUE.into()), number)
}

fn open(
    source: &dyn Source,
    credits: u16,
) -> Result<(Arc<SessionState>, OpenSession), SourceError> {
    let state = SessionState::start();
    let opened = source.open(Arc::clone(&state), credits).now_or_never();
    let opened = opened.expect("the embedded broker answers at once");
    opened.map(|session| (state, session))
}

/// What has arrived and was not read yet; `None` if nothing has.
fn read_now(session: &mut OpenSession) -> Option<Option<Result<Vec<Delivery>, SourceError>>> {
    session.deliveries.next().now_or_never()
}

fn number_of(envelope: &Envelope) -> u32 {
    u32::from_be_bytes(envelope.body.as_ref().try_into().expect("four bytes"))
}

fn numbers_of(envelopes: &[Envelope]) -> Vec<u32> {
    envelopes.iter().map(number_of).collect()
}

fn batch_now(session: &mut OpenSession) -> Vec<(u32, bool)> {
    match read_now(session) {
        Some(Some(Ok(batch))) => batch
            .iter()
            .map(|one| (number_of(one.envelope()), one.is_redelivered()))
            .collect(),
        None => Vec::new(),
        other => panic!("a live session, but: {other:?}"),
    }
}

fn acknowledge(session: &OpenSession, tag: u64) {
    session.control.acknowledge(&[Ack {
        tag: DeliveryTag(tag),
        multiple: false,
    }]);
}

#[test]
fn a_tag_that_is_not_outstanding_ends_the_session_as_rabbitmq_does() {
    let (broker, spec) = broker_with(|queue| queue);
    for number in 1..=3 {
        publish(&broker, number).expect("the queue exists");
    }
    let (state, mut session) = open(&*broker.source(&spec), 10).expect("the queue exists");
    assert_eq!(
        batch_now(&mut session),
        [(1, false), (2, false), (3, false)]
    );
    acknowledge(&session, 1);
    acknowledge(&session, 1);

    assert!(state.has_ended());
    let Some(Some(Err(error))) = read_now(&mut session) else {
        panic!("the stream ends with an error");
    };
    let text = error.to_string();
    assert!(text.contains("406") && text.contains(QUEUE), "{text}");
    assert!(matches!(read_now(&mut session), Some(None)));
    assert_eq!(
        session.control.barrier().now_or_never(),
        Some(Err(SessionLost))
    );
    let (_state, mut next) = open(&*broker.source(&spec), 10).expect("the queue exists");
    assert_eq!(batch_now(&mut next), [(2, true), (3, true)]);
}

#[test]
fn a_session_settles_nothing_once_it_is_marked_ended_by_its_owner() {
    let (broker, spec) = broker_with(|queue| queue);
    publish(&broker, 1).expect("the queue exists");
    let (state, mut session) = open(&*broker.source(&spec), 10).expect("the queue exists");
    assert_eq!(batch_now(&mut session), [(1, false)]);
    state.end();
    acknowledge(&session, 1);
    assert_eq!(
        session.control.barrier().now_or_never(),
        Some(Err(SessionLost))
    );
    session.control.close().now_or_never().expect("at once");
    assert_eq!(broker.status(QUEUE).ready, 1);
    assert!(
        open_with(&broker, &spec, state).is_err(),
        "an ended session cannot be opened"
    );
}

fn open_with(
    broker: &MemoryBroker,
    spec: &QueueSpec,
    state: Arc<SessionState>,
) -> Result<OpenSession, SourceError> {
    let opened = broker.source(spec).open(state, 10).now_or_never();
    opened.expect("the embedded broker answers at once")
}

#[test]
fn a_session_that_nobody_holds_any_more_gives_its_messages_back() {
    let (broker, spec) = broker_with(QueueSpec::single_active_consumer);
    publish(&broker, 1).expect("the queue exists");
    let (state, mut forgotten) = open(&*broker.source(&spec), 10).expect("the queue exists");
    let (_standby_state, mut standby) = open(&*broker.source(&spec), 10).expect("the queue exists");
    assert_eq!(batch_now(&mut forgotten), [(1, false)]);
    assert_eq!(broker.status(QUEUE).sessions, 2);
    // One half is enough to keep it.
    let OpenSession {
        deliveries,
        control,
    } = forgotten;
    drop(deliveries);
    assert_eq!(batch_now(&mut standby), []);
    drop(control);
    assert!(state.has_ended());
    assert_eq!(broker.status(QUEUE).sessions, 1);
    assert_eq!(batch_now(&mut standby), [(1, true)]);
}

#[test]
fn a_cut_session_is_marked_ended_before_another_receives_its_messages() {
    let (broker, spec) = broker_with(|queue| queue);
    publish(&broker, 1).expect("the queue exists");
    let (state, mut session) = open(&*broker.source(&spec), 10).expect("the queue exists");
    assert_eq!(batch_now(&mut session), [(1, false)]);
    publish(&broker, 2).expect("the queue exists");
    broker.cut_sessions(QUEUE);
    assert!(state.has_ended());
    // Message 2 had been assigned and not read: it is not handed over by a dead session.
    assert!(matches!(
        read_now(&mut session),
        Some(Some(Err(SourceError::Unavailable { .. })))
    ));
    assert!(matches!(read_now(&mut session), Some(None)));
    let (_state, mut next) = open(&*broker.source(&spec), 10).expect("the queue exists");
    assert_eq!(batch_now(&mut next), [(1, true), (2, true)]);
}

#[test]
fn an_unreachable_broker_cuts_and_refuses_until_it_is_back() {
    let (broker, spec) = broker_with(|queue| queue.parking("dlx", "parked"));
    publish(&broker, 1).expect("the queue exists");
    let source = broker.source(&spec);
    let (state, mut session) = open(&*source, 10).expect("the queue exists");
    broker.make_unreachable();

    assert!(state.has_ended());
    assert!(matches!(
        read_now(&mut session),
        Some(Some(Err(SourceError::Unavailable { .. })))
    ));
    assert!(matches!(
        open(&*source, 10).map(|_| ()),
        Err(SourceError::Unavailable { .. })
    ));
    let verified = source.verify().now_or_never().expect("at once");
    assert!(matches!(
        verified.expect_err("unreachable")[..],
        [SourceError::Unavailable { .. }]
    ));
    assert!(matches!(publish(&broker, 2), Err(PublishError::Refused(_))));

    broker.make_reachable();
    let (_state, mut session) = open(&*source, 10).expect("reachable again");
    assert_eq!(batch_now(&mut session), [(1, true)]);
}

#[test]
fn a_full_queue_refuses_and_an_exchange_delivers_to_all_or_none() {
    let (broker, _) = broker_with(|queue| queue.parking("dlx", "parked"));
    broker
        .bind("dlx", QUEUE, "")
        .expect("both the exchange and the queue exist");
    broker.limit_length(QUEUE, Some(1));
    publish(&broker, 1).expect("there is room for one");
    assert!(matches!(publish(&broker, 2), Err(PublishError::Refused(_))));

    let to_both = || Destination::Exchange {
        exchange: "dlx".into(),
        routing_key: "".into(),
    };
    let Err(PublishError::Refused(why)) = publish_to(&broker, to_both(), 3) else {
        panic!("one of the two queues is full");
    };
    assert!(why.contains(QUEUE), "{why}");
    assert_eq!(broker.status("parked").total(), 0);

    broker.limit_length(QUEUE, None);
    publish_to(&broker, to_both(), 4).expect("there is room");
    assert_eq!(numbers_of(&broker.messages(QUEUE)), [1, 4]);
    assert_eq!(numbers_of(&broker.messages("parked")), [4]);
}

#[test]
fn a_direct_exchange_delivers_by_routing_key() {
    let (broker, _) = broker_with(|queue| queue);
    broker
        .declare_exchange("events", ExchangeKind::Direct)
        .expect("the name is free");
    assert!(
        broker
            .declare_exchange("events", ExchangeKind::Fanout)
            .is_err()
    );
    broker.bind("events", QUEUE, "blue").expect("both exist");
    assert!(broker.bind("events", "missing", "blue").is_err());
    assert!(broker.bind("missing", QUEUE, "blue").is_err());
    let to = |routing_key: &str| Destination::Exchange {
        exchange: "events".into(),
        routing_key: routing_key.into(),
    };
    publish_to(&broker, to("blue"), 1).expect("bound");
    assert!(matches!(
        publish_to(&broker, to("red"), 2),
        Err(PublishError::Refused(_))
    ));
    assert_eq!(numbers_of(&broker.messages(QUEUE)), [1]);
}

#[test]
fn parking_is_refused_while_no_queue_is_bound_or_the_queue_is_full() {
    let (broker, spec) = broker_with(|queue| queue.parking("dlx", "parked"));
    let parking = broker.parking(&spec).expect("the queue has one");
    assert_eq!(parking.name(), "dlx");
    let park = || {
        let letter = DeadLetter {
            delivery: Arc::new(Delivery::new(
                Envelope::default(),
                SessionState::start(),
                DeliveryTag(1),
            )),
            endpoint: "billing".into(),
            queue: QUEUE.into(),
            key: None,
            reason: PoisonReason::Permanent,
            place: laneway::actors::port::Place::Parking,
            detail: String::new(),
            attempts: 1,
            given_up_at: SystemTime::now(),
        };
        let parked = parking.park(Arc::new(letter)).now_or_never();
        parked.expect("the embedded broker answers at once")
    };
    broker.remove_exchange("dlx");
    broker
        .declare_exchange("dlx", ExchangeKind::Fanout)
        .expect("the name is free again");
    assert!(matches!(park(), Err(ParkError::Refused(_))), "unbound");
    broker.bind("dlx", "parked", "").expect("both exist");
    broker.limit_length("parked", Some(0));
    assert!(matches!(park(), Err(ParkError::Refused(_))), "full");
    broker.limit_length("parked", None);
    park().expect("bound, and there is room");
    assert_eq!(broker.messages("parked").len(), 1);
}

#[test]
fn a_parking_place_that_differs_is_refused_and_nothing_is_created() {
    let broker = MemoryBroker::new();
    broker
        .declare_exchange("dlx", ExchangeKind::Direct)
        .expect("the name is free");
    let topology = Topology::default()
        .queue("parked", |queue| queue.durable().single_active_consumer())
        .queue(QUEUE, |queue| queue.parking("dlx", "parked"));
    broker
        .declare_queue(&topology.queues()[0])
        .expect("the name is free");
    let source = broker.source(&topology.queues()[1]);
    let verified = source.verify().now_or_never().expect("at once");
    let errors = verified.expect_err("exchange and queue differ");
    let texts: Vec<_> = errors.iter().map(ToString::to_string).collect();
    assert_eq!(texts.len(), 2, "{texts:?}");
    assert!(texts[0].contains("`parked`"), "{texts:?}");
    assert!(texts[1].contains("`dlx`"), "{texts:?}");
    assert!(publish(&broker, 1).is_err(), "the queue was not created");
}

#[tokio::test]
async fn waiting_ends_when_everything_is_acknowledged_also_for_a_queue_still_to_come() {
    let topology = Topology::default().queue(QUEUE, |queue| queue);
    let spec = topology.queues()[0].clone();
    let broker = MemoryBroker::new();
    broker.wait_empty(QUEUE).await;

    let waiting = {
        let broker = broker.clone();
        tokio::spawn(async move {
            broker.wait_until(QUEUE, |status| status.total() == 2).await;
            broker.wait_empty(QUEUE).await;
        })
    };
    tokio::task::yield_now().await;
    broker.declare_queue(&spec).expect("the name is free");
    publish(&broker, 1).expect("the queue exists");
    publish(&broker, 2).expect("the queue exists");
    // Both must have been seen before they are acknowledged.
    tokio::task::yield_now().await;
    let (_state, mut session) = open(&*broker.source(&spec), 10).expect("the queue exists");
    batch_now(&mut session);
    acknowledge(&session, 2);
    tokio::task::yield_now().await;
    assert!(!waiting.is_finished());
    acknowledge(&session, 1);
    tokio::time::timeout(Duration::from_secs(20), waiting)
        .await
        .expect("the queue is empty")
        .expect("nothing panics");
}

/// Several publishers, one session after the other, each cut between its batches and by another thread
/// at any moment: no message is lost, and the first arrivals of each publisher's messages are in order.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nothing_is_lost_or_reordered_while_sessions_are_cut() {
    const PUBLISHERS: u32 = 3;
    const EACH: u32 = 5_000;
    let (broker, spec) = broker_with(QueueSpec::single_active_consumer);

    let publishers: Vec<_> = (0..PUBLISHERS)
        .map(|publisher| {
            let broker = broker.clone();
            std::thread::spawn(move || {
                for number in 0..EACH {
                    publish(&broker, publisher * EACH + number).expect("the queue exists");
                }
            })
        })
        .collect();
    let done = Arc::new(AtomicBool::new(false));
    let cutter = {
        let (broker, done) = (broker.clone(), Arc::clone(&done));
        std::thread::spawn(move || {
            while !done.load(Ordering::Relaxed) {
                broker.cut_sessions(QUEUE);
                // Lets sessions live for a while; nothing waits for this.
                std::thread::sleep(Duration::from_micros(300));
            }
        })
    };

    let consuming = {
        let broker = broker.clone();
        async move {
            let source = broker.source(&spec);
            let mut expected: BTreeMap<u32, u32> = BTreeMap::new();
            let mut sessions = 0_u32;
            while expected.values().sum::<u32>() < PUBLISHERS * EACH {
                let state = SessionState::start();
                let opened = source.open(state, 64).await;
                let mut session = opened.expect("the broker is reachable");
                sessions += 1;
                for _ in 0..10 {
                    let Some(Ok(batch)) = session.deliveries.next().await else {
                        break;
                    };
                    for delivery in &batch {
                        let number = number_of(delivery.envelope());
                        let (publisher, number) = (number / EACH, number % EACH);
                        let expected = expected.entry(publisher).or_default();
                        if number < *expected {
                            assert!(delivery.is_redelivered(), "seen before, so marked");
                        } else {
                            assert_eq!(number, *expected, "of publisher {publisher}");
                            *expected += 1;
                        }
                    }
                    let last = batch.last().expect("no batch is empty");
                    session.control.acknowledge(&[Ack {
                        tag: last.tag(),
                        multiple: true,
                    }]);
                    if expected.values().sum::<u32>() == PUBLISHERS * EACH {
                        break;
                    }
                }
                broker.cut_sessions(QUEUE);
            }
            sessions
        }
    };
    let sessions = tokio::time::timeout(Duration::from_secs(60), consuming)
        .await
        .expect("everything arrives");
    done.store(true, Ordering::Relaxed);
    for thread in publishers.into_iter().chain([cutter]) {
        thread.join().expect("nothing panics");
    }
    assert!(sessions > 1, "the test cut something");
}
