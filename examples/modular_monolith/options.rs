//! The command line: raw in, valid out.

use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};

use crate::life::SHARDS;
use crate::modules::QUEUES;
use crate::place::Place;

/// The file in the working folder.
const FILE: &str = "modular_monolith.db";
const SCHEMA: &str = "modular_monolith";

/// Places orders, ships and bills them: three modules of one program that talk through durable queues in the
/// program's own database. However it is killed, started again it goes on, and every effect is applied once.
#[derive(Debug, Clone, Parser)]
#[command(
    name = "modular_monolith",
    after_help = "\
An order is done when it has been shipped or that has become a dead letter, and the same of billing. A run
ends when so many orders are placed and done, whichever runs placed them. Of every 500 orders one cannot be
billed, and 1 in 25 fails once and is billed in its second attempt. Some orders are taken back before their
transaction commits: they never existed, and neither did their messages.

--json writes one object. All but the last three are counts over all runs on the database, from the
application's own tables and the dead letters:
  orders, shipped, billed
                   orders, and those that have the effect
  lost             effects that were neither applied nor became a dead letter, and do not wait
  duplicates_of_effects
                   effects and dead letters beyond one for each order and module
  inversions       effects that were applied after that of a later order of the same customer
  dead_letters     messages that were given up
  recovered        messages that were found unhandled at the start
  waiting          only of a run that did not finish: messages that still wait
  seconds          how long the run took

Exit status: 0 if lost, duplicates_of_effects and inversions are 0; 1 otherwise. After SIGTERM or Ctrl-C the
run drains and ends with the same. 137 (SIGKILL) after a crash: of this process, or of all nodes."
)]
pub(crate) struct Options {
    /// How many orders are to exist in the end
    #[arg(long, value_name = "N", default_value_t = 2_000,
          value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    pub orders: u64,

    /// The SQLite file [default: modular_monolith.db in the working folder]
    #[arg(long, value_name = "PATH")]
    pub sqlite: Option<PathBuf>,

    /// Use this PostgreSQL instead
    #[arg(long, value_name = "URL")]
    pub postgres: Option<String>,

    /// The PostgreSQL schema with all tables, created where it is missing [default: modular_monolith]
    #[arg(long, value_name = "NAME", value_parser = plain_name)]
    pub schema: Option<String>,

    /// Use a database of this run's own, and remove it in the end
    #[arg(long)]
    pub temporary: bool,

    /// Let so many processes of this program share the work; with PostgreSQL
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(SHARDS)))]
    pub nodes: Option<u32>,

    /// Kill this process (with --nodes each of them) with SIGKILL after so many handled messages of its own
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub crash_after: Option<u64>,

    /// Write the summary to standard output as one JSON object
    #[arg(long)]
    pub json: bool,

    /// Be one of the nodes; what to do comes by standard input
    #[arg(long, hide = true, exclusive = true)]
    pub node: bool,
}

/// It stands in statements as it is.
fn plain_name(text: &str) -> Result<String, String> {
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let begins_well = text.starts_with(|c: char| c.is_ascii_lowercase() || c == '_');
    if begins_well && text.len() <= 32 && text.chars().all(is_plain) {
        Ok(text.to_owned())
    } else {
        Err("use a plain name: lower-case letters, digits and underscores, at most 32".to_owned())
    }
}

impl Options {
    /// Reads the command line; ends the process with a message if it is wrong.
    pub(crate) fn read() -> Self {
        let options = Self::parse();
        if !options.node
            && let Err(wrong) = options.check()
        {
            Self::command()
                .error(ErrorKind::ValueValidation, wrong)
                .exit()
        }
        options
    }

    fn check(&self) -> Result<(), String> {
        let on_postgres = self.postgres.is_some();
        if on_postgres && self.sqlite.is_some() {
            return Err(
                "--sqlite and --postgres: there is one database; remove one of them".into(),
            );
        }
        if !on_postgres && self.schema.is_some() {
            return Err(
                "--schema: a SQLite file has none; add --postgres URL, or name a file with --sqlite PATH"
                    .into(),
            );
        }
        if !on_postgres && self.nodes.is_some() {
            return Err(
                "--nodes: a SQLite file belongs to one process; add --postgres URL, or remove --nodes"
                    .into(),
            );
        }
        if self.temporary && (self.sqlite.is_some() || self.schema.is_some()) {
            return Err(
                "--temporary: a database of this run's own has no name; remove it, or --sqlite and --schema"
                    .into(),
            );
        }
        if self.temporary && self.crash_after.is_some() {
            return Err(
                "--temporary: nobody could go on after --crash-after; remove one of them".into(),
            );
        }
        let messages = self.orders * QUEUES.len() as u64;
        if let Some(after) = self.crash_after
            && after >= messages
        {
            return Err(format!(
                "--crash-after {after}: --orders {} make {messages} messages, so that would never be; lower the one or raise the other",
                self.orders
            ));
        }
        Ok(())
    }

    /// Where the database is, unless it is temporary.
    pub(crate) fn place(&self) -> Place {
        match &self.postgres {
            None => Place::Sqlite {
                file: self.sqlite.clone().unwrap_or_else(|| FILE.into()),
            },
            Some(url) => Place::Postgres {
                url: url.clone(),
                schema: self.schema.clone().unwrap_or_else(|| SCHEMA.into()),
            },
        }
    }
}
