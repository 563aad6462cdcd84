//! A shard: one source of the endpoint, and the life of its session: opened, lost, renewed, given.
//!
//! An endpoint that is not sharded has one. A session is **given** when another instance is to have it,
//! when it is renewed, when the endpoint pauses or drains; always in this order: its lanes start nothing
//! more of it; what runs may finish, and what is being parked may be confirmed; every acknowledgement is
//! processed (barrier); it is closed, which gives the rest back in order. Never by cancelling the
//! consumer: that would hand out later messages while earlier ones still run (FACTS 12).

use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::{ActorFutureExt, AsyncContext, Context, WrapFuture};
use futures::StreamExt;

use crate::balance::{EXPIRY, Subscriptions};
use crate::lane::ToLane;
use crate::observe::{EndpointState, EventKind, ShardSnapshot};
use crate::policy::Backoff;
use crate::port::{Ack, OpenSession, Session, Source, SourceError};
use crate::session::{SessionId, SessionState};
use crate::settlement::{AckBook, Finished};

use super::drain::QuietLanes;
use super::{EndpointSupervisor, FromSource};

/// Pauses between tries to open a session. No longer than a member may be silent: an instance that comes back
/// later than the others after a restart of the broker finds its shards taken.
const RECONNECT_BACKOFF: Backoff = Backoff {
    first: Duration::from_millis(100),
    ceiling: EXPIRY,
    factor: 2.0,
    jitter: 0.3,
};

/// At which part of `ack_timeout` a session is renewed.
const RENEW_AT: f64 = 0.8;
/// At which part of it the attempts are aborted that still run in a session to be renewed.
const ABORT_AT: f64 = 0.9;

/// No pause of an endpoint is longer.
const LONGEST_PAUSE: Duration = Duration::from_secs(30 * 86_400);

/// The open session.
pub(super) struct Live {
    pub(super) state: Arc<SessionState>,
    pub(super) control: Arc<dyn Session>,
    pub(super) book: AckBook,
    opened: Instant,
    /// Something was acknowledged on it.
    useful: bool,
}

impl Live {
    fn send(&mut self, acks: &[Ack]) {
        if !acks.is_empty() {
            self.control.acknowledge(acks);
            self.useful = true;
        }
    }
}

/// One source, and what its sessions leave to one another.
pub(super) struct Shard {
    pub(super) source: Arc<dyn Source>,
    pub(super) queue: Arc<str>,
    /// Its part of the endpoint's credits: the same in every session, and in every instance. (A quorum
    /// queue puts what a session gives back behind what an earlier one with more credits gave back.)
    pub(super) credits: u16,
    pub(super) live: Option<Live>,
    pub(super) last_session: SessionId,
    /// One that was ended here, and perhaps not at the source yet: the next one is opened after it. (Where
    /// several consumers may be active, it would be given later messages before earlier ones come back.)
    leaving: Option<Arc<dyn Session>>,
    pub(super) finished: Finished,
    /// Whether this instance is to have a session.
    pub(super) wanted: bool,
    /// A session is being opened, or the next try waits.
    opening: bool,
    /// The last try failed, or the last session was lost.
    disconnected: bool,
    pub(super) giving: Option<Giving>,
    /// Failed tries to open a session, and sessions that were of no use, since the last useful one.
    failures: u32,
    /// All its credits are used, which has been told.
    pub(super) exhausted: bool,
}

/// A session on its way to being closed.
pub(super) struct Giving {
    pub(super) session: SessionId,
    pub(super) quiet: QuietLanes,
    since: Instant,
    /// Nothing of it is waited for any more.
    closing: bool,
    /// Its attempts were aborted.
    aborted: bool,
}

impl Shard {
    pub(super) fn new(source: Arc<dyn Source>, credits: u16, wanted: bool) -> Self {
        Self {
            queue: source.name().into(),
            source,
            credits,
            live: None,
            last_session: SessionId::next(),
            leaving: None,
            finished: Finished::new(2 * usize::from(credits)),
            wanted,
            opening: false,
            disconnected: false,
            giving: None,
            failures: 0,
            exhausted: false,
        }
    }

    pub(super) fn in_flight(&self) -> usize {
        self.live.as_ref().map_or(0, |live| live.book.unsettled())
    }

