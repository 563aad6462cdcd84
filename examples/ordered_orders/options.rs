//! The command line: raw in, valid out.

use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};

use crate::broker::{Kind, run_id};

/// Publishes order events and handles them: the events of one order strictly in order, different
/// orders in parallel. Ends with a summary that proves it.
#[derive(Debug, Clone, Parser)]
#[command(
    name = "ordered_orders",
    after_help = "\
Exit status: 0 if nothing was lost, no event overtook another of its order, no two ran at once, and
exactly the poison events were parked; 1 otherwise. After SIGTERM or Ctrl-C the run drains and ends
with 0 if that held so far and every running handler finished; a run on RabbitMQ can then be
continued, as standard error says."
)]
pub(crate) struct Options {
    /// How many events
    #[arg(long, value_name = "N", default_value_t = 50_000,
          value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    pub messages: u64,

    /// How many orders they belong to; events of one order have one ordering key
    #[arg(long, value_name = "K", default_value_t = 500,
          value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    pub keys: u64,

    /// How many handlers may run at once
    #[arg(long, value_name = "C", default_value_t = 16,
          value_parser = clap::value_parser!(u32).range(1..=65_535))]
    pub concurrency: u32,

    /// A handler takes a random time from 0 to this many milliseconds (the same in every run)
    #[arg(long, value_name = "MS", default_value_t = 2,
          value_parser = clap::value_parser!(u64).range(0..=10_000))]
    pub handler_ms: u64,

    /// How many of the events always fail, and must end in the parking queue
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub poison: u64,

    /// Use the RabbitMQ at this address, instead of the embedded broker
    #[arg(long, value_name = "URL")]
    pub amqp: Option<String>,

    /// The kind of the queues on RabbitMQ
    #[arg(
        long,
        value_name = "TYPE",
        default_value = "classic",
        requires = "amqp"
    )]
    pub queue_type: Kind,

    /// Name of the run, and of its queues. An interrupted run of this name is continued
    #[arg(long, value_name = "ID", requires = "amqp", value_parser = run_id)]
    pub run: Option<String>,

    /// Keep the files of the order ledger in this folder
    #[arg(long, value_name = "DIR")]
    pub ledger: Option<PathBuf>,

    /// Write the summary to standard output as one JSON object
    #[arg(long)]
    pub json: bool,
}

impl Options {
    /// Reads the command line; ends the process with a message if it is wrong.
    pub(crate) fn read() -> Self {
        let options = Self::parse();
        let wrong = if options.keys > options.messages {
            format!(
                "--keys {} is more than --messages {}: an order without events proves nothing",
                options.keys, options.messages
            )
        } else if options.poison > options.messages {
            format!(
                "--poison {} is more than --messages {}",
                options.poison, options.messages
            )
        } else {
            return options;
        };
        Self::command()
            .error(ErrorKind::ValueValidation, wrong)
            .exit()
    }
}
