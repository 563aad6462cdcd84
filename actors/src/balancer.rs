//! The Balancer actor: takes part in the group of an endpoint over several shards, and says what to take
//! and what to give.
//!
//! ```text
//!              ┌── join ── heard ──►┐
//! Membership ──┤                    ├─ Balance ──► decide(Decision) ──► whoever opens and drains sessions
//!              └◄─ announce ────────┘     ▲                                     │
//!                  unattended ────────────┘◄────────── Subscriptions ───────────┘
//! ```
//! Owns the place in the group: it joins, again and again after a loss, announces every
//! [`ANNOUNCE_EVERY`] and at once when the subscriptions change, and looks at the shards that nobody
//! announces. What follows from it is decided in [`balance`](crate::balance); what was decided is
//! carried out by others.
//!
//! Promises: one announcement is under way at a time, the newest one next. While the group is lost, or the
//! instance is unwilling, nothing is decided. When the sender of the subscriptions is dropped it says
//! goodbye, and ends.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::{
    Actor, ActorContext, ActorFutureExt, Addr, AsyncContext, Context, StreamHandler, Supervised,
    WrapFuture,
};
use futures::StreamExt;
use tokio::sync::watch;

use crate::balance::{
    ANNOUNCE_EVERY, Balance, Decision, EXPIRY, LISTEN, LOOK_EVERY, Subscriptions,
};
use crate::policy::Backoff;
use crate::port::{Announcement, Announcer, Joined, MemberId, Membership, SourceError};
use crate::restart::{self, Intensity};

#[cfg(test)]
mod tests;

/// Pauses between tries to join; see the pauses between tries to open a session.
const JOIN_BACKOFF: Backoff = Backoff {
    first: Duration::from_millis(100),
    ceiling: EXPIRY,
    factor: 2.0,
    jitter: 0.3,
};

/// What a [`Balancer`] is started with.
pub struct BalancerSpec {
    /// The group of the instances that share the shards.
    pub membership: Arc<dyn Membership>,
    /// Name of the endpoint, for logs.
    pub endpoint: Arc<str>,
    /// Into how many shards the endpoint is divided; they are numbered from 0. The same in all instances:
    /// those that differ do not count one another as members.
    pub shards: usize,
    /// How many panics of the actor are survived.
    pub intensity: Intensity,
    /// What the instance has. Each change is announced at once; dropping the sender is the goodbye.
    pub subscriptions: watch::Receiver<Subscriptions>,
    /// Carries out a decision, later; called on the actor's thread and must not block. A decision is repeated
    /// every [`ANNOUNCE_EVERY`] until `subscriptions` shows that it was carried out, or it is no
    /// longer right, so that nothing depends on a single call.
    pub decide: Box<dyn Fn(Decision) + Send>,
    /// Called when the actor has panicked too often and is given up: nothing is balanced any more.
    pub died: Box<dyn FnOnce() + Send>,
}

/// Takes part in a group for one instance; see the module.
pub struct Balancer {
    /// Keeps it alive: nobody else holds its address, and an actor without one is not restarted.
    _myself: Addr<Self>,
    membership: Arc<dyn Membership>,
    endpoint: Arc<str>,
    shards: usize,
    me: MemberId,
    balance: Balance,
    sequence: u64,
    subscriptions: watch::Receiver<Subscriptions>,
    /// The sender of the subscriptions is gone.
    ending: bool,
    decide: Box<dyn Fn(Decision) + Send>,
    /// What was decided last, so that it is repeated by the clock only.
    decided: Decision,
    /// The place in the group; `None` while it is lost.
    announcer: Option<Arc<dyn Announcer>>,
    /// Which place it is: late news of an earlier one count for nothing.
    place: u64,
    /// Failed tries to join, and places lost at once, since the group was last heard.
    failures: u32,
    announcing: Announcing,
    announcing_fails: bool,
    looking: bool,
    looking_fails: bool,
    warned_of_others: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Announcing {
    Idle,
    UnderWay,
    /// Something has changed since the one that is under way.
    OnceMore,
}

impl Balancer {
    /// Starts it in the current thread's actix `System`. It ends by itself when the sender of the
    /// subscriptions is dropped.
    ///
    /// Answers the name under which the others will know this instance.
    ///
    /// # Panics
    /// When the current thread runs no actix `System`.
    pub fn start(spec: BalancerSpec) -> MemberId {
        let me = MemberId::unique();
        let make = move |ctx: &mut Context<Self>| Self {
            _myself: ctx.address(),
            balance: Balance::new(me, spec.shards, now()),
            membership: spec.membership,
            endpoint: spec.endpoint,
            shards: spec.shards,
            me,
            sequence: 0,
            subscriptions: spec.subscriptions,
            ending: false,
            decide: spec.decide,
            decided: Decision::default(),
            announcer: None,
            place: 0,
            failures: 0,
            announcing: Announcing::Idle,
            announcing_fails: false,
            looking: false,
            looking_fails: false,
            warned_of_others: false,
        };
        restart::start(None, spec.intensity, make, spec.died);
        me
    }

