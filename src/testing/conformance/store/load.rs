//! Many at once.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::*;
use crate::store::{Placed, StoreError};

/// Eight writers per key, each of whose transactions stays open for a random while after its enqueuing. A reader that
/// looks all the time sees each key's messages in the order of their places, never one below what it has seen; and
/// a commit that had returned before another began has the lower place.
pub async fn commits_of_one_key_are_never_read_out_of_order<A: StoreAdapter>(stage: Stage<A>) {
    const KEYS: usize = 3;
    const WRITERS: usize = 8;
    const EACH: u64 = 12;
    let lease = stage.ordered("q").await;
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..KEYS * WRITERS {
        let store = stage.store.clone();
        writers.spawn(async move {
            let key = format!("k{}", writer % KEYS);
            let mut random = fastrand::Rng::with_seed(writer as u64);
            let mut commits = Vec::new();
            for number in 0..EACH {
                let began = Instant::now();
                let mut transaction = begin(&*store).await;
                let batch = vec![message("q", &key, number)];
                let enqueued = store.enqueue_in(&mut transaction, batch).await;
                let enqueued = enqueued.expect("one key in one call cannot dead-lock");
                // Part of the case: commits in another order than that of the draws, were there no lock.
                tokio::time::sleep(Duration::from_millis(random.u64(0..4))).await;
                transaction.commit().await.expect("commits");
                let [Placed::At(place)] = enqueued.committed()[..] else {
                    panic!("it is new");
                };
                commits.push((key.clone(), place, began, Instant::now()));
            }
            commits
        });
    }

    let expected = KEYS * WRITERS * EACH as usize;
    let mut seen: BTreeMap<KeyBytes, Vec<Sequence>> = BTreeMap::new();
    let mut have = Vec::new();
    while have.len() < expected {
        let window = Window::of(50).skipping(have.iter().copied());
        for message in stage.window(&lease, window).await {
            let key = message.key.as_ref().expect("a key").as_bytes().to_vec();
            seen.entry(key).or_default().push(message.sequence);
            have.push(message.sequence);
        }
    }
    for places in seen.values() {
        assert!(places.is_sorted(), "read out of order: {places:?}");
    }
    let mut commits = Vec::new();
    while let Some(of_writer) = writers.join_next().await {
        commits.extend(of_writer.expect("the writer ends"));
    }
    let places: BTreeSet<_> = commits.iter().map(|(_, place, ..)| *place).collect();
    assert_eq!(places, have.into_iter().collect());
    for (key, place, began, _) in &commits {
        let before = commits
            .iter()
            .filter(|(k, .., ended)| k == key && ended < began);
        for (_, earlier, ..) in before {
            assert!(earlier < place, "a later commit has a lower place");
        }
    }
}

type KeyBytes = Vec<u8>;

/// Sixteen writers, each transaction with one to fifty keys (now and then a hundred) in random order, in one call.
pub async fn writers_of_many_keys_lose_nothing_and_never_dead_lock<A: StoreAdapter>(
    stage: Stage<A>,
) {
    let load = Load {
        writers: 16,
        most_keys: 50,
        most_calls: 1,
    };
    write_many_keys(stage, load).await;
}

/// With transactions of two calls among them, there may be dead-locks: retryable, and nothing is lost.
pub async fn several_calls_dead_lock_only_as_a_retryable_conflict<A: StoreAdapter>(
    stage: Stage<A>,
) {
    // Small: a database looks for dead-locks only after a second or so of waiting.
    let load = Load {
        writers: 6,
        most_keys: 12,
        most_calls: 2,
    };
    write_many_keys(stage, load).await;
}

struct Load {
    writers: u64,
    /// Of a transaction; every sixth has up to twice as many.
    most_keys: usize,
    most_calls: usize,
}

