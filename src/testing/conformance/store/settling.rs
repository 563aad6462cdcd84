//! How it ends.

use laneway_actors::PoisonReason;

use super::*;
use crate::store::{Counts, DeadReason, FailedAttempt, StoreError};

/// Handled and discarded messages are gone; a repetition changes nothing and says so.
pub async fn what_was_handled_is_gone_and_settling_it_again_does_nothing<A: StoreAdapter>(
    stage: Stage<A>,
) {
    let lease = stage.ordered("q").await;
    let batch = (0..3).map(|number| message("q", "a", number));
    stage.enqueue(batch.collect()).await;
    let read = sequences(&stage.read(&lease, 9).await);
    let endings = [
        settlement(read[0], Ending::Handled),
        settlement(read[1], Ending::Discarded),
    ];
    let settled = stage.store.settle(&lease, &endings).await.expect("settles");
    assert_eq!((settled.settled, settled.missing), (2, 0));
    let again = stage.store.settle(&lease, &endings).await.expect("answers");
    assert_eq!((again.settled, again.missing), (0, 2));
    let left = stage.store.unsettled(&lease, &read).await.expect("answers");
    assert_eq!(left, read[2..]);
    assert_eq!(stage.count("q").await.backlog, 1);
}

/// A retry waits by the database's clock, keeps its place, and holds its key but no other.
pub async fn a_retry_keeps_its_place_and_holds_its_key<A: StoreAdapter>(stage: Stage<A>) {
    let lease = stage.ordered("q").await;
    stage
        .enqueue(vec![
            message("q", "a", 1),
            message("q", "a", 2),
            message("q", "b", 3),
        ])
        .await;
    let head = stage.read(&lease, 1).await[0].sequence;
    let retry = Ending::Retry {
        after: LATER,
        failed: Vec::new(),
    };
    let settled = stage.store.settle(&lease, &[settlement(head, retry)]).await;
    assert_eq!(settled.expect("settles").settled, 1);
    assert_eq!(numbers(&stage.read(&lease, 9).await), [3]);
    tokio::time::sleep(LATER + SHORT).await;
    assert_eq!(numbers(&stage.read(&lease, 9).await), [1, 2, 3]);

    // In an unordered queue it is claimed again when it is due, and holds nobody.
    let node = stage.unordered("u").await;
    stage
        .enqueue(vec![message("u", "a", 1), message("u", "a", 2)])
        .await;
    let first = stage.store.claim(&node, 1).await.expect("claims");
    let retry = Ending::Retry {
        after: LATER,
        failed: Vec::new(),
    };
    let settled = stage
        .store
        .settle(&node, &[settlement(first[0].sequence, retry)])
        .await;
    assert_eq!(settled.expect("settles").settled, 1);
    assert_eq!(
        numbers(&stage.store.claim(&node, 9).await.expect("claims")),
        [2]
    );
    tokio::time::sleep(LATER + SHORT).await;
    assert_eq!(
        numbers(&stage.store.claim(&node, 9).await.expect("claims")),
        [1]
    );
}

/// A hold has no end of its own, and survives a restart.
pub async fn a_held_message_waits_until_it_is_let_go<A: StoreAdapter>(mut stage: Stage<A>) {
    let lease = stage.ordered("q").await;
    stage
        .enqueue(vec![message("q", "a", 1), message("q", "a", 2)])
        .await;
    let head = stage.read(&lease, 1).await[0].sequence;
    let hold = [settlement(head, Ending::Hold { failed: Vec::new() })];
    let settled = stage.store.settle(&lease, &hold).await.expect("settles");
    assert_eq!(settled.settled, 1);
    stage.store.release(&lease).await.expect("releases");
    stage.restart().await;
    let lease = stage.ordered("q").await;
    assert_eq!(numbers(&stage.read(&lease, 9).await), NONE);
    let now = Ending::Retry {
        after: Duration::ZERO,
        failed: Vec::new(),
    };
    let settled = stage.store.settle(&lease, &[settlement(head, now)]).await;
    assert_eq!(settled.expect("settles").settled, 1);
    assert_eq!(numbers(&stage.read(&lease, 9).await), [1, 2]);
}

