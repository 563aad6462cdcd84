//! The end of a pass, and the alarm that wakes the lane for the next one.
//!
//! A lane has one timer, set for whatever comes first: the end of a pause or of a hold, or the next look at attempts that
//! overstay. Everything that a pass has gathered (starts, outcomes, what is held) goes out here, once for the pass.

use std::time::{Duration, Instant};

use actix::{AsyncContext, Context};

use super::Lane;
use super::machine::{Event, HoldEnd};
use crate::observe::HoldOver;

/// How often a lane with running attempts looks for those that overstay.
const SWEEP: Duration = Duration::from_millis(250);

impl Lane {
    /// After each post: start what may start, tell the supervisor what ended, and set the alarm.
    pub(super) fn finish_pass(&mut self, ctx: &mut Context<Self>) {
        if !self.starting.is_empty() {
            self.endpoint.crew.put(&mut self.starting);
        }
        self.review_holds();
        self.tell_settled();
        self.link.publish_load(self.machine.tracks());
        let sweep = (!self.runs.is_empty()).then(|| Instant::now() + SWEEP);
        let timer = self.timers.keys().next().map(|&(at, _)| at);
        let Some(at) = [sweep, timer].into_iter().flatten().min() else {
            return;
        };
        match self.alarm {
            Some((set, _)) if set <= at => return,
            Some((_, handle)) => {
                ctx.cancel_future(handle);
            }
            None => {}
        }
        let after = at.saturating_duration_since(Instant::now());
        let handle = ctx.run_later(after, Self::ring);
        self.alarm = Some((at, handle));
    }

    fn ring(&mut self, ctx: &mut Context<Self>) {
        self.alarm = None;
        let now = Instant::now();
        while let Some(first) = self.timers.first_entry()
            && first.key().0 <= now
        {
            let ((_, ticket), ()) = first.remove_entry();
            if self.holds.contains_key(&ticket) {
                self.end_hold(ticket, HoldEnd::Release, HoldOver::TooLong);
                continue;
            }
            self.since.remove(&ticket);
            self.feed(Event::BackoffElapsed(ticket), None);
        }
        self.endpoint.crew.look_after(now);
        self.look_after_runs(now);
        self.finish_pass(ctx);
    }
}
