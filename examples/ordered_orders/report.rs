//! The summary: what the ledger proves, for people or as JSON.

use std::process::ExitCode;
use std::time::Duration;

use indicatif::HumanCount;
use laneway::testing::Figures;
use serde::Serialize;

use crate::options::Options;

/// How a run went.
pub(crate) struct Report {
    object: Object,
    figures: Figures,
    poison: u64,
    clean: bool,
    trouble: Option<String>,
}

/// The object that `--json` writes. The definitions are those of `OrderLedger`.
#[derive(Serialize)]
struct Object {
    messages: u64,
    keys: u64,
    concurrency: u32,
    /// From the first publish to the last settle; of a continued run including the time in between.
    seconds: f64,
    /// `null` for a run that is incomplete, or in which order did not hold.
    messages_per_second: Option<f64>,
    /// Without those that wait in the queues, if the run was interrupted.
    lost: u64,
    inversions: u64,
    overlaps: u64,
    duplicates: u64,
    parked: u64,
    attempts: u64,
    /// Only of an interrupted run: messages that wait in its queues.
    #[serde(skip_serializing_if = "Option::is_none")]
    waiting: Option<u64>,
}

impl Report {
    /// `tail` is the time from the end of the last handler to the last settle. `waiting` is the
    /// number of messages left in the queues by a run that was interrupted.
    pub(crate) fn new(
        options: &Options,
        figures: Figures,
        tail: Duration,
        waiting: Option<u64>,
        clean: bool,
        trouble: Option<String>,
    ) -> Self {
        let span = match (figures.first_publish, figures.last_end) {
            (Some(first), Some(last)) => last.saturating_sub(first) + tail,
            _ => Duration::ZERO,
        };
        let lost = match waiting {
            Some(waiting) => figures.lost.saturating_sub(waiting),
            // What was never published is missing too.
            None => figures.lost + options.messages.saturating_sub(figures.published),
        };
        let complete = waiting.is_none() && lost == 0 && trouble.is_none();
        let ordered = figures.inversions == 0 && figures.overlaps == 0;
        let rate = options.messages as f64 / span.as_secs_f64();
        let object = Object {
            messages: options.messages,
            keys: options.keys,
            concurrency: options.concurrency,
            seconds: (span.as_secs_f64() * 1000.0).round() / 1000.0,
            messages_per_second: (complete && ordered && rate.is_finite()).then(|| rate.round()),
            lost,
            inversions: figures.inversions,
            overlaps: figures.overlaps,
            duplicates: figures.duplicates,
            parked: figures.parked,
            attempts: figures.attempts,
            waiting,
        };
        Self {
            object,
            figures,
            poison: options.poison,
            clean,
            trouble,
        }
    }

    pub(crate) fn print(&self, options: &Options) {
        if let Some(trouble) = &self.trouble {
            eprintln!("error: {trouble}");
        }
        if options.json {
            let text = serde_json::to_string(&self.object);
            println!(
                "{}",
                text.expect("cannot fail because it holds only numbers")
            );
        } else {
            self.print_for_people();
        }
        for example in &self.figures.examples {
            if self.object.waiting.is_none() || !example.contains("lost") {
                eprintln!("{example}");
            }
        }
    }

    fn print_for_people(&self) {
        let Object {
            messages,
            keys,
            concurrency,
            seconds,
            ..
        } = self.object;
        let on = if self.object.waiting.is_some() {
            "interrupted"
        } else {
            "done"
        };
        println!(
            "{on}: {} events of {} orders, up to {} handlers at once",
            HumanCount(messages),
            HumanCount(keys),
            HumanCount(concurrency.into())
        );
        match self.object.messages_per_second {
            Some(rate) => println!(
                "time        {seconds:.2} s, {} events per second",
                HumanCount(rate as u64)
            ),
            None => println!("time        {seconds:.2} s"),
        }
        println!("handled     {}", HumanCount(self.figures.handled));
        println!(
            "parked      {} (of {} that always fail)",
            HumanCount(self.figures.parked),
            HumanCount(self.poison)
        );
        if let Some(waiting) = self.object.waiting {
            println!("waiting     {} in the queues", HumanCount(waiting));
        }
        println!("lost        {}", HumanCount(self.object.lost));
        println!(
            "overtaken   {} (inversions: an event that succeeded after a later one of its order)",
            HumanCount(self.object.inversions)
        );
        println!(
            "overlapping {} (two handlers of one order at once)",
            HumanCount(self.object.overlaps)
        );
        println!(
            "duplicates  {} (successful runs beyond the first of an event)",
            HumanCount(self.object.duplicates)
        );
        println!("attempts    {}", HumanCount(self.object.attempts));
        println!(
            "{}",
            if self.holds() {
                "order held"
            } else {
                "ORDER DID NOT HOLD, or the run failed"
            }
        );
    }

    fn holds(&self) -> bool {
        let Object {
            lost,
            inversions,
            overlaps,
            parked,
            waiting,
            ..
        } = self.object;
        let parked_right = match waiting {
            None => parked == self.poison,
            Some(_) => parked <= self.poison && self.clean,
        };
        lost == 0 && inversions == 0 && overlaps == 0 && parked_right && self.trouble.is_none()
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        if self.holds() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        }
    }
}