/// An attempt counts from its start, also one that the process did not survive.
pub async fn attempts_are_counted_over_restarts<A: StoreAdapter>(mut stage: Stage<A>) {
    for expected in 0..3 {
        let lease = stage.ordered("q").await;
        if expected == 0 {
            stage
                .enqueue(vec![message("q", "a", 1), message("q", "b", 2)])
                .await;
        }
        let read = stage.read(&lease, 9).await;
        let attempts: Vec<_> = read.iter().map(|message| message.attempts).collect();
        assert_eq!(attempts, [expected, 0]);
        // Told twice, as after an answer that did not come: it counts once.
        for _ in 0..2 {
            let start = attempt(read[0].sequence, expected + 1);
            let started = stage.store.start(&lease, &[start]).await;
            started.expect("starts");
        }
        // The lease is not released: on a database that others share it would have to expire.
        stage.store.release(&lease).await.expect("releases");
        stage.restart().await;
    }
}

/// The messages named that have had one attempt have had none; what they are otherwise, and all others, stays.
pub async fn a_first_attempt_is_uncounted_and_no_other<A: StoreAdapter>(mut stage: Stage<A>) {
    let lease = stage.ordered("q").await;
    let batch = (0..5).map(|number| message("q", &number.to_string(), number));
    stage.enqueue(batch.collect()).await;
    let read = sequences(&stage.read(&lease, 9).await);
    let starts = [
        attempt(read[0], 1),
        attempt(read[1], 2),
        attempt(read[3], 1),
        attempt(read[4], 1),
    ];
    stage.store.start(&lease, &starts).await.expect("starts");
    let _ = stage.handled(&lease, &read[4..]).await;
    // Of the fourth nothing is said, and the last is not there any more. Told twice, it is the same.
    let named = [read[0], read[1], read[2], read[4]];
    for _ in 0..2 {
        let uncounted = stage.store.uncount(&lease, &named).await;
        uncounted.expect("uncounts");
    }
    stage.store.release(&lease).await.expect("releases");
    stage.restart().await;
    let lease = stage.ordered("q").await;
    let read = stage.read(&lease, 9).await;
    let attempts: Vec<_> = read.iter().map(|message| message.attempts).collect();
    assert_eq!(
        (numbers(&read), attempts),
        (vec![0, 1, 2, 3], vec![0, 2, 0, 1])
    );
    // It counts anew.
    let first = [attempt(read[0].sequence, 1)];
    stage.store.start(&lease, &first).await.expect("starts");
    assert_eq!(stage.read(&lease, 1).await[0].attempts, 1);
}

/// What another node has claimed keeps its count, and a node that has left uncounts nothing.
pub async fn only_its_own_node_uncounts_what_it_has_claimed<A: StoreAdapter>(stage: Stage<A>) {
    let one = stage.unordered("q").await;
    let two = stage.join("q", LONG).await;
    stage
        .enqueue(vec![message("q", "a", 1), message("q", "a", 2)])
        .await;
    let claimed = stage.store.claim(&one, 9).await.expect("claims");
    let store = &stage.store;
    store.start(&one, &firsts(&claimed)).await.expect("starts");
    let all = sequences(&claimed);
    store.uncount(&two, &all).await.expect("does nothing");
    store.uncount(&one, &all[..1]).await.expect("uncounts");
    store.release(&one).await.expect("releases");
    let late = store.uncount(&one, &all).await;
    assert!(
        matches!(late, Err(StoreError::LeaseLost { .. })),
        "{late:?}"
    );
    let again = store.claim(&two, 9).await.expect("claims");
    let attempts: Vec<_> = again.iter().map(|message| message.attempts).collect();
    assert_eq!((numbers(&again), attempts), (vec![1, 2], vec![0, 1]));
}

/// What was tried is in the dead letter, from every process that tried it.
pub async fn a_dead_letter_keeps_the_message_and_its_whole_past<A: StoreAdapter>(stage: Stage<A>) {
    let lease = stage.ordered("q").await;
    let sent = message("q", "a", 1);
    stage
        .enqueue(vec![sent.clone(), message("q", "a", 2)])
        .await;
    let read = stage.read(&lease, 9).await;
    let past: Vec<_> = (1..=3)
        .map(|attempt| FailedAttempt::now(attempt, "failed", "line\nbreak \"quoted\" \0"))
        .collect();
    let head = [read[0].sequence];
    for failed in &past[..2] {
        let start = [attempt(head[0], failed.attempt)];
        stage.store.start(&lease, &start).await.expect("starts");
        let retry = Ending::Retry {
            after: Duration::ZERO,
            failed: vec![failed.clone()],
        };
        let settled = stage
            .store
            .settle(&lease, &[settlement(head[0], retry)])
            .await;
        assert_eq!(settled.expect("settles").settled, 1);
    }
    let start = [attempt(head[0], 3)];
    stage.store.start(&lease, &start).await.expect("starts");
    let dead = Ending::Dead {
        reason: DeadReason::Poison(PoisonReason::Failed),
        detail: "in the end\0".into(),
        failed: vec![past[2].clone()],
    };
    let settled = stage
        .store
        .settle(&lease, &[settlement(head[0], dead)])
        .await;
    assert_eq!(settled.expect("settles").settled, 1);

    let letters = stage.store.dead_letters("q", 0, 9).await.expect("lists");
    let [letter] = &letters[..] else {
        panic!("{letters:?}");
    };
    assert_eq!(letter.past, past);
    assert_eq!(letter.reason, "failed");
    assert!(letter.detail.starts_with("in the end"));
    assert_eq!(letter.message.attempts, 3);
    assert_eq!(letter.message.sequence, head[0]);
    assert_eq!(letter.message.key, sent.key);
    assert_eq!(letter.message.envelope.body, sent.envelope.body);
    assert_eq!(numbers(&stage.read(&lease, 9).await), [2]);
    // Its id is remembered like that of any message that has ended.
    assert_eq!(
        stage.enqueue(vec![sent]).await,
        [crate::store::Placed::Duplicate]
    );
}

