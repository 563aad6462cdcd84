//! What the files of the ledger say while they are being written: how much is handled, and when what moved.
//!
//! The judgement at the end is [`OrderLedger::merge`](laneway::testing::OrderLedger::merge)'s; this
//! is for what it does not tell.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

/// Reads the files of a folder, again and again.
pub(crate) struct History {
    folder: PathBuf,
    keys: u64,
    files: BTreeMap<PathBuf, Tail>,
    moments: Vec<Moment>,
    handled: Vec<bool>,
    handled_count: u64,
}

/// A file, and the beginning of the line that is not complete yet.
struct Tail {
    file: File,
    rest: Vec<u8>,
}

/// A line of a ledger's file, as far as it matters here; see `OrderLedger`.
#[derive(Deserialize)]
struct Line {
    ev: String,
    t: u64,
    #[serde(default)]
    key: String,
    #[serde(default)]
    seq: u64,
    ok: Option<bool>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Published,
    Started,
    Handled,
    /// A run ended without success.
    Ended,
}

#[derive(Debug, Clone, Copy)]
struct Moment {
    t: u64,
    order: u64,
    number: usize,
    what: What,
}

impl History {
    pub(crate) fn new(folder: &Path, messages: u64, keys: u64) -> Self {
        Self {
            folder: folder.to_owned(),
            keys,
            files: BTreeMap::new(),
            moments: Vec::new(),
            handled: vec![false; usize::try_from(messages).unwrap_or(usize::MAX)],
            handled_count: 0,
        }
    }

    /// How many messages have been handled, as far as was read.
    pub(crate) fn handled(&self) -> u64 {
        self.handled_count
    }

    /// Reads what was written since.
    pub(crate) fn read_on(&mut self) -> io::Result<()> {
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            if path.extension().is_some_and(|end| end == "jsonl") && !self.files.contains_key(&path)
            {
                let file = File::open(&path)?;
                let rest = Vec::new();
                self.files.insert(path, Tail { file, rest });
            }
        }
        let mut files = std::mem::take(&mut self.files);
        for tail in files.values_mut() {
            tail.file.read_to_end(&mut tail.rest)?;
            let whole = tail.rest.iter().rposition(|byte| *byte == b'\n');
            let lines: Vec<u8> = tail.rest.drain(..whole.map_or(0, |end| end + 1)).collect();
            for line in lines.split(|byte| *byte == b'\n').filter(|l| !l.is_empty()) {
                self.add(&serde_json::from_slice(line)?);
            }
        }
        self.files = files;
        Ok(())
    }

    fn add(&mut self, line: &Line) {
        let what = match (line.ev.as_str(), line.ok) {
            ("published", _) => What::Published,
            ("start", _) => What::Started,
            ("end", Some(true)) => What::Handled,
            ("end", _) => What::Ended,
            _ => return, // the death of a process
        };
        let Some((order, number)) = self.number(line) else {
            return; // not of this run
        };
        let handled = &mut self.handled[number];
        if what == What::Handled && !*handled {
            *handled = true;
            self.handled_count += 1;
        }
        self.moments.push(Moment {
            t: line.t,
            order,
            number,
            what,
        });
    }

    /// Events are numbered round robin over the orders.
    fn number(&self, line: &Line) -> Option<(u64, usize)> {
        let order: u64 = line.key.parse().ok()?;
        let number = line.seq.checked_sub(1)? * self.keys + order;
        let number = usize::try_from(number).ok()?;
        (number < self.handled.len()).then_some((order, number))
    }

    /// The longest time in which no run of a shard started or ended although a message of it was there.
    pub(crate) fn longest_pause(&self, shards: usize, shard_of: impl Fn(u64) -> usize) -> Duration {
        #[derive(Clone, Copy, PartialEq, Eq)]
        enum Known {
            Unknown,
            Waits,
            Handled,
        }
        let mut moments = self.moments.clone();
        moments.sort_by_key(|moment| moment.t);
        let mut known = vec![Known::Unknown; self.handled.len()];
        // For each shard: messages that wait or run, and when it last moved.
        let mut state = vec![(0_u64, 0_u64); shards];
        let mut longest = 0;
        for moment in moments {
            let (open, moved) = &mut state[shard_of(moment.order)];
            let known = &mut known[moment.number];
            if *open > 0 && moment.what != What::Published {
                longest = longest.max(moment.t.saturating_sub(*moved));
            }
            if *open == 0 || moment.what != What::Published {
                *moved = moment.t;
            }
            // That it was published may be written down after its first run has begun.
            if *known == Known::Unknown {
                *known = Known::Waits;
                *open += 1;
            }
            if moment.what == What::Handled && *known == Known::Waits {
                *known = Known::Handled;
                *open -= 1;
            }
        }
        Duration::from_nanos(longest)
    }
}
