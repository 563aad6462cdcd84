//! The command line: raw in, valid out.

use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, ValueEnum};
use laneway::PoisonMode;

use crate::broker::{Kind, run_id};
use crate::plan::Plan;

/// Handles order events among which are some that fail, panic, take too long or cannot be decoded:
/// shows what becomes of each and of the events around it, then replays them to a mended program.
#[derive(Debug, Clone, Parser)]
#[command(
    name = "poison_orders",
    after_help = "\
The events come in six rounds, in turn without and with poison. In a round with poison 1 in 100 of its
orders, but at least four, have one poison event each, of the four kinds in turn; they are spread evenly
over the round. The next round begins when all of a round has been handled or parked. The publisher keeps
at most 64 events of healthy orders (those without poison in this round) under way; for events of the others
it does not wait. Up to 16 handlers run at once. So that held events and all that can wait behind them fit
into half of the credits, `max_in_flight` is twice their number, and 128 more.

With --poison-mode block poison events hold their keys until everything else of the round is handled. Then
the held keys are looked at, one is retried (and is held again), and all are released.

--json writes one object:
  healthy_handled  events that are no poison, and were handled
  parked_expected  poison events
  parked           events that were parked
  replayed         parked events that were replayed and then handled, by a program that has been mended
  lost             published events that no handler has handled in the end
  inversions       events that succeeded after a later one of their order. A replayed event has a new
                   place, behind what its order had; leaving the old one does not count
  overlaps         pairs of handlers of one order at the same time
  held_keys        keys that were seen held in snapshots; each is counted once, and 0 when not blocking
  healthy_p99_ms, healthy_p99_ms_without_poison
                   99th percentile of the time from publish to effect of the events of healthy orders, in
                   milliseconds; the median of the rounds with and of those without poison
  waiting          only of a run that was interrupted: events that were left in its queues

Exit status: 0 if lost, inversions and overlaps are 0 and exactly the poison was parked, each event for the
reason that was expected; 1 otherwise. After SIGTERM or Ctrl-C the run drains, removes its queues and ends
with 0 if that held so far and every running handler finished."
)]
pub(crate) struct Options {
    /// How many events, over all rounds
    #[arg(long, value_name = "N", default_value_t = 20_000,
          value_parser = clap::value_parser!(u64).range(600..=10_000_000))]
    pub messages: u64,

    /// How many orders they belong to; events of one order have one ordering key
    #[arg(long, value_name = "K", default_value_t = 500,
          value_parser = clap::value_parser!(u64).range(16..=10_000_000))]
    pub keys: u64,

    /// What happens to the key of a poison event
    #[arg(long, value_name = "MODE", default_value = "release")]
    pub poison_mode: Mode,

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

    /// Name of the run, and of its queues
    #[arg(long, value_name = "ID", requires = "amqp", value_parser = run_id)]
    pub run: Option<String>,

    /// Keep the files of the order ledger in this folder; a replayed event stands there under the number N +
    /// its own
    #[arg(long, value_name = "DIR")]
    pub ledger: Option<PathBuf>,

    /// Write the summary to standard output as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// What happens to the key of a poison event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    /// It goes on once the event is parked.
    Release,
    /// It is held until an operator decides.
    Block,
}

impl From<Mode> for PoisonMode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Release => Self::ReleaseKey,
            Mode::Block => Self::block_key(),
        }
    }
}

impl Options {
    /// Reads the command line; ends the process with a message if it is wrong.
    pub(crate) fn read() -> (Self, Plan) {
        let options = Self::parse();
        let wrong = if options.keys > options.messages {
            format!(
                "--keys {} is more than --messages {}: an order without events proves nothing",
                options.keys, options.messages
            )
        } else {
            let plan = Plan::new(options.messages, options.keys);
            if options.poison_mode == Mode::Release || plan.credits() <= Plan::MOST_CREDITS {
                return (options, plan);
            }
            format!(
                "--poison-mode block: {} events would wait behind held keys, which takes {} credits, and there are at most {}; use fewer --messages or more --keys",
                plan.most_behind(),
                plan.credits(),
                Plan::MOST_CREDITS
            )
        };
        Self::command()
            .error(ErrorKind::ValueValidation, wrong)
            .exit()
    }
}
