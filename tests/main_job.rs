//! The main job, `examples/ordered_orders`, keeps what its help and the README say: as a process, seen from
//! outside. Figures are counted again from the ledger's files, by other code than Laneway's.
//!
//! `LANEWAY_SOAK=1` runs the full counts (200,000 messages, 5,000 keys).

#![cfg(all(unix, feature = "rabbitmq"))]

use std::collections::BTreeSet;
use std::time::Duration;

use lapin::options::QueueDeclareOptions;
use lapin::types::FieldTable;
use lapin::{Connection, ConnectionProperties};

#[path = "support/job.rs"]
mod job;
mod support;
use job::{Counted, Ended, HandlerRun, History, Job};
use support::broker::{shared_url, unique};

/// The most that a killed process can leave unsettled: twice the concurrency of 16, the default of
/// `max_in_flight`.
const MAX_IN_FLIGHT: u64 = 32;
/// The most events that the example has published and not yet recorded: its window. After a kill it
/// publishes them again.
const UNCONFIRMED: u64 = 256;

fn counts() -> (u64, u64) {
    match std::env::var_os("LANEWAY_SOAK") {
        Some(_) => (200_000, 5_000),
        None => (8_000, 200),
    }
}

fn strings(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

// ---- the command line

#[test]
fn a_finished_run_writes_one_object_of_exactly_the_promised_fields() {
    let folder = tempfile::tempdir().expect("a folder");
    let ledger = folder.path().display().to_string();
    let mut arguments = strings(&["--messages", "2000", "--keys", "50", "--concurrency", "8"]);
    arguments.extend(strings(&[
        "--handler-ms",
        "1",
        "--json",
        "--ledger",
        &ledger,
    ]));
    let ended = Job::start(&arguments).wait();
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    let object = ended.object();
    let fields: BTreeSet<&str> = object.keys().map(String::as_str).collect();
    let promised = [
        "messages",
        "keys",
        "concurrency",
        "seconds",
        "messages_per_second",
        "lost",
        "inversions",
        "overlaps",
        "duplicates",
        "parked",
        "attempts",
    ];
    assert_eq!(fields, BTreeSet::from(promised));
    let asked = ["messages", "keys", "concurrency"].map(|field| ended.number(field));
    assert_eq!(asked, [2_000, 50, 8]);
    for field in ["seconds", "messages_per_second"] {
        assert!(
            object[field].as_f64().is_some_and(|number| number > 0.0),
            "{ended:?}"
        );
    }
    let clean = Counted {
        attempts: 2_000,
        ..Counted::default()
    };
    assert_eq!(told(&ended), clean);
    let history = History::read(folder.path());
    assert_eq!(history.count(), clean);
    assert_eq!(history.published.len(), 2_000);
}

#[test]
fn exactly_the_poison_is_parked_after_all_its_attempts_and_that_is_success() {
    let folder = tempfile::tempdir().expect("a folder");
    let ledger = folder.path().display().to_string();
    let mut arguments = strings(&["--messages", "1000", "--keys", "20", "--poison", "30"]);
    arguments.extend(strings(&[
        "--handler-ms",
        "0",
        "--json",
        "--ledger",
        &ledger,
    ]));
    let ended = Job::start(&arguments).wait();
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    let expected = Counted {
        parked: 30,
        attempts: 970 + 3 * 30,
        ..Counted::default()
    };
    assert_eq!(told(&ended), expected);
    assert_eq!(History::read(folder.path()).count(), expected);
}

#[test]
fn without_json_standard_output_is_a_summary_for_people() {
    let arguments = ["--messages", "100", "--keys", "10", "--handler-ms", "0"];
    let ended = Job::start(&arguments).wait();
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    for words in ["100 events of 10 orders", "lost        0", "order held"] {
        assert!(ended.output.contains(words), "{words}: {ended:?}");
    }
}

#[test]
fn a_bad_option_is_named_and_nothing_runs() {
    let check = |arguments: &[&str], status: i32, names: &str| {
        let ended = Job::start(arguments).wait();
        assert_eq!(
            ended.status.code(),
            Some(status),
            "{arguments:?}: {ended:?}"
        );
        assert!(ended.errors.contains(names), "{arguments:?}: {ended:?}");
        assert!(!ended.errors.contains("s3cret"), "{arguments:?}: {ended:?}");
        assert_eq!(ended.output, "", "{arguments:?}");
    };
    // The command line is wrong.
    check(&["--messages", "0"], 2, "--messages");
    check(&["--messages", "many"], 2, "--messages");
    check(&["--messages", "10000001"], 2, "--messages");
    check(&["--keys", "0"], 2, "--keys");
    check(&["--messages", "5", "--keys", "6"], 2, "--keys 6");
    check(&["--concurrency", "0"], 2, "--concurrency");
    check(&["--concurrency", "65536"], 2, "--concurrency");
    check(&["--handler-ms", "-1"], 2, "-1");
    check(&["--handler-ms", "10001"], 2, "--handler-ms");
    check(&["--messages", "600", "--poison", "601"], 2, "--poison 601");
    check(
        &["--queue-type", "stream", "--amqp", "amqp://localhost"],
        2,
        "--queue-type",
    );
    check(&["--queue-type", "quorum"], 2, "--amqp");
    check(&["--run", "one"], 2, "--amqp");
    check(
        &["--run", "no/path", "--amqp", "amqp://localhost"],
        2,
        "--run",
    );
    check(&["--unknown"], 2, "--unknown");
    // The world is not as the command line says.
    let s3cret = "amqp://guest:s3cret@127.0.0.1:1";
    check(&["--json", "--amqp", s3cret], 1, "127.0.0.1:1");
    check(
        &["--json", "--amqp", "http://guest:s3cret@localhost"],
        1,
        "--amqp",
    );
    check(&["--json", "--ledger", "/dev/null/ledger"], 1, "ledger");
}

#[test]
fn a_folder_with_the_ledger_of_another_run_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let ledger = folder.path().display().to_string();
    let arguments = [
        "--messages",
        "10",
        "--keys",
        "2",
        "--json",
        "--ledger",
        &ledger,
    ];
    assert_eq!(Job::start(&arguments).wait().status.code(), Some(0));
    let again = Job::start(&arguments).wait();
    assert_eq!(
        (again.status.code(), &*again.output),
        (Some(1), ""),
        "{again:?}"
    );
    assert!(again.errors.contains("--ledger"), "{again:?}");
}

