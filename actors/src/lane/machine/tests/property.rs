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
        prop_oneof![
            3 => Just(PoisonPlan::Park),
            1 => Just(PoisonPlan::Discard),
            2 => Just(PoisonPlan::Hold(HOUR)),
        ],
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
    // One number per step: a strategy made of strategies takes ten times as long as the story.
    vec(any::<u32>(), 0..150).prop_map(|numbers| numbers.into_iter().map(step).collect())
}

fn step(number: u32) -> Step {
    let [which, a, b, c] = number.to_le_bytes().map(usize::from);
    let (nth, queue) = (a % 4, b % 2);
    match which % 64 {
        0..6 => Step::Publish {
            key: a % 6,
            kind: match b % 8 {
                0..5 => Kind::Unique,
                5..7 => Kind::WithoutId,
                _ => Kind::Twin,
            },
        },
        6..14 => Step::Deliver {
            queue,
            count: 1 + a % 3,
        },
        14..23 => Step::Grant(nth),
        23..32 => Step::Finish(
            nth,
            match c % 18 {
                0..6 => Ending::Handled,
                6..11 => Ending::Failed(FailureKind::Transient, rule(c)),
                11..12 => Ending::Failed(FailureKind::RetryAfter(PAUSE), rule(c)),
                12..13 => Ending::Failed(FailureKind::Panicked, rule(c)),
                13..16 => Ending::Failed(FailureKind::Permanent, rule(c)),
                _ => Ending::Aborted,
            },
        ),
        32..34 => Step::Blocks(nth),
        34..36 | 60..62 => Step::Timer(nth),
        36..42 => Step::Park(nth),
        42..44 => Step::Acks { queue, count: nth },
        44..47 => Step::Lose { queue, acks: nth },
        47..52 => Step::Notice(queue),
        52..54 => Step::Drain(queue),
        54..57 => Step::Close(queue),
        57..58 => Step::Pause,
        58..60 => Step::EndHold(
            nth,
            match c % 3 {
                0 => HoldEnd::Release,
                1 => HoldEnd::Retry,
                _ => HoldEnd::Skip,
            },
        ),
        _ => Step::Resume,
    }
}

/// Mostly none.
fn rule(number: usize) -> Option<PlanIndex> {
    match number / 18 % 6 {
        0 => DISCARD,
        1 => SHORT,
        2 => PAUSING,
        _ => None,
    }
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
        .filter(|(mutant, promise)| search(20_000, fixed(), Some(*mutant), Some(promise)).is_ok())
        .collect();
    assert!(survivors.is_empty(), "not found: {survivors:?}");
}
