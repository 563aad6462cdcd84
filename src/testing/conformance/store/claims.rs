//! What comes out.

use std::collections::BTreeSet;

use super::*;
use crate::store::StoreError;

/// Order is that of the store, not of the process.
pub async fn backlog_is_read_before_new_arrivals_after_a_restart<A: StoreAdapter>(
    mut stage: Stage<A>,
) {
    let lease = stage.ordered("q").await;
    for start in (0..200).step_by(50) {
        let batch = (start..start + 50).map(|number| message("q", "a", number));
        stage.enqueue(batch.collect()).await;
    }
    stage.store.release(&lease).await.expect("releases");
    stage.restart().await;
    let lease = stage.ordered("q").await;
    stage.enqueue(vec![message("q", "a", 200)]).await;
    let mut read = Vec::new();
    loop {
        let window = stage.read(&lease, 64).await;
        if window.is_empty() {
            break;
        }
        read.extend(numbers(&window));
        let _ = stage.handled(&lease, &sequences(&window)).await;
    }
    assert!(read.into_iter().eq(0..=200));
}

/// However much of a held key waits in front, a window is full of other keys.
pub async fn rows_of_held_keys_do_not_fill_the_window<A: StoreAdapter>(stage: Stage<A>) {
    let lease = stage.ordered("q").await;
    let held = (0..500).map(|number| message("q", "held", number));
    stage.enqueue(held.collect()).await;
    let free = (0..20).map(|number| message("q", &format!("free{}", number % 3), 1000 + number));
    stage.enqueue(free.collect()).await;
    let key = OrderingKey::from("held");
    let read = stage.window(&lease, Window::of(10).holding([&key])).await;
    assert!(numbers(&read).into_iter().eq(1000..1010));
    // The same for a head that waits for its retry, which nobody has to remember.
    let head = stage.read(&lease, 1).await[0].sequence;
    let retry = Ending::Retry {
        after: LONG,
        failed: Vec::new(),
    };
    let settled = stage.store.settle(&lease, &[settlement(head, retry)]).await;
    assert_eq!(settled.expect("settles").settled, 1);
    assert!(
        numbers(&stage.read(&lease, 10).await)
            .into_iter()
            .eq(1000..1010)
    );
}

/// A reader names what it has, and gets the rest.
pub async fn what_is_skipped_is_not_read_again<A: StoreAdapter>(stage: Stage<A>) {
    let lease = stage.ordered("q").await;
    let batch = (0..10).map(|number| message("q", "a", number));
    stage.enqueue(batch.collect()).await;
    let first = stage.read(&lease, 4).await;
    let mut have = sequences(&first);
    let window = Window::of(4).skipping(have.clone());
    let second = stage.window(&lease, window.clone()).await;
    assert_eq!(numbers(&second), [4, 5, 6, 7]);
    // Reading claims nothing: asked again it is the same.
    assert_eq!(numbers(&stage.window(&lease, window).await), [4, 5, 6, 7]);
    have.extend(sequences(&second));
    let third = stage.window(&lease, Window::of(4).skipping(have)).await;
    assert_eq!(numbers(&third), [8, 9]);
}

/// What one has claimed nobody else gets; the lease of a shard does not claim.
pub async fn claims_of_two_nodes_do_not_overlap<A: StoreAdapter>(stage: Stage<A>) {
    let one = stage.unordered("q").await;
    let two = stage.join("q", LONG).await;
    let batch = (0..100).map(|number| message("q", "a", number));
    stage.enqueue(batch.collect()).await;
    let claim = async |lease: &Lease| {
        let mut claimed = BTreeSet::new();
        for _ in 0..5 {
            let some = stage.store.claim(lease, 12).await.expect("claims");
            claimed.extend(numbers(&some));
        }
        claimed
    };
    let (first, second) = futures::join!(claim(&one), claim(&two));
    assert!(first.is_disjoint(&second));
    assert_eq!(first.len() + second.len(), 100);

    let shard = stage.ordered("other").await;
    let refused = stage.store.claim(&shard, 1).await;
    assert!(matches!(refused, Err(StoreError::Refused { .. })));
    let refused = stage.store.read(&one, &Window::of(1)).await;
    assert!(matches!(refused, Err(StoreError::Refused { .. })));
}

/// The work of a node that is gone moves, and it cannot settle it any more.
pub async fn claims_of_an_expired_node_are_claimed_by_another<A: StoreAdapter>(stage: Stage<A>) {
    stage.declare("q", QueueOrder::Unordered).await;
    let gone = stage.join("q", LONG).await;
    let alive = stage.join("q", LONG).await;
    stage.enqueue(vec![message("q", "a", 1)]).await;
    let claimed = stage.store.claim(&gone, 9).await.expect("claims");
    assert_eq!(numbers(&claimed), [1]);
    assert_eq!(stage.store.claim(&alive, 9).await.expect("claims").len(), 0);
    // Its last sign of life.
    let lost = stage.store.renew(std::slice::from_ref(&gone), SHORT).await;
    assert_eq!(lost.expect("answers"), []);
    tokio::time::sleep(SHORT * 2).await;
    let moved = stage.store.claim(&alive, 9).await.expect("claims");
    assert_eq!(numbers(&moved), [1]);
    let stale = stage
        .store
        .settle(&gone, &handled(&sequences(&claimed)))
        .await;
    assert!(matches!(stale, Err(StoreError::LeaseLost { .. })));
    let lost = stage.store.renew(std::slice::from_ref(&gone), LONG).await;
    assert_eq!(lost.expect("answers"), [gone]);
    assert_eq!(stage.handled(&alive, &sequences(&moved)).await.settled, 1);
}

