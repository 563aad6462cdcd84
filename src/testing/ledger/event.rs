//! What is recorded: events, the lines they are written as, and a history read back.
//!
//! Owns the form of the files. Promises that a line that is no event is reported with its file and
//! line, except for a torn last line, which is counted. Does not judge whether a history is right.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Published,
    Start,
    Succeeded,
    Failed,
    Parked,
    Discarded,
    Skipped,
}

/// One event about one message. Kept small (32 bytes): soak tests record millions.
#[derive(Debug, Clone, Copy)]
pub(super) struct Event {
    pub(super) t: u64,
    pub(super) seq: u64,
    /// Number of the key in [`Names`].
    pub(super) key: u32,
    pub(super) pid: u32,
    /// 0 where there is none.
    pub(super) attempt: u32,
    pub(super) kind: Kind,
}

/// Every key once.
#[derive(Debug, Clone, Default)]
pub(super) struct Names {
    numbers: HashMap<Arc<str>, u32>,
    names: Vec<Arc<str>>,
}

impl Names {
    pub(super) fn number(&mut self, name: &str) -> u32 {
        if let Some(number) = self.numbers.get(name) {
            return *number;
        }
        let number = u32::try_from(self.names.len())
            .expect("cannot fail because four billion keys do not fit into memory");
        let name: Arc<str> = name.into();
        self.names.push(Arc::clone(&name));
        self.numbers.insert(name, number);
        number
    }

    pub(super) fn name(&self, number: u32) -> &str {
        &self.names[number as usize]
    }
}

/// Everything recorded, in the order of recording within each process.
#[derive(Debug, Clone, Default)]
pub(super) struct History {
    pub(super) keys: Names,
    pub(super) events: Vec<Event>,
    /// Process and time.
    pub(super) deaths: Vec<(u32, u64)>,
    /// Last lines that were cut off.
    pub(super) torn: u64,
}

/// An event as a line of JSON.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Line<'a> {
    ev: Name,
    t: u64,
    pid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seq: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    attempt: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ok: Option<bool>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Name {
    Published,
    Start,
    End,
    Parked,
    Discarded,
    Skipped,
    Died,
}

impl<'a> Line<'a> {
    /// An event of this process about one message. Only runs have an attempt.
    pub(super) fn about(kind: Kind, t: u64, key: &'a str, seq: u64, attempt: u32) -> Self {
        let (ev, ok) = match kind {
            Kind::Published => (Name::Published, None),
            Kind::Start => (Name::Start, None),
            Kind::Succeeded => (Name::End, Some(true)),
            Kind::Failed => (Name::End, Some(false)),
            Kind::Parked => (Name::Parked, None),
            Kind::Discarded => (Name::Discarded, None),
            Kind::Skipped => (Name::Skipped, None),
        };
        let is_run = matches!(ev, Name::Start | Name::End);
        Self {
            ev,
            t,
            pid: std::process::id(),
            key: Some(Cow::Borrowed(key)),
            seq: Some(seq),
            attempt: is_run.then_some(attempt),
            ok,
        }
    }

    /// The death of a process, usually another one.
    pub(super) fn died(pid: u32, t: u64) -> Self {
        Self {
            ev: Name::Died,
            t,
            pid,
            key: None,
            seq: None,
            attempt: None,
            ok: None,
        }
    }
}

impl History {
    /// Reads every `*.jsonl` file of a folder.
    pub(super) fn read(folder: &Path) -> io::Result<Self> {
        let mut paths = Vec::new();
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.extension().is_some_and(|end| end == "jsonl") && path.is_file() {
                paths.push(path);
            }
        }
        // The order of a directory is nobody's: events at the same nanosecond keep file order.
        paths.sort();
        let mut history = Self::default();
        for path in paths {
            history.read_file(&path).map_err(|error| {
                io::Error::new(error.kind(), format!("{}:{error}", path.display()))
            })?;
        }
        Ok(history)
    }

    /// Errors begin with the number of the line.
    fn read_file(&mut self, path: &Path) -> io::Result<()> {
        let refuse = |number: u64, why: &dyn std::fmt::Display| {
            io::Error::new(io::ErrorKind::InvalidData, format!("{number}: {why}"))
        };
        let mut reader = BufReader::with_capacity(1 << 16, File::open(path)?);
        let mut line = Vec::new();
        for number in 1.. {
            line.clear();
            if reader.read_until(b'\n', &mut line)? == 0 {
                break;
            }
            let text = line.trim_ascii();
            if text.is_empty() {
                continue;
            }
            match serde_json::from_slice::<Line<'_>>(text) {
                Ok(event) => self.add(&event).map_err(|why| refuse(number, &why))?,
                Err(error) if !error.is_eof() => return Err(refuse(number, &error)),
                // Cut off. Its writer was killed, or is about to write the rest.
                Err(_) if reader.fill_buf()?.is_empty() => self.torn += 1,
                Err(error) => {
                    return Err(refuse(number, &format_args!("torn line: {error}")));
                }
            }
        }
        Ok(())
    }

    fn add(&mut self, line: &Line<'_>) -> Result<(), &'static str> {
        let kind = match (line.ev, line.ok) {
            (Name::Died, _) => {
                self.deaths.push((line.pid, line.t));
                return Ok(());
            }
            (Name::End, Some(true)) => Kind::Succeeded,
            (Name::End, Some(false)) => Kind::Failed,
            (Name::End, None) => return Err("an end needs ok"),
            (Name::Published, _) => Kind::Published,
            (Name::Start, _) => Kind::Start,
            (Name::Parked, _) => Kind::Parked,
            (Name::Discarded, _) => Kind::Discarded,
            (Name::Skipped, _) => Kind::Skipped,
        };
        let attempt = match kind {
            Kind::Start | Kind::Succeeded | Kind::Failed => {
                line.attempt.ok_or("a run needs attempt")?
            }
            _ => 0,
        };
        let key = line.key.as_deref().ok_or("an event needs key")?;
        self.events.push(Event {
            t: line.t,
            seq: line.seq.ok_or("an event needs seq")?,
            key: self.keys.number(key),
            pid: line.pid,
            attempt,
            kind,
        });
        Ok(())
    }
}
