//! What a run says of itself: its goal, and the summary, for people or as JSON.

use std::collections::HashSet;
use std::process::ExitCode;
use std::time::Duration;

use indicatif::HumanCount;
use serde::Serialize;

use crate::Ended;
use crate::census::Census;
use crate::life::Plan;
use crate::options::Options;
use crate::orders::OrderPlaced;
use crate::tables::{EffectTally, Tally};

/// Tells people what they are going to see.
pub(crate) fn print_goal(options: &Options, plan: &Plan, placed: u64, recovered: u64) {
    let Plan { place, orders, .. } = plan;
    println!(
        "\
Orders places {} orders, each in a transaction with its message. Shipping and Billing handle the messages,
each from its own queue, a customer's orders in sequence; each effect is written in its handler's transaction.
The bank sometimes does not answer Billing, and 1 order in 500 cannot be billed: a dead letter.
Everything is in {place}.",
        HumanCount(*orders)
    );
    if !options.temporary {
        println!(
            "Kill this process as you like (kill -9): started again with the same arguments it goes on."
        );
    }
    println!();
    if placed > 0 {
        println!(
            "Earlier runs have placed {} orders, and left {} messages unhandled.",
            HumanCount(placed),
            HumanCount(recovered)
        );
    }
    if placed >= *orders && recovered == 0 {
        println!("So there is nothing left to do: raise --orders to see more.");
    }
}

/// How a run went.
pub(crate) struct Report {
    object: Object,
    trouble: Option<String>,
}

/// The object that `--json` writes; `--help` says what each field means.
#[derive(Serialize)]
struct Object {
    orders: u64,
    shipped: u64,
    billed: u64,
    lost: u64,
    duplicates_of_effects: u64,
    inversions: u64,
    dead_letters: u64,
    recovered: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    waiting: Option<u64>,
    seconds: f64,
}

impl Report {
    pub(crate) fn new(
        census: Census,
        tally: &Tally,
        recovered: u64,
        took: Duration,
        worked: Result<Ended, String>,
    ) -> Self {
        let [shipments, invoices] = &tally.effects;
        let balances = tally.effects.iter().zip(&census.dead);
        let balances: Vec<_> = balances
            .map(|(effects, dead)| Balance::of(effects, dead))
            .collect();
        let unaccounted: u64 = balances.iter().map(|one| one.unaccounted).sum();
        let object = Object {
            orders: tally.orders,
            shipped: shipments.applied,
            billed: invoices.applied,
            lost: unaccounted.saturating_sub(census.waiting),
            duplicates_of_effects: balances.iter().map(|one| one.duplicates).sum(),
            inversions: shipments.inversions + invoices.inversions,
            dead_letters: census.dead_letters(),
            recovered,
            waiting: (worked != Ok(Ended::Done)).then_some(census.waiting),
            seconds: took.as_millis() as f64 / 1e3,
        };
        Self {
            object,
            trouble: worked.err(),
        }
    }

    fn is_right(&self) -> bool {
        let object = &self.object;
        object.lost == 0 && object.duplicates_of_effects == 0 && object.inversions == 0
    }

    pub(crate) fn print(&self, json: bool) {
        if json {
            let text = serde_json::to_string(&self.object);
            println!(
                "{}",
                text.expect("cannot fail because it holds only numbers")
            );
        } else {
            self.print_for_people();
        }
        if let Some(trouble) = &self.trouble {
            eprintln!("error: {trouble}");
        }
        if !self.is_right() {
            eprintln!("error: not every effect was applied exactly once and in sequence");
        }
    }

    fn print_for_people(&self) {
        let object = &self.object;
        let line = |name: &str, number: u64, note: &str| {
            println!("{name:14}{} {note}", HumanCount(number));
        };
        line("orders", object.orders, "placed, by all runs");
        line("shipped", object.shipped, "");
        line("billed", object.billed, "");
        line(
            "dead letters",
            object.dead_letters,
            "of orders that cannot be billed",
        );
        line("lost", object.lost, "effects that nobody applied");
        line(
            "repeated",
            object.duplicates_of_effects,
            "effects that were applied again",
        );
        line(
            "overtaken",
            object.inversions,
            "effects after that of a later order of the customer",
        );
        line(
            "recovered",
            object.recovered,
            "messages of earlier runs, unhandled at the start",
        );
        if let Some(waiting) = object.waiting {
            line("waiting", waiting, "messages for the next run");
        }
        println!(
            "{}",
            match (self.is_right(), object.waiting) {
                (true, None) => "every effect was applied exactly once and in sequence",
                (true, Some(_)) => "what was applied was applied exactly once and in sequence",
                (false, _) => "SOMETHING WAS LOST, REPEATED OR OVERTAKEN",
            }
        );
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        if self.is_right() && self.trouble.is_none() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        }
    }
}

/// The effects of a module against its dead letters.
#[derive(Debug, Default, PartialEq, Eq)]
struct Balance {
    /// Orders without the effect and without a dead letter: lost, unless their messages still wait.
    unaccounted: u64,
    /// Effects and dead letters beyond one for each order.
    duplicates: u64,
}

impl Balance {
    fn of(effects: &EffectTally, dead: &[Option<OrderPlaced>]) -> Self {
        let mut without: HashSet<_> = effects.missing.iter().collect();
        // An order that is not there any more has the effect, or another dead letter, or does not exist.
        let surplus = dead
            .iter()
            .flatten()
            .filter(|order| !without.remove(order))
            .count();
        Self {
            unaccounted: without.len() as u64,
            duplicates: effects.surplus + surplus as u64,
        }
    }
}
