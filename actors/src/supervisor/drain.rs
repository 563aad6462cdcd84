//! The drain of the whole endpoint: every session is given (see [`shard`](super::shard)), direct senders
//! are refused, and when nothing runs any more the lanes stop.

use std::sync::atomic::Ordering;
use std::time::Duration;

use actix::{ActorContext, AsyncContext, Context};
use tokio::sync::oneshot;

use crate::lane::ToLane;
use crate::observe::{EndpointState, EventKind};
use crate::session::SessionId;

use super::{ABORT_PATIENCE, DrainReport, EndpointSupervisor};

pub(super) struct Draining {
    /// Stands for everything that belongs to no open session: direct deliveries, and attempts whose session
    /// was lost and that still run.
    pub(super) rest: SessionId,
    pub(super) quiet: QuietLanes,
    pub(super) given_back: usize,
    pub(super) reports: Vec<oneshot::Sender<DrainReport>>,
    /// Why, if it was not asked for.
    pub(super) broken: bool,
    /// The deadline has passed, and what was aborted then has had its time.
    pub(super) over: bool,
}

/// Which lanes have said that nothing of something runs any more.
pub(super) struct QuietLanes(Vec<bool>);

impl QuietLanes {
    pub(super) fn none_of(lanes: usize) -> Self {
        Self(vec![false; lanes])
    }

    pub(super) fn mark(&mut self, lane: usize) {
        self.0[lane] = true;
    }

    pub(super) fn all(&self) -> bool {
        self.0.iter().all(|&quiet| quiet)
    }
}

impl EndpointSupervisor {
    pub(super) fn begin_drain(&mut self, within: Duration, broken: bool, ctx: &mut Context<Self>) {
        if self.drain.is_some() {
            return;
        }
        self.draining_flag.store(true, Ordering::Release);
        for gate in self.gates.iter() {
            gate.slots.close();
        }
        let rest = SessionId::next();
        self.drain = Some(Draining {
            rest,
            quiet: QuietLanes::none_of(self.lanes.len()),
            given_back: 0,
            reports: Vec::new(),
            broken,
            over: false,
        });
        // The goodbye, so that others stand by before the sessions are closed.
        self.review_subscriptions();
        self.tell_lanes(|| ToLane::DrainAll(rest));
        for shard in 0..self.shards.len() {
            self.give(shard);
        }
        // Shown only now: whatever somebody who sees it does, the lanes hear of the drain first.
        self.set_state(EndpointState::Draining);
        self.answer_first(Err("the endpoint is draining".to_owned()));
        ctx.run_later(within, |this, ctx| {
            if this.drain.is_some() {
                this.endpoint.cancel.cancel();
                this.tell_lanes(|| ToLane::AbortRuns(None));
                ctx.run_later(ABORT_PATIENCE, Self::drain_at_once);
            }
        });
    }

    /// The rest of a drain, without waiting for anything that runs.
    pub(super) fn drain_at_once(&mut self, ctx: &mut Context<Self>) {
        let Some(drain) = &mut self.drain else {
            return;
        };
        drain.over = true;
        for shard in 0..self.shards.len() {
            self.close(shard, ctx);
        }
        self.stop_if_done(ctx);
    }

    /// Stops when nothing is left to wait for.
    pub(super) fn stop_if_done(&mut self, ctx: &mut Context<Self>) {
        let Some(drain) = &self.drain else {
            return;
        };
        let given = |shard: &super::Shard| shard.live.is_none() && shard.giving.is_none();
        if (drain.over || drain.quiet.all()) && self.shards.iter().all(given) {
            self.stopped(ctx);
        }
    }

    fn stopped(&mut self, ctx: &mut Context<Self>) {
        let Some(drain) = self.drain.take() else {
            return;
        };
        self.endpoint.cancel.cancel();
        self.tell_lanes(|| ToLane::Stop);
        self.mails.iter().for_each(|mail| mail.close());
        let report = DrainReport {
            given_back: drain.given_back,
            unfinished: self.endpoint.permits.running() as usize,
        };
        tracing::info!(
            endpoint = %self.endpoint.config.name,
            queue = %self.endpoint.queue,
            given_back = report.given_back,
            unfinished = report.unfinished,
            "drained"
        );
        self.endpoint.emit(EventKind::Drained {
            given_back: report.given_back,
            unfinished: report.unfinished,
        });
        self.set_state(if drain.broken {
            EndpointState::Failed
        } else {
            EndpointState::Stopped
        });
        for waiting in drain.reports {
            // An error means that nobody waits any more.
            let _ = waiting.send(report);
        }
        ctx.stop();
    }
}
