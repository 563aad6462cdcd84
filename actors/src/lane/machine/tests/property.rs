//! Random stories, and what must find the mutants.

use std::panic::{AssertUnwindSafe, catch_unwind};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};

use super::mutants::Mutant;
use super::world::*;
use super::*;

fn setups() -> impl Strategy<Value = Setup> {
    (
        1..4_usize,
        1..5_u32,
        prop_oneof![3 => Just(PoisonPlan::Park), 1 => Just(PoisonPlan::Discard)],
        prop_oneof![4 => Just(1000), 1 => 1..3_usize],
        2..7_usize,
        prop::bool::weighted(0.7),
    )
        .prop_map(
            |(permits, max_attempts, plan, remember, credit, finished_memory)| Setup {
                permits,
                max_attempts,
                plan,
                remember,
                credit,
                finished_memory,
            },
        )
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let kind =
        prop_oneof![5 => Just(Kind::Unique), 2 => Just(Kind::WithoutId), 1 => Just(Kind::Twin)];
    let failure = prop_oneof![
        4 => Just(FailureKind::Transient),
        1 => Just(FailureKind::RetryAfter(PAUSE)),
        2 => Just(FailureKind::Permanent),
        1 => Just(FailureKind::Panicked),
    ];
    let ending = prop_oneof![
        3 => Just(Ending::Handled),
        5 => failure.prop_map(Ending::Failed),
        1 => Just(Ending::Aborted),
    ];
    let few = 0..4_usize;
    let queue = 0..2_usize;
    let step = prop_oneof![
        6 => (0..6_usize, kind).prop_map(|(key, kind)| Step::Publish { key, kind }),
        8 => (queue.clone(), 1..4_usize).prop_map(|(queue, count)| Step::Deliver { queue, count }),
        9 => few.clone().prop_map(Step::Grant),
        9 => (few.clone(), ending).prop_map(|(nth, ending)| Step::Finish(nth, ending)),
        2 => few.clone().prop_map(Step::Blocks),
        2 => few.clone().prop_map(Step::Timer),
        6 => few.clone().prop_map(Step::Park),
        2 => (queue.clone(), few.clone()).prop_map(|(queue, count)| Step::Acks { queue, count }),
        3 => (queue.clone(), few).prop_map(|(queue, acks)| Step::Lose { queue, acks }),
        5 => queue.clone().prop_map(Step::Notice),
        1 => queue.clone().prop_map(Step::Drain),
        3 => queue.prop_map(Step::Close),
        1 => Just(Step::Pause),
        2 => Just(Step::Resume),
    ];
    vec(step, 0..150)
}

/// Plays `cases` stories, and shrinks the first that breaks `promise` (any, if `None`).
fn search(
    cases: u32,
    rng: TestRng,
    mutant: Option<Mutant>,
    promise: Option<&str>,
) -> Result<(), String> {
    let config = Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    };
    let stories = (setups(), steps());
    TestRunner::new_with_rng(config, rng)
        .run(&stories, |(setup, steps)| {
            let play = || World::new(setup, mutant).play(&steps);
            let played = match promise {
                None => play(),
                // A broken machine may also panic; that is not what is looked for.
                Some(_) => catch_unwind(AssertUnwindSafe(play)).unwrap_or(Ok(())),
            };
            match played {
                Err(broken) if promise.is_none_or(|promise| promise == broken.promise) => Err(
                    TestCaseError::fail(format!("{}: {}", broken.promise, broken.detail)),
                ),
                _ => Ok(()),
            }
        })
        .map_err(|error| match error {
            TestError::Fail(why, story) => format!("{why}\n{story:#?}"),
            TestError::Abort(why) => format!("no story was played: {why}"),
        })
}

fn fixed() -> TestRng {
    TestRng::deterministic_rng(RngAlgorithm::ChaCha)
}

#[test]
fn no_interleaving_breaks_a_promise() {
    // A fixed seed, so that a failure in one place is a failure in all; the long run looks further.
    let (cases, rng) = match std::env::var_os("LANEWAY_SOAK") {
        None => (4_000, fixed()),
        Some(_) => {
            let mut seed = [0; 32];
            seed.fill_with(|| fastrand::u8(..));
            println!("seed {seed:?}");
            (400_000, TestRng::from_seed(RngAlgorithm::ChaCha, &seed))
        }
    };
    if let Err(broken) = search(cases, rng, None, None) {
        panic!("{broken}");
    }
}

/// Each mutant breaks the promise it is meant to break: not just any, so that no check is idle.
#[test]
fn every_broken_twin_is_found() {
    let survivors: Vec<_> = mutants::ALL
        .iter()
        .filter(|(mutant, promise)| search(4_000, fixed(), Some(*mutant), Some(promise)).is_ok())
        .collect();
    assert!(survivors.is_empty(), "not found: {survivors:?}");
}
