//! What goes in.

use std::time::SystemTime;

use laneway_actors::{HeaderValue, Headers};

use super::*;
use crate::store::{Counts, Placed, StoreError};

/// What a transaction enqueued is there when it has committed, and only then.
pub async fn what_is_rolled_back_never_existed<A: StoreAdapter>(stage: Stage<A>) {
    let lease = stage.ordered("q").await;
    let mut transaction = stage.store.begin().await.expect("begins");
    let enqueued = stage
        .store
        .enqueue_in(&mut transaction, vec![message("q", "a", 1)])
        .await
        .expect("stores");
    assert!(matches!(enqueued.placed(), [Placed::At(_)]));
    // Nobody else sees it before the commit.
    assert_eq!(numbers(&stage.read(&lease, 9).await), NONE);
    transaction.rollback().await.expect("rolls back");
    drop(enqueued);
    assert_eq!(numbers(&stage.read(&lease, 9).await), NONE);

    let mut transaction = stage.store.begin().await.expect("begins");
    let batch = vec![message("q", "a", 2)];
    let enqueued = stage.store.enqueue_in(&mut transaction, batch).await;
    transaction.commit().await.expect("commits");
    enqueued.expect("stores").committed();
    assert_eq!(numbers(&stage.read(&lease, 9).await), [2]);
}

/// Everything an envelope has comes back, in the order of the batches and within each.
pub async fn what_is_committed_is_read_in_order_with_all_its_properties<A: StoreAdapter>(
    stage: Stage<A>,
) {
    let lease = stage.ordered("q").await;
    let mut first = message("q", "a", 1);
    first.envelope.message_type = Some("order".into());
    first.envelope.content_type = Some("application/json".into());
    first.envelope.correlation_id = Some("c-1".into());
    first.envelope.causation_id = Some("c-0".into());
    // Microseconds are kept.
    first.envelope.sent_at = Some(SystemTime::UNIX_EPOCH + Duration::from_micros(1_234_567_890));
    let mut headers = Headers::new();
    headers.insert("text", "é\0\"");
    headers.insert("number", -7);
    headers.insert("bytes", HeaderValue::Bytes(vec![0, 255]));
    first.envelope.headers = headers;
    first.envelope.body = bytes::Bytes::from_static(&[0, 159, 146, 150]);
    let mut keyless = message("q", "", 3);
    keyless.key = None;

    let placed = stage
        .enqueue(vec![first.clone(), message("q", "b", 2), keyless])
        .await;
    stage.enqueue(vec![message("q", "a", 4)]).await;
    let read = stage.read(&lease, 9).await;
    let places: Vec<_> = sequences(&read).into_iter().map(Placed::At).collect();
    assert_eq!(places[..3], placed);
    assert_eq!(numbers(&read[1..]), [2, 3, 4]);
    assert_eq!(read[2].key, None);

    let (sent, got) = (&first.envelope, &read[0].envelope);
    assert_eq!(read[0].key, first.key);
    assert_eq!(read[0].broken, None);
    assert_eq!(read[0].attempts, 0);
    assert_eq!(got.id, sent.id);
    assert_eq!(got.message_type, sent.message_type);
    assert_eq!(got.content_type, sent.content_type);
    assert_eq!(got.correlation_id, sent.correlation_id);
    assert_eq!(got.causation_id, sent.causation_id);
    assert_eq!(got.sent_at, sent.sent_at);
    assert_eq!(got.headers, sent.headers);
    assert_eq!(got.body, sent.body);
}

/// The same id with the same body is stored once, as long as its id is remembered.
pub async fn a_copy_is_recognised_while_the_first_waits_and_after_it_was_handled<
    A: StoreAdapter,
>(
    stage: Stage<A>,
) {
    let lease = stage.ordered("q").await;
    let copy = || vec![with_id(message("q", "a", 1), "same")];
    assert!(matches!(stage.enqueue(copy()).await[..], [Placed::At(_)]));
    assert_eq!(stage.enqueue(copy()).await, [Placed::Duplicate]);
    let read = stage.read(&lease, 9).await;
    assert_eq!(numbers(&read), [1]);
    let _ = stage.handled(&lease, &sequences(&read)).await;
    assert_eq!(stage.enqueue(copy()).await, [Placed::Duplicate]);
    assert_eq!(stage.count("q").await, Counts::default());
}

