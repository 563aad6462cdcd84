//! What was finished when a session ended. Pure.
//!
//! Owns which copies of messages are settled without running.

use std::collections::{HashMap, VecDeque};

use crate::envelope::Identity;
use crate::outcome::Outcome;

/// What was finished in the session that just ended: copies of it need not run again.
///
/// Acknowledgements that were on their way when a session ended may or may not have been processed.
/// Until the first delivery of the next session that is not a redelivery, a copy that is surely the
/// same message (id, body, replay number) is settled without running.
#[derive(Debug, Default)]
pub(crate) struct Finished {
    /// The last deliveries of this session, oldest first.
    entries: VecDeque<(Identity, Ending)>,
    keep: usize,
    /// What earlier sessions finished; the deliveries of this one are compared with it.
    comparing: HashMap<Identity, Ending>,
}

/// How a message ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ending {
    pub(crate) outcome: Outcome,
    /// It ended after its session, so nobody has counted it yet: perhaps no copy of it comes here, and
    /// another instance handles it.
    pub(crate) late: bool,
}

impl Finished {
    /// Remembers the last `keep` finished deliveries.
    pub(crate) fn new(keep: usize) -> Self {
        Self {
            keep,
            ..Self::default()
        }
    }

    /// A delivery of the current session ended. Without an id it could not be recognised.
    pub(crate) fn record(&mut self, identity: &Identity, outcome: Outcome) {
        // What its source keeps comes again, to run.
        if identity.id().is_none() || outcome == Outcome::Kept {
            return;
        }
        if self.entries.len() == self.keep {
            self.entries.pop_front();
        }
        let late = false;
        self.entries
            .push_back((identity.clone(), Ending { outcome, late }));
    }

    /// A delivery of a session that has already ended turned out to be finished.
    pub(crate) fn record_late(&mut self, identity: &Identity, ending: Ending) {
        if identity.id().is_some() && ending.outcome != Outcome::Kept {
            self.make_room();
            self.comparing.insert(identity.clone(), ending);
        }
    }

    /// The session ended: what it finished is compared with what comes next. What came before stays
    /// as well: a session that ended early must not make us forget the one before it.
    pub(crate) fn session_ended(&mut self) {
        self.make_room();
        self.comparing.extend(self.entries.drain(..));
    }

    /// Bounds the memory. To forget costs a second run of a message, never the order: copies come
    /// before their successors.
    fn make_room(&mut self) {
        if self.comparing.len() >= 2 * self.keep {
            self.comparing.clear();
        }
    }

    /// How the message ended before, if this delivery is a copy of a finished one. An entry matches
    /// once.
    pub(crate) fn match_copy(&mut self, identity: &Identity, redelivered: bool) -> Option<Ending> {
        if self.comparing.is_empty() {
            return None;
        }
        if !redelivered {
            // The redeliveries of the ended session come first, in order; they are over.
            self.comparing.clear();
            return None;
        }
        identity.id()?;
        self.comparing.remove(identity)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::envelope::Envelope;

    fn identity(id: Option<&str>, body: &'static str) -> Identity {
        Identity::of(&Envelope {
            id: id.map(Into::into),
            body: bytes::Bytes::from_static(body.as_bytes()),
            ..Envelope::default()
        })
    }

    const HANDLED: Ending = Ending {
        outcome: Outcome::Handled,
        late: false,
    };

    fn finished(id: Option<&str>, body: &'static str) -> Finished {
        let mut finished = Finished::new(4);
        finished.record(&identity(id, body), Outcome::Handled);
        finished.session_ended();
        finished
    }

    #[test]
    fn a_copy_of_a_finished_message_is_recognised_once() {
        let mut finished = finished(Some("a"), "x");
        let copy = identity(Some("a"), "x");
        assert_eq!(finished.match_copy(&copy, true), Some(HANDLED));
        assert_eq!(finished.match_copy(&copy, true), None);
    }

    #[test]
    fn another_body_or_no_id_is_no_copy() {
        assert_eq!(
            finished(Some("a"), "x").match_copy(&identity(Some("a"), "y"), true),
            None
        );
        assert_eq!(
            finished(None, "x").match_copy(&identity(None, "x"), true),
            None
        );
    }

    #[test]
    fn the_memory_ends_with_the_first_new_message() {
        let mut finished = finished(Some("a"), "x");
        let copy = identity(Some("a"), "x");
        assert_eq!(finished.match_copy(&copy, false), None);
        assert_eq!(finished.match_copy(&copy, true), None);
    }

    #[test]
    fn two_losses_in_a_row_do_not_forget() {
        let mut finished = finished(Some("a"), "x");
        finished.session_ended();
        let copy = identity(Some("a"), "x");
        assert_eq!(finished.match_copy(&copy, true), Some(HANDLED));
    }
}
