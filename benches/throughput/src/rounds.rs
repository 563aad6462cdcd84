//! Runs a suite: interleaved rounds, each subject on a fresh queue with the same messages.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::Error;
use crate::child::{Outcome, Places, measure};
use crate::options::Options;
use crate::subject::{Job, QueueType, Subject};
use crate::suite::{Case, Compared, Part, Suite};
use crate::workload::{Plan, Shape};

/// What came out, round by round. A run that failed stands as what went wrong.
#[derive(Default)]
pub(crate) struct Results {
    pub(crate) runs: BTreeMap<(Subject, Part), Vec<Result<Outcome, String>>>,
    /// The ideal rate of each round, where that is what is compared with.
    pub(crate) ideal: Vec<f64>,
}

/// Runs all rounds of a suite.
pub(crate) async fn run(
    suite: &Suite,
    queue_type: QueueType,
    options: &Options,
    places: &Places,
) -> Result<Results, Error> {
    let mut results = Results::default();
    for round in 1..=options.rounds() {
        if suite.compared == Compared::ToIdeal {
            let shape = suite.cases[0].shape;
            results.ideal.push(ideal(seeded(shape, round)).await);
        }
        // Each round begins with another subject, so that none always comes first.
        let mut cases = suite.cases.clone();
        let first = round as usize % cases.len();
        cases.rotate_left(first);
        cases.retain(|case| options.measures(case.subject));
        for case in cases {
            let Case { subject, part, .. } = case;
            let (process, name) = (std::process::id(), subject.name());
            let job = Job {
                url: match case.durable {
                    Some(_) => options.postgres.clone(),
                    None => options.amqp.clone(),
                },
                name: format!("laneway-bench-{process}-{name}-{round}-{part:?}"),
                queue_type,
                subject,
                shape: seeded(case.shape, round),
                durable: case.durable,
            };
            let began = Instant::now();
            let outcome = measure(places, &job, case.per_second).await;
            let outcome = outcome.map_err(|error| error.to_string());
            let place = case.durable.map_or("", |durable| durable.database.name());
            let label = format!("{} {place} round {round} {name:<21} {part:?}", suite.name);
            tell(&label, subject, &outcome, began.elapsed());
            results
                .runs
                .entry((subject, part))
                .or_default()
                .push(outcome);
        }
    }
    Ok(results)
}

fn seeded(shape: Shape, round: u32) -> Shape {
    Shape {
        seed: u64::from(round),
        ..shape
    }
}

fn tell(label: &str, subject: Subject, outcome: &Result<Outcome, String>, took: Duration) {
    let took = took.as_secs_f64();
    match outcome {
        Ok(outcome) if !passes(subject, outcome) => {
            eprintln!("{label}: the ledger says no\n{}", outcome.verdict.words);
        }
        Ok(Outcome {
            verdict, cpu_us, ..
        }) => eprintln!(
            "{label}: {:.0}/s, {cpu_us:.1} µs, p99 {:.1} ms, {} inversions, {} duplicates ({took:.1} s)",
            verdict.per_second, verdict.latency_ms[1], verdict.inversions, verdict.duplicates,
        ),
        Err(what) => eprintln!("{label}: {what}"),
    }
}

/// Whether the ledger lets a run have a figure: nothing lost, the parked set exact, and order, of those that
/// promise it.
pub(crate) fn passes(subject: Subject, outcome: &Outcome) -> bool {
    let verdict = &outcome.verdict;
    verdict.complete && (verdict.ordered() || !subject.keeps_order())
}

/// The rate at which nothing but the busiest key bounds: a loop that runs the handler alone, one message
/// after the other, divided by that key's share.
async fn ideal(shape: Shape) -> f64 {
    const TURNS: u32 = 500;
    let handler = shape.handler;
    let alone = tokio::spawn(async move {
        let start = Instant::now();
        for _ in 0..TURNS {
            tokio::time::sleep(handler).await;
        }
        f64::from(TURNS) / start.elapsed().as_secs_f64()
    });
    alone.await.unwrap_or(f64::NAN) / Plan::of(shape).top_share()
}
