//! The command line.

use clap::builder::PossibleValuesParser;
use clap::{Parser, ValueEnum};

use crate::database::Database;
use crate::subject::{QueueType, Subject};

/// The page that has the notes.
pub(crate) const MAIN_REPORT: &str = "benchmarks";

fn file_name(name: &str) -> Result<String, String> {
    let is_fine = |letter: char| letter.is_ascii_lowercase() || letter == '-';
    match !name.is_empty() && name.chars().all(is_fine) {
        true => Ok(name.to_owned()),
        false => Err("a name of small letters and `-`, without an ending".to_owned()),
    }
}

/// Measures Laneway beside consumers written by hand on the raw client and other libraries: same queue, same
/// messages, same handler, interleaved rounds in one run. Ratios are the result; absolute figures are this
/// machine's.
#[derive(Parser)]
pub(crate) struct Options {
    /// What is handled; all of them if none is named.
    #[arg(long, value_enum)]
    pub(crate) workload: Vec<Workload>,
    /// 10,000 messages, 3 rounds, classic queues, SQLite: ends within 15 minutes.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Kind of the queues.
    #[arg(long, value_enum)]
    queue_type: Option<QueueTypes>,
    /// The databases of W7 [both; with --quick sqlite].
    #[arg(long, value_enum)]
    database: Vec<Database>,
    /// Only these, by the name that the table shows; all if none is named. A ratio to one that does not run is
    /// missing.
    #[arg(long, value_parser = PossibleValuesParser::new(Subject::names()), conflicts_with = "report")]
    pub(crate) subject: Vec<String>,
    /// Rounds; the median counts [5; with --quick 3].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Messages per run [200,000; with --quick 10,000]. W5 has its own number; W7 uses fewer
    /// where it is slow.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1_000..=5_000_000))]
    messages: Option<u64>,
    /// Other libraries as well (needs the feature `peers`).
    #[arg(long)]
    pub(crate) peers: bool,
    /// One JSON object for each row to standard output, instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
    /// Writes a page and its chart to the folder docs: benchmarks.md, or with another name what does not fit
    /// into that one (`--report=benchmarks-peers`).
    #[arg(
        long,
        value_name = "NAME",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = MAIN_REPORT,
        value_parser = file_name
    )]
    pub(crate) report: Option<String>,
    /// The broker. Never printed.
    #[arg(
        long,
        env = "LANEWAY_AMQP_URL",
        hide_env_values = true,
        default_value = "amqp://guest:guest@127.0.0.1:5672"
    )]
    pub(crate) amqp: String,
    /// A PostgreSQL where W7 may create databases. Never printed.
    #[arg(
        long,
        env = "LANEWAY_POSTGRES_URL",
        hide_env_values = true,
        default_value = "postgres://postgres@127.0.0.1:5432/test"
    )]
    pub(crate) postgres: String,
}

/// The workloads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Workload {
    /// A handler that waits 1 ms, like one that does I/O: first a backlog, then 2,000 messages a second.
    W1,
    /// A handler that does nothing: the cost of the framework.
    W2,
    /// W1's handler with few busy keys and many quiet ones (Zipf, s = 1.0 and s = 1.2).
    W3,
    /// W1 with a message that always fails in one key of a hundred.
    W4,
    /// One key whose messages take 100 ms, between others that take 1 ms.
    W5,
    /// Durable queues: inserts, drains, and both at once.
    W7,
    /// No broker: the lanes alone.
    W10,
}

impl Workload {
    pub(crate) fn needs_broker(self) -> bool {
        !matches!(self, Self::W7 | Self::W10)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum QueueTypes {
    Classic,
    Quorum,
    Both,
}

impl Options {
    pub(crate) fn workloads(&self) -> Vec<Workload> {
        if self.workload.is_empty() {
            Workload::value_variants().to_vec()
        } else {
            self.workload.clone()
        }
    }

    pub(crate) fn queue_types(&self) -> Vec<QueueType> {
        let default = if self.quick {
            QueueTypes::Classic
        } else {
            QueueTypes::Both
        };
        match self.queue_type.unwrap_or(default) {
            QueueTypes::Classic => vec![QueueType::Classic],
            QueueTypes::Quorum => vec![QueueType::Quorum],
            QueueTypes::Both => vec![QueueType::Classic, QueueType::Quorum],
        }
    }

    pub(crate) fn databases(&self) -> Vec<Database> {
        match (self.database.as_slice(), self.quick) {
            ([], true) => vec![Database::Sqlite],
            ([], false) => Database::value_variants().to_vec(),
            (named, _) => named.to_vec(),
        }
    }

    pub(crate) fn measures(&self, subject: Subject) -> bool {
        self.subject.is_empty() || self.subject.iter().any(|name| name == subject.name())
    }

    pub(crate) fn needs_broker(&self) -> bool {
        self.workloads().into_iter().any(Workload::needs_broker)
    }

    pub(crate) fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.quick { 3 } else { 5 })
    }

    pub(crate) fn messages(&self) -> u64 {
        self.messages
            .unwrap_or(if self.quick { 10_000 } else { 200_000 })
    }
}
