//! The promises of the machine, by name, and how a broken one comes back.

/// A broken promise.
#[derive(Debug, PartialEq)]
pub(in super::super) struct Violation {
    pub(in super::super) promise: &'static str,
    pub(in super::super) detail: String,
}

pub(super) type Checked = Result<(), Violation>;

/// `must!(condition, promise, detail…)`.
macro_rules! must {
    ($holds:expr, $promise:expr, $($detail:tt)+) => {
        if !$holds {
            return Err(Violation { promise: $promise, detail: format!($($detail)+) });
        }
    };
}

pub(in super::super) const ONE_RUN: &str = "a key has one run at a time";
pub(in super::super) const IN_ORDER: &str = "a key's messages start in order";
pub(in super::super) const EFFECT_ORDER: &str = "first effects come in sequence";
pub(in super::super) const EVERY_READY_KEY_ASKS: &str = "a key that waits blocks no other";
pub(in super::super) const PERMITS: &str = "every grant is used or returned, once";
pub(in super::super) const ENDED: &str = "nothing of an ended session starts";
pub(in super::super) const DRAINING: &str = "nothing of a draining session starts";
pub(in super::super) const PAUSED: &str = "nothing starts while paused";
pub(in super::super) const COUNT: &str = "attempts are counted exactly";
pub(in super::super) const LIMIT: &str = "no message has more attempts than allowed";
pub(in super::super) const NOT_AGAIN: &str = "what has ended does not run again";
pub(in super::super) const BARRIER: &str =
    "a successor waits for the parked head's acknowledgement";
pub(in super::super) const HOLD: &str =
    "poison is held where keys are to be held, until the hold ends";
pub(in super::super) const PARK: &str = "poison is parked once, and nothing else is";
pub(in super::super) const SETTLE: &str = "a delivery is settled once, in its live session";
pub(in super::super) const ORPHAN: &str = "an orphan's end is told";
pub(in super::super) const FORGOTTEN: &str = "a dropped keyless message hands its attempts on";
pub(in super::super) const CANCEL: &str = "runs of an ended session are cancelled";
pub(in super::super) const TIMER: &str = "a retry waits for the pause of the policy";
pub(in super::super) const SHOWN: &str = "failed attempts and stuck runs are shown";
pub(in super::super) const GAP: &str = "a gap is reported once";
pub(in super::super) const QUIET: &str =
    "a drained session is quiet when nothing of it runs or parks";
pub(in super::super) const DEPTH: &str = "the depth is the number of deliveries here";
pub(in super::super) const LEAK: &str = "nothing is left of what has ended";
pub(in super::super) const EVERYTHING_ENDS: &str = "everything ends";

pub(super) use must;
