//! What a lane is told, and what it makes of it.
//!
//! Promises to take everything in the order in which it was told, and to look at all of one post before anything is
//! started, told or armed. What comes of a session that has ended, or after the drain began, goes no further than here.

use std::collections::BTreeSet;
use std::sync::Arc;

use actix::{ActorContext, Context, Handler, Message};
use tokio::sync::mpsc;

use super::Lane;
use super::attempt::RunEnd;
use super::machine::{Event, HoldEnd, Ticket};
use super::runs::RunId;
use crate::envelope::Delivery;
use crate::key::Fingerprint;
use crate::observe::HoldOver;
use crate::permits::Permit;
use crate::session::SessionId;

/// Everything that a lane is told at one time, in order.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct Post(pub(super) Vec<ToLane>);

/// What a lane is told.
pub(crate) enum ToLane {
    /// Deliveries of the source, in order.
    Offer(Vec<Arc<Delivery>>),
    /// A delivery of a direct sender.
    Direct(Arc<Delivery>),
    /// The permit that was asked for.
    Granted(Ticket, Permit),
    /// A run has ended: its future has returned or was dropped.
    RunEnded(RunId, RunEnd),
    /// The head is parked, and perhaps settled.
    Parked { ticket: Ticket, settled: bool },
    /// The head cannot be parked any more: its session has ended.
    ParkingEnded(Ticket),
    /// An operator ends the hold of a key. Answered by the lane that holds it.
    EndHold {
        key: Fingerprint,
        end: HoldEnd,
        done: mpsc::UnboundedSender<()>,
    },
    /// Held keys use too many credits, and this hold is the oldest.
    HoldTooMany(Ticket),
    /// A session ended.
    SessionEnded(SessionId),
    /// All sessions of before have: what is offered from now on comes from new ones, and so completely.
    AllEnded,
    /// Nothing of a session may start any more; tell when nothing of it runs.
    Drain(SessionId),
    /// Nothing may start any more; tell, under this name, when nothing runs of direct senders' sessions and
    /// of sessions that were lost.
    DrainAll(SessionId),
    /// A new proof of life: things may start again.
    Resume,
    /// The time for a drain is over: abort what runs, of one session or of all.
    AbortRuns(Option<SessionId>),
    /// The endpoint has stopped.
    Stop,
    /// Panics, to test the restart of the lane.
    #[cfg(any(test, feature = "testing"))]
    Panic,
}

impl Handler<Post> for Lane {
    type Result = ();

    fn handle(&mut self, Post(post): Post, ctx: &mut Context<Self>) {
        self.post.extend(post);
        self.read_post(ctx);
    }
}

impl Lane {
    pub(super) fn read_post(&mut self, ctx: &mut Context<Self>) {
        while let Some(message) = self.post.pop_front() {
            if matches!(message, ToLane::Stop) {
                self.tell_settled();
                ctx.stop();
                return;
            }
            self.hear(message);
        }
        self.finish_pass(ctx);
    }

    fn hear(&mut self, message: ToLane) {
        match message {
            ToLane::Offer(_) if self.forgetful => {} // unsettled, so they come again
            ToLane::Offer(deliveries) => {
                for delivery in deliveries {
                    // The machine may know of the end before the supervisor does (see `not_started`). It
                    // would take this for the first message of the next session, and drop what it remembers
                    // of the key.
                    if !Delivery::session(&delivery).has_ended() {
                        self.feed(Event::Offered(delivery), None);
                    }
                }
            }
            ToLane::Direct(delivery) => {
                // A session that has ended takes its deliveries with it, and a sender that had looked before
                // the drain began can still come after it: the settle handle is dropped.
                if !self.drains && !Delivery::session(&delivery).has_ended() {
                    self.feed(Event::Offered(delivery), None);
                }
            }
            ToLane::Granted(ticket, permit) => self.feed(Event::Granted(ticket), Some(permit)),
            ToLane::RunEnded(run, end) => self.run_ended(run, end),
            ToLane::Parked { ticket, settled } => {
                self.since.remove(&ticket);
                self.feed(Event::Parked { ticket, settled }, None);
            }
            ToLane::ParkingEnded(ticket) => {
                self.since.remove(&ticket);
                self.feed(Event::ParkingEnded(ticket), None);
            }
            ToLane::SessionEnded(session) => self.feed(Event::SessionEnded(session), None),
            ToLane::AllEnded => self.forgetful = false,
            ToLane::Drain(session) => {
                self.draining.insert(session, session);
                self.feed(Event::Drain(session), None);
            }
            ToLane::DrainAll(name) => {
                self.drains = true;
                let direct = self.machine.deliveries().filter(|it| it.is_direct());
                let rest: BTreeSet<_> = direct.map(|it| it.session_id()).chain([name]).collect();
                self.draining
                    .extend(rest.iter().map(|&session| (session, name)));
                for session in rest {
                    self.feed(Event::Drain(session), None);
                }
            }
            ToLane::EndHold { key, end, done } => {
                if let Some(ticket) = self.hold_of(key) {
                    self.end_hold(ticket, end, HoldOver::Operator(end));
                    // An error means that nobody waits for the answer.
                    let _ = done.send(());
                }
            }
            ToLane::HoldTooMany(ticket) => {
                self.end_hold(ticket, HoldEnd::Release, HoldOver::TooMany);
            }
            ToLane::Resume => self.feed(Event::Resumed, None),
            ToLane::AbortRuns(session) => {
                self.abort_runs(session);
            }
            ToLane::Stop => {} // `read_post` sees to it
            #[cfg(any(test, feature = "testing"))]
            ToLane::Panic => panic!("a panic of the lane itself, asked for by a test"),
        }
    }
}
