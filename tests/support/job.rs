//! The main job, `examples/ordered_orders`, or another example as a process of its own, and what its
//! ledger's files say.
//!
//! [`History`] reads the files by itself and counts naively: it shares nothing with `OrderLedger`.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test file uses its own part of it"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(180);

/// Where cargo has built the example: it does so before it runs integration tests.
fn program(example: &str) -> PathBuf {
    let own = std::env::current_exe().expect("a test has a path");
    // target/<profile>/deps/<test> and target/<profile>/examples/<example>.
    let profile = own.ancestors().nth(2).expect("a test is in a folder");
    let program = profile
        .join("examples")
        .join(format!("{example}{}", std::env::consts::EXE_SUFFIX));
    assert!(
        program.exists(),
        "{} is missing; `cargo test` builds it, and so does `cargo build --example {example}` \
         (with --release, if the test is run with it)",
        program.display()
    );
    program
}

/// A process: a run of the example, or of another program. Killed when dropped.
pub struct Job {
    child: Option<Child>,
    id: u32,
}

/// How a run ended.
#[derive(Debug)]
pub struct Ended {
    /// Its exit status.
    pub status: ExitStatus,
    /// Standard output.
    pub output: String,
    /// Standard error.
    pub errors: String,
}

impl Job {
    /// Starts the main job with these arguments.
    pub fn start<S: AsRef<str>>(arguments: &[S]) -> Self {
        Self::of("ordered_orders", arguments)
    }

    /// Starts an example with these arguments.
    pub fn of<S: AsRef<str>>(example: &str, arguments: &[S]) -> Self {
        let mut command = Command::new(program(example));
        command.args(arguments.iter().map(AsRef::as_ref));
        Self::running(command)
    }

    /// Starts any program that writes a ledger.
    pub fn running(mut command: Command) -> Self {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program can be started");
        Self {
            id: child.id(),
            child: Some(child),
        }
    }

