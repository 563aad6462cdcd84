//! The command line: raw in, valid out.

use std::path::PathBuf;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::broker::Kind;

/// How often a run is disturbed.
pub(crate) const DISTURBANCES: u64 = 10;

/// Starts instances of itself that share the work of one queue, publishes to them, and meanwhile disturbs
/// them. Ends with a summary of what their ledgers prove.
#[derive(Debug, Clone, Parser)]
#[command(
    name = "sharded_instances",
    after_help = "\
What is a disturbance (there are ten in a run, spread over the work):
  kill    a random instance is killed (SIGKILL), and another one started
  roll    an instance is asked to stop (SIGTERM), drains, and another one is started; one after the other
  close   the broker closes all connections, of all instances and of the publisher
  broker  the broker is stopped in order and started again (rabbitmqctl stop_app, start_app). It is not
          killed: a classic queue would forget acknowledgements then, which is a limit of its own
While the broker closes connections or restarts, nothing is being published, so that a message that ran twice
is the consumers' doing. `close` and `broker` start a private RabbitMQ (the program rabbitmq-server is needed)
and use no other.

Exit status 0 if the guarantee held, else 1:
  lost, inversions    none, and nothing left in the queues
  overlaps            none; with kill, close and broker not more than --concurrency for each disturbance
  duplicates          none; with kill, close and broker not more than max_in_flight for each disturbance
  subscriptions       10 s after the last disturbance they differ by one at most between instances
With --affinity local order is kept within one instance. With several, none is promised: the summary
shows what became of it and why, and the exit status is 0 as long as nothing is lost.

max_pause_ms is the longest time in which no handler of a shard started or ended while the shard had work.
With --affinity hash only the broker knows the shard of a key, so all of them count as one there."
)]
pub(crate) struct Options {
    /// How many instances work at a time
    #[arg(long, value_name = "N", default_value_t = 3,
          value_parser = clap::value_parser!(u32).range(1..=32))]
    pub instances: u32,

    /// The RabbitMQ to use [default: what LANEWAY_AMQP_URL names, or the local one; with
    /// --chaos close and broker a private one]
    #[arg(long, value_name = "URL")]
    pub amqp: Option<String>,

    /// What keeps a key in order across the instances
    #[arg(long, value_name = "AFFINITY", default_value = "sharded")]
    pub affinity: Affinity,

    /// Into how many queues the work is divided, with --affinity sharded and hash [default: 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub shards: Option<u32>,

    /// How many events
    #[arg(long, value_name = "N", default_value_t = 60_000,
          value_parser = clap::value_parser!(u64).range(1_000..=1_000_000))]
    pub messages: u64,

    /// How many orders they belong to; events of one order have one ordering key [default: 1000; with
    /// --affinity local 50, so that its instances meet]
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub keys: Option<u64>,

    /// How many handlers may run at once in each instance
    #[arg(long, value_name = "C", default_value_t = 16,
          value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub concurrency: u32,

    /// The kind of the queues
    #[arg(long, value_name = "TYPE", default_value = "classic")]
    pub queue_type: Kind,

    /// What is done to the instances; see below
    #[arg(long, value_name = "CHAOS", default_value = "none")]
    pub chaos: Chaos,

    /// How long the work takes if nothing disturbs it: the time that a handler takes follows from this
    #[arg(long, value_name = "S", default_value_t = 45,
          value_parser = clap::value_parser!(u64).range(1..=3_600))]
    pub seconds: u64,

    /// Keep the files of the order ledger in this folder
    #[arg(long, value_name = "DIR")]
    pub ledger: Option<PathBuf>,

    /// Write the summary to standard output as one JSON object
    #[arg(long)]
    pub json: bool,

    /// Be one of the instances; what to do comes by standard input
    #[arg(long, hide = true, exclusive = true)]
    pub instance: bool,
}

