//! Random moves of two instances over three shards, judged by the ledger.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use actix::Arbiter;
use fastrand::Rng;

use super::Poke;
use super::world::{Instance, Script, Step, World, within};
use crate::config::{EndpointSettings, PoisonMode};
use crate::lane::ToLane;
use crate::policy::Backoff;
use crate::restart::Intensity;
use crate::supervisor::FromLane;

const SHARDS: usize = 3;
const KEYS: usize = 4;
const STEPS: usize = 400;

/// What may happen in a story.
#[derive(Debug, Clone, Copy, Default)]
struct Faults {
    /// Sessions are cut, attempts of those that are given are aborted, parking fails.
    losses: bool,
    /// Actors panic.
    panics: bool,
    /// Poison keeps its key for a while.
    holds: bool,
}

fn settings(settings: &mut EndpointSettings, faults: Faults) {
    settings.concurrency = 4;
    settings.lanes = Some(3);
    settings.max_in_flight = Some(24);
    settings.backoff = Backoff::constant(Duration::from_millis(2));
    settings.intensity = Intensity {
        restarts: 1_000,
        within: Duration::from_secs(1),
        backoff: Duration::from_micros(200),
    };
    if faults.holds {
        settings.poison_mode = PoisonMode::BlockKey {
            hold_at_most: Duration::from_millis(15),
        };
    }
}

/// One step; most are messages.
async fn step(world: &World, instance: &Instance, faults: Faults, random: &mut Rng) {
    let shard = random.usize(0..SHARDS);
    let supervisor = &instance.handle.addr;
    match random.u32(0..42) {
        0..=18 => {
            let key = match random.usize(0..=KEYS) {
                KEYS => format!("keyless-{shard}"),
                key => format!("key-{shard}-{key}"),
            };
            for _ in 0..random.usize(1..5) {
                world.publish(shard, &key);
            }
        }
        19..=21 => instance.rebalance(&[], &[shard]),
        22..=25 => instance.rebalance(&[shard], &[]),
        26..=27 => supervisor.do_send(Poke::Give(shard)),
        28 => {
            let pause = Duration::from_millis(random.u64(0..6));
            supervisor.do_send(FromLane::PauseEndpoint(pause));
        }
        29 => instance.send(world, &format!("direct-{}", instance.number)),
        30 if faults.losses => world.cut(shard, instance.number),
        31 if faults.losses => {
            world.unclean.store(true, Ordering::SeqCst);
            supervisor.do_send(Poke::Give(shard));
            supervisor.do_send(Poke::Hurry(shard));
        }
        32 if faults.panics => {
            world.unclean.store(true, Ordering::SeqCst);
            let lane = random.usize(0..instance.handle.lanes.len());
            instance.handle.lanes[lane].tell(ToLane::Panic);
        }
        33 if faults.panics && random.u32(0..5) == 0 => {
            world.unclean.store(true, Ordering::SeqCst);
            supervisor.do_send(Poke::Panic);
        }
        34 => {
            // Lets back-offs and pauses end in the middle of the story.
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        _ => {
            for _ in 0..random.usize(0..60) {
                tokio::task::yield_now().await;
            }
        }
    }
}

async fn drained(instance: &Instance, world: &World) {
    let drain = instance.handle.drain(Duration::from_secs(3_600));
    let report = within("a drain", drain).await;
    assert!(
        report.unfinished == 0 || world.unclean.load(Ordering::SeqCst),
        "{report:?}"
    );
}

async fn nothing_left(instance: &Instance) {
    let mut left = Vec::new();
    let looking = async {
        loop {
            left = instance.left().await;
            if left.is_empty() {
                return;
            }
            // Timers of before still ring, and nothing tells of it.
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let looked = tokio::time::timeout(Duration::from_secs(20), looking).await;
    assert!(looked.is_ok(), "left: {left:?}");
}

async fn play(seed: u64, faults: Faults, arbiters: &[Arbiter]) {
    let mut random = Rng::with_seed(seed);
    let world = World::new(SHARDS, faults.losses);
    let script: Script = Arc::new(|message, attempt| match (message.seq % 23, attempt) {
        (5, 1) | (11, 1..=2) | (17, _) => Step::Fail,
        (3, _) => Step::Take(Duration::from_millis(3)),
        (8, _) => Step::Take(Duration::from_micros(fastrand::u64(0..900))),
        _ => Step::Succeed,
    });
    let start = |number| {
        let arbiters = arbiters.iter().map(Arbiter::handle).collect();
        let describe = |raw: &mut EndpointSettings| settings(raw, faults);
        Instance::start(&world, number, &script, arbiters, describe)
    };
    let instances = [start(0), start(1)];
    for _ in 0..STEPS / 2 {
        let instance = &instances[random.usize(0..2)];
        step(&world, instance, faults, &mut random).await;
    }
    let [stays, leaves] = &instances;
    // In every other story one of them drains while the other goes on, and hears everything all the same.
    let drains = seed % 4 < 2;
    let second_half = async {
        for _ in 0..STEPS / 2 {
            let instance = &instances[random.usize(0..2)];
            step(&world, instance, faults, &mut random).await;
        }
    };
    let draining = async {
        if drains {
            drained(leaves, &world).await;
        }
    };
    futures::join!(second_half, draining);
    let all: Vec<_> = (0..SHARDS).collect();
    let there = if drains {
        vec![stays]
    } else {
        vec![stays, leaves]
    };
    for instance in &there {
        instance.rebalance(&all, &[]);
    }
    world.empty().await;
    for instance in &there {
        nothing_left(instance).await;
    }
    for instance in &there {
        drained(instance, &world).await;
    }
    world.check();
}

/// Plays stories, and says which one failed. `STORIES=100` plays a hundred times as many.
fn stories(first: u64, number: u64, faults: Faults) {
    let times = std::env::var("STORIES").ok();
    let times: u64 = times.and_then(|times| times.parse().ok()).unwrap_or(1);
    for seed in first..first + number * times {
        fastrand::seed(seed);
        let story = || {
            actix::System::new().block_on(async {
                let arbiters: Vec<_> = (0..2 * (seed % 2)).map(|_| Arbiter::new()).collect();
                play(seed, faults, &arbiters).await;
                for arbiter in arbiters {
                    arbiter.stop();
                    arbiter.join().expect("no panic");
                }
            });
        };
        if let Err(panic) = std::panic::catch_unwind(story) {
            eprintln!("in story {seed} with {faults:?}");
            std::panic::resume_unwind(panic);
        }
    }
}

#[test]
fn while_sessions_are_only_given_renewed_and_paused_no_two_runs_of_a_key_overlap_anywhere() {
    stories(0, 6, Faults::default());
}

#[test]
fn held_keys_move_with_their_sessions() {
    let holds = Faults {
        holds: true,
        ..Faults::default()
    };
    stories(1_000, 4, holds);
}

#[test]
fn losses_among_the_moves_lose_no_message_and_no_order() {
    let losses = Faults {
        losses: true,
        ..Faults::default()
    };
    stories(2_000, 6, losses);
    let held = Faults {
        holds: true,
        ..losses
    };
    stories(3_000, 3, held);
}

#[test]
fn panics_among_the_moves_lose_no_message_and_no_order() {
    let faults = Faults {
        losses: true,
        panics: true,
        holds: false,
    };
    stories(4_000, 6, faults);
}