/// What a handler wrote (here: a message to another queue) exists if and only if its message is settled.
pub async fn a_handlers_writes_and_its_mark_commit_together<A: StoreAdapter>(stage: Stage<A>) {
    let lease = stage.ordered("q").await;
    let effects = stage.ordered("effects").await;
    stage.enqueue(vec![message("q", "a", 1)]).await;
    let read = sequences(&stage.read(&lease, 9).await);
    for commits in [false, true] {
        let mut transaction = stage.store.begin().await.expect("begins");
        let batch = vec![message("effects", "a", 7)];
        let enqueued = stage.store.enqueue_in(&mut transaction, batch).await;
        let enqueued = enqueued.expect("stores");
        let settlements = handled(&read);
        let settled = stage
            .store
            .settle_in(&mut transaction, &lease, &settlements);
        settled.await.expect("settles");
        if commits {
            transaction.commit().await.expect("commits");
            enqueued.committed();
        } else {
            transaction.rollback().await.expect("rolls back");
        }
        let (marks, writes) = if commits { (0, 1) } else { (1, 0) };
        assert_eq!(stage.read(&lease, 9).await.len(), marks);
        assert_eq!(stage.read(&effects, 9).await.len(), writes);
    }
}

/// A second run of a message that was settled cannot commit its writes.
pub async fn an_ended_transaction_is_not_repeated<A: StoreAdapter>(stage: Stage<A>) {
    let lease = stage.ordered("q").await;
    stage.ordered("effects").await;
    stage.enqueue(vec![message("q", "a", 1)]).await;
    let read = sequences(&stage.read(&lease, 9).await);
    let _ = stage.handled(&lease, &read).await;
    let mut transaction = stage.store.begin().await.expect("begins");
    let batch = vec![message("effects", "a", 7)];
    let enqueued = stage.store.enqueue_in(&mut transaction, batch).await;
    drop(enqueued.expect("stores"));
    let settlements = handled(&read);
    let again = stage
        .store
        .settle_in(&mut transaction, &lease, &settlements)
        .await;
    assert!(matches!(
        again,
        Err(StoreError::AlreadySettled { missing: 1, .. })
    ));
    transaction.rollback().await.expect("rolls back");
    assert_eq!(stage.count("effects").await, Counts::default());
}

/// A copy that arrives while the first is being settled is recognised however that ends: it was handled, or it is
/// still there.
pub async fn a_copy_that_meets_a_settling_waits_for_its_end<A: StoreAdapter>(stage: Stage<A>) {
    let lease = stage.ordered("q").await;
    let copy = message("q", "a", 1);
    stage.enqueue(vec![copy.clone()]).await;
    let read = sequences(&stage.read(&lease, 9).await);
    for commits in [false, true] {
        let mut transaction = stage.store.begin().await.expect("begins");
        let settlements = handled(&read);
        let settled = stage
            .store
            .settle_in(&mut transaction, &lease, &settlements);
        settled.await.expect("settles");
        let (store, batch) = (stage.store.clone(), vec![copy.clone()]);
        let enqueuing = tokio::spawn(async move { store.enqueue(batch).await });
        // Time for an enqueuing that would not wait.
        tokio::time::sleep(SHORT * 2).await;
        assert!(!enqueuing.is_finished());
        if commits {
            transaction.commit().await.expect("commits");
        } else {
            transaction.rollback().await.expect("rolls back");
        }
        let enqueued = enqueuing.await.expect("ends").expect("answers");
        assert_eq!(enqueued.committed(), [crate::store::Placed::Duplicate]);
        assert_eq!(stage.read(&lease, 9).await.len(), usize::from(!commits));
    }
}
