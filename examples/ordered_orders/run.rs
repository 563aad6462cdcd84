//! A run that several processes work on, one after the other: its name, its folder, what is done.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use laneway::testing::OrderLedger;
use serde::{Deserialize, Serialize};

use crate::broker::{Kind, fresh_run_id};
use crate::options::Options;
use crate::work::OrderEvent;

/// What earlier processes of the run have done, as their ledgers say.
#[derive(Default)]
pub(crate) struct Earlier {
    pub handled: Vec<OrderEvent>,
    pub parked: Vec<OrderEvent>,
    /// For each order: its last event that is known to be published.
    pub published: Vec<u64>,
    /// Events that ran although their publisher died before it could write that they were published.
    pub unrecorded: Vec<OrderEvent>,
    /// Processes that left files.
    pub pids: BTreeSet<u32>,
}

/// This process's part of a run.
pub(crate) struct Run {
    pub id: String,
    pub ledger: OrderLedger,
    pub earlier: Earlier,
    /// Where the ledger's files are; `None` for a ledger in memory.
    pub folder: Option<PathBuf>,
    /// Whether the folder goes when the run is complete.
    temporary: bool,
}

/// What must be the same in every process of a run. Kept in the folder.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Plan {
    run: Option<String>,
    messages: u64,
    keys: u64,
    poison: u64,
    queue_type: String,
}

impl Run {
    /// Begins a run, or continues the one of this name.
    pub(crate) fn open(options: &Options) -> Result<Self, String> {
        let id = options.run.clone().unwrap_or_else(fresh_run_id);
        // On RabbitMQ the messages outlive this process; so does the ledger, to continue with.
        let folder = match (&options.ledger, &options.amqp) {
            (Some(folder), _) => Some(folder.clone()),
            (None, Some(_)) => Some(std::env::temp_dir().join(format!("ordered-orders-{id}"))),
            (None, None) => None,
        };
        let Some(folder) = folder else {
            return Ok(Self {
                id,
                ledger: OrderLedger::in_memory(),
                earlier: Earlier::none(options),
                folder: None,
                temporary: false,
            });
        };
        let cannot = |error: io::Error| format!("--ledger {}: {error}", folder.display());
        let earlier = check_plan(&folder, &id, options)
            .and_then(|()| Earlier::read(&folder, options).map_err(cannot))?;
        let ledger = OrderLedger::in_folder(&folder).map_err(cannot)?;
        // Whoever worked on this run before is gone: what it left running ended at the latest now.
        for pid in &earlier.pids {
            if !Path::new(&format!("/proc/{pid}")).exists() {
                ledger.died(*pid);
            }
        }
        for event in &earlier.unrecorded {
            ledger.published(&event.order.to_string(), event.seq);
        }
        Ok(Self {
            id,
            ledger,
            earlier,
            temporary: options.ledger.is_none(),
            folder: Some(folder),
        })
    }

    /// The arguments that continue it.
    pub(crate) fn to_continue(&self, options: &Options) -> String {
        let ledger = match (&options.ledger, &self.folder) {
            (Some(_), Some(folder)) => format!(" --ledger {}", folder.display()),
            _ => String::new(), // found again by the run's name
        };
        format!("--run {}{ledger}", self.id)
    }

    /// Removes what nobody needs when the run could not start: a ledger that nobody asked to keep, unless an
    /// earlier process wrote to it.
    pub(crate) fn remove_unused(&self) {
        if self.earlier.pids.is_empty() {
            self.remove_temporary();
        }
    }

    /// Removes a ledger that nobody asked to keep.
    pub(crate) fn remove_temporary(&self) {
        if let (true, Some(folder)) = (self.temporary, &self.folder)
            && let Err(error) = fs::remove_dir_all(folder)
        {
            eprintln!("cannot remove {}: {error}", folder.display());
        }
    }
}

/// Writes down what the run is, or compares it with what was written.
fn check_plan(folder: &Path, id: &str, options: &Options) -> Result<(), String> {
    let path = folder.join("run.json");
    let queue_type = match options.queue_type {
        Kind::Classic => "classic",
        Kind::Quorum => "quorum",
    };
    let plan = Plan {
        run: options.amqp.is_some().then(|| id.to_owned()),
        messages: options.messages,
        keys: options.keys,
        poison: options.poison,
        queue_type: queue_type.to_owned(),
    };
    let cannot = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    if !path.exists() {
        fs::create_dir_all(folder).map_err(|error| cannot(&error))?;
        let text = serde_json::to_string(&plan).map_err(|error| cannot(&error))?;
        return fs::write(&path, text + "\n").map_err(|error| cannot(&error));
    }
    let text = fs::read(&path).map_err(|error| cannot(&error))?;
    let written: Plan = serde_json::from_slice(&text).map_err(|error| cannot(&error))?;
    if options.run.is_none() {
        return Err(format!(
            "--ledger {}: holds the ledger of an earlier run; choose another folder{}",
            folder.display(),
            match written.run {
                Some(run) => format!(", or continue that run with --run {run}"),
                None => String::new(),
            }
        ));
    }
    if written != plan {
        return Err(format!(
            "--run {id}: was begun as {written:?}, which is not what is asked for now: {plan:?}"
        ));
    }
    Ok(())
}

/// A line of a ledger's file, as far as it matters here; see `OrderLedger`.
#[derive(Deserialize)]
struct Line {
    ev: String,
    pid: u32,
    #[serde(default)]
    key: String,
    #[serde(default)]
    seq: u64,
    ok: Option<bool>,
}

impl Earlier {
    fn none(options: &Options) -> Self {
        let orders = usize::try_from(options.keys).unwrap_or(usize::MAX);
        Self {
            published: vec![0; orders],
            ..Self::default()
        }
    }

    fn read(folder: &Path, options: &Options) -> io::Result<Self> {
        let mut earlier = Self::none(options);
        let mut recorded = earlier.published.clone();
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.extension().is_some_and(|end| end == "jsonl") {
                for line in BufReader::new(File::open(path)?).lines() {
                    // The last line of a process that was killed may be torn.
                    if let Ok(line) = serde_json::from_str::<Line>(&line?) {
                        earlier.add(&line, &mut recorded);
                    }
                }
            }
        }
        for (order, (&known, &recorded)) in (0..).zip(earlier.published.iter().zip(&recorded)) {
            let unrecorded = (recorded + 1..=known).map(|seq| OrderEvent { order, seq });
            earlier.unrecorded.extend(unrecorded);
        }
        Ok(earlier)
    }

    fn add(&mut self, line: &Line, recorded: &mut [u64]) {
        self.pids.insert(line.pid);
        let Ok(order) = line.key.parse::<u64>() else {
            return;
        };
        let index = usize::try_from(order).unwrap_or(usize::MAX);
        let (Some(known), Some(recorded)) =
            (self.published.get_mut(index), recorded.get_mut(index))
        else {
            return;
        };
        let seq = line.seq;
        // What ran or was parked was published. Events of an order are published one by one, so
        // the largest number tells them all.
        *known = seq.max(*known);
        match (line.ev.as_str(), line.ok) {
            ("published", _) => *recorded = seq.max(*recorded),
            ("end", Some(true)) => self.handled.push(OrderEvent { order, seq }),
            ("parked", _) => self.parked.push(OrderEvent { order, seq }),
            _ => {}
        }
    }
}
