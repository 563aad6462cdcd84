//! Several nodes with the same durable queues, on PostgreSQL: nodes that come and go, and one that comes back too late.
//!
//! A node is this test program itself, started again to run one test, [`one_life`]. `LANEWAY_SOAK=1` makes the full
//! counts.
#![cfg(all(unix, feature = "sqlite", feature = "postgres"))]

#[path = "support/job.rs"]
mod job;
#[path = "support/lives.rs"]
mod lives;
#[path = "support/stores.rs"]
mod stores;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use laneway::prelude::*;
use laneway::store::Store;
use laneway::testing::OrderLedger;

use job::{History, Job};
use lives::{Life, Loose, Place, Step, new_loose, new_step, soak};
use stores::Database;

one_life!();

const PATIENCE: Duration = Duration::from_secs(90);

/// Stores steps of 16 keys and loose messages until it is stopped.
async fn load(store: Arc<dyn Store>, ledger: OrderLedger, stop: Arc<AtomicBool>) {
    let mut number = 0;
    while !stop.load(Ordering::SeqCst) {
        number += 1;
        let steps = (0..16).map(|key| new_step(key, number));
        let loose = (0..8).map(|n| number * 8 + n);
        let batch = steps.chain(loose.clone().map(new_loose)).collect();
        store.enqueue(batch).await.expect("stored").committed();
        for key in 0..16_u64 {
            ledger.published(&key.to_string(), number);
        }
        for number in loose {
            ledger.published(&format!("loose-{number}"), number);
        }
        // The pace of the load: what two cores can handle.
        tokio::time::sleep(Duration::from_millis(60)).await;
    }
}

