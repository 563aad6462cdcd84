//! Messages that are parked, looked at and sent back: whole, with what is told of them, and never by halves.

use std::sync::Arc;

use laneway_actors::port::{ParkError, PublishError};
use laneway_actors::{HeaderValue, Identity, header};

use super::Adapter;
use super::stage::{
    GIVEN_UP_AT_MILLIS, Reader, Stage, assert_same_message, full_envelope, number_in, number_of,
    numbers_of, unique_name, within,
};
use crate::transport::provenance;

/// The parked copy has body, id, type, content type, correlation id and headers of the original, and
/// says why, where and when it was given up.
pub async fn parking_keeps_the_message_and_adds_its_provenance(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    let sent = full_envelope();
    stage.publish(sent.clone()).await;
    let mut session = stage.open(1).await;
    let delivery = Arc::new(session.next().await);
    stage
        .park(&delivery, 5)
        .await
        .expect("the parking place exists");

    let parked = stage.next_parked().await;
    let headers = parked.headers.clone();
    assert_same_message(&parked, &sent);
    let number = |name| match headers.get(name) {
        Some(HeaderValue::Integer(number)) => Some(*number),
        _ => None,
    };
    assert_eq!(headers.text(provenance::REASON), Some("failed"));
    assert_eq!(headers.text(provenance::ENDPOINT), Some("conformance"));
    assert_eq!(headers.text(provenance::QUEUE), Some(stage.name()));
    assert_eq!(headers.text(provenance::DETAIL), Some("no answer"));
    assert_eq!(number(provenance::ATTEMPTS), Some(5));
    assert_eq!(number(provenance::PARKED_AT), Some(GIVEN_UP_AT_MILLIS));

    // Parking settles nothing: that is the session's part.
    session.close().await;
    stage.expect_exactly(&[number_in(&sent)]).await;
}

/// A message that was parked before, came back and is given up again tells of the last time.
pub async fn parking_again_replaces_the_provenance(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    let mut sent = full_envelope();
    sent.headers.insert(provenance::ATTEMPTS, 2);
    sent.headers.insert(provenance::REASON, "panicked");
    stage.publish(sent).await;
    let mut session = stage.open(1).await;
    let delivery = Arc::new(session.next().await);
    stage
        .park(&delivery, 7)
        .await
        .expect("the parking place exists");
    session.acknowledge(delivery.tag());

    let parked = stage.next_parked().await;
    assert_eq!(parked.headers.text(provenance::REASON), Some("failed"));
    assert_eq!(
        parked.headers.get(provenance::ATTEMPTS),
        Some(&HeaderValue::Integer(7))
    );
    stage.end(session).await;
}

/// A parked message that is sent back has everything it had, and its replay number; the parked copy stays
/// until it is acknowledged.
pub async fn a_parked_message_comes_back_with_everything_and_its_replay_number(
    adapter: &dyn Adapter,
) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    let mut sent = full_envelope();
    stage.publish(sent.clone()).await;
    let mut session = stage.open(1).await;
    let delivery = Arc::new(session.next().await);
    stage.park(&delivery, 3).await.expect("the place exists");
    session.acknowledge(delivery.tag());

    let parked = stage.parked();
    let mut look = Reader::look(parked.as_ref(), 10).await;
    let copy = Arc::new(look.next().await);
    let sending = parked.send_back(Arc::clone(&copy), stage.name().into(), 4);
    within("the message to be sent back", sending)
        .await
        .expect("the queue exists");
    let again = session.next().await;
    for (name, value) in copy.envelope().headers.iter() {
        // A quorum queue's own count; it counts that queue only.
        if name != "x-delivery-count" {
            sent.headers.insert(name, value.clone());
        }
    }
    sent.headers.insert(header::REPLAY, 4);
    assert_same_message(again.envelope(), &sent);
    assert_ne!(
        Identity::of(again.envelope()),
        Identity::of(delivery.envelope()),
        "a replayed message is not a copy of the one that was parked"
    );
    session.acknowledge(again.tag());
    look.close().await;

    let mut look = Reader::look(parked.as_ref(), 10).await;
    let kept = look.next().await;
    assert_same_message(kept.envelope(), copy.envelope());
    look.acknowledge(kept.tag());
    look.barrier().await.expect("the session lives");
    look.close().await;
    stage.end(session).await;
}

/// Who looks at parked messages is counted, and gives back in order what was not acknowledged.
pub async fn a_look_at_parked_messages_counts_as_a_session_and_gives_them_back_in_order(
    adapter: &dyn Adapter,
) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    stage.publish_all(0..50).await;
    let mut session = stage.open(50).await;
    for _ in 0..50 {
        let delivery = Arc::new(session.next().await);
        stage.park(&delivery, 1).await.expect("the place exists");
        session.acknowledge(delivery.tag());
    }
    let parked = stage.parked();
    let count = within("a count", parked.count()).await.expect("it exists");
    assert_eq!((count.ready, count.sessions), (50, 0));
    let mut look = Reader::look(parked.as_ref(), 40).await;
    let held = look.take(40).await;
    let count = within("a count", parked.count()).await.expect("it exists");
    assert_eq!((count.ready, count.sessions), (10, 1));
    look.acknowledge(held[20].tag());
    look.barrier().await.expect("the session lives");
    look.close().await;

    let mut look = Reader::look(parked.as_ref(), 60).await;
    let left: Vec<_> = (0..50).filter(|number| *number != 20).collect();
    assert_eq!(numbers_of(&look.take(49).await), left);
    look.close().await;
    stage.end(session).await;
}

/// Sending back to a queue that does not exist is refused: surely nothing was sent.
pub async fn a_parked_message_is_not_sent_back_to_a_missing_queue(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    stage.publish_all(0..1).await;
    let mut session = stage.open(1).await;
    let delivery = Arc::new(session.next().await);
    let missing = unique_name("missing").into();
    let sending = stage.parked().send_back(delivery, missing, 1);
    let refused = within("an answer", sending).await;
    assert!(
        matches!(refused, Err(PublishError::Refused(_))),
        "surely not sent, but: {refused:?}"
    );
    stage.end(session).await;
}

/// Without its exchange, parking says that no copy was made, and goes on working once it is back.
pub async fn parking_without_its_exchange_is_refused_and_works_once_restored(
    adapter: &dyn Adapter,
) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    stage.publish_all(0..2).await;
    let mut session = stage.open(2).await;
    let first = Arc::new(session.next().await);
    let second = Arc::new(session.next().await);
    // Once before, so that whatever the adapter opens for parking is open when the exchange goes.
    stage.park(&first, 1).await.expect("the place exists");

    within(
        "the exchange to be removed",
        adapter.remove_exchange(&stage.parking().exchange),
    )
    .await;
    for _ in 0..2 {
        let refused = stage.park(&second, 1).await;
        assert!(
            matches!(refused, Err(ParkError::Refused(_))),
            "surely no copy was made, but: {refused:?}"
        );
    }

    stage.verify().await.expect("declares it again");
    stage.park(&second, 1).await.expect("the place is back");
    session.acknowledge_up_to(second.tag());
    let parked = stage.parked_source();
    let mut reader = Reader::open(parked.as_ref(), 10).await;
    // Two, not three: what was refused left no copy.
    assert_eq!(numbers_of(&reader.take(2).await), [0, 1]);
    stage.park(&first, 1).await.expect("the place is back");
    assert_eq!(number_of(&reader.next().await), 0);
    reader.close().await;
    stage.end(session).await;
}
