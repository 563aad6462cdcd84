//! Who may.

use super::*;
use crate::store::StoreError;

/// A lease is one owner's until it has expired; every take has a higher epoch.
pub async fn a_fresh_lease_is_refused_and_an_expired_one_is_taken<A: StoreAdapter>(
    stage: Stage<A>,
) {
    stage.declare("q", ordered(1)).await;
    let (one, two) = (MemberId::unique(), MemberId::unique());
    let first = stage.take("q", one, LONG).await.expect("it is free");
    assert_eq!(stage.take("q", two, LONG).await, None);
    // Its owner may take it again, and the older epoch is stale from then on.
    let second = stage.take("q", one, SHORT).await.expect("it is its own");
    assert!(second.epoch > first.epoch);
    let lost = stage.store.renew(std::slice::from_ref(&first), LONG).await;
    assert_eq!(lost.expect("answers"), [first]);
    tokio::time::sleep(SHORT * 2).await;
    let third = stage.take("q", two, LONG).await.expect("it has expired");
    assert!(third.epoch > second.epoch);
    assert_eq!(stage.take("q", one, LONG).await, None);
}

/// Renewing prolongs, releasing ends. Both leave what is somebody else's alone.
pub async fn a_renewed_lease_lasts_and_a_released_one_is_free<A: StoreAdapter>(stage: Stage<A>) {
    let shared = stage.unordered("shared").await;
    stage.declare("q", ordered(1)).await;
    let (one, two) = (MemberId::unique(), MemberId::unique());
    let first = stage.take("q", one, SHORT).await.expect("it is free");
    let leases = [first.clone(), shared];
    assert_eq!(stage.store.renew(&leases, LONG).await.expect("answers"), []);
    tokio::time::sleep(SHORT * 2).await;
    assert_eq!(stage.take("q", two, LONG).await, None);

    stage.store.release(&first).await.expect("releases");
    let second = stage.take("q", two, LONG).await.expect("it was released");
    // A late release, a repeated one, of the lease that is gone.
    stage.store.release(&first).await.expect("does nothing");
    assert_eq!(stage.take("q", one, LONG).await, None);
    let lost = stage.store.renew(&[second, first.clone()], LONG).await;
    assert_eq!(lost.expect("answers"), [first]);
}

/// With the epoch gone, nothing has an effect any more.
pub async fn a_stale_owner_cannot_read_start_or_settle<A: StoreAdapter>(stage: Stage<A>) {
    stage.declare("q", ordered(1)).await;
    let stale = stage.take("q", MemberId::unique(), SHORT).await;
    let stale = stale.expect("it is free");
    stage.enqueue(vec![message("q", "a", 1)]).await;
    let read = stage.read(&stale, 9).await;
    tokio::time::sleep(SHORT * 2).await;
    // Expired, and not taken: still its owner's.
    let store = &stage.store;
    store.start(&stale, &firsts(&read)).await.expect("starts");

    let fresh = stage.take("q", MemberId::unique(), LONG).await;
    let fresh = fresh.expect("it has expired");
    fn is_lost<T: std::fmt::Debug>(answer: Result<T, StoreError>) {
        assert!(
            matches!(answer, Err(StoreError::LeaseLost { .. })),
            "{answer:?}"
        );
    }
    is_lost(store.read(&stale, &Window::of(9)).await);
    is_lost(store.start(&stale, &firsts(&read)).await);
    is_lost(store.uncount(&stale, &sequences(&read)).await);
    is_lost(store.settle(&stale, &handled(&sequences(&read))).await);
    let mut transaction = store.begin().await.expect("begins");
    is_lost(
        store
            .settle_in(&mut transaction, &stale, &handled(&sequences(&read)))
            .await,
    );
    transaction.rollback().await.expect("rolls back");

    let read = stage.read(&fresh, 9).await;
    assert_eq!((numbers(&read), read[0].attempts), (vec![1], 1));
    assert_eq!(stage.handled(&fresh, &sequences(&read)).await.settled, 1);
}

/// Between a settling's check and its commit nobody takes the shard.
pub async fn a_take_waits_for_a_settling_that_has_begun<A: StoreAdapter>(stage: Stage<A>) {
    stage.declare("q", ordered(1)).await;
    let old = stage.take("q", MemberId::unique(), SHORT).await;
    let old = old.expect("it is free");
    stage.enqueue(vec![message("q", "a", 1)]).await;
    let read = stage.read(&old, 9).await;
    let mut transaction = stage.store.begin().await.expect("begins");
    let settlements = handled(&sequences(&read));
    let settled = stage.store.settle_in(&mut transaction, &old, &settlements);
    settled.await.expect("settles");
    tokio::time::sleep(SHORT * 2).await;

    let store = stage.store.clone();
    let take = async move { store.take("q", Shard(0), MemberId::unique(), LONG).await };
    let take = tokio::spawn(take);
    // Time for a take that would not wait.
    tokio::time::sleep(SHORT * 2).await;
    assert!(!take.is_finished());
    transaction.commit().await.expect("commits");
    let new = take.await.expect("ends").expect("answers").expect("taken");
    assert_eq!(numbers(&stage.read(&new, 9).await), NONE);
}

/// Each shard has its own keys, owner and epoch.
pub async fn the_shards_of_a_queue_have_owners_of_their_own<A: StoreAdapter>(stage: Stage<A>) {
    stage.declare("q", ordered(4)).await;
    let keys: Vec<String> = (0..40).map(|key| format!("k{key}")).collect();
    let batch = keys.iter().zip(0..).map(|(key, n)| message("q", key, n));
    stage.enqueue(batch.collect()).await;
    let mut all = Vec::new();
    for shard in 0..4 {
        let taken = stage
            .store
            .take("q", Shard(shard), MemberId::unique(), LONG);
        let lease = taken.await.expect("answers").expect("it is free");
        let read = stage.read(&lease, 99).await;
        let count = ShardCount::new(4).expect("allowed");
        for message in &read {
            let key = message.key.as_ref().expect("a key");
            let expected = laneway_actors::ShardIndex::of(key, count);
            assert_eq!(expected.get(), shard as usize);
        }
        all.extend(numbers(&read));
    }
    all.sort_unstable();
    assert!(all.into_iter().eq(0..40));
    let missing = stage
        .store
        .take("q", Shard(4), MemberId::unique(), LONG)
        .await;
    assert!(matches!(missing, Err(StoreError::Refused { .. })));
}
