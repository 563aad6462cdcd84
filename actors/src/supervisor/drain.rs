//! The drain; its steps are in the parent module's text.

use std::sync::atomic::Ordering;
use std::time::Duration;

use actix::{ActorContext, ActorFutureExt, AsyncContext, Context, WrapFuture};
use tokio::sync::oneshot;

use crate::lane::ToLane;
use crate::observe::{EndpointState, EventKind};

use super::{DrainReport, EndpointSupervisor};

/// After the deadline, how long aborted attempts may take before the session is closed all the same.
const ABORT_PATIENCE: Duration = Duration::from_secs(1);

pub(super) struct Draining {
    pub(super) quiet: Vec<bool>,
    pub(super) reports: Vec<oneshot::Sender<DrainReport>>,
    pub(super) closing: bool,
    /// Why, if it was not asked for.
    pub(super) broken: bool,
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
        self.drain = Some(Draining {
            quiet: vec![false; self.lanes.len()],
            reports: Vec::new(),
            closing: false,
            broken,
        });
        let session = self.last_session;
        self.tell_lanes(|| ToLane::Drain(session));
        // Shown only now: whatever somebody who sees it does, the lanes hear of the drain first.
        self.set_state(EndpointState::Draining);
        self.answer_first(Err("the endpoint is draining".to_owned()));
        ctx.run_later(within, |this, ctx| {
            if this.drain.as_ref().is_some_and(|drain| !drain.closing) {
                this.endpoint.cancel.cancel();
                this.tell_lanes(|| ToLane::AbortRuns);
                ctx.run_later(ABORT_PATIENCE, |this, ctx| this.close(ctx));
            }
        });
    }

    pub(super) fn maybe_close(&mut self, ctx: &mut Context<Self>) {
        let all_quiet = |drain: &Draining| drain.quiet.iter().all(|&quiet| quiet);
        if self.drain.as_ref().is_some_and(all_quiet) {
            self.close(ctx);
        }
    }

    /// The last steps: acknowledge, barrier, close, stop. Everything in them is bounded by the source.
    pub(super) fn close(&mut self, ctx: &mut Context<Self>) {
        match &mut self.drain {
            Some(drain) if !drain.closing => drain.closing = true,
            _ => return,
        }
        self.flush();
        let live = self.live.take();
        let report = DrainReport {
            given_back: live.as_ref().map_or(0, |live| live.book.unsettled()),
            unfinished: self.endpoint.permits.running() as usize,
        };
        ctx.spawn(
            async move {
                if let Some(live) = live {
                    // An error means that the session ended by itself: everything unsettled is given back.
                    let _ = live.control.barrier().await;
                    // Before the close: what it gives back may start elsewhere at once.
                    live.state.end();
                    live.control.close().await;
                }
            }
            .into_actor(self)
            .map(move |(), this, ctx| this.stopped(report, ctx)),
        );
    }

    pub(super) fn stopped(&mut self, report: DrainReport, ctx: &mut Context<Self>) {
        self.endpoint.cancel.cancel();
        let session = self.last_session;
        self.tell_lanes(|| ToLane::SessionEnded(session));
        self.tell_lanes(|| ToLane::Stop);
        self.mails.iter().for_each(|mail| mail.close());
        let drain = self.drain.take();
        let broken = drain.as_ref().is_some_and(|drain| drain.broken);
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
        self.set_state(if broken {
            EndpointState::Failed
        } else {
            EndpointState::Stopped
        });
        for waiting in drain.into_iter().flat_map(|drain| drain.reports) {
            // An error means that nobody waits any more.
            let _ = waiting.send(report);
        }
        ctx.stop();
    }
}