    /// Acknowledges what is due; returns until when the rest is kept back, if something is.
    pub(super) fn acknowledge(&mut self, now: Instant) -> Option<Instant> {
        let live = self.live.as_mut().filter(|live| live.book.has_ended())?;
        let mut acks = Vec::new();
        let until = live.book.acknowledge(now, &mut acks);
        live.send(&acks);
        until
    }

    /// Acknowledges everything that has ended: a barrier follows.
    pub(super) fn acknowledge_all(&mut self) {
        if let Some(live) = self.live.as_mut().filter(|live| live.book.has_ended()) {
            let mut acks = Vec::new();
            live.book.acknowledge_all(Instant::now(), &mut acks);
            live.send(&acks);
        }
    }

    pub(super) fn snapshot(&self) -> ShardSnapshot {
        ShardSnapshot {
            queue: Arc::clone(&self.queue),
            subscribed: self.live.is_some(),
            in_flight: self.in_flight(),
            credits: self.credits,
        }
    }

    /// After a panic of the supervisor: what is spawned in its context is gone, the books may be half
    /// changed. The session is given up, so that everything unsettled comes again.
    pub(super) fn restart(&mut self) {
        if let Some(live) = self.live.take() {
            self.leaving = Some(Arc::clone(&live.control));
            live.state.end();
            actix::spawn(async move { live.control.close().await });
        }
        self.finished.session_ended();
        self.opening = false;
        self.giving = None;
    }
}

/// A part of the endpoint's credits for each of `shards` sources.
pub(super) fn split_credits(credits: u16, shards: usize) -> impl Iterator<Item = u16> {
    let shards = u16::try_from(shards).unwrap_or(u16::MAX).max(1);
    let (each, more) = (credits / shards, credits % shards);
    (0..shards).map(move |shard| each + u16::from(shard < more))
}

impl EndpointSupervisor {
    pub(super) fn open_wanted(&mut self, ctx: &mut Context<Self>) {
        for shard in 0..self.shards.len() {
            self.open(shard, ctx);
        }
    }

    /// Opens a session, where one is wanted and there is none.
    pub(super) fn open(&mut self, number: usize, ctx: &mut Context<Self>) {
        let paused = self.paused_until.is_some() || self.drain.is_some();
        let shard = &mut self.shards[number];
        if paused
            || !shard.wanted
            || shard.opening
            || shard.live.is_some()
            || shard.giving.is_some()
        {
            return;
        }
        shard.opening = true;
        let state = SessionState::of_shard(number);
        let (source, credits) = (Arc::clone(&shard.source), shard.credits);
        let (opening, leaving) = (Arc::clone(&state), shard.leaving.take());
        ctx.spawn(
            async move {
                if let Some(before) = leaving {
                    before.close().await;
                }
                source.open(opening, credits).await
            }
            .into_actor(self)
            .map(move |result, this, ctx| this.opened(state, result, ctx)),
        );
    }

    fn opened(
        &mut self,
        state: Arc<SessionState>,
        result: Result<OpenSession, SourceError>,
        ctx: &mut Context<Self>,
    ) {
        let number = state.shard();
        let unwanted = self.drain.is_some() || self.paused_until.is_some();
        let shard = &mut self.shards[number];
        match result {
            Ok(open) if unwanted || !shard.wanted => {
                state.end();
                // Only then another one: two sessions of one shard would share its credits and its order.
                ctx.spawn(
                    async move { open.control.close().await }
                        .into_actor(self)
                        .map(move |(), this, ctx| {
                            this.shards[number].opening = false;
                            this.open(number, ctx);
                        }),
                );
            }
            Ok(open) => {
                let session = state.id();
                let gather = open.control.gathers_acknowledgements();
                shard.opening = false;
                shard.disconnected = false;
                shard.last_session = session;
                shard.live = Some(Live {
                    state,
                    control: open.control,
                    book: AckBook::new(shard.credits, gather),
                    opened: Instant::now(),
                    useful: false,
                });
                let queue = Arc::clone(&shard.queue);
                let reconnects = self.endpoint.counters.reconnects.get();
                tracing::info!(
                    endpoint = %self.endpoint.config.name,
                    %queue,
                    %session,
                    reconnects,
                    "session opened"
                );
                let of_session = move |batch| FromSource {
                    shard: number,
                    session,
                    batch,
                };
                ctx.add_stream(
                    open.deliveries
                        .map(move |batch| of_session(Some(batch)))
                        .chain(futures::stream::iter([of_session(None)])),
                );
                self.review_state();
                self.review_subscriptions();
                self.endpoint.emit(EventKind::Connected {
                    queue,
                    session,
                    reconnects,
                });
                self.answer_if_connected();
            }
            Err(error) => {
                self.answer_first(Err(error.to_string()));
                self.retry(number, error.to_string(), ctx);
            }
        }
    }

