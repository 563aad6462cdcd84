//! The life of the source's session: opened, lost, opened again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::{ActorFutureExt, AsyncContext, Context, WrapFuture};
use futures::StreamExt;

use crate::lane::ToLane;
use crate::observe::{EndpointState, EventKind};
use crate::policy::Backoff;
use crate::port::{OpenSession, SourceError};
use crate::session::SessionState;
use crate::settlement::AckBook;

use super::{EndpointSupervisor, FromSource, Live};

/// Pauses between tries to open a session.
const RECONNECT_BACKOFF: Backoff = Backoff {
    first: Duration::from_millis(100),
    ceiling: Duration::from_secs(10),
    factor: 2.0,
    jitter: 0.3,
};

impl EndpointSupervisor {
    pub(super) fn open(&mut self, ctx: &mut Context<Self>) {
        let state = SessionState::start();
        let (source, credits) = (Arc::clone(&self.source), self.endpoint.config.credits);
        let opening = Arc::clone(&state);
        ctx.spawn(
            async move { source.open(opening, credits).await }
                .into_actor(self)
                .map(move |result, this, ctx| this.opened(state, result, ctx)),
        );
    }

    pub(super) fn opened(
        &mut self,
        state: Arc<SessionState>,
        result: Result<OpenSession, SourceError>,
        ctx: &mut Context<Self>,
    ) {
        match result {
            Ok(open) if self.drain.is_some() => {
                state.end();
                ctx.spawn(async move { open.control.close().await }.into_actor(self));
            }
            Ok(open) => {
                let session = state.id();
                self.last_session = session;
                self.live = Some(Live {
                    state,
                    control: open.control,
                    book: AckBook::default(),
                    opened: Instant::now(),
                    useful: false,
                });
                let reconnects = self.endpoint.counters.reconnects.get();
                tracing::info!(
                    endpoint = %self.endpoint.config.name,
                    queue = %self.endpoint.queue,
                    %session,
                    reconnects,
                    "session opened"
                );
                let of_session = move |batch| FromSource { session, batch };
                ctx.add_stream(
                    open.deliveries
                        .map(move |batch| of_session(Some(batch)))
                        .chain(futures::stream::iter([of_session(None)])),
                );
                self.set_state(EndpointState::Running);
                self.endpoint.emit(EventKind::Connected {
                    session,
                    reconnects,
                });
                self.answer_first(Ok(()));
            }
            Err(error) => {
                self.answer_first(Err(error.to_string()));
                self.retry(error.to_string(), ctx);
            }
        }
    }

    pub(super) fn answer_first(&mut self, result: Result<(), String>) {
        for waiting in self.first_session.drain(..) {
            // An error means that nobody waits any more.
            let _ = waiting.send(result.clone());
        }
        self.first_result.get_or_insert(result);
    }

    pub(super) fn retry(&mut self, reason: String, ctx: &mut Context<Self>) {
        if self.drain.is_some() {
            return;
        }
        self.failures += 1;
        let retry_in = RECONNECT_BACKOFF.pause(self.failures, fastrand::f64());
        tracing::warn!(
            endpoint = %self.endpoint.config.name,
            queue = %self.endpoint.queue,
            %reason,
            ?retry_in,
            "disconnected"
        );
        self.set_state(EndpointState::Disconnected);
        self.endpoint
            .emit(EventKind::Disconnected { reason, retry_in });
        ctx.run_later(retry_in, |this, ctx| {
            if this.drain.is_none() && this.live.is_none() {
                this.open(ctx);
            }
        });
    }

    /// The session is over: nothing of it may start or be settled any more.
    pub(super) fn session_lost(&mut self, reason: String, ctx: &mut Context<Self>) {
        let Some(live) = self.live.take() else {
            return;
        };
        live.state.end();
        // A session that ends as soon as it is open is as good as one that cannot be opened; only one that
        // was of use, or that lasted, begins the pauses anew.
        if live.useful || live.opened.elapsed() >= RECONNECT_BACKOFF.ceiling {
            self.failures = 0;
        }
        let session = live.state.id();
        self.tell_lanes(|| ToLane::SessionEnded(session));
        for lane in live.book.outstanding_lanes() {
            self.loads[lane] -= 1;
        }
        self.finished.session_ended();
        self.endpoint.counters.reconnects.add(1);
        // Whatever the other side still believes of this session, it shall end there too.
        ctx.spawn(async move { live.control.close().await }.into_actor(self));
        match &mut self.drain {
            Some(_) => self.maybe_close(ctx),
            None => self.retry(reason, ctx),
        }
    }
}