    // ---- the place in the group

    fn join(&mut self, ctx: &mut Context<Self>) {
        let membership = Arc::clone(&self.membership);
        ctx.spawn(async move { membership.join().await }.into_actor(self).map(
            |result, this, ctx| match result {
                Ok(_) if this.ending => ctx.stop(),
                Ok(joined) => this.joined(joined, ctx),
                Err(error) => this.lost(&error.to_string(), ctx),
            },
        ));
    }

    fn joined(&mut self, joined: Joined, ctx: &mut Context<Self>) {
        tracing::debug!(
            endpoint = %self.endpoint,
            group = self.membership.name(),
            member = %self.me,
            "joined the group"
        );
        self.balance.joined_again(now());
        self.place += 1;
        let place = self.place;
        let of_place = move |announcement| FromGroup {
            place,
            announcement,
        };
        ctx.add_stream(
            joined
                .heard
                .map(move |announcement| of_place(Some(announcement)))
                .chain(futures::stream::iter([of_place(None)])),
        );
        self.announcer = Some(joined.announcer);
        // Of the earlier place, if any is under way: its end counts for nothing.
        self.announcing = Announcing::Idle;
        self.announce(ctx);
    }

    fn lost(&mut self, reason: &str, ctx: &mut Context<Self>) {
        self.announcer = None;
        if self.ending {
            ctx.stop();
            return;
        }
        self.failures += 1;
        let retry_in = JOIN_BACKOFF.pause(self.failures, fastrand::f64());
        tracing::warn!(
            endpoint = %self.endpoint,
            group = self.membership.name(),
            %reason,
            ?retry_in,
            "no place in the group: shards are neither taken nor given"
        );
        ctx.run_later(retry_in, Self::join_again);
    }

    fn join_again(&mut self, ctx: &mut Context<Self>) {
        match self.ending {
            true => ctx.stop(),
            false => self.join(ctx),
        }
    }

    // ---- speaking

    fn announce(&mut self, ctx: &mut Context<Self>) {
        let Some(announcer) = self.announcer.clone() else {
            return;
        };
        if self.announcing != Announcing::Idle {
            self.announcing = Announcing::OnceMore;
            return;
        }
        self.announcing = Announcing::UnderWay;
        self.sequence += 1;
        let announcement = {
            let own = self.subscriptions.borrow_and_update();
            Announcement {
                member: self.me,
                sequence: self.sequence,
                of: self.shards,
                shards: own.shards.keys().copied().collect(),
                willing: own.willing && !self.ending,
            }
        };
        let (place, goodbye) = (self.place, self.ending);
        ctx.spawn(
            async move { announcer.announce(announcement).await }
                .into_actor(self)
                .map(move |result, this, ctx| {
                    if place == this.place {
                        this.announced(result, goodbye, ctx);
                    }
                }),
        );
    }

    fn announced(
        &mut self,
        result: Result<(), SourceError>,
        goodbye: bool,
        ctx: &mut Context<Self>,
    ) {
        match result {
            Ok(()) => self.announcing_fails = false,
            // Said once for as long as it lasts; the next announcement is the next try.
            Err(_) if self.announcing_fails => {}
            Err(error) => {
                self.announcing_fails = true;
                tracing::warn!(
                    endpoint = %self.endpoint,
                    group = self.membership.name(),
                    %error,
                    "the group cannot be told about this instance: it keeps its shards, and others may stand by"
                );
            }
        }
        let once_more = self.announcing == Announcing::OnceMore;
        self.announcing = Announcing::Idle;
        if goodbye {
            // Heard or not: after an expiry they know anyway.
            ctx.stop();
        } else if once_more {
            self.announce(ctx);
        }
    }

    // ---- deciding

    fn tick(&mut self, ctx: &mut Context<Self>) {
        self.decide(true);
        self.announce(ctx);
    }