    /// The first sessions are open: whoever waits for that may go on.
    pub(super) fn answer_if_connected(&mut self) {
        let mut wanted = self.shards.iter().filter(|shard| shard.wanted);
        if wanted.all(|shard| shard.live.is_some()) {
            self.answer_first(Ok(()));
        }
    }

    pub(super) fn answer_first(&mut self, result: Result<(), String>) {
        for waiting in self.first_session.drain(..) {
            // An error means that nobody waits any more.
            let _ = waiting.send(result.clone());
        }
        self.first_result.get_or_insert(result);
        self.review_state();
    }

    /// Tells the group what this instance has. What is being given is not told any more, from before its lanes
    /// hear of it: others give a shard to us only if we keep it.
    pub(super) fn review_subscriptions(&self) {
        let kept = |(number, shard): (usize, &Shard)| {
            let live = shard.live.as_ref().filter(|_| shard.giving.is_none())?;
            Some((number, live.opened))
        };
        let now = Subscriptions {
            shards: self.shards.iter().enumerate().filter_map(kept).collect(),
            willing: self.drain.is_none() && self.paused_until.is_none(),
        };
        self.subscriptions.send_if_modified(|before| {
            let changed = *before != now;
            *before = now;
            changed
        });
    }

    /// Running as long as every session that should be there is, or is being opened for the first time.
    pub(super) fn review_state(&mut self) {
        let lost = |shard: &Shard| shard.wanted && shard.disconnected;
        let state = if self.drain.is_some() {
            return;
        } else if self.paused_until.is_some() {
            EndpointState::Paused
        } else if self.shards.iter().any(lost) {
            EndpointState::Disconnected
        } else if self.first_result.is_some()
            || self.shards.iter().any(|shard| shard.live.is_some())
        {
            EndpointState::Running
        } else {
            EndpointState::Starting
        };
        self.set_state(state);
    }

    fn retry(&mut self, number: usize, reason: String, ctx: &mut Context<Self>) {
        if self.drain.is_some() {
            self.shards[number].opening = false;
            return;
        }
        let shard = &mut self.shards[number];
        shard.failures += 1;
        shard.opening = true;
        shard.disconnected = true;
        let retry_in = RECONNECT_BACKOFF.pause(shard.failures, fastrand::f64());
        let queue = Arc::clone(&shard.queue);
        tracing::warn!(
            endpoint = %self.endpoint.config.name,
            %queue,
            %reason,
            ?retry_in,
            "disconnected"
        );
        self.review_state();
        self.endpoint.emit(EventKind::Disconnected {
            queue,
            reason,
            retry_in,
        });
        ctx.run_later(retry_in, move |this, ctx| {
            this.shards[number].opening = false;
            this.open(number, ctx);
        });
    }

