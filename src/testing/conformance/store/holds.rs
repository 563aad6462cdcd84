//! What is held, and how that ends.

use std::collections::BTreeSet;

use laneway_actors::PoisonReason;

use super::*;
use crate::store::{DeadReason, FailedAttempt, HoldEnding, Placed};

impl<A: StoreAdapter> Stage<A> {
    /// Holds the first messages of a lease, each after one attempt.
    async fn hold(&self, lease: &Lease, count: u32) -> Vec<Sequence> {
        let mut held = Vec::new();
        for _ in 0..count {
            let head = self.read(lease, 1).await[0].sequence;
            self.store
                .start(lease, &[attempt(head, 1)])
                .await
                .expect("starts");
            let hold = Ending::Hold {
                failed: vec![FailedAttempt::now(1, "failed", "first")],
            };
            let settled = self.store.settle(lease, &[settlement(head, hold)]).await;
            assert_eq!(settled.expect("settles").settled, 1);
            held.push(head);
        }
        held
    }

    async fn held(&self, queue: &str, after: Sequence, limit: u32) -> Vec<Stored> {
        let held = self.store.held(queue, after, limit).await;
        held.expect("lists")
    }

    async fn end_hold(&self, queue: &str, sequence: Sequence, ending: HoldEnding) -> bool {
        let ended = self.store.end_hold(queue, sequence, ending).await;
        ended.expect("answers")
    }
}

const START: Sequence = Sequence(0);

/// Those of one queue and no others, in pages; in an unordered queue too.
pub async fn what_is_held_is_listed_in_pages_oldest_first<A: StoreAdapter>(stage: Stage<A>) {
    let lease = stage.ordered("q").await;
    let other = stage.ordered("other").await;
    stage.enqueue(vec![message("other", "a", 99)]).await;
    stage.hold(&other, 1).await;
    // Keys of several hashes, so that an order by them would be seen.
    let batch = (0..10).map(|number| message("q", &format!("k{number}"), number));
    stage.enqueue(batch.collect()).await;
    stage.enqueue(vec![message("q", "k0", 10)]).await;
    stage.hold(&lease, 9).await;
    // One that waits for its retry is not held, one that waits for its turn neither.
    let last = stage.read(&lease, 1).await[0].sequence;
    let retry = Ending::Retry {
        after: LONG,
        failed: Vec::new(),
    };
    let settled = stage.store.settle(&lease, &[settlement(last, retry)]).await;
    assert_eq!(settled.expect("settles").settled, 1);

    let first = stage.held("q", START, 4).await;
    assert_eq!(numbers(&first), [0, 1, 2, 3]);
    assert_eq!(first[0].attempts, 1);
    assert_eq!(first[0].key, Some(OrderingKey::from("k0")));
    let rest = stage.held("q", first[3].sequence, 99).await;
    assert_eq!(numbers(&rest), [4, 5, 6, 7, 8]);
    assert_eq!(numbers(&stage.held("other", START, 9).await), [99]);

    let node = stage.unordered("u").await;
    stage.enqueue(vec![message("u", "a", 1)]).await;
    let claimed = stage.store.claim(&node, 1).await.expect("claims");
    let hold = settlement(claimed[0].sequence, Ending::Hold { failed: Vec::new() });
    let settled = stage.store.settle(&node, &[hold]).await.expect("settles");
    assert_eq!(settled.settled, 1);
    let held = stage.held("u", START, 9).await;
    assert_eq!(numbers(&held), [1]);
    let ended = stage.end_hold("u", held[0].sequence, HoldEnding::Retry);
    assert!(ended.await);
    let again = stage.store.claim(&node, 9).await.expect("claims");
    assert_eq!((numbers(&again), again[0].attempts), (vec![1], 0));
}

/// It keeps its place, its key follows, and whoever waits for news is woken. No lease is needed.
pub async fn a_hold_that_is_retried_runs_at_once_with_attempts_counted_anew<A: StoreAdapter>(
    stage: Stage<A>,
) {
    let lease = stage.ordered("q").await;
    let batch = (1..=2).map(|number| message("q", "a", number));
    stage.enqueue(batch.collect()).await;
    let held = stage.hold(&lease, 1).await[0];
    assert_eq!(numbers(&stage.read(&lease, 9).await), NONE);
    stage.store.release(&lease).await.expect("releases");

    let mut hints = stage.store.watch("q");
    assert!(stage.end_hold("q", held, HoldEnding::Retry).await);
    let hint = tokio::time::timeout(LONG, hints.next()).await;
    hint.expect("a hint");
    let lease = stage.ordered("q").await;
    let read = stage.read(&lease, 9).await;
    assert_eq!(numbers(&read), [1, 2]);
    assert_eq!(read[0].attempts, 0);
    assert_eq!(numbers(&stage.held("q", START, 9).await), NONE);
}