    /// Emits what is to be done; what was said already only if it is time to repeat it.
    fn decide(&mut self, repeat: bool) {
        if self.announcer.is_none() || self.ending {
            return;
        }
        let decision = {
            let own = self.subscriptions.borrow();
            self.balance.decide(&own, now())
        };
        if !decision.is_empty() && (repeat || decision != self.decided) {
            tracing::debug!(
                endpoint = %self.endpoint,
                subscribe = ?decision.subscribe,
                give = ?decision.give,
                "balance"
            );
            (self.decide)(decision.clone());
        }
        self.decided = decision;
    }

    fn look(&mut self, ctx: &mut Context<Self>) {
        if self.announcer.is_none() || self.ending || self.looking {
            return;
        }
        let asked = {
            let own = self.subscriptions.borrow();
            self.balance.worth_a_look(&own, now())
        };
        if asked.is_empty() {
            self.balance.looked(&asked, &BTreeSet::new());
            return;
        }
        self.looking = true;
        let membership = Arc::clone(&self.membership);
        ctx.spawn(
            async move { (membership.unattended(asked.clone()).await, asked) }
                .into_actor(self)
                .map(|(result, asked), this, _| this.looked(result, &asked)),
        );
    }

    fn looked(&mut self, result: Result<BTreeSet<usize>, SourceError>, asked: &BTreeSet<usize>) {
        self.looking = false;
        match result {
            Ok(deserted) => {
                self.looking_fails = false;
                self.balance.looked(asked, &deserted);
                self.decide(false);
            }
            Err(_) if self.looking_fails => {}
            Err(error) => {
                self.looking_fails = true;
                tracing::warn!(
                    endpoint = %self.endpoint,
                    group = self.membership.name(),
                    %error,
                    "shards that nobody works on cannot be looked for"
                );
            }
        }
    }

    fn warn_of_others(&mut self, announcement: &Announcement) {
        if announcement.of != self.shards && !self.warned_of_others {
            self.warned_of_others = true;
            tracing::warn!(
                endpoint = %self.endpoint,
                group = self.membership.name(),
                member = %announcement.member,
                shards = self.shards,
                theirs = announcement.of,
                "another instance divides this endpoint into another number of shards"
            );
        }
    }
}

/// By tokio's clock, which tests can pause.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// An announcement, or (without) the end of the place.
struct FromGroup {
    place: u64,
    announcement: Option<Announcement>,
}

/// The subscriptions have changed.
struct Changed;

impl Actor for Balancer {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Context<Self>) {
        ctx.run_interval(ANNOUNCE_EVERY, Self::tick);
        ctx.run_interval(LOOK_EVERY, Self::look);
        let mut subscriptions = self.subscriptions.clone();
        // What is there now is announced on joining.
        subscriptions.mark_unchanged();
        ctx.add_stream(futures::stream::unfold(
            subscriptions,
            async |mut subscriptions| {
                let changed = subscriptions.changed().await;
                changed.is_ok().then_some((Changed, subscriptions))
            },
        ));
        self.join(ctx);
    }
}

impl Supervised for Balancer {
    /// After a panic: the place in the group is given up with everything that was spawned, and what was
    /// heard may be half noted.
    fn restarting(&mut self, _: &mut Context<Self>) {
        self.balance = Balance::new(self.me, self.shards, now());
        self.announcer = None;
        self.place += 1;
        self.announcing = Announcing::Idle;
        self.looking = false;
        self.decided = Decision::default();
    }
}

impl StreamHandler<FromGroup> for Balancer {
    fn handle(&mut self, from: FromGroup, ctx: &mut Context<Self>) {
        if from.place != self.place {
            return;
        }
        let Some(announcement) = from.announcement else {
            self.lost("the connection was lost", ctx);
            return;
        };
        self.failures = 0;
        self.warn_of_others(&announcement);
        self.balance.heard(&announcement, now());
        self.decide(false);
        if announcement.member == self.me {
            // Listening may end just then: what is decided at the start need not wait for the next tick.
            ctx.run_later(LISTEN, |this, _| this.decide(false));
        }
    }

    /// The end of one place is not the end of the balancer.
    fn finished(&mut self, _: &mut Context<Self>) {}
}

impl StreamHandler<Changed> for Balancer {
    fn handle(&mut self, _: Changed, ctx: &mut Context<Self>) {
        self.announce(ctx);
        self.decide(false);
    }

    /// The sender is gone.
    fn finished(&mut self, ctx: &mut Context<Self>) {
        self.ending = true;
        match self.announcer {
            Some(_) => self.announce(ctx),
            // Nobody knows of this instance, or soon nobody will. A join under way ends unused.
            None => ctx.stop(),
        }
    }
}