// ---- interrupted runs on RabbitMQ

/// The figures that the JSON object tells.
fn told(ended: &Ended) -> Counted {
    Counted {
        lost: ended.number("lost"),
        duplicates: ended.number("duplicates"),
        inversions: ended.number("inversions"),
        overlaps: ended.number("overlaps"),
        parked: ended.number("parked"),
        attempts: ended.number("attempts"),
    }
}

/// A run that several processes work on, with a folder for its ledger.
struct LongRun {
    url: String,
    id: String,
    folder: tempfile::TempDir,
    arguments: Vec<String>,
}

impl LongRun {
    fn new(name: &str, queue_type: &str, poison: u64) -> Self {
        Self::with(name, queue_type, poison, "2")
    }

    fn with(name: &str, queue_type: &str, poison: u64, handler_ms: &str) -> Self {
        let (url, id) = (shared_url(), unique(name));
        let folder = tempfile::tempdir().expect("a folder");
        let ledger = folder.path().display().to_string();
        let (messages, keys) = counts();
        let mut arguments = strings(&["--json", "--handler-ms", handler_ms, "--concurrency", "16"]);
        arguments.extend(strings(&["--messages", &messages.to_string()]));
        arguments.extend(strings(&["--keys", &keys.to_string()]));
        arguments.extend(strings(&["--poison", &poison.to_string()]));
        arguments.extend(strings(&["--amqp", &url, "--queue-type", queue_type]));
        arguments.extend(strings(&["--run", &id, "--ledger", &ledger]));
        Self {
            url,
            id,
            folder,
            arguments,
        }
    }

