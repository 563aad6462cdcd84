//! The keys that this lane holds: what is told of them, and how a hold ends.
//!
//! Owns the lane's book of holds; the machine alone knows whether one still is. Promises that each hold is told when it
//! begins and, once, when and why it is over; and that the endpoint knows after every pass what its held keys use.
//! (Over all lanes: [`holds`](crate::holds).)

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Lane;
use super::machine::{Event, HoldEnd, Ticket};
use crate::envelope::{Delivery, Identity, MessageId};
use crate::holds::HeldKey;
use crate::key::Fingerprint;
use crate::observe::{EventKind, HoldOver};
use crate::outcome::PoisonReason;

/// One held head.
pub(super) struct Hold {
    shard: usize,
    since: Instant,
    key: Option<Fingerprint>,
    message: Option<MessageId>,
    reason: PoisonReason,
    identity: Identity,
    /// The last error's text, with the key replaced.
    detail: String,
}

impl Lane {
    pub(super) fn hold(
        &mut self,
        ticket: Ticket,
        delivery: &Arc<Delivery>,
        reason: PoisonReason,
        attempts: u32,
        at_most: Duration,
    ) {
        let since = Instant::now();
        let detail = self.take_detail(delivery.identity());
        let (key, message) = self.tell_held(delivery, reason, attempts, Some(at_most));
        self.since.insert(ticket, since);
        self.timers.insert((since + at_most, ticket), ());
        let hold = Hold {
            shard: Delivery::session(delivery).shard(),
            since,
            key,
            message,
            reason,
            identity: delivery.identity().clone(),
            detail: self.endpoint.redact(&detail, delivery.key()),
        };
        self.holds.insert(ticket, hold);
    }

    /// A key is held, here or by its source.
    pub(super) fn tell_held(
        &self,
        delivery: &Arc<Delivery>,
        reason: PoisonReason,
        attempts: u32,
        at_most: Option<Duration>,
    ) -> (Option<Fingerprint>, Option<MessageId>) {
        let key = self.fingerprint(delivery);
        let message = delivery.envelope().id.clone();
        tracing::error!(
            endpoint = %self.endpoint.config.name,
            queue = %self.endpoint.queue_of(delivery),
            key = key.map(tracing::field::display),
            message = message.as_ref().map(tracing::field::display),
            %reason,
            attempts,
            ?at_most,
            "poison message: its key is held until an operator releases, retries or skips it"
        );
        self.endpoint.emit(EventKind::Held {
            key,
            message: message.clone(),
            reason,
            attempts,
            at_most,
        });
        (key, message)
    }

    /// The hold of a key, if it is held here.
    pub(super) fn hold_of(&self, key: Fingerprint) -> Option<Ticket> {
        let mut holds = self.holds.iter();
        let held = holds.find(|(_, hold)| hold.key == Some(key));
        held.map(|(&ticket, _)| ticket)
    }

    /// Ends a hold, if it is still there.
    pub(super) fn end_hold(&mut self, ticket: Ticket, end: HoldEnd, why: HoldOver) {
        if self.machine.held(ticket).is_none() {
            return; // `review_holds` tells
        }
        let Some(hold) = self.holds.remove(&ticket) else {
            return;
        };
        self.tell_hold_ended(&hold, why);
        self.since.remove(&ticket);
        self.detail = (end == HoldEnd::Release).then_some(hold.detail);
        self.feed(Event::HoldEnded(ticket, end), None);
        // Not taken: it is parked when its copy comes.
        if let Some(detail) = self.detail.take() {
            self.keep_detail(hold.identity, detail);
        }
    }

    fn tell_hold_ended(&self, hold: &Hold, why: HoldOver) {
        let after = hold.since.elapsed();
        let (key, message) = (hold.key, hold.message.clone());
        let queue = &self.endpoint.queues[hold.shard];
        if matches!(why, HoldOver::TooLong | HoldOver::TooMany) {
            tracing::error!(
                endpoint = %self.endpoint.config.name,
                %queue,
                key = key.map(tracing::field::display),
                message = message.as_ref().map(tracing::field::display),
                reason = %hold.reason,
                ?why,
                ?after,
                "a hold has reached its bound: the message is parked, its key goes on"
            );
        } else {
            tracing::info!(
                endpoint = %self.endpoint.config.name,
                %queue,
                key = key.map(tracing::field::display),
                message = message.as_ref().map(tracing::field::display),
                reason = %hold.reason,
                ?why,
                ?after,
                "hold ended"
            );
        }
        self.endpoint.emit(EventKind::HoldEnded {
            key,
            message,
            why,
            after,
        });
    }

    /// Tells what is held here, so that the endpoint knows what its held keys use.
    pub(super) fn review_holds(&mut self) {
        if self.holds.is_empty() && !self.holds_reported {
            return;
        }
        let tickets: Vec<_> = self.holds.keys().copied().collect();
        for ticket in tickets {
            if self.machine.held(ticket).is_none()
                && let Some(hold) = self.holds.remove(&ticket)
            {
                self.since.remove(&ticket);
                self.tell_hold_ended(&hold, HoldOver::Gone);
            }
        }
        let held = self.holds.iter().map(|(&ticket, hold)| HeldKey {
            ticket,
            shard: hold.shard,
            since: hold.since,
            credits: self.machine.held(ticket).unwrap_or(0),
        });
        let held: Vec<_> = held.collect();
        self.holds_reported = !held.is_empty();
        self.endpoint.holds.report(&self.link, held);
    }
}