/// What keeps a key in order across the instances.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Affinity {
    /// One queue with a single active consumer: one instance works, the others stand by.
    Sac,
    /// One queue in shards, which the instances share out among them.
    Sharded,
    /// Queues behind a consistent-hash exchange, shared out in the same way.
    Hash,
    /// Nothing: order within each instance alone.
    Local,
}

/// What is done to the instances.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Chaos {
    /// Nothing.
    None,
    /// Instances are killed.
    Kill,
    /// Instances are replaced, one after the other.
    Roll,
    /// The broker closes connections.
    Close,
    /// The broker restarts.
    Broker,
}

impl Chaos {
    /// Whether the broker itself is disturbed, which must then be nobody else's.
    pub(crate) fn needs_own_broker(self) -> bool {
        matches!(self, Self::Close | Self::Broker)
    }
}

impl Options {
    /// Reads the command line; ends the process with a message if it is wrong.
    pub(crate) fn read() -> Self {
        let options = Self::parse();
        if !options.instance
            && let Err(wrong) = options.check()
        {
            Self::command()
                .error(ErrorKind::ValueValidation, wrong)
                .exit()
        }
        options
    }

    fn check(&self) -> Result<(), String> {
        let one_queue = matches!(self.affinity, Affinity::Sac | Affinity::Local);
        if self.keys() > self.messages {
            return Err(format!(
                "--keys {} is more than --messages {}: an order without events proves nothing",
                self.keys(),
                self.messages
            ));
        }
        if one_queue && self.shards.is_some() {
            return Err(
                "--shards: this affinity has one queue; remove it, or use --affinity sharded or hash"
                    .to_owned(),
            );
        }
        if self.affinity == Affinity::Local && self.chaos != Chaos::None {
            return Err(
                "--affinity local promises no order once an instance is replaced or cut off, so there is nothing to measure; use it with --chaos none"
                    .to_owned(),
            );
        }
        if self.affinity == Affinity::Hash && self.chaos == Chaos::Broker {
            return Err(
                "--affinity hash: RabbitMQ may map keys to other queues after a restart, and order is not promised while that map changes; use --affinity sharded, or another --chaos"
                    .to_owned(),
            );
        }
        if self.chaos.needs_own_broker() && self.amqp.is_some() {
            return Err(
                "--amqp: this chaos disturbs the broker and everybody who uses it, so it starts one of its own; remove --amqp"
                    .to_owned(),
            );
        }
        // Running handlers must end within the drain's deadline.
        if self.handler_time() > Duration::from_secs(2) {
            return Err(format!(
                "--seconds {}: a handler would have to take {:?}; lower it, or raise --messages or --keys",
                self.seconds,
                self.handler_time()
            ));
        }
        Ok(())
    }

    /// The number of queues.
    pub(crate) fn shards(&self) -> u32 {
        match self.affinity {
            Affinity::Sac | Affinity::Local => 1,
            Affinity::Sharded | Affinity::Hash => self.shards.unwrap_or(8),
        }
    }

    /// The number of orders.
    pub(crate) fn keys(&self) -> u64 {
        self.keys.unwrap_or(match self.affinity {
            Affinity::Local => 50,
            Affinity::Sac | Affinity::Sharded | Affinity::Hash => 1_000,
        })
    }

    /// The setting of the endpoints. It is what Laneway would choose by itself; said in words, because the
    /// summary is held against it.
    pub(crate) fn max_in_flight(&self) -> u32 {
        (2 * self.concurrency).max(16 * self.shards()).max(32)
    }

    /// The time that handlers take on average, so that all instances together need `seconds` for the work.
    pub(crate) fn handler_time(&self) -> Duration {
        let working = match self.affinity {
            Affinity::Sac => 1,
            Affinity::Local => self.instances,
            Affinity::Sharded | Affinity::Hash => self.instances.min(self.shards()),
        };
        let at_once = u64::from(working * self.concurrency).min(self.keys());
        Duration::from_secs(self.seconds).mul_f64(at_once as f64 / self.messages as f64)
    }
}
