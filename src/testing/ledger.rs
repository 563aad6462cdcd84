//! The order ledger: what ran, when, and whether anything was lost, overtaken or overlapped.
//!
//! Owns the record of publishes, handler runs and outcomes, in memory or as one file per process.
//! Promises that a line handed over is in the kernel before the call returns, so a SIGKILL loses
//! at most the line being written; and that an event that cannot be recorded is never silently
//! dropped. Does not judge while recording: the definitions live in [`figures`], the form of the
//! files in [`event`]. Does not survive a loss of power: nothing is synced to the disk.
//!
//! ```text
//! publisher ──published──┐                                    ┌─> ledger-4711-0.jsonl ─┐
//! handler   ──run / end──┼─> OrderLedger (one per process) ───┤   ledger-4712-0.jsonl ─┼─> Figures
//! killer    ──died───────┘                                    └─> memory ──────────────┘
//! ```

mod clock;
mod count;
mod event;
mod examples;
mod figures;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use event::{Event, History, Kind, Line};
pub use figures::Figures;

/// Records what happened to every message, and counts what went wrong.
///
/// A test calls [`published`](Self::published) for each message it has sent, wraps the body of its
/// handler in a [`run`](Self::run), notes parked messages, and in the end asks for the
/// [`figures`](Self::figures). Cloning is cheap; clones share one record and work from any thread.
///
/// ```
/// use laneway::testing::OrderLedger;
///
/// let ledger = OrderLedger::in_memory();
/// ledger.published("account-7", 1);
/// let run = ledger.run("account-7", 1, 1);
/// run.end(true);
///
/// let figures = ledger.figures()?;
/// figures.assert_ordered();
/// assert_eq!((figures.handled, figures.duplicates), (1, 0));
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// # Several processes
///
/// Processes that share a folder each open it with [`in_folder`](Self::in_folder) and write a file
/// of their own; [`merge`](Self::merge) reads every `*.jsonl` file of the folder. A line is one
/// event, with the fields that apply:
///
/// ```json
/// {"ev":"start","t":81364722541,"pid":4711,"key":"account-7","seq":1,"attempt":1}
/// ```
///
/// | `ev` | fields besides `t` and `pid` | means |
/// |---|---|---|
/// | `published` | `key`, `seq` | the source has the message |
/// | `start` | `key`, `seq`, `attempt` | the handler is about to run |
/// | `end` | `key`, `seq`, `attempt`, `ok` | that run returned, or its future was dropped (`ok` false) |
/// | `parked`, `discarded`, `skipped` | `key`, `seq` | the message ended without effect |
/// | `died` | | the process `pid` is dead; written by whoever killed or reaped it |
///
/// `t` is `CLOCK_MONOTONIC` in nanoseconds, one clock for all processes of a machine; files of
/// several machines cannot be merged. An `end` belongs to the earliest unended `start` with the
/// same `pid`, `key`, `seq` and `attempt` (of a process that has not died in between, if there is
/// one). The last line of a file may be torn, because its writer was killed; torn lines are
/// counted in [`Figures::torn`]. A torn line elsewhere is an error. Unknown fields are ignored.
///
/// The files hold the ordering keys in plain text: the ledger is a tool for tests and benchmarks,
/// not for production data.
///
/// # Panics
///
/// Recording panics when the line cannot be written (a full disk): a ledger with holes would prove
/// nothing. While the thread is already panicking the failure is kept for
/// [`figures`](Self::figures), which then refuses to count.
#[derive(Debug, Clone)]
pub struct OrderLedger {
    sink: Arc<Sink>,
}

#[derive(Debug)]
enum Sink {
    Memory(Mutex<History>),
    Folder {
        folder: PathBuf,
        file: Mutex<Appender>,
    },
}

/// The file of this process. One `write` for each line: what was written survives a SIGKILL.
#[derive(Debug)]
struct Appender {
    file: File,
    path: PathBuf,
    /// Reused, so that recording does not allocate.
    line: Vec<u8>,
    failure: Option<String>,
}

impl OrderLedger {
    /// A ledger of this process alone. About 32 bytes for each event.
    pub fn in_memory() -> Self {
        Self {
            sink: Arc::new(Sink::Memory(Mutex::default())),
        }
    }

