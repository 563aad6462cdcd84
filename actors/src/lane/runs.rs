//! The attempts that run: how they start, how long they may stay, what their end means.
//!
//! Owns the table of running attempts. Promises that none starts that its session does not allow; that each is in the
//! table from its start until its future is known to be gone; and that one which overstays is reported, not waited for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::AbortHandle;

use super::Lane;
use super::attempt::{self, RunEnd};
use super::machine::{Event, RunResult, Ticket};
use crate::envelope::{Delivery, Identity};
use crate::permits::Permit;
use crate::session::SessionId;
use crate::supervisor::FromLane;

/// How long an aborted attempt may take to be dropped before its key is reported stuck.
const ABORT_PATIENCE: Duration = Duration::from_secs(1);

/// Names one attempt for as long as it runs: its place in the table. (Its ticket changes when the lane restarts.)
///
/// A place is free again when the attempt's report has been taken, and there is one report of each attempt. So no report
/// can mean another attempt that has the place of an earlier one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RunId(usize);

/// One attempt that runs.
pub(super) struct Run {
    ticket: Ticket,
    attempt: u32,
    abort: AbortHandle,
    delivery: Arc<Delivery>,
    /// When the handler's own time-out fires, in its task.
    deadline: Option<Instant>,
    abort_at: Option<Instant>,
    aborted: Option<Instant>,
    reported_stuck: bool,
}

impl Run {
    fn abort(&mut self) {
        self.abort.abort();
        self.aborted = Some(Instant::now());
    }
}

impl Lane {
    pub(super) fn start(
        &mut self,
        ticket: Ticket,
        delivery: Arc<Delivery>,
        attempt: u32,
        permit: Permit,
    ) {
        if !Delivery::session(&delivery).may_start() {
            drop(permit);
            self.not_started(ticket, &delivery);
            return;
        }
        let deadline = self
            .endpoint
            .config
            .handler_timeout
            .and_then(|bound| Instant::now().checked_add(bound));
        let place = self.runs.vacant_entry();
        let id = RunId(place.key());
        let (job, abort) = attempt::prepare(
            &self.endpoint,
            &self.link,
            id,
            Arc::clone(&delivery),
            attempt,
            permit,
        );
        let run = Run {
            ticket,
            attempt,
            abort,
            delivery,
            deadline,
            abort_at: None,
            aborted: None,
            reported_stuck: false,
        };
        place.insert(run);
        self.starting.push(job);
    }

    /// The session does not allow a start: it has ended (its end is about to be reported here, and is
    /// taken for known), or its proof of life is too old (then nothing starts until there is a new
    /// one; the supervisor watches for it); or it is to be closed, and gives this message back.
    fn not_started(&mut self, ticket: Ticket, delivery: &Delivery) {
        let session = delivery.session();
        if session.has_ended() {
            let ended = Event::SessionEnded(session.id());
            self.machine.handle(ended, &mut self.effects);
        } else if !session.is_draining() {
            self.supervisor.do_send(FromLane::Paused);
            self.machine.handle(Event::Paused, &mut self.effects);
        }
        let result = RunResult::Aborted;
        self.machine
            .handle(Event::Finished { ticket, result }, &mut self.effects);
    }

    pub(super) fn run_ended(&mut self, id: RunId, end: RunEnd) {
        let Some(run) = self.runs.try_remove(id.0) else {
            return;
        };
        let ticket = run.ticket;
        let result = match end {
            RunEnd::Handled => RunResult::Handled,
            RunEnd::Failed { kind, plan, detail } => {
                self.detail = Some(detail);
                RunResult::Failed {
                    kind,
                    plan,
                    chance: fastrand::f64(),
                }
            }
            RunEnd::NotStarted => {
                self.not_started(ticket, &run.delivery);
                self.perform_all(None);
                return;
            }
            RunEnd::Dropped => {
                if run.aborted.is_none() {
                    // Nobody here aborted it: the runtime that runs the handlers is shutting down, and would
                    // drop every further attempt as well.
                    self.machine.handle(Event::Paused, &mut self.effects);
                    self.supervisor.do_send(FromLane::HandlersGone);
                }
                RunResult::Aborted
            }
        };
        if !matches!(result, RunResult::Aborted) {
            self.endpoint.counters.attempts.add(1);
        }
        self.feed(Event::Finished { ticket, result }, None);
        // Not taken: the message is not parked now. Never left here for another one, whose key is not the
        // one that is replaced in it.
        if let Some(detail) = self.detail.take()
            && Delivery::session(&run.delivery).has_ended()
        {
            self.keep_detail(run.delivery.identity().clone(), detail);
        }
    }

    /// Its session has ended: aborts the run after the grace.
    pub(super) fn cancel(&mut self, ticket: Ticket) {
        let mut runs = self.runs.iter_mut().map(|(_, run)| run);
        if let Some(run) = runs.find(|run| run.ticket == ticket) {
            run.abort_at = Some(Instant::now() + self.endpoint.config.abort_grace);
            if self.endpoint.config.abort_grace.is_zero() {
                run.abort();
            }
        }
    }

    /// Aborts what runs, of one session or of all.
    pub(super) fn abort_runs(&mut self, session: Option<SessionId>) {
        for (_, run) in &mut self.runs {
            if session.is_none_or(|session| session == run.delivery.session_id()) {
                run.abort();
            }
        }
    }

    /// Hands the attempts that run to a fresh machine, and aborts them: their sessions are given up.
    pub(super) fn adopt_runs(&mut self) {
        for (_, run) in &mut self.runs {
            run.abort();
            run.reported_stuck = false;
            let head = Arc::clone(&run.delivery);
            run.ticket = self.machine.adopt_running(head, run.attempt);
        }
    }

    /// Aborts whose grace is over, and reports those that are still there a while after that, or after their time-out.
    pub(super) fn look_after_runs(&mut self, now: Instant) {
        let mut overstaying = Vec::new();
        for (_, run) in &mut self.runs {
            if run.aborted.is_none() && run.abort_at.is_some_and(|at| at <= now) {
                run.abort();
            }
            let over = |since: Option<Instant>| since.is_some_and(|at| now >= at + ABORT_PATIENCE);
            if !run.reported_stuck && (over(run.aborted) || over(run.deadline)) {
                run.reported_stuck = true;
                overstaying.push(run.ticket);
            }
        }
        for ticket in overstaying {
            self.since.insert(ticket, now);
            self.feed(Event::StillRunning(ticket), None);
        }
    }

    /// What was said of a message that is given up now: by the attempt that has just ended, or by an earlier one.
    pub(super) fn take_detail(&mut self, identity: &Identity) -> String {
        let said = self.detail.take();
        said.or_else(|| self.late_details.remove(identity))
            .unwrap_or_default()
    }

    pub(super) fn keep_detail(&mut self, identity: Identity, detail: String) {
        if self.late_details.len() >= 2 * usize::from(self.endpoint.config.credits) {
            self.late_details.clear(); // a parked message without a text, nothing worse
        }
        self.late_details.insert(identity, detail);
    }
}
