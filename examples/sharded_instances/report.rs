//! The summary: what the ledgers of all instances prove, for people or as JSON.

use std::process::ExitCode;
use std::time::Duration;

use indicatif::HumanCount;
use laneway::testing::Figures;
use serde::Serialize;

use crate::options::{Affinity, Chaos, Options};

/// How a run went.
pub(crate) struct Report {
    object: Object,
    affinity: Affinity,
    chaos: Chaos,
    keys: u64,
    trouble: Option<String>,
}

/// The object that `--json` writes. The definitions are those of `OrderLedger`.
#[derive(Serialize)]
struct Object {
    instances: u32,
    shards: u32,
    messages: u64,
    lost: u64,
    inversions: u64,
    overlaps: u64,
    duplicates: u64,
    disturbances: u64,
    max_pause_ms: u64,
    max_in_flight: u32,
    concurrency: u32,
    /// `null` if the run ended before it could be measured.
    subscriptions_max_minus_min: Option<usize>,
}

/// What was measured while it ran.
#[derive(Debug, Default)]
pub(crate) struct Measured {
    pub disturbances: u64,
    /// Of each instance, 10 s after the last disturbance.
    pub subscriptions: Option<Vec<usize>>,
    pub longest_pause: Duration,
}

impl Report {
    pub(crate) fn new(
        options: &Options,
        figures: Figures,
        measured: &Measured,
        trouble: Option<String>,
    ) -> Self {
        let difference = measured.subscriptions.as_ref().map(|subscriptions| {
            let (most, fewest) = (subscriptions.iter().max(), subscriptions.iter().min());
            most.unwrap_or(&0) - fewest.unwrap_or(&0)
        });
        let object = Object {
            instances: options.instances,
            shards: options.shards(),
            messages: options.messages,
            // What was never published is missing too.
            lost: figures.lost + options.messages.saturating_sub(figures.published),
            inversions: figures.inversions,
            overlaps: figures.overlaps,
            duplicates: figures.duplicates,
            disturbances: measured.disturbances,
            max_pause_ms: u64::try_from(measured.longest_pause.as_millis()).unwrap_or(u64::MAX),
            max_in_flight: options.max_in_flight(),
            concurrency: options.concurrency,
            subscriptions_max_minus_min: difference,
        };
        Self {
            object,
            affinity: options.affinity,
            chaos: options.chaos,
            keys: options.keys(),
            trouble,
        }
    }

    /// Order is promised, and not just delivery.
    fn promises_order(&self) -> bool {
        self.affinity != Affinity::Local || self.object.instances == 1
    }

    /// The most overlaps and duplicates that the guarantee allows; see the table in the README.
    fn allowed(&self) -> (u64, u64) {
        let object = &self.object;
        let times = match self.chaos {
            Chaos::None | Chaos::Roll => 0,
            Chaos::Kill | Chaos::Close | Chaos::Broker => object.disturbances,
        };
        (
            times * u64::from(object.concurrency),
            times * u64::from(object.max_in_flight),
        )
    }

    fn holds(&self) -> bool {
        let object = &self.object;
        let (overlaps, duplicates) = self.allowed();
        let even = object.subscriptions_max_minus_min.is_some_and(|n| n <= 1);
        let in_order = object.inversions == 0 && object.overlaps <= overlaps;
        object.lost == 0
            && (in_order || !self.promises_order())
            && object.duplicates <= duplicates
            && even
            && self.trouble.is_none()
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        if self.holds() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        }
    }

    pub(crate) fn print(&self, json: bool) {
        if let Some(trouble) = &self.trouble {
            eprintln!("error: {trouble}");
        }
        if json {
            let text = serde_json::to_string(&self.object);
            println!(
                "{}",
                text.expect("cannot fail because it holds only numbers")
            );
        } else {
            self.print_for_people();
        }
        if !self.promises_order() {
            eprintln!(
                "with `local_partitioned()` each instance keeps a key in order among what it gets itself. The \
                 broker shares one queue out to all instances, message by message, so two of them had messages of \
                 one order at the same time. It is for one instance, or for keys that need no order across \
                 instances; otherwise use `SingleActiveConsumer` or `Sharded`."
            );
        }
    }

    fn print_for_people(&self) {
        let object = &self.object;
        let (overlaps, duplicates) = self.allowed();
        println!(
            "{} events of {} orders, {} instances, {} shards, {} disturbances",
            HumanCount(object.messages),
            HumanCount(self.keys),
            object.instances,
            object.shards,
            object.disturbances
        );
        println!("lost        {}", HumanCount(object.lost));
        println!(
            "overtaken   {} (inversions: an event that succeeded after a later one of its order)",
            HumanCount(object.inversions)
        );
        println!(
            "overlapping {} (two handlers of one order at once; at most {} were allowed)",
            HumanCount(object.overlaps),
            HumanCount(overlaps)
        );
        println!(
            "duplicates  {} (successful runs beyond the first of an event; at most {} were allowed)",
            HumanCount(object.duplicates),
            HumanCount(duplicates)
        );
        println!(
            "pause       {} ms was the longest of a shard with work",
            HumanCount(object.max_pause_ms)
        );
        match object.subscriptions_max_minus_min {
            Some(difference) => println!(
                "balance     {difference} is the difference between the most and the fewest subscriptions"
            ),
            None => println!("balance     not measured"),
        }
        println!(
            "{}",
            match (self.holds(), self.promises_order()) {
                (false, _) => "THE GUARANTEE DID NOT HOLD, or the run failed",
                (true, true) => "order held",
                (true, false) => "nothing was lost; order was not promised",
            }
        );
    }
}