/// A batch may hold a message and its copy.
pub async fn copies_within_one_batch_are_recognised<A: StoreAdapter>(stage: Stage<A>) {
    let lease = stage.ordered("q").await;
    let placed = stage
        .enqueue(vec![
            with_id(message("q", "a", 1), "same"),
            with_id(message("q", "a", 1), "same"),
            with_id(message("q", "a", 2), "same"),
            message("q", "a", 3),
        ])
        .await;
    assert!(matches!(
        placed[..],
        [
            Placed::At(_),
            Placed::Duplicate,
            Placed::IdReused,
            Placed::At(_)
        ]
    ));
    assert_eq!(numbers(&stage.read(&lease, 9).await), [1, 3]);
    assert_eq!(stage.count("q").await.dead, 1);
}

/// A message that takes another one's id is neither handled nor lost.
pub async fn an_id_with_another_body_is_a_dead_letter<A: StoreAdapter>(stage: Stage<A>) {
    let lease = stage.ordered("q").await;
    let with_body = |number| vec![with_id(message("q", "a", number), "same")];
    stage.enqueue(with_body(1)).await;
    assert_eq!(stage.enqueue(with_body(2)).await, [Placed::IdReused]);
    let read = stage.read(&lease, 9).await;
    assert_eq!(numbers(&read), [1]);
    let _ = stage.handled(&lease, &sequences(&read)).await;
    assert_eq!(stage.enqueue(with_body(3)).await, [Placed::IdReused]);
    assert_eq!(numbers(&stage.read(&lease, 9).await), NONE);

    let letters = stage.store.dead_letters("q", 0, 9).await.expect("lists");
    let bodies: Vec<_> = letters.iter().map(|l| number_of(&l.message)).collect();
    assert_eq!(bodies, [2, 3]);
    assert!(letters.iter().all(|letter| letter.reason == "id reused"));
    // The list goes on after a number.
    let rest = stage.store.dead_letters("q", letters[0].number, 9).await;
    assert_eq!(rest.expect("lists").len(), 1);
}

/// De-duplication is by id and queue.
pub async fn the_same_id_in_two_queues_is_two_messages<A: StoreAdapter>(stage: Stage<A>) {
    let one = stage.ordered("one").await;
    let two = stage.ordered("two").await;
    stage
        .enqueue(vec![
            with_id(message("one", "a", 1), "same"),
            with_id(message("two", "a", 1), "same"),
        ])
        .await;
    let twice = with_id(message("two", "a", 1), "same");
    assert_eq!(stage.enqueue(vec![twice]).await, [Placed::Duplicate]);
    assert_eq!(numbers(&stage.read(&one, 9).await), [1]);
    assert_eq!(numbers(&stage.read(&two, 9).await), [1]);
}

/// Ids are forgotten after their window, a batch at a time, and not before.
pub async fn handled_ids_are_pruned_in_small_batches<A: StoreAdapter>(stage: Stage<A>) {
    let lease = stage.ordered("q").await;
    let copy = with_id(message("q", "a", 0), "same");
    let mut batch: Vec<_> = (1..25).map(|number| message("q", "a", number)).collect();
    batch.push(copy.clone());
    stage.enqueue(batch).await;
    let read = stage.read(&lease, 99).await;
    assert_eq!(stage.handled(&lease, &sequences(&read)).await.settled, 25);

    let hour = Duration::from_secs(3600);
    assert_eq!(stage.store.prune(hour, 10).await.expect("prunes"), 0);
    tokio::time::sleep(SHORT).await;
    for expected in [10, 10, 5, 0] {
        let pruned = stage.store.prune(Duration::from_millis(1), 10).await;
        assert_eq!(pruned.expect("prunes"), expected);
    }
    assert!(matches!(
        stage.enqueue(vec![copy]).await[..],
        [Placed::At(_)]
    ));
}