async fn write_many_keys<A: StoreAdapter>(stage: Stage<A>, load: Load) {
    const EACH: u64 = 12;
    let Load {
        writers,
        most_keys,
        most_calls,
    } = load;
    let lease = stage.ordered("q").await;
    let mut tasks = tokio::task::JoinSet::new();
    for writer in 0..writers {
        let store = stage.store.clone();
        tasks.spawn(async move {
            let mut random = fastrand::Rng::with_seed(writer);
            let mut sent = Vec::new();
            for number in 0..EACH {
                let most = if number % 6 == 5 {
                    2 * most_keys
                } else {
                    most_keys
                };
                let mut keys: Vec<u64> = (0..120).collect();
                random.shuffle(&mut keys);
                keys.truncate(random.usize(1..=most));
                let body = |key: &u64| message("q", &key.to_string(), writer * 1000 + number);
                let batch: Vec<_> = keys.iter().map(body).collect();
                let calls = if number % 4 == 3 { most_calls } else { 1 };
                let each = batch.len().div_ceil(calls);
                while let Err(error) = write(&*store, batch.chunks(each)).await {
                    // Whose transaction is ended is the database's choice: also one of a single call that
                    // stands in the way of one of two.
                    let may = most_calls > 1 && error.is_retryable();
                    assert!(may, "{error:?}");
                }
                sent.extend(keys.into_iter().map(|key| (key, writer * 1000 + number)));
            }
            sent
        });
    }
    let mut sent = BTreeSet::new();
    while let Some(of_writer) = tasks.join_next().await {
        sent.extend(of_writer.expect("the writer ends"));
    }
    let mut read = BTreeSet::new();
    let mut last: BTreeMap<(u64, u64), u64> = BTreeMap::new();
    loop {
        let window = stage.read(&lease, 500).await;
        if window.is_empty() {
            break;
        }
        for message in &window {
            let key = message.key.as_ref().expect("a key").as_bytes();
            let key: u64 = std::str::from_utf8(key)
                .expect("text")
                .parse()
                .expect("a number");
            let number = number_of(message);
            assert!(read.insert((key, number)), "stored twice");
            // Transactions of one writer commit one after the other.
            let earlier = last.insert((key, number / 1000), number);
            assert!(earlier < Some(number), "out of order");
        }
        let _ = stage.handled(&lease, &sequences(&window)).await;
    }
    assert_eq!(read, sent);
}

/// A pool with fewer connections than there are writers lets them wait, here longer than one time-out.
async fn begin<S: TransactionalStore>(store: &S) -> sqlx::Transaction<'static, S::Database> {
    loop {
        match store.begin().await {
            Ok(transaction) => return transaction,
            Err(error) => assert!(error.is_retryable(), "{error:?}"),
        }
    }
}

async fn write<S: TransactionalStore>(
    store: &S,
    calls: std::slice::Chunks<'_, NewMessage>,
) -> Result<(), StoreError> {
    let mut transaction = begin(store).await;
    let mut enqueued = Vec::new();
    for call in calls {
        enqueued.push(store.enqueue_in(&mut transaction, call.to_vec()).await?);
    }
    transaction.commit().await.expect("commits");
    for enqueued in enqueued {
        enqueued.committed();
    }
    Ok(())
}

/// Two nodes share an unordered queue: each message is handled by one of them.
pub async fn two_nodes_empty_a_queue_and_handle_each_message_once<A: StoreAdapter>(
    stage: Stage<A>,
) {
    let one = stage.unordered("q").await;
    let two = stage.join("q", LONG).await;
    for start in (0..600).step_by(100) {
        let batch = (start..start + 100).map(|number| message("q", "a", number));
        stage.enqueue(batch.collect()).await;
    }
    let node = async |lease: &Lease| {
        let mut done = Vec::new();
        loop {
            let claimed = stage.store.claim(lease, 20).await.expect("claims");
            if claimed.is_empty() {
                return done;
            }
            let settled = stage.handled(lease, &sequences(&claimed)).await;
            assert_eq!(settled.settled, claimed.len());
            done.extend(numbers(&claimed));
        }
    };
    let (mut done, more) = futures::join!(node(&one), node(&two));
    done.extend(more);
    done.sort_unstable();
    assert!(done.into_iter().eq(0..600));
}