    /// The session is over: nothing of it may start or be settled any more.
    pub(super) fn session_lost(&mut self, number: usize, reason: String, ctx: &mut Context<Self>) {
        let shard = &mut self.shards[number];
        let Some(live) = shard.live.take() else {
            return;
        };
        // One that the source has lost is nothing to wait for.
        shard.leaving = (!live.state.has_ended()).then(|| Arc::clone(&live.control));
        live.state.end();
        // A session that ends as soon as it is open is as good as one that cannot be opened; only one that
        // was of use, or that lasted, begins the pauses anew.
        if live.useful || live.opened.elapsed() >= RECONNECT_BACKOFF.ceiling {
            shard.failures = 0;
        }
        shard.finished.session_ended();
        let giving = shard.giving.is_some();
        let session = live.state.id();
        self.tell_lanes(|| ToLane::SessionEnded(session));
        for lane in live.book.outstanding_lanes() {
            self.loads[lane] -= 1;
        }
        self.review_subscriptions();
        self.endpoint.counters.reconnects.add(1);
        // Whatever the other side still believes of this session, it shall end there too.
        ctx.spawn(async move { live.control.close().await }.into_actor(self));
        if !giving {
            self.retry(number, reason, ctx);
        } else if self.drain.is_some() {
            // What runs of it is still waited for: the drain's own name may have been told quiet before.
            self.close_if_quiet(number, ctx);
        } else {
            // As after any loss: the next session need not wait for what runs, only its key does. (Were it
            // waited for, an attempt with a long grace would keep the whole shard closed.)
            tracing::warn!(
                endpoint = %self.endpoint.config.name,
                queue = %self.shards[number].queue,
                %session,
                %reason,
                "a session was lost while it was given"
            );
            self.close(number, ctx);
        }
    }

    // ---- giving

    /// Gives the session of a shard, if there is one; see the module.
    pub(super) fn give(&mut self, number: usize) {
        let lanes = self.lanes.len();
        let shard = &mut self.shards[number];
        let session = match &shard.live {
            Some(live) if shard.giving.is_none() => {
                live.state.drain();
                live.state.id()
            }
            _ => return,
        };
        shard.giving = Some(Giving {
            session,
            quiet: QuietLanes::none_of(lanes),
            since: Instant::now(),
            closing: false,
            aborted: false,
        });
        self.review_subscriptions();
        self.tell_lanes(|| ToLane::Drain(session));
    }

    /// Nothing of the session runs in a lane any more.
    pub(super) fn lane_is_quiet(
        &mut self,
        lane: usize,
        session: SessionId,
        ctx: &mut Context<Self>,
    ) {
        let giving = |shard: &Shard| {
            let giving = shard.giving.as_ref();
            giving.is_some_and(|giving| giving.session == session)
        };
        if let Some(number) = self.shards.iter().position(giving) {
            if let Some(giving) = &mut self.shards[number].giving {
                giving.quiet.mark(lane);
            }
            self.close_if_quiet(number, ctx);
        }
    }

    pub(super) fn close_if_quiet(&mut self, number: usize, ctx: &mut Context<Self>) {
        let giving = self.shards[number].giving.as_ref();
        if giving.is_some_and(|giving| giving.quiet.all()) {
            self.close(number, ctx);
        }
    }

    /// Gives sessions that are too old to be safe: the broker ends one whose oldest message has waited for its
    /// acknowledgement for `ack_timeout`. What is still running then was going to be cut off anyway.
    ///
    /// Nor does the giving of a session last longer than an attempt may: what is left after that is a parking
    /// place that fails, and all keys of the shard would wait for it, here and elsewhere. (A drain has its own
    /// deadline.)
    pub(super) fn renew_sessions(&mut self, ctx: &mut Context<Self>) {
        // A source without such a bound keeps its sessions.
        let limit = self.endpoint.config.ack_timeout.unwrap_or(Duration::MAX);
        let attempt = self.endpoint.config.handler_timeout;
        let longest = attempt.map_or(limit.mul_f64(ABORT_AT), |it| {
            it.saturating_add(super::ABORT_PATIENCE)
        });
        for number in 0..self.shards.len() {
            let shard = &self.shards[number];
            let oldest = shard.live.as_ref().and_then(|live| live.book.oldest());
            let age = oldest.map_or(Duration::ZERO, |oldest| oldest.elapsed());
            match &shard.giving {
                None if age >= limit.mul_f64(RENEW_AT) => {
                    let queue = Arc::clone(&shard.queue);
                    tracing::warn!(
                        endpoint = %self.endpoint.config.name,
                        %queue,
                        ?age,
                        ack_timeout = ?limit,
                        "a message waits for its acknowledgement for too long: the session is renewed"
                    );
                    self.endpoint.emit(EventKind::SessionRenewed { queue, age });
                    self.give(number);
                }
                Some(giving)
                    if age >= limit.mul_f64(ABORT_AT)
                        || self.drain.is_none() && giving.since.elapsed() >= longest =>
                {
                    self.hurry(number, ctx);
                }
                _ => {}
            }
        }
    }

