//! What a lane says of itself when it is asked.

use std::time::Instant;

use actix::{Context, Handler, Message};

use super::Lane;
use super::machine::Waiting;
use crate::observe::{WaitReason, WaitingKey};

/// Asks a lane for its part of a snapshot.
#[derive(Message)]
#[rtype(result = "LaneSnapshot")]
pub(crate) struct AskLane;

/// A lane's part of a snapshot.
#[derive(Debug, Default, actix::MessageResponse)]
pub(crate) struct LaneSnapshot {
    pub(crate) depth: usize,
    pub(crate) waiting: Vec<WaitingKey>,
}

impl Lane {
    fn snapshot(&mut self) -> LaneSnapshot {
        let now = Instant::now();
        let lane = self.link.index().get();
        let waiting: Vec<_> = self
            .machine
            .waiting()
            .map(|(ticket, key, why, behind)| {
                let since = self.since.get(&ticket).copied().unwrap_or(now);
                let why = match why {
                    Waiting::BackingOff => WaitReason::BackingOff,
                    Waiting::Parking => WaitReason::Parking,
                    Waiting::Held => WaitReason::Held,
                    Waiting::Stuck => WaitReason::Stuck,
                };
                (
                    ticket,
                    WaitingKey {
                        key: self.endpoint.fingerprint(key),
                        lane,
                        why,
                        since: now.saturating_duration_since(since),
                        behind,
                    },
                )
            })
            .collect();
        // What no longer waits needs no time any more.
        let known: std::collections::HashSet<_> =
            waiting.iter().map(|(ticket, _)| *ticket).collect();
        self.since.retain(|ticket, _| known.contains(ticket));
        LaneSnapshot {
            depth: self.machine.depth(),
            waiting: waiting.into_iter().map(|(_, waiting)| waiting).collect(),
        }
    }
}

impl Handler<AskLane> for Lane {
    type Result = LaneSnapshot;

    fn handle(&mut self, _: AskLane, _: &mut Context<Self>) -> LaneSnapshot {
        self.snapshot()
    }
}

/// Asks a lane what it has not put away.
#[cfg(test)]
#[derive(Message)]
#[rtype(result = "Vec<String>")]
pub(crate) struct AskLeft;

#[cfg(test)]
impl Handler<AskLeft> for Lane {
    type Result = Vec<String>;

    fn handle(&mut self, _: AskLeft, _: &mut Context<Self>) -> Vec<String> {
        let sizes = [
            ("draining in the lane", self.draining.len()),
            ("draining in the machine", self.machine.draining()),
            ("depth", self.machine.depth()),
            ("runs", self.runs.len()),
            ("holds", self.holds.len()),
            ("timers", self.timers.len()),
            ("since", self.since.len()),
            ("forgetful", usize::from(self.forgetful)),
        ];
        let left = sizes.into_iter().filter(|&(_, size)| size > 0);
        left.map(|(what, size)| format!("{what}: {size}")).collect()
    }
}
