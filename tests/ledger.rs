//! The order ledger, held to its definitions by a second implementation that shares nothing with
//! it: it reads the raw lines and compares everything with everything.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use fastrand::Rng;
use laneway::testing::{Figures, OrderLedger};
use serde_json::{Value, json};

// ---- The naive implementation ---------------------------------------------------------------

#[derive(Debug, PartialEq, Eq)]
struct Naive {
    published: usize,
    handled: usize,
    parked: usize,
    lost: usize,
    inversions: usize,
    overlaps: usize,
    duplicates: usize,
    attempts: usize,
    unended: usize,
}

impl From<&Figures> for Naive {
    fn from(figures: &Figures) -> Self {
        let number = |n: u64| usize::try_from(n).expect("small");
        Self {
            published: number(figures.published),
            handled: number(figures.handled),
            parked: number(figures.parked),
            lost: number(figures.lost),
            inversions: number(figures.inversions),
            overlaps: number(figures.overlaps),
            duplicates: number(figures.duplicates),
            attempts: number(figures.attempts),
            unended: number(figures.unended),
        }
    }
}

/// A (key, sequence).
type Message = (String, u64);

struct NaiveRun {
    message: Message,
    pid: u64,
    attempt: u64,
    start: u64,
    end: Option<u64>,
    ok: bool,
}

fn naive(folder: &Path) -> Naive {
    let mut lines: Vec<Value> = Vec::new();
    for entry in fs::read_dir(folder).expect("the folder") {
        let text = fs::read(entry.expect("an entry").path()).expect("a file");
        let mut of_file: Vec<&[u8]> = text.split(|byte| *byte == b'\n').collect();
        // What follows the last line break: nothing, or a torn line.
        of_file.pop();
        lines.extend(
            of_file
                .into_iter()
                .map(|line| serde_json::from_slice::<Value>(line).expect("a line of JSON")),
        );
    }
    let number = |line: &Value, field: &str| line[field].as_u64().expect("a number");
    let message = |line: &Value| -> Message {
        (
            line["key"].as_str().expect("a key").to_owned(),
            number(line, "seq"),
        )
    };
    lines.sort_by_key(|line| number(line, "t"));
    let of = |ev: &'static str| lines.iter().filter(move |line| line["ev"] == ev);
    let set = |ev| of(ev).map(message).collect::<BTreeSet<Message>>();
    let death = |pid: u64, from: u64| {
        of("died")
            .filter(|line| number(line, "pid") == pid)
            .map(|line| number(line, "t"))
            .filter(|t| *t >= from)
            .min()
    };

    let mut runs: Vec<NaiveRun> = Vec::new();
    for line in &lines {
        if line["ev"] == "start" {
            runs.push(NaiveRun {
                message: message(line),
                pid: number(line, "pid"),
                attempt: number(line, "attempt"),
                start: number(line, "t"),
                end: None,
                ok: false,
            });
        } else if line["ev"] == "end" {
            let t = number(line, "t");
            let candidates: Vec<usize> = (0..runs.len())
                .filter(|index| {
                    let run = &runs[*index];
                    run.end.is_none()
                        && run.message == message(line)
                        && run.pid == number(line, "pid")
                        && run.attempt == number(line, "attempt")
                })
                .collect();
            let same_life = candidates
                .iter()
                .find(|index| death(runs[**index].pid, runs[**index].start).is_none_or(|d| d >= t));
            let index = *same_life
                .or(candidates.first())
                .expect("a start before the end");
            runs[index].end = Some(t);
            runs[index].ok = line["ok"].as_bool().expect("ok");
        }
    }
    let mut unended = 0;
    for run in &mut runs {
        if run.end.is_none() {
            run.end = death(run.pid, run.start);
            unended += usize::from(run.end.is_none());
        }
    }

    let handled: BTreeSet<Message> = runs
        .iter()
        .filter(|run| run.ok)
        .map(|run| run.message.clone())
        .collect();
    let (published, parked) = (set("published"), set("parked"));
    let (discarded, skipped) = (set("discarded"), set("skipped"));
    let lost = published
        .iter()
        .filter(|message| {
            ![&handled, &parked, &discarded, &skipped]
                .iter()
                .any(|ended| ended.contains(message))
        })
        .count();

    let before = |a: Option<u64>, b: u64| a.is_none_or(|end| end > b);
    let mut overlaps = 0;
    for (index, a) in runs.iter().enumerate() {
        for b in &runs[..index] {
            let intersect = before(a.end, b.start) && before(b.end, a.start);
            overlaps += usize::from(a.message.0 == b.message.0 && intersect);
        }
    }

    let mut firsts: BTreeMap<&Message, (u64, u64, u64)> = BTreeMap::new();
    for run in runs.iter().filter(|run| run.ok) {
        let when = (run.end.expect("it succeeded"), run.start, run.message.1);
        let first = firsts.entry(&run.message).or_insert(when);
        *first = (*first).min(when);
    }
    let inversions = firsts
        .iter()
        .filter(|(message, when)| {
            firsts.iter().any(|(other, earlier)| {
                other.0 == message.0 && other.1 > message.1 && earlier < when
            })
        })
        .count();

    Naive {
        published: published.len(),
        handled: handled.len(),
        parked: parked.len(),
        lost,
        inversions,
        overlaps,
        duplicates: runs.iter().filter(|run| run.ok).count() - handled.len(),
        attempts: runs.len(),
        unended,
    }
}