    fn start(&self) -> Job {
        Job::start(&self.arguments)
    }

    fn history(&self) -> History {
        History::read(self.folder.path())
    }

    /// Which of its queues are at the broker.
    fn queues(&self) -> Vec<String> {
        let orders = format!("ordered-orders-{}", self.id);
        let names = [format!("{orders}-parked"), orders];
        let runtime = tokio::runtime::Runtime::new().expect("a runtime starts");
        runtime.block_on(async {
            let connection = Connection::connect(&self.url, ConnectionProperties::default())
                .await
                .expect("the broker is there");
            let mut there = Vec::new();
            for name in names {
                // A refusal closes the channel: one for each question.
                let channel = connection.create_channel().await.expect("a channel");
                let options = QueueDeclareOptions::default().passive();
                let asked =
                    channel.queue_declare(name.as_str().into(), options, FieldTable::default());
                if asked.await.is_ok() {
                    there.push(name);
                }
            }
            there
        })
    }

    /// Waits until the broker has given up whoever consumed the orders.
    fn until_no_consumer(&self) {
        let orders = format!("ordered-orders-{}", self.id);
        let runtime = tokio::runtime::Runtime::new().expect("a runtime starts");
        let waiting = async {
            let connection = Connection::connect(&self.url, ConnectionProperties::default())
                .await
                .expect("the broker is there");
            let channel = connection.create_channel().await.expect("a channel");
            loop {
                let options = QueueDeclareOptions::default().passive();
                let name = orders.as_str().into();
                let asked = channel.queue_declare(name, options, FieldTable::default());
                if asked.await.expect("the queue is there").consumer_count() == 0 {
                    return;
                }
                // The broker tells nobody; asking again is cheap.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        runtime
            .block_on(async { tokio::time::timeout(Duration::from_secs(120), waiting).await })
            .expect("the broker gives up who is silent for two heartbeats");
    }

    /// Holds the finished run to its promises, by its own summary and by the files.
    fn check(&self, ended: &Ended, at_most_duplicates: u64, poison: u64) {
        assert_eq!(ended.status.code(), Some(0), "{ended:?}");
        let history = self.history();
        let counted = history.count();
        assert_eq!(told(ended), counted, "the summary is what the files say");
        assert_eq!(history.published.len() as u64, counts().0);
        let Counted {
            lost,
            inversions,
            overlaps,
            parked,
            duplicates,
            ..
        } = counted;
        assert_eq!((lost, inversions, overlaps, parked), (0, 0, 0, poison));
        assert!(duplicates <= at_most_duplicates, "{duplicates} duplicates");
        assert_eq!(self.queues(), Vec::<String>::new(), "everything is removed");
    }
}

fn stopped_twice_by_sigterm(queue_type: &str) {
    let (messages, _) = counts();
    let run = LongRun::new("sigterm", queue_type, 0);
    // Once while it publishes, and once more when most is published.
    for handled in [messages / 20, messages / 2] {
        let mut job = run.start();
        job.until(run.folder.path(), "end", handled as usize);
        job.signal("TERM");
        let ended = job.wait();
        assert_eq!(ended.status.code(), Some(0), "{ended:?}");
        let waiting = ended.number("waiting");
        let history = run.history();
        let handled = history.successes() as u64;
        assert!(
            history.runs.iter().all(|run| run.ok),
            "all that ran has finished"
        );
        // Nothing is in between: it was handled and is gone, or it waits.
        assert_eq!(
            history.published.len() as u64,
            handled + waiting,
            "{ended:?}"
        );
        assert_eq!(
            run.queues().len(),
            2,
            "an interrupted run leaves its queues"
        );
    }
    let ended = run.start().wait();
    run.check(&ended, 0, 0);
    let history = run.history();
    assert_eq!(history.runs.len() as u64, messages);
    let processes: BTreeSet<u64> = history.runs.iter().map(|run| run.pid).collect();
    assert_eq!(processes.len(), 3, "each has worked");
}

#[test]
fn a_run_on_a_classic_queue_goes_on_after_sigterm_without_loss_or_duplicate() {
    stopped_twice_by_sigterm("classic");
}

#[test]
fn a_run_on_a_quorum_queue_goes_on_after_sigterm_without_loss_or_duplicate() {
    stopped_twice_by_sigterm("quorum");
}

fn killed_twice(queue_type: &str) {
    let (messages, _) = counts();
    let run = LongRun::new("sigkill", queue_type, 20);
    for handled in [messages / 20, messages / 2] {
        let mut job = run.start();
        job.until(run.folder.path(), "end", handled as usize);
        job.signal("KILL");
        let ended = job.wait();
        assert_eq!(
            (ended.status.code(), &*ended.output),
            (None, ""),
            "{ended:?}"
        );
    }
    let ended = run.start().wait();
    run.check(&ended, 2 * (MAX_IN_FLIGHT + UNCONFIRMED), 20);
    let deaths: BTreeSet<u64> = run.history().deaths.iter().map(|(pid, _)| *pid).collect();
    assert_eq!(deaths.len(), 2, "the deaths are on record");
}

#[test]
fn a_run_on_a_classic_queue_goes_on_after_sigkill_in_order_and_with_few_duplicates() {
    killed_twice("classic");
}

#[test]
fn a_run_on_a_quorum_queue_goes_on_after_sigkill_in_order_and_with_few_duplicates() {
    killed_twice("quorum");
}

// ---- a process that is stopped for longer than its connection lives

/// The machine pauses one process (SIGSTOP), the broker gives it up, another takes over, and then the first
/// one goes on as if nothing had happened.
#[test]
fn a_process_that_was_stopped_starts_nothing_stale_when_it_goes_on() {
    let rounds = match std::env::var_os("LANEWAY_SOAK") {
        Some(_) => 10,
        None => 1,
    };
    for _ in 0..rounds {
        for queue_type in ["classic", "quorum"] {
            stopped_and_continued(queue_type);
        }
    }
}

fn stopped_and_continued(queue_type: &str) {
    // At 10 ms each the half of the messages is left when all are published.
    let run = LongRun::with("sigstop", queue_type, 0, "20");
    let folder = run.folder.path();
    let (messages, _) = counts();
    let mut first = run.start();
    first.until(folder, "published", messages as usize);
    first.signal("STOP");
    run.until_no_consumer();
    let stopped = run.history();
    let id = u64::from(first.id());
    let of_first = |history: &History| -> Vec<HandlerRun> {
        let runs = history.runs.iter();
        runs.filter(|run| run.pid == id).cloned().collect()
    };
    let before = of_first(&stopped);
    let running: Vec<_> = before.iter().filter(|run| run.end.is_none()).collect();
    assert!((1..=16).contains(&running.len()), "{}", running.len());
    let left = messages as usize - stopped.successes();
    assert!(
        left > 1_000,
        "only {left} messages are left to be taken over"
    );

    let mut second = run.start();
    second.until(folder, "start", stopped.runs.len() + left / 4);
    first.signal("CONT");
    let ended = second.wait();
    first.signal("KILL");
    assert_eq!(first.wait().status.code(), None);

    let mut history = run.history();
    let after = of_first(&history);
    // Between its last look at the clock and the handler's first line a thread can be stopped too; there
    // are two in the way of a message.
    let stale = after.len() - before.len();
    assert!(
        stale <= 2,
        "{stale} handlers were started although the messages were another's"
    );
    let counted = history.count();
    assert_eq!(
        (counted.lost, counted.inversions),
        (0, 0),
        "{counted:?} {ended:?}"
    );
    assert!(counted.duplicates <= MAX_IN_FLIGHT, "{counted:?}");
    // What ran when it was stopped goes on, and may meet the other's runs. Nothing else may.
    let went_on: Vec<_> = running.iter().map(|run| (run.pid, run.start)).collect();
    history
        .runs
        .retain(|run| !went_on.contains(&(run.pid, run.start)));
    if stale == 0 {
        assert_eq!(history.count().overlaps, 0);
    }
    assert_eq!(run.queues(), Vec::<String>::new(), "everything is removed");
}
