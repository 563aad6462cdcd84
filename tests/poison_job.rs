//! `examples/poison_orders` keeps what its help says: as a process, seen from outside.

#![cfg(all(unix, feature = "rabbitmq"))]

use std::collections::BTreeSet;

use laneway::prelude::*;
use laneway::transport::Transport;
use laneway::{QueueSpec, Topology};

#[path = "support/job.rs"]
mod job;
mod support;
use job::{Ended, History, Job};
use support::broker::{shared_url, unique};

fn start(arguments: &[&str]) -> Job {
    Job::of("poison_orders", arguments)
}

/// Small, and of four poison events in each of three rounds.
const SMALL: [&str; 5] = ["--messages", "1200", "--keys", "40", "--json"];
const POISON: u64 = 12;

fn small(more: &[&str]) -> Job {
    start(&[&SMALL, more].concat())
}

fn numbers<const N: usize>(ended: &Ended, fields: [&str; N]) -> [u64; N] {
    fields.map(|field| ended.number(field))
}

#[test]
fn a_finished_run_writes_one_object_of_exactly_the_promised_fields() {
    for (mode, held) in [("release", 0), ("block", POISON)] {
        let folder = tempfile::tempdir().expect("a folder");
        let ledger = folder.path().display().to_string();
        let ended = small(&["--poison-mode", mode, "--ledger", &ledger]).wait();
        assert_eq!(ended.status.code(), Some(0), "{ended:?}");
        let object = ended.object();
        let fields: BTreeSet<&str> = object.keys().map(String::as_str).collect();
        let promised = [
            "healthy_handled",
            "parked_expected",
            "parked",
            "replayed",
            "lost",
            "inversions",
            "overlaps",
            "held_keys",
            "healthy_p99_ms",
            "healthy_p99_ms_without_poison",
        ];
        assert_eq!(fields, BTreeSet::from(promised));
        let poison = numbers(&ended, ["parked_expected", "parked", "replayed"]);
        assert_eq!(poison, [POISON; 3], "{ended:?}");
        let handled = numbers(&ended, ["healthy_handled", "held_keys"]);
        assert_eq!(handled, [1_200 - POISON, held], "{ended:?}");
        let wrong = numbers(&ended, ["lost", "inversions", "overlaps"]);
        assert_eq!(wrong, [0; 3], "{ended:?}");
        for field in ["healthy_p99_ms", "healthy_p99_ms_without_poison"] {
            let time = object[field].as_f64();
            assert!(time.is_some_and(|time| time > 0.0), "{ended:?}");
        }
        // Counted again, by other code. A replayed event is published there once more, in its new place.
        let counted = History::read(folder.path()).count();
        let wrong = (counted.lost, counted.inversions, counted.overlaps);
        assert_eq!((wrong, counted.parked), ((0, 0, 0), POISON));
    }
}

#[test]
fn without_json_it_prints_what_became_of_each_poison_event() {
    let ended = start(&["--messages", "1200", "--keys", "40"]).wait();
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    for reason in ["failed", "panicked", "timed-out", "undecodable"] {
        let lines = ended.output.lines().filter(|line| {
            line.contains(&format!(" {reason} ")) && line.ends_with("replayed and handled")
        });
        assert_eq!(lines.count(), 3, "{reason}: {ended:?}");
    }
}

#[test]
fn a_bad_option_is_named_and_nothing_runs() {
    let check = |arguments: &[&str], status: i32, names: &str| {
        let ended = start(arguments).wait();
        let code = ended.status.code();
        assert_eq!(code, Some(status), "{arguments:?}: {ended:?}");
        assert!(ended.errors.contains(names), "{arguments:?}: {ended:?}");
        assert!(!ended.errors.contains("s3cret"), "{arguments:?}: {ended:?}");
        assert_eq!(ended.output, "", "{arguments:?}");
    };
    check(&["--messages", "599"], 2, "--messages");
    check(&["--keys", "15"], 2, "--keys");
    check(&["--messages", "600", "--keys", "601"], 2, "--keys 601");
    check(&["--poison-mode", "hold"], 2, "--poison-mode");
    check(&["--queue-type", "quorum"], 2, "--amqp");
    check(&["--run", "one"], 2, "--amqp");
    // More would wait behind held keys than half of the credits can be.
    let many = ["--messages", "10000000", "--keys", "16"];
    let block = [&many[..], &["--poison-mode", "block"]].concat();
    check(&block, 2, "use fewer --messages or more --keys");
    // The world is not as the command line says.
    let s3cret = "amqp://guest:s3cret@127.0.0.1:1";
    check(&["--json", "--amqp", s3cret], 1, "127.0.0.1:1");
    check(&["--json", "--ledger", "/dev/null/ledger"], 1, "ledger");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_whose_queues_are_there_already_is_refused_and_leaves_them_alone() {
    let (url, run) = (shared_url(), unique("poison-job"));
    let rabbitmq = RabbitMq::at(&url);
    let name = format!("poison-orders-{run}");
    let topology = Topology::default().queue(&name, QueueSpec::durable);
    let declared = rabbitmq.source(&topology.queues()[0]).verify().await;
    declared.expect("declared");
    let refused = start(&["--json", "--amqp", &url, "--run", &run]).wait();
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert!(refused.errors.contains("--run"), "{refused:?}");
    assert_eq!(rabbitmq.ready(&name).await.expect("it is there"), 0);
    rabbitmq.delete(&topology).await.expect("deleted");
    rabbitmq.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_drains_the_run_which_then_removes_its_queues() {
    let (url, run) = (shared_url(), unique("poison-job"));
    let folder = tempfile::tempdir().expect("a folder");
    let ledger = folder.path().display().to_string();
    let on_rabbitmq = ["--amqp", &url, "--run", &run, "--ledger", &ledger];
    let mut job = start(&[&["--json", "--poison-mode", "block"], &on_rabbitmq[..]].concat());
    // In the first round with poison, of which each event fails and is held.
    job.until(folder.path(), "end", 5_000);
    job.signal("INT");
    let ended = job.wait();
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    let wrong = numbers(&ended, ["lost", "inversions", "overlaps"]);
    assert_eq!(wrong, [0; 3], "{ended:?}");
    assert!(ended.object().contains_key("waiting"), "{ended:?}");
    let rabbitmq = RabbitMq::at(&url);
    let gone = rabbitmq.ready(&format!("poison-orders-{run}")).await;
    assert!(gone.is_err(), "{gone:?}");
    rabbitmq.close().await;
}