/// The message is gone, a copy of it is recognised, and the next of its key runs. A dead letter has the whole past.
pub async fn a_hold_that_is_given_up_lets_its_key_go<A: StoreAdapter>(stage: Stage<A>) {
    let lease = stage.ordered("q").await;
    let batch: Vec<_> = (1..=3).map(|number| message("q", "a", number)).collect();
    stage.enqueue(batch.clone()).await;
    let first = stage.hold(&lease, 1).await[0];
    assert!(stage.end_hold("q", first, HoldEnding::Discarded).await);
    assert_eq!(numbers(&stage.read(&lease, 9).await), [2, 3]);
    assert_eq!(stage.count("q").await.dead, 0);

    let second = stage.hold(&lease, 1).await[0];
    let dead = HoldEnding::Dead {
        reason: DeadReason::Poison(PoisonReason::Failed),
        detail: "given up by hand\0".into(),
    };
    assert!(stage.end_hold("q", second, dead).await);
    assert_eq!(numbers(&stage.read(&lease, 9).await), [3]);
    let letters = stage.store.dead_letters("q", 0, 9).await.expect("lists");
    let [letter] = &letters[..] else {
        panic!("{letters:?}");
    };
    assert_eq!(letter.message.sequence, second);
    assert_eq!(letter.message.attempts, 1);
    assert_eq!(letter.past.len(), 1);
    assert!(letter.detail.starts_with("given up by hand"));
    let copies = stage.enqueue(batch[..2].to_vec()).await;
    assert_eq!(copies, [Placed::Duplicate; 2]);
}

/// What waits, what waits for its retry, what is in another queue, what was never there.
pub async fn what_is_not_held_is_left_as_it_is<A: StoreAdapter>(stage: Stage<A>) {
    let lease = stage.ordered("q").await;
    stage.declare("other", ordered(1)).await;
    let batch = [("a", 1), ("b", 2), ("c", 3)];
    let batch = batch.map(|(key, number)| message("q", key, number));
    stage.enqueue(batch.into()).await;
    let held = stage.hold(&lease, 1).await[0];
    let read = sequences(&stage.read(&lease, 9).await);
    let retry = Ending::Retry {
        after: LONG,
        failed: Vec::new(),
    };
    let settled = stage
        .store
        .settle(&lease, &[settlement(read[0], retry)])
        .await;
    assert_eq!(settled.expect("settles").settled, 1);
    for (queue, sequence) in [
        ("q", read[0]),
        ("q", read[1]),
        ("other", held),
        ("q", Sequence(i64::MAX)),
    ] {
        for ending in [HoldEnding::Retry, HoldEnding::Discarded] {
            assert!(!stage.end_hold(queue, sequence, ending).await);
        }
    }
    assert_eq!(numbers(&stage.read(&lease, 9).await), [3]);
    assert_eq!(numbers(&stage.held("q", START, 9).await), [1]);
    assert_eq!(stage.count("q").await.backlog, 3);
    let undeclared = stage.store.held("nowhere", START, 1).await;
    assert!(matches!(
        undeclared,
        Err(crate::store::StoreError::Refused { .. })
    ));
}

/// Everybody is told whether it was they who ended it, and what they said is what became of it.
pub async fn of_several_who_end_a_hold_one_does<A: StoreAdapter>(stage: Stage<A>) {
    let lease = stage.ordered("q").await;
    let mut alive = BTreeSet::new();
    for round in 0..12 {
        stage.enqueue(vec![message("q", "a", round)]).await;
        let read = stage.read(&lease, 9).await;
        let Some(new) = read.iter().find(|message| number_of(message) == round) else {
            panic!("round {round} waits behind {alive:?}");
        };
        let hold = settlement(new.sequence, Ending::Hold { failed: Vec::new() });
        let settled = stage.store.settle(&lease, &[hold]).await;
        assert_eq!(settled.expect("settles").settled, 1);
        let endings = (0..6).map(|one| {
            let (store, sequence) = (stage.store.clone(), new.sequence);
            let ending = if one % 2 == 0 {
                HoldEnding::Retry
            } else {
                HoldEnding::Discarded
            };
            tokio::spawn(async move { store.end_hold("q", sequence, ending).await })
        });
        let endings: Vec<_> = endings.collect();
        let mut winners = Vec::new();
        for (one, ending) in endings.into_iter().enumerate() {
            if ending.await.expect("ends").expect("answers") {
                winners.push(one);
            }
        }
        let [winner] = winners[..] else {
            panic!("{winners:?} ended one hold");
        };
        if winner % 2 == 0 {
            alive.insert(round);
        }
        let left = numbers(&stage.read(&lease, 99).await);
        assert_eq!(left, alive.iter().copied().collect::<Vec<_>>());
    }
}