    /// A ledger that this process shares with others through a folder, which is created if
    /// missing. Writes to a new file `ledger-<pid>-<n>.jsonl`, never to an existing one.
    ///
    /// # Errors
    /// When the folder or the file cannot be created, and on systems without a monotonic clock
    /// that all processes share.
    pub fn in_folder(folder: impl AsRef<Path>) -> io::Result<Self> {
        clock::shared_by_processes()?;
        let folder = folder.as_ref().to_owned();
        fs::create_dir_all(&folder)?;
        let pid = std::process::id();
        // A process may open the folder twice, and the system may give a dead process's id to a
        // new one: the first free number is taken, so that no two writers share a file.
        for n in 0_u32.. {
            let path = folder.join(format!("ledger-{pid}-{n}.jsonl"));
            let file = match OpenOptions::new().append(true).create_new(true).open(&path) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(error),
            };
            let file = Mutex::new(Appender {
                file,
                path,
                line: Vec::with_capacity(256),
                failure: None,
            });
            return Ok(Self {
                sink: Arc::new(Sink::Folder { folder, file }),
            });
        }
        Err(io::Error::other("no free file number is left"))
    }

    /// The figures of everything recorded in a folder so far, by whatever processes.
    ///
    /// # Errors
    /// When a file cannot be read; when a line is no event (the error names file and line); when an
    /// `end` has no `start`.
    pub fn merge(folder: impl AsRef<Path>) -> io::Result<Figures> {
        count::figures(History::read(folder.as_ref())?)
    }

    /// Records that the source has the message. Call it when the publish is confirmed: a message
    /// recorded earlier counts as lost when the publisher dies in between.
    pub fn published(&self, key: &str, seq: u64) {
        self.record(Kind::Published, clock::now(), key, seq, 0);
    }

    /// Records that attempt number `attempt` (from 1) of the message starts now.
    ///
    /// Dropping the returned [`Run`] without [`end`](Run::end) records a failed run that ended
    /// then: an attempt that panicked, was aborted or cancelled ended when its future was dropped.
    pub fn run(&self, key: &str, seq: u64, attempt: u32) -> Run {
        self.record(Kind::Start, clock::now(), key, seq, attempt);
        Run {
            ledger: self.clone(),
            key: key.into(),
            seq,
            attempt,
            ended: false,
        }
    }

    /// Records that the message was moved durably to the parking place.
    pub fn parked(&self, key: &str, seq: u64) {
        self.record(Kind::Parked, clock::now(), key, seq, 0);
    }

    /// Records that the message was given up without parking, because the endpoint says so.
    pub fn discarded(&self, key: &str, seq: u64) {
        self.record(Kind::Discarded, clock::now(), key, seq, 0);
    }

    /// Records that an operator skipped the message.
    pub fn skipped(&self, key: &str, seq: u64) {
        self.record(Kind::Skipped, clock::now(), key, seq, 0);
    }

    /// Records that a process is dead: its runs without an end ended now. Call it after the
    /// process was waited for, not after the signal was sent.
    pub fn died(&self, pid: u32) {
        let t = clock::now();
        match &*self.sink {
            Sink::Memory(history) => lock(history).deaths.push((pid, t)),
            Sink::Folder { file, .. } => lock(file).append(&Line::died(pid, t)),
        }
    }

    /// The figures of everything recorded so far; of a folder, by all its processes.
    ///
    /// # Errors
    /// As [`merge`](Self::merge), and when this process could not write a line.
    pub fn figures(&self) -> io::Result<Figures> {
        match &*self.sink {
            // A copy, so that sorting millions of events does not stop those who record.
            Sink::Memory(history) => {
                let history = lock(history).clone();
                count::figures(history)
            }
            Sink::Folder { folder, file } => {
                if let Some(failure) = &lock(file).failure {
                    return Err(io::Error::other(failure.clone()));
                }
                Self::merge(folder)
            }
        }
    }

    /// `t` comes in as an argument: it is taken before the lock, so that a wait for the lock
    /// neither shortens a run nor moves its end behind the start of the next one.
    fn record(&self, kind: Kind, t: u64, key: &str, seq: u64, attempt: u32) {
        match &*self.sink {
            Sink::Memory(history) => {
                let mut history = lock(history);
                let key = history.keys.number(key);
                history.events.push(Event {
                    t,
                    seq,
                    key,
                    pid: std::process::id(),
                    attempt,
                    kind,
                });
            }
            Sink::Folder { file, .. } => {
                lock(file).append(&Line::about(kind, t, key, seq, attempt));
            }
        }
    }
}

impl Appender {
    fn append(&mut self, line: &Line<'_>) {
        self.line.clear();
        let written = serde_json::to_writer(&mut self.line, line)
            .map_err(io::Error::from)
            .and_then(|()| {
                self.line.push(b'\n');
                self.file.write_all(&self.line)
            });
        if let Err(error) = written {
            let failure = format!(
                "order ledger: cannot write {}: {error}",
                self.path.display()
            );
            self.failure = Some(failure.clone());
            // A second panic would abort the process and hide the first one.
            if !std::thread::panicking() {
                panic!("{failure}");
            }
        }
    }
}

/// One run of a handler, from [`OrderLedger::run`] to its end.
#[must_use = "dropping it records a failed run"]
#[derive(Debug)]
pub struct Run {
    ledger: OrderLedger,
    key: Box<str>,
    seq: u64,
    attempt: u32,
    ended: bool,
}

impl Run {
    /// Records the end of the run and whether the handler succeeded.
    pub fn end(mut self, ok: bool) {
        self.finish(ok);
    }

    fn finish(&mut self, ok: bool) {
        // Before recording: if that panics, the drop that follows must not record a second end.
        self.ended = true;
        let kind = if ok { Kind::Succeeded } else { Kind::Failed };
        let t = clock::now();
        self.ledger
            .record(kind, t, &self.key, self.seq, self.attempt);
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if !self.ended {
            self.finish(false);
        }
    }
}

/// A panic while recording leaves nothing half-done that the next caller could see.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
