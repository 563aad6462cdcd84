//! Two instances over the shards of a scripted broker, whose sessions are given, renewed, paused, lost and
//! drained in any order, while lanes and supervisors panic.
//!
//! - `world`: the broker, the instances, and the ledger that says what must hold.
//! - `stories`: one hand-written interleaving per promise.
//! - `random`: all of it at random.

mod random;
mod stories;
mod world;

use actix::{Context, Handler, Message};

use super::EndpointSupervisor;

/// What only a test asks of a supervisor.
#[derive(Message)]
#[rtype(result = "()")]
enum Poke {
    /// As for a renewal: given, and still wanted.
    Give(usize),
    /// As when the renewal takes too long.
    Hurry(usize),
    /// Panics.
    Panic,
}

impl Handler<Poke> for EndpointSupervisor {
    type Result = ();

    fn handle(&mut self, poke: Poke, ctx: &mut Context<Self>) {
        match poke {
            Poke::Give(shard) => self.give(shard),
            Poke::Hurry(shard) => self.hurry(shard, ctx),
            Poke::Panic => panic!("a panic of the supervisor itself, asked for by a test"),
        }
    }
}

/// What a supervisor has not put away.
#[derive(Message)]
#[rtype(result = "Vec<String>")]
struct AskLeft;

impl Handler<AskLeft> for EndpointSupervisor {
    type Result = Vec<String>;

    fn handle(&mut self, _: AskLeft, _: &mut Context<Self>) -> Vec<String> {
        let mut left = Vec::new();
        if self.loads.iter().any(|&load| load > 0) {
            left.push(format!("loads {:?}", self.loads));
        }
        for (number, shard) in self.shards.iter().enumerate() {
            if shard.giving.is_some() || shard.live.is_none() || shard.in_flight() > 0 {
                left.push(format!("shard {number}: {:?}", shard.snapshot()));
            }
        }
        left
    }
}

/// The deliveries that a supervisor has taken in, without a question to the lanes.
#[derive(Message)]
#[rtype(result = "usize")]
struct AskInFlight;

impl Handler<AskInFlight> for EndpointSupervisor {
    type Result = usize;

    fn handle(&mut self, _: AskInFlight, _: &mut Context<Self>) -> usize {
        self.shards.iter().map(super::Shard::in_flight).sum()
    }
}