    /// A failure rule wants the endpoint to pause.
    pub(super) fn pause(&mut self, pause: Duration, ctx: &mut Context<Self>) {
        let pause = pause.min(LONGEST_PAUSE);
        let until = Instant::now() + pause;
        if self.drain.is_some() || self.paused_until.is_some_and(|before| until <= before) {
            return;
        }
        tracing::warn!(
            endpoint = %self.endpoint.config.name,
            queue = %self.endpoint.queue,
            ?pause,
            "a failure rule pauses the endpoint"
        );
        self.paused_until = Some(until);
        for number in 0..self.shards.len() {
            self.give(number);
        }
        self.review_state();
        self.review_subscriptions();
        self.endpoint.emit(EventKind::Paused { pause });
        self.resume_when_over(ctx);
    }

    /// Opens the sessions again when the pause is over.
    pub(super) fn resume_when_over(&mut self, ctx: &mut Context<Self>) {
        let Some(until) = self.paused_until else {
            return;
        };
        ctx.run_later(
            until.saturating_duration_since(Instant::now()),
            move |this, ctx| {
                // Otherwise a longer one has begun meanwhile.
                if this.paused_until == Some(until) {
                    this.paused_until = None;
                    this.review_state();
                    this.review_subscriptions();
                    this.endpoint.emit(EventKind::Resumed);
                    this.open_wanted(ctx);
                }
            },
        );
    }

    /// Aborts what still runs of a session that is being given, and closes it when that had its time.
    pub(super) fn hurry(&mut self, number: usize, ctx: &mut Context<Self>) {
        let Some(giving) = &mut self.shards[number].giving else {
            return;
        };
        if giving.closing || giving.aborted {
            return;
        }
        giving.aborted = true;
        let session = giving.session;
        self.tell_lanes(|| ToLane::AbortRuns(Some(session)));
        ctx.run_later(super::ABORT_PATIENCE, move |this, ctx| {
            let giving = this.shards[number].giving.as_ref();
            if giving.is_some_and(|giving| giving.session == session) {
                this.close(number, ctx);
            }
        });
    }

    /// The last steps: acknowledge, barrier, close. Everything in them is bounded by the source.
    pub(super) fn close(&mut self, number: usize, ctx: &mut Context<Self>) {
        let session = match &mut self.shards[number].giving {
            Some(giving) if !giving.closing => {
                giving.closing = true;
                giving.session
            }
            _ => return,
        };
        self.shards[number].acknowledge_all();
        let live = self.shards[number].live.take();
        let mut given_back = 0;
        if let Some(live) = &live {
            given_back = live.book.unsettled();
            for lane in live.book.outstanding_lanes() {
                self.loads[lane] -= 1;
            }
        }
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
            .map(move |(), this, ctx| this.closed(number, session, given_back, ctx)),
        );
    }

    fn closed(
        &mut self,
        number: usize,
        session: SessionId,
        given_back: usize,
        ctx: &mut Context<Self>,
    ) {
        self.tell_lanes(|| ToLane::SessionEnded(session));
        let shard = &mut self.shards[number];
        shard.giving = None;
        shard.failures = 0;
        if shard.wanted {
            shard.finished.session_ended();
        } else {
            // Another instance has it from here on, for minutes or for days. What comes back then is its business:
            // a message that was given the same id and body again must not be taken for one finished here.
            shard.finished = Finished::new(2 * usize::from(shard.credits));
        }
        let queue = Arc::clone(&shard.queue);
        tracing::info!(
            endpoint = %self.endpoint.config.name,
            %queue,
            %session,
            given_back,
            "session closed"
        );
        self.endpoint.emit(EventKind::SessionClosed {
            queue,
            session,
            given_back,
        });
        match &mut self.drain {
            Some(drain) => {
                drain.given_back += given_back;
                self.stop_if_done(ctx);
            }
            None => self.open(number, ctx),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::split_credits;

    #[test]
    fn credits_are_split_to_the_last_one_and_as_evenly_as_can_be() {
        let split = |credits, shards| split_credits(credits, shards).collect::<Vec<_>>();
        assert_eq!(split(32, 1), [32]);
        assert_eq!(split(10, 4), [3, 3, 2, 2]);
        assert_eq!(split(65_535, 2), [32_768, 32_767]);
    }
}