// ---- Random histories -----------------------------------------------------------------------

const KEYS: [&str; 3] = ["a", "b\"\\\n", "ключ"];

/// Writes the files of a few processes that work, overlap, retry, die and come back.
fn write_random_history(rng: &mut Rng, folder: &Path) {
    let pids = rng.u32(1..4);
    let mut files: Vec<fs::File> = (0..pids)
        .map(|pid| fs::File::create(folder.join(format!("{pid}.jsonl"))).expect("a file"))
        .collect();
    let mut open: Vec<(u32, &str, u64, u32)> = Vec::new();
    let mut t = rng.u64(0..1 << 40);
    let mut write = |pid: u32, line: Value| {
        let file = &mut files[pid as usize];
        writeln!(file, "{line}").expect("a line");
    };
    for _ in 0..rng.u32(0..80) {
        // Often the same nanosecond: ties must be judged alike.
        t += rng.u64(0..3);
        let pid = rng.u32(0..pids);
        let key = KEYS[rng.usize(..KEYS.len())];
        let seq = rng.u64(0..5);
        match rng.u32(0..20) {
            0..5 => write(
                pid,
                json!({"ev": "published", "t": t, "pid": pid, "key": key, "seq": seq}),
            ),
            5..11 => {
                let attempt = rng.u32(1..3);
                open.push((pid, key, seq, attempt));
                write(
                    pid,
                    json!({"ev": "start", "t": t, "pid": pid, "key": key, "seq": seq, "attempt": attempt}),
                );
            }
            11..17 if !open.is_empty() => {
                let (pid, key, seq, attempt) = open.swap_remove(rng.usize(..open.len()));
                write(
                    pid,
                    json!({"ev": "end", "t": t, "pid": pid, "key": key, "seq": seq, "attempt": attempt,
                           "ok": rng.bool(), "extra": 1}),
                );
            }
            17 => {
                let ev = ["parked", "discarded", "skipped"][rng.usize(..3)];
                write(
                    pid,
                    json!({"ev": ev, "t": t, "pid": pid, "key": key, "seq": seq}),
                );
            }
            18 => {
                // After everything the process wrote itself.
                t += 1;
                open.retain(|run| run.0 != pid);
                write(rng.u32(0..pids), json!({"ev": "died", "t": t, "pid": pid}));
            }
            _ => {}
        }
    }
    for file in &mut files {
        if rng.u32(0..4) == 0 {
            write!(file, "{{\"ev\":\"start\",\"t\":{t},\"pi").expect("a torn line");
        }
    }
}

#[test]
fn random_histories_give_the_figures_of_the_naive_implementation() {
    let mut seen_worst = (0, 0, 0, 0);
    for seed in 0..600 {
        let folder = tempfile::tempdir().expect("a folder");
        write_random_history(&mut Rng::with_seed(seed), folder.path());
        let figures = OrderLedger::merge(folder.path()).expect("a history that can be read");
        assert_eq!(
            Naive::from(&figures),
            naive(folder.path()),
            "seed {seed}\n{figures}"
        );
        seen_worst.0 += figures.lost;
        seen_worst.1 += figures.inversions;
        seen_worst.2 += figures.overlaps;
        seen_worst.3 += figures.torn;
    }
    // Histories in which nothing goes wrong would compare nothing with nothing.
    let (lost, inversions, overlaps, torn) = seen_worst;
    assert!(lost > 100 && inversions > 100 && overlaps > 100 && torn > 100);
}