/// A scheduled message has no place before its time, and one after what was stored meanwhile.
pub async fn a_scheduled_message_gets_its_place_when_it_is_due_and_holds_nobody<A: StoreAdapter>(
    stage: Stage<A>,
) {
    let lease = stage.ordered("q").await;
    let promoted = async |expected| {
        let promoted = stage.store.promote_due(100).await.expect("promotes");
        assert_eq!(promoted, expected);
    };
    let mut later = with_id(message("q", "a", 1), "later");
    later.due = Some(SystemTime::now() + LATER);
    let mut far = message("q", "a", 9);
    far.due = Some(SystemTime::now() + Duration::from_secs(3600));
    let mut past = message("q", "b", 2);
    past.due = Some(SystemTime::now() - Duration::from_secs(60));
    let placed = stage.enqueue(vec![later.clone(), far, past]).await;
    assert_eq!(placed, [Placed::Scheduled; 3]);
    promoted(1).await;
    assert_eq!(stage.enqueue(vec![later]).await, [Placed::Duplicate]);
    stage.enqueue(vec![message("q", "a", 3)]).await;
    assert_eq!(numbers(&stage.read(&lease, 9).await), [2, 3]);

    tokio::time::sleep(LATER + SHORT).await;
    promoted(1).await;
    promoted(0).await;
    assert_eq!(numbers(&stage.read(&lease, 9).await), [2, 3, 1]);
    let counts = stage.count("q").await;
    assert_eq!((counts.backlog, counts.scheduled), (3, 1));
}

/// Order and number of shards do not change.
pub async fn a_queue_keeps_its_identity<A: StoreAdapter>(mut stage: Stage<A>) {
    stage.declare("q", ordered(2)).await;
    stage.restart().await;
    stage.declare("q", ordered(2)).await;
    for order in [ordered(3), QueueOrder::Unordered] {
        let changed = QueueIdentity {
            name: "q".into(),
            order,
        };
        let refused = stage.store.declare(&[changed]).await;
        let Err(StoreError::Refused { what }) = refused else {
            panic!("{refused:?}");
        };
        assert!(what.contains("`q`") && what.contains("2 shards"), "{what}");
    }
}

/// A program learns of queues with messages that it has never declared, and what they are.
pub async fn queues_with_messages_are_listed_whoever_declared_them<A: StoreAdapter>(
    mut stage: Stage<A>,
) {
    let lease = stage.ordered("handled").await;
    stage.declare("ordered", ordered(2)).await;
    stage.declare("empty", QueueOrder::Unordered).await;
    stage.declare("unordered", QueueOrder::Unordered).await;
    let mut later = message("unordered", "a", 3);
    later.due = Some(SystemTime::now() + LONG);
    let batch = vec![
        message("ordered", "a", 1),
        message("ordered", "b", 2),
        message("handled", "a", 1),
        message("unordered", "a", 2),
        later,
    ];
    stage.enqueue(batch).await;
    let read = stage.read(&lease, 1).await;
    let _ = stage.handled(&lease, &sequences(&read)).await;
    stage.restart().await;
    let waiting = stage.store.waiting_queues().await.expect("answers");
    let waiting: Vec<_> = waiting
        .iter()
        .map(|one| {
            (
                &*one.queue.name,
                one.queue.order,
                one.backlog,
                one.scheduled,
            )
        })
        .collect();
    let expected = [
        ("ordered", ordered(2), 2, 0),
        ("unordered", QueueOrder::Unordered, 1, 1),
    ];
    assert_eq!(waiting, expected);
    let declared = stage.store.declared("ordered").await.expect("answers");
    assert_eq!(declared.map(|queue| queue.order), Some(ordered(2)));
    let never = stage.store.declared("never").await.expect("answers");
    assert_eq!(never, None);
}

/// A batch is stored as a whole or not at all.
pub async fn a_batch_with_an_undeclared_queue_stores_nothing<A: StoreAdapter>(stage: Stage<A>) {
    stage.ordered("q").await;
    let batch = vec![message("q", "a", 1), message("other", "a", 2)];
    let refused = stage.store.enqueue(batch).await;
    assert!(matches!(refused, Err(StoreError::Refused { .. })));
    assert_eq!(stage.count("q").await, Counts::default());
}

/// Whoever waits for a queue is told of a commit, also of one that came before the wait.
pub async fn a_commit_gives_a_hint<A: StoreAdapter>(stage: Stage<A>) {
    stage.ordered("q").await;
    stage.ordered("other").await;
    let mut hints = stage.store.watch("q");
    stage.enqueue(vec![message("q", "a", 1)]).await;
    let hint = tokio::time::timeout(super::super::PATIENCE, hints.next());
    hint.await.expect("a hint");
}
