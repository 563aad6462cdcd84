//! Proof of the lane machine, in four parts.
//!
//! - `interleavings`: one hand-written story per promise.
//! - `world`: a broker, permits, timers and a parking place around one machine, driven at random, and
//!   a naive model that says what must hold. `property` runs it.
//! - `kept`, `keeping`: the same two ways for sources that keep messages themselves.
//! - `mutants`: machines that are broken on purpose. The property must find each of them.

mod interleavings;
mod keeping;
mod kept;
mod mutants;
mod property;
mod world;

use std::num::NonZeroU32;
use std::time::Duration;

use super::track::{Memory, Next};
use super::*;
use crate::envelope::{Envelope, Identity, MessageId};
use crate::handler::FailureKind;
use crate::outcome::Outcome;
use crate::policy::{self, Backoff, Plan, PlanIndex, Verdict};
use crate::port::Place;

/// A delivery as small as the machine allows.
#[derive(Debug, Clone, PartialEq)]
struct Msg {
    /// Which message; only for the tests, the machine cannot see it.
    number: usize,
    key: Option<OrderingKey>,
    session: SessionId,
    identity: Identity,
    redelivered: bool,
    earlier: u32,
    /// What the source has counted, where it counts.
    counted: Option<u32>,
}

impl Msg {
    /// The copy that a later session gives.
    fn again(&self, session: SessionId) -> Self {
        Self {
            session,
            redelivered: true,
            ..self.clone()
        }
    }
}

impl Item for Msg {
    fn key(&self) -> Option<&OrderingKey> {
        self.key.as_ref()
    }

    fn session(&self) -> SessionId {
        self.session
    }

    fn identity(&self) -> &Identity {
        &self.identity
    }

    fn is_redelivered(&self) -> bool {
        self.redelivered
    }

    fn earlier_attempts(&self) -> u32 {
        self.earlier
    }

    fn source_attempts(&self) -> Option<u32> {
        self.counted
    }
}

fn identity(id: Option<&str>, body: &str) -> Identity {
    Identity::of(&Envelope {
        id: id.map(MessageId::from),
        body: body.to_owned().into(),
        ..Envelope::default()
    })
}

/// The pause after every failed attempt.
const PAUSE: Duration = Duration::from_secs(1);

/// The bound of every hold.
const HOUR: Duration = Duration::from_secs(3_600);

fn policy(max_attempts: u32) -> Policy {
    Policy {
        keep_from: None,
        max_attempts: NonZeroU32::new(max_attempts).expect("tests allow at least one attempt"),
        backoff: Backoff::constant(PAUSE),
        plans: [
            Plan {
                discard: true,
                ..Plan::default()
            },
            Plan {
                steps: vec![policy::Step::Wait(PAUSE)],
                ..Plan::default()
            },
            Plan {
                steps: vec![policy::Step::PauseEndpoint(PAUSE)],
                ..Plan::default()
            },
        ]
        .into(),
    }
}

/// The plan of a rule that discards after the first attempt.
const DISCARD: Option<PlanIndex> = Some(PlanIndex(0));
/// The plan of a rule that parks after the second attempt.
const SHORT: Option<PlanIndex> = Some(PlanIndex(1));

/// The plan of a rule that lets the endpoint pause after the first attempt and parks after the second.
const PAUSING: Option<PlanIndex> = Some(PlanIndex(2));

/// A failure to which no rule applies.
fn failed(kind: FailureKind) -> RunResult {
    failed_by(kind, None)
}

fn failed_by(kind: FailureKind, plan: Option<PlanIndex>) -> RunResult {
    let chance = 0.5;
    RunResult::Failed { kind, plan, chance }
}
