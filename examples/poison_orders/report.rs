//! The summary, for people or as JSON.

use std::process::ExitCode;
use std::time::Duration;

use indicatif::HumanCount;
use laneway::testing::Figures;
use serde::Serialize;

use crate::work::Work;

/// How a run went.
pub(crate) struct Report {
    object: Object,
    /// Nothing was lost, overtaken or overlapping.
    is_ordered: bool,
    /// Exactly the poison was parked.
    is_parked: bool,
    trouble: Option<String>,
}

/// The object that `--json` writes; `--help` says what each field means.
#[derive(Serialize)]
struct Object {
    healthy_handled: u64,
    parked_expected: u64,
    parked: u64,
    replayed: u64,
    lost: u64,
    inversions: u64,
    overlaps: u64,
    held_keys: u64,
    /// `null` for a run that is incomplete.
    healthy_p99_ms: Option<f64>,
    healthy_p99_ms_without_poison: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    waiting: Option<u64>,
}

impl Report {
    /// `waiting` is the number of messages that an interrupted run left in its queues.
    pub(crate) fn new(work: &Work, figures: Figures, waiting: Option<u64>) -> Self {
        let counts = work.counts();
        let is_complete = waiting.is_none() && work.trouble().is_none();
        let lost = figures.lost.saturating_sub(waiting.unwrap_or(0));
        let p99 = |with_poison| is_complete.then(|| median_p99_ms(work, with_poison));
        let object = Object {
            healthy_handled: counts.handled,
            parked_expected: work.plan.poison().len() as u64,
            parked: counts.parked,
            replayed: counts.replayed,
            lost,
            inversions: figures.inversions,
            overlaps: figures.overlaps,
            held_keys: work.held_keys(),
            healthy_p99_ms: p99(true),
            healthy_p99_ms_without_poison: p99(false),
            waiting,
        };
        Self {
            object,
            is_ordered: lost == 0 && figures.inversions == 0 && figures.overlaps == 0,
            is_parked: work.parked_as_expected(is_complete),
            trouble: work.trouble().map(str::to_owned),
        }
    }

    fn holds(&self) -> bool {
        self.is_ordered && self.is_parked && self.trouble.is_none()
    }

    pub(crate) fn print_json(&self) {
        let text = serde_json::to_string(&self.object);
        println!(
            "{}",
            text.expect("cannot fail because it holds only numbers")
        );
    }

    pub(crate) fn print_for_people(&self) {
        let object = &self.object;
        let line = |name: &str, number: u64, note: &str| {
            println!("{name:12}{} {note}", HumanCount(number));
        };
        line("handled", object.healthy_handled, "that are no poison");
        let expected = format!("(of {} poison events)", HumanCount(object.parked_expected));
        line("parked", object.parked, &expected);
        line("held", object.held_keys, "keys, seen in snapshots");
        line("replayed", object.replayed, "and then handled");
        line("lost", object.lost, "");
        line("overtaken", object.inversions, "(but for replayed events)");
        line(
            "overlapping",
            object.overlaps,
            "(two handlers of one order at once)",
        );
        if let Some(waiting) = object.waiting {
            line(
                "waiting",
                waiting,
                "left in the queues: the run was interrupted",
            );
        }
        if let (Some(with), Some(without)) =
            (object.healthy_p99_ms, object.healthy_p99_ms_without_poison)
        {
            println!(
                "healthy p99 {with:.2} ms from publish to effect beside poison, {without:.2} ms without"
            );
        }
        println!(
            "{}",
            if self.holds() {
                "order held, and exactly the poison was parked"
            } else {
                "ORDER DID NOT HOLD, or the run failed"
            }
        );
    }

    /// Says on standard error what went wrong, without the keys.
    pub(crate) fn print_trouble(&self) {
        if let Some(trouble) = &self.trouble {
            eprintln!("error: {trouble}");
        }
        if !self.is_parked {
            eprintln!("error: not exactly the poison was parked, each event for its reason");
        }
        if !self.is_ordered {
            eprintln!("error: order did not hold; a ledger (--ledger DIR) shows where");
        }
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        if self.holds() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        }
    }
}

/// The median over the rounds with poison, or over those without.
fn median_p99_ms(work: &Work, with_poison: bool) -> f64 {
    let rounds = work.plan.rounds.iter().enumerate();
    let rounds = rounds.filter(|(_, round)| round.poison.is_empty() != with_poison);
    let p99s = rounds.map(|(number, _)| rank(work.healthy_times(number), 0.99));
    let median = rank(p99s.collect(), 0.5);
    (median.as_secs_f64() * 1e6).round() / 1e3
}

/// The smallest value that is not below this share of the values.
fn rank(mut values: Vec<Duration>, share: f64) -> Duration {
    values.sort_unstable();
    let place = (values.len() as f64 * share).ceil() as usize;
    values[place.max(1) - 1]
}