/// Given back, by name or with the lease, is free at once and uncounted.
pub async fn what_is_given_back_is_claimed_again<A: StoreAdapter>(stage: Stage<A>) {
    let one = stage.unordered("q").await;
    let two = stage.join("q", LONG).await;
    stage
        .enqueue(vec![message("q", "a", 1), message("q", "a", 2)])
        .await;
    let claimed = stage.store.claim(&one, 9).await.expect("claims");
    let first = [claimed[0].sequence];
    stage.store.give_back(&one, &first).await.expect("gives");
    // What is not its own it cannot give.
    stage
        .store
        .give_back(&two, &sequences(&claimed))
        .await
        .expect("does nothing");
    let again = stage.store.claim(&two, 9).await.expect("claims");
    assert_eq!((numbers(&again), again[0].attempts), (vec![1], 0));
    stage.store.release(&one).await.expect("releases");
    let rest = stage.store.claim(&two, 9).await.expect("claims");
    assert_eq!(numbers(&rest), [2]);
}

/// One row that cannot be read is shown as that, and the others as they are.
pub async fn a_broken_row_hides_no_other<A: StoreAdapter>(stage: Stage<A>) {
    let lease = stage.ordered("q").await;
    let batch = ["x", "y", "z"].into_iter().zip(1..);
    let batch = batch.map(|(id, number)| with_id(message("q", id, number), id));
    stage.enqueue(batch.collect()).await;
    stage.adapter.break_headers("messages", "y").await;
    let read = stage.read(&lease, 9).await;
    assert_eq!(numbers(&read), [1, 2, 3]);
    let broken = |messages: &[Stored]| -> Vec<bool> {
        messages.iter().map(|m| m.broken.is_some()).collect()
    };
    assert_eq!(broken(&read), [false, true, false]);

    let dead = sequences(&read).into_iter().map(|sequence| {
        let ending = Ending::Dead {
            reason: crate::store::DeadReason::Broken,
            detail: String::new(),
            failed: Vec::new(),
        };
        settlement(sequence, ending)
    });
    let dead: Vec<_> = dead.collect();
    let settled = stage.store.settle(&lease, &dead).await.expect("settles");
    assert_eq!(settled.settled, 3);
    let letters = stage.store.dead_letters("q", 0, 9).await.expect("lists");
    let letters: Vec<_> = letters.into_iter().map(|letter| letter.message).collect();
    assert_eq!(broken(&letters), [false, true, false]);
}

/// A random history of enqueuing, handling, retrying and holding, beside a list that does the same.
pub async fn windows_agree_with_a_plain_model<A: StoreAdapter>(stage: Stage<A>) {
    #[derive(Debug, Clone)]
    struct Row {
        sequence: Sequence,
        key: usize,
        waits: bool,
    }
    let lease = stage.ordered("q").await;
    let keys: Vec<OrderingKey> = (0..6).map(OrderingKey::from).collect();
    let mut random = fastrand::Rng::with_seed(7);
    let mut model: Vec<Row> = Vec::new();
    for round in 0..120_u64 {
        match random.u8(0..10) {
            0..4 => {
                let chosen: Vec<usize> = (0..random.usize(1..8))
                    .map(|_| random.usize(0..6))
                    .collect();
                let batch = chosen
                    .iter()
                    .map(|key| message("q", &key.to_string(), round));
                let placed = stage.enqueue(batch.collect()).await;
                for (key, placed) in chosen.into_iter().zip(placed) {
                    let crate::store::Placed::At(sequence) = placed else {
                        panic!("{placed:?}");
                    };
                    model.push(Row {
                        sequence,
                        key,
                        waits: false,
                    });
                }
            }
            action if !model.is_empty() => {
                let at = random.usize(0..model.len());
                let sequence = model[at].sequence;
                let (ending, waits) = match action {
                    4..7 => (Ending::Handled, None),
                    7 => (Ending::Hold { failed: Vec::new() }, Some(true)),
                    8 => (
                        Ending::Retry {
                            after: LONG,
                            failed: Vec::new(),
                        },
                        Some(true),
                    ),
                    _ => (
                        Ending::Retry {
                            after: Duration::ZERO,
                            failed: Vec::new(),
                        },
                        Some(false),
                    ),
                };
                let settled = stage
                    .store
                    .settle(&lease, &[settlement(sequence, ending)])
                    .await;
                assert_eq!(settled.expect("settles").settled, 1);
                match waits {
                    Some(waits) => model[at].waits = waits,
                    None => drop(model.remove(at)),
                }
            }
            _ => {}
        }
        let held: Vec<usize> = (0..6).filter(|_| random.u8(0..5) == 0).collect();
        let skip: Vec<Sequence> = model
            .iter()
            .map(|row| row.sequence)
            .filter(|_| random.u8(0..4) == 0)
            .collect();
        let limit = random.usize(1..12);
        let mut blocked: BTreeSet<usize> = held.iter().copied().collect();
        let mut expected = Vec::new();
        for row in &model {
            if row.waits {
                blocked.insert(row.key);
            }
            if !blocked.contains(&row.key)
                && !skip.contains(&row.sequence)
                && expected.len() < limit
            {
                expected.push(row.sequence);
            }
        }
        let window = Window::of(limit as u32)
            .holding(held.iter().map(|key| &keys[*key]))
            .skipping(skip);
        let read = stage.window(&lease, window).await;
        assert_eq!(sequences(&read), expected, "round {round}");
    }
}