#[test]
fn a_ledger_in_memory_and_one_in_a_folder_record_the_same() {
    for seed in 0..20 {
        let folder = tempfile::tempdir().expect("a folder");
        let memory = OrderLedger::in_memory();
        let files = OrderLedger::in_folder(folder.path()).expect("a ledger");
        let mut rng = Rng::with_seed(seed);
        let mut open = Vec::new();
        for _ in 0..200 {
            let (key, seq) = (KEYS[rng.usize(..KEYS.len())], rng.u64(0..20));
            match rng.u32(0..8) {
                0 => [&memory, &files].map(|ledger| ledger.published(key, seq)),
                1 => [&memory, &files].map(|ledger| ledger.parked(key, seq)),
                2 => [&memory, &files].map(|ledger| ledger.discarded(key, seq)),
                3 => [&memory, &files].map(|ledger| ledger.skipped(key, seq)),
                4 | 5 => {
                    open.push([&memory, &files].map(|ledger| ledger.run(key, seq, 1)));
                    continue;
                }
                _ if !open.is_empty() => {
                    let ok = rng.bool();
                    let runs = open.swap_remove(rng.usize(..open.len()));
                    runs.map(|run| run.end(ok))
                }
                _ => continue,
            };
        }
        drop(open);
        let in_files = files.figures().expect("figures");
        let in_memory = memory.figures().expect("figures");
        assert_eq!(
            Naive::from(&in_files),
            Naive::from(&in_memory),
            "seed {seed}"
        );
        assert_eq!(Naive::from(&in_files), naive(folder.path()), "seed {seed}");
        assert_eq!(in_files.unended, 0);
    }
}

// ---- Promises of the recording side ---------------------------------------------------------

#[test]
fn threads_that_record_at_once_lose_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let ledgers = [
        OrderLedger::in_memory(),
        OrderLedger::in_folder(folder.path()).expect("a ledger"),
    ];
    for ledger in &ledgers {
        std::thread::scope(|scope| {
            for thread in 0..4 {
                scope.spawn(move || {
                    let key = format!("key-{thread}");
                    for seq in 0..1_000 {
                        ledger.published(&key, seq);
                        ledger.run(&key, seq, 1).end(true);
                    }
                });
            }
        });
        let figures = ledger.figures().expect("figures");
        figures.assert_ordered();
        assert_eq!((figures.published, figures.handled), (4_000, 4_000));
        assert!(figures.per_second().is_some());
        assert!(figures.to_string().contains("messages per second"));
    }
}

#[test]
fn a_run_that_is_dropped_is_a_failed_run_that_ended() {
    let ledger = OrderLedger::in_memory();
    ledger.published("a", 1);
    drop(ledger.run("a", 1, 1));
    let panicked = std::thread::spawn({
        let ledger = ledger.clone();
        move || {
            let _run = ledger.run("a", 1, 2);
            panic!("a handler panics");
        }
    });
    assert!(panicked.join().is_err());
    let figures = ledger.figures().expect("figures");
    assert_eq!((figures.attempts, figures.unended, figures.lost), (2, 0, 1));
    assert_eq!(figures.overlaps, 0);
}

#[test]
fn a_process_that_opens_a_folder_twice_writes_two_files() {
    let folder = tempfile::tempdir().expect("a folder");
    let first = OrderLedger::in_folder(folder.path()).expect("a ledger");
    let second = OrderLedger::in_folder(folder.path()).expect("a ledger");
    first.published("a", 1);
    second.run("a", 1, 1).end(true);
    assert_eq!(fs::read_dir(folder.path()).expect("the folder").count(), 2);
    let figures = first.figures().expect("figures");
    assert_eq!((figures.handled, figures.lost), (1, 0));
}