    /// The id of its process.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Sends it a signal ("TERM", "KILL", "STOP", "CONT").
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill")
            .args([format!("-{name}"), self.id.to_string()])
            .status()
            .expect("the command kill is there");
        assert!(status.success(), "the process is there");
    }

    /// Waits until it has ended. What it writes meanwhile fits into the pipes: a line every few seconds.
    pub fn wait(mut self) -> Ended {
        let mut child = self.child.take().expect("it is taken only here");
        let began = Instant::now();
        while child.try_wait().expect("it is ours").is_none() {
            if began.elapsed() > PATIENCE {
                let _ = child.kill();
                let ended = Self::read(child);
                panic!("the process did not end within {PATIENCE:?}: {ended:?}");
            }
            // The standard library cannot wait for a process with a bound.
            std::thread::sleep(Duration::from_millis(10));
        }
        Self::read(child)
    }

    fn read(child: Child) -> Ended {
        let output = child.wait_with_output().expect("it is ours");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
        Ended {
            status: output.status,
            output: text(output.stdout),
            errors: text(output.stderr),
        }
    }

    /// Whether it has not ended yet.
    pub fn is_running(&mut self) -> bool {
        let child = self.child.as_mut().expect("not waited for yet");
        child.try_wait().expect("it is ours").is_none()
    }

    /// Waits until the ledger's files have `count` lines of this event ("start", "end", "published",
    /// "parked"). The process must not end before.
    pub fn until(&mut self, folder: &Path, event: &str, count: usize) {
        let began = Instant::now();
        let mut lines = Lines::of(folder, event);
        // Files tell nobody when they grow; looking again is cheap.
        while lines.count() < count {
            let so_far = lines.count;
            assert!(
                began.elapsed() < PATIENCE,
                "waited in vain for {count} lines of {event}; there are {so_far}"
            );
            if !self.is_running() {
                let child = self.child.take().expect("it was there just now");
                let ended = Self::read(child);
                panic!("it ended before {count} lines of {event}, at {so_far}: {ended:?}");
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Counts the lines of one event in files that grow.
struct Lines {
    folder: PathBuf,
    mark: String,
    read: BTreeMap<PathBuf, u64>,
    count: usize,
}

impl Lines {
    fn of(folder: &Path, event: &str) -> Self {
        Self {
            folder: folder.to_owned(),
            mark: format!("\"ev\":\"{event}\""),
            read: BTreeMap::new(),
            count: 0,
        }
    }

    fn count(&mut self) -> usize {
        for path in files(&self.folder) {
            let mut file = fs::File::open(&path).expect("readable");
            let read = self.read.entry(path).or_default();
            file.seek(SeekFrom::Start(*read)).expect("a file");
            let mut text = String::new();
            file.read_to_string(&mut text).expect("text");
            let whole = text.rfind('\n').map_or(0, |end| end + 1);
            *read += whole as u64;
            self.count += text[..whole]
                .lines()
                .filter(|line| line.contains(&self.mark))
                .count();
        }
        self.count
    }
}

/// The files of a ledger; none if the folder is not there yet.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries
        .map(|entry| entry.expect("a file of the folder").path())
        .filter(|path| path.extension().is_some_and(|end| end == "jsonl"))
        .collect()
}

impl Drop for Job {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Ended {
    /// The one JSON object on standard output.
    pub fn object(&self) -> serde_json::Map<String, Value> {
        assert_eq!(self.output.lines().count(), 1, "{self:?}");
        match serde_json::from_str(&self.output) {
            Ok(Value::Object(object)) => object,
            other => panic!("{other:?}: {self:?}"),
        }
    }

    /// A number of the object.
    pub fn number(&self, field: &str) -> u64 {
        let object = self.object();
        let number = object.get(field).and_then(Value::as_u64);
        number.unwrap_or_else(|| panic!("no number `{field}`: {self:?}"))
    }
}

/// One run of a handler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HandlerRun {
    /// The message: key and sequence.
    pub message: (String, u64),
    /// The process.
    pub pid: u64,
    /// Which attempt.
    pub attempt: u64,
    /// When it started, in nanoseconds.
    pub start: u64,
    /// When it ended, or its process died.
    pub end: Option<u64>,
    /// Whether it succeeded.
    pub ok: bool,
}

/// Everything that the files of a ledger say.
#[derive(Debug, Default)]
pub struct History {
    /// Published messages.
    pub published: BTreeSet<(String, u64)>,
    /// Parked messages.
    pub parked: BTreeSet<(String, u64)>,
    /// Runs, in the order of their files' lines.
    pub runs: Vec<HandlerRun>,
    /// Deaths: process and time.
    pub deaths: Vec<(u64, u64)>,
}

/// What the definitions of the order ledger come to, counted the long way.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Published, and neither handled nor parked.
    pub lost: u64,
    /// Successful runs beyond the first of a message.
    pub duplicates: u64,
    /// First successes, in the order of their ends, below an earlier one of their key.
    pub inversions: u64,
    /// Pairs of runs of a key at the same time.
    pub overlaps: u64,
    /// Parked messages.
    pub parked: u64,
    /// All runs.
    pub attempts: u64,
}

impl History {
    /// Reads a folder.
    pub fn read(folder: &Path) -> Self {
        let mut history = Self::default();
        for path in files(folder) {
            let text = fs::read_to_string(&path).expect("readable");
            // What follows the last line's end is being written, or was when its process was killed.
            let whole = text.rfind('\n').map_or("", |end| &text[..end]);
            for line in whole.lines() {
                let line: Value = serde_json::from_str(line).expect("a line is an object");
                history.add(&line);
            }
        }
        for run in &mut history.runs {
            if run.end.is_none() {
                // A death is recorded by each process that finds it; the files are in no order of time.
                let deaths = history.deaths.iter();
                run.end = deaths
                    .filter(|(pid, t)| *pid == run.pid && *t >= run.start)
                    .map(|&(_, t)| t)
                    .min();
            }
        }
        history
    }

    fn add(&mut self, line: &Value) {
        let number = |name: &str| line[name].as_u64().unwrap_or_else(|| panic!("{line}"));
        let message = || {
            let key = line["key"].as_str().unwrap_or_else(|| panic!("{line}"));
            (key.to_owned(), number("seq"))
        };
        match line["ev"].as_str() {
            Some("published") => {
                self.published.insert(message());
            }
            Some("parked") => {
                self.parked.insert(message());
            }
            Some("start") => self.runs.push(HandlerRun {
                message: message(),
                pid: number("pid"),
                attempt: number("attempt"),
                start: number("t"),
                end: None,
                ok: false,
            }),
            Some("end") => {
                let (message, pid) = (message(), number("pid"));
                let attempt = number("attempt");
                let run = self.runs.iter_mut().rev().find(|run| {
                    run.end.is_none()
                        && run.message == message
                        && run.pid == pid
                        && run.attempt == attempt
                });
                let run = run.unwrap_or_else(|| panic!("an end without a start: {line}"));
                run.end = Some(number("t"));
                run.ok = line["ok"].as_bool().unwrap_or_else(|| panic!("{line}"));
            }
            Some("died") => self.deaths.push((number("pid"), number("t"))),
            other => panic!("{other:?}: {line}"),
        }
    }

    /// Successful runs.
    pub fn successes(&self) -> usize {
        self.runs.iter().filter(|run| run.ok).count()
    }

    /// The figures.
    pub fn count(&self) -> Counted {
        let mut ended: Vec<_> = self.runs.iter().filter(|run| run.ok).collect();
        ended.sort_by_key(|run| run.end);
        let (mut duplicates, mut inversions) = (0, 0);
        let mut handled = BTreeSet::new();
        let mut highest = BTreeMap::new();
        for run in ended {
            let (key, seq) = &run.message;
            if !handled.insert(&run.message) {
                duplicates += 1;
                continue;
            }
            let highest = highest.entry(key).or_insert(0);
            if seq < highest {
                inversions += 1;
            }
            *highest = (*highest).max(*seq);
        }
        let mut of_key: BTreeMap<&str, Vec<&HandlerRun>> = BTreeMap::new();
        for run in &self.runs {
            of_key.entry(&run.message.0).or_default().push(run);
        }
        let mut overlaps = 0;
        for runs in of_key.values() {
            for (number, one) in runs.iter().enumerate() {
                for other in &runs[number + 1..] {
                    let before =
                        |a: &HandlerRun, b: &HandlerRun| a.end.is_some_and(|end| end <= b.start);
                    if !before(one, other) && !before(other, one) {
                        overlaps += 1;
                    }
                }
            }
        }
        let lost = self
            .published
            .iter()
            .filter(|message| !handled.contains(message) && !self.parked.contains(*message));
        Counted {
            lost: lost.count() as u64,
            duplicates,
            inversions,
            overlaps,
            parked: self.parked.len() as u64,
            attempts: self.runs.len() as u64,
        }
    }
}