/// Waits until a node has handled something.
async fn until_handles(folder: &Path, job: &mut Job) {
    let id = u64::from(job.id());
    let handles = async {
        while !History::read(folder)
            .runs
            .iter()
            .any(|run| run.pid == id && run.ok)
        {
            assert!(job.is_running(), "the node ended");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let handles = tokio::time::timeout(PATIENCE, handles).await;
    assert!(handles.is_ok(), "the node handles nothing");
}

/// Waits until each shard has a fresh lease, of so many owners in all.
async fn until_owned_by(store: &dyn Store, count: usize) {
    let owned = async {
        loop {
            let owners = store.owners(Step::TYPE).await.expect("answered");
            let different: BTreeSet<_> = owners.iter().map(|one| one.owner).collect();
            if owners.iter().all(|one| one.fresh) && different.len() == count {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let owned = tokio::time::timeout(PATIENCE, owned).await;
    assert!(owned.is_ok(), "{:?}", store.owners(Step::TYPE).await);
}

/// Those who share the queue `loose`.
const NODES: &str = "SELECT count(*) FROM {t}nodes AS n JOIN {t}queues AS q ON q.number = n.queue \
     WHERE q.name = 'loose' AND NOT n.dead AND n.expires > clock_timestamp()";
const ABSENT_NODES: &str =
    "SELECT count(*) FROM {t}nodes WHERE NOT dead AND expires <= clock_timestamp()";
const CLAIMS_OF_ABSENT_NODES: &str = "SELECT count(*) FROM {t}messages WHERE claim IS NOT NULL AND claim NOT IN \
     (SELECT epoch FROM {t}nodes WHERE NOT dead AND expires > clock_timestamp())";

/// D7: nodes are stopped in order and killed by turns, each replaced, under load; in the end two of three are killed,
/// so that every owner must be the third.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_belongs_to_an_absent_node_after_rolling_restarts_under_load() {
    let restarts = if soak() { 10 } else { 4 };
    let database = Database::postgres();
    let place = Place::of(&database);
    let folder = tempfile::tempdir().expect("a folder");
    let ledger = OrderLedger::in_folder(folder.path()).expect("a folder");
    let store = place.open().await;
    let mut look = place.look().await;
    let stop = Arc::new(AtomicBool::new(false));
    let loading = load(Arc::clone(&store), ledger.clone(), Arc::clone(&stop));
    let loading = tokio::spawn(loading);
    let start = || {
        let mut life = Life::new(&place, folder.path(), "node");
        // A message may be in flight at several kills.
        life.attempts = 20;
        life.start()
    };
    let kill = |job: Job| {
        let id = job.id();
        job.signal("KILL");
        let ended = job.wait();
        assert_eq!(ended.status.code(), None, "it was killed: {ended:?}");
        ledger.died(id);
    };
    let mut nodes = std::collections::VecDeque::new();
    for _ in 0..3 {
        nodes.push_back(start());
    }
    for number in 0..restarts {
        let newest = nodes.back_mut().expect("there are three");
        until_handles(folder.path(), newest).await;
        let oldest = nodes.pop_front().expect("there are three");
        if number % 2 == 0 {
            oldest.signal("TERM");
            let ended = oldest.wait();
            assert_eq!(ended.status.code(), Some(0), "{ended:?}");
        } else {
            kill(oldest);
        }
        nodes.push_back(start());
    }
    until_owned_by(&*store, 3).await;
    look.until(NODES, 3).await;
    look.until(CLAIMS_OF_ABSENT_NODES, 0).await;
    nodes.drain(..2).for_each(kill);
    until_owned_by(&*store, 1).await;
    look.until(NODES, 1).await;
    look.until(ABSENT_NODES, 0).await;
    look.until(CLAIMS_OF_ABSENT_NODES, 0).await;

    stop.store(true, Ordering::SeqCst);
    loading.await.expect("everything was stored");
    look.until_backlog(Step::TYPE, 0).await;
    look.until_backlog(Loose::TYPE, 0).await;
    let last = nodes.pop_front().expect("one is left");
    last.signal("TERM");
    let ended = last.wait();
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    let counted = History::read(folder.path()).count();
    assert_eq!(
        (counted.lost, counted.inversions, counted.overlaps),
        (0, 0, 0),
        "{counted:?}"
    );
    store.close().await;
    drop(look);
    database.clean_up().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_owner_that_was_stopped_for_longer_than_its_lease_settles_nothing() {
    a_stale_owner_has_no_effect(false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_owner_that_was_stopped_for_longer_than_its_lease_commits_nothing() {
    a_stale_owner_has_no_effect(true).await;
}

/// The first node is stopped while its handler runs; the second one has the message in its handler when the first goes
/// on, ends its handler well, and drains.
async fn a_stale_owner_has_no_effect(transactional: bool) {
    let database = Database::postgres();
    let place = Place::of(&database);
    let folder = tempfile::tempdir().expect("a folder");
    let store = place.open().await;
    let batch = vec![new_step(1, 7), new_step(1, 8)];
    store.enqueue(batch).await.expect("stored").committed();
    place.create_effects().await;
    let mut look = place.look().await;
    let life = |name| {
        let mut life = Life::new(&place, folder.path(), name);
        life.waits = Some(7);
        life.transactional = transactional;
        life
    };
    let (stale, fresh) = (life("stale"), life("fresh"));
    let mut first = stale.start();
    first.until(folder.path(), "start", 1);
    first.signal("STOP");
    let mut second = fresh.start();
    second.until(folder.path(), "start", 2);
    // It takes nothing new, and what runs ends.
    stale.let_go();
    first.signal("TERM");
    let first_id = u64::from(first.id());
    first.signal("CONT");
    let ended = first.wait();
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    let history = History::read(folder.path());
    let runs: Vec<_> = history
        .runs
        .iter()
        .filter(|run| run.pid == first_id)
        .collect();
    // One in a transaction may be broken off, since it is known that it could not commit.
    assert!(
        matches!(runs[..], [run] if (run.ok || transactional) && run.message.1 == 7),
        "its handler goes on after the stop: {runs:?}"
    );
    look.until_backlog(Step::TYPE, 2).await;
    assert_eq!(look.number("SELECT count(*) FROM {t}effects").await, 0);

    fresh.let_go();
    look.until_backlog(Step::TYPE, 0).await;
    second.signal("TERM");
    let ended = second.wait();
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    let effects = "SELECT count(*) FROM {t}effects WHERE life = 'fresh'";
    let expected = if transactional { 2 } else { 0 };
    assert_eq!(look.number(effects).await, expected);
    let all = "SELECT count(*) FROM {t}effects";
    assert_eq!(look.number(all).await, expected);
    store.close().await;
    drop(look);
    database.clean_up().await;
}