#[test]
fn a_torn_last_line_is_counted_and_a_torn_line_elsewhere_is_refused_by_file_and_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("worker.jsonl");
    let good = r#"{"ev":"published","t":1,"pid":1,"key":"a","seq":1}"#;
    // Cut off at every byte, also within a character.
    let long = r#"{"ev":"end","t":12,"pid":34,"key":"ключ","seq":5,"attempt":1,"ok":true}"#;
    for cut in 1..long.len() {
        let torn = [good.as_bytes(), b"\n", &long.as_bytes()[..cut]].concat();
        fs::write(&file, &torn).expect("a file");
        let figures = OrderLedger::merge(folder.path()).expect("a torn last line");
        assert_eq!((figures.torn, figures.published), (1, 1), "cut at {cut}");

        fs::write(&file, [&torn, &b"\n"[..], good.as_bytes(), b"\n"].concat()).expect("a file");
        let error = OrderLedger::merge(folder.path()).expect_err("torn elsewhere");
        assert!(
            error.to_string().contains("worker.jsonl:2: torn"),
            "{error}"
        );
    }
    for (bad, why) in [
        (r#"{"ev":"published","t":1,"pid":1,"seq":1}"#, "key"),
        (
            r#"{"ev":"start","t":1,"pid":1,"key":"a","seq":1}"#,
            "attempt",
        ),
        (
            r#"{"ev":"end","t":1,"pid":1,"key":"a","seq":1,"attempt":1}"#,
            "ok",
        ),
        (r#"{"ev":"finished","t":1,"pid":1}"#, "finished"),
        ("not JSON", "expected"),
    ] {
        fs::write(&file, format!("{good}\n\n{bad}")).expect("a file");
        let error = OrderLedger::merge(folder.path()).expect_err("no event");
        let text = error.to_string();
        assert!(
            text.contains("worker.jsonl:3:") && text.contains(why),
            "{error}"
        );
    }
}

// ---- Processes that are killed --------------------------------------------------------------

const CHILD_FOLDER: &str = "LANEWAY_TEST_LEDGER_FOLDER";
const CHILD_KEY: &str = "LANEWAY_TEST_LEDGER_KEY";

/// Not a promise but the other process: this test binary, started again by the test below.
/// Without the variable, as in an ordinary run of the tests, it has nothing to do.
#[test]
fn child_that_records_until_it_is_killed() {
    let Ok(folder) = std::env::var(CHILD_FOLDER) else {
        return;
    };
    let key = std::env::var(CHILD_KEY).expect("the parent sets both variables");
    let ledger = OrderLedger::in_folder(folder).expect("a ledger");
    // A handler that never comes back: its run is cut off by the death of the process.
    let _hung = ledger.run("shared", 1, 1);
    for seq in 1.. {
        ledger.published(&key, seq);
        ledger.run(&key, seq, 1).end(true);
        // What the parent has read is what the file must hold.
        println!("recorded {seq}");
    }
}

struct Killed {
    pid: u32,
    /// Messages of which the child said that they were recorded.
    recorded: u64,
}

fn start_child(folder: &Path, key: &str) -> Child {
    Command::new(std::env::current_exe().expect("this program"))
        .args([
            "--exact",
            "child_that_records_until_it_is_killed",
            "--nocapture",
        ])
        .env(CHILD_FOLDER, folder)
        .env(CHILD_KEY, key)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a child")
}

/// Lets it record at least `enough` messages, then kills it in the middle of its work.
fn kill_after(mut child: Child, enough: u64) -> Killed {
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let recorded = |line: String| line.strip_prefix("recorded ")?.parse::<u64>().ok();
    let mut last = 0;
    while last < enough {
        let line = lines.next().expect("the child lives").expect("text");
        last = recorded(line).unwrap_or(last);
    }
    // SIGKILL.
    child.kill().expect("a kill");
    for line in lines.map_while(Result::ok) {
        last = recorded(line).unwrap_or(last);
    }
    child.wait().expect("a dead child");
    Killed {
        pid: child.id(),
        recorded: last,
    }
}

#[test]
#[cfg(unix)]
fn the_files_of_killed_processes_still_merge() {
    let folder = tempfile::tempdir().expect("a folder");
    let ledger = OrderLedger::in_folder(folder.path()).expect("a ledger");
    ledger.published("shared", 1);
    let first = kill_after(start_child(folder.path(), "one"), 100);

    // Nobody has recorded the death yet: the hung run may still be going on.
    let alive = ledger.figures().expect("figures");
    assert!(alive.unended >= 1);
    ledger.died(first.pid);

    // The hung message is taken over by the next process, which is killed as well, then by us.
    let second = kill_after(start_child(folder.path(), "two"), 100);
    ledger.died(second.pid);
    ledger.run("shared", 1, 1).end(true);

    let figures = ledger.figures().expect("figures");
    assert_eq!(Naive::from(&figures), naive(folder.path()), "{figures}");
    assert_eq!((figures.unended, figures.overlaps), (0, 0), "{figures}");
    assert_eq!((figures.inversions, figures.duplicates), (0, 0));
    assert!(
        figures.handled > first.recorded + second.recorded,
        "{figures}"
    );
    // Each was killed within one message, at most.
    assert!(figures.lost <= 2, "{figures}");
    assert!(figures.handled <= first.recorded + second.recorded + 3);
}
