//! Balance: which shards an instance subscribes to, and which it gives away. Pure: time is passed in.
//!
//! ```text
//! announcements heard ──┐
//! shards nobody is on ──┼──► Balance ──► Decision { subscribe, give }
//! own subscriptions  ───┤
//! now ──────────────────┘
//! ```
//! Several instances can be subscribed to one shard; the broker lets one of them be active and
//! promotes the next when that one leaves. So *taking* a shard is to stand by for it, which harms
//! nobody, and *giving* it is what moves it. The broker itself never rebalances (FACTS 18).
//!
//! Promises, when every instance decides like this and announcements arrive:
//! - [`KEEP`] plus [`LISTEN`] and a few intervals after the last change (less than 10 seconds, and
//!   what a drain takes) every shard has one subscriber, and two members never differ by more than one
//!   shard. From then on nothing moves.
//! - A shard is given only to an heir that has announced its subscription to it.
//! - An instance that cannot hear the group (not even itself) gives nothing, and takes only what nobody is
//!   subscribed to.
//!
//! It does not promise that a shard is never without a subscriber: the heir may die while it inherits.
//! Then the next take it, after an expiry or two looks. And it is no fence: order rests on the broker's
//! single active consumer, never on this view.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::port::{Announcement, MemberId};

mod assign;
#[cfg(test)]
mod tests;

pub use assign::assign;

/// Pause between two announcements of an instance.
pub const ANNOUNCE_EVERY: Duration = Duration::from_millis(500);

/// A member that was not heard for this long has left: six announcements in a row were lost, or it.
pub const EXPIRY: Duration = Duration::from_secs(3);

/// How long a new instance only listens: two announcements of everybody, so that it knows of all and
/// does not grab everything.
pub const LISTEN: Duration = Duration::from_secs(1);

/// Nothing is given before the membership was the same for this long. As long as the expiry, so that by
/// then a member whose death nobody knew of has expired.
pub const STABLE: Duration = Duration::from_secs(3);

/// A shard just received is kept for this long, so that views that differ for a moment do not send it
/// to and fro. Five seconds, not ten: a join that follows a leave must be even again within ten, and the
/// shards received by the leave are those that the join has to move.
pub const KEEP: Duration = Duration::from_secs(5);

/// Pause between two looks at the shards that nobody announces.
pub const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A member that has left is remembered a while longer, so that an announcement which comes late does
/// not bring it back.
const FORGET: Duration = Duration::from_secs(10);

/// What an instance has now; written by whoever opens and drains its sessions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Subscriptions {
    /// The shards on which a session is open, active or standing by, each with the time of the
    /// subscription. **A shard that is being given is not listed any more**, from before its drain begins:
    /// another instance may give it to this one only if this one keeps it.
    pub shards: BTreeMap<usize, Instant>,
    /// Whether the instance wants shards: false when it drains, is paused or ends.
    pub willing: bool,
}

/// What to do now. A decision is repeated until it is carried out, or until it is no longer right:
/// who carries it out ignores what is under way already.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Decision {
    /// Open a session on these shards and stand by, in rising order.
    pub subscribe: Vec<usize>,
    /// Drain the sessions of these and close them, in rising order.
    pub give: Vec<usize>,
}

impl Decision {
    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.subscribe.is_empty() && self.give.is_empty()
    }
}

/// What is known of another instance.
#[derive(Debug)]
struct Heard {
    sequence: u64,
    shards: BTreeSet<usize>,
    willing: bool,
    at: Instant,
}

impl Heard {
    fn is_fresh(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.at) < EXPIRY
    }
}

/// How well the group is heard. The own announcements tell: all members hear all, the speaker
/// included. Without this a broker that lets nobody publish (an alarm) would make everybody look dead to
/// everybody, and everybody would take everything; and an instance that was stopped for a while
/// would trust a view of before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum View {
    /// The own announcements do not come back. Since when.
    Blind(Instant),
    /// They do, but not for long enough to have heard of everybody.
    Listening,
    Clear,
}

/// Decides for one instance; see the module.
#[derive(Debug)]
pub struct Balance {
    me: MemberId,
    shards: usize,
    others: BTreeMap<MemberId, Heard>,
    /// Another member was heard at some time.
    ever_heard: bool,
    blind_since: Instant,
    last_echo: Option<Instant>,
    listening_since: Instant,
    /// The willing members, me included if I am, as of the last decision, and since when it is these.
    members: Vec<MemberId>,
    unchanged_since: Instant,
    /// Of these members.
    owners: Vec<MemberId>,
    /// Taken while nobody else had ever been heard: not received from anybody, so not kept.
    unclaimed: BTreeSet<usize>,
    /// How often in a row a look found nobody subscribed.
    deserted: BTreeMap<usize, u32>,
}

impl Balance {
    /// For an instance that joins the group now, of an endpoint with this many shards.
    pub fn new(me: MemberId, shards: usize, now: Instant) -> Self {
        Self {
            me,
            shards,
            others: BTreeMap::new(),
            ever_heard: false,
            blind_since: now,
            last_echo: None,
            listening_since: now,
            members: Vec::new(),
            unchanged_since: now,
            owners: Vec::new(),
            unclaimed: BTreeSet::new(),
            deserted: BTreeMap::new(),
        }
    }

    /// The group was lost and joined again: what was known of it is old.
    pub fn joined_again(&mut self, now: Instant) {
        self.blind_since = now;
        self.last_echo = None;
        self.deserted.clear();
    }

    /// Takes note of an announcement, the own ones included. One that is older than what is known, or
    /// that counts other shards, changes nothing.
    pub fn heard(&mut self, announcement: &Announcement, now: Instant) {
        if announcement.of != self.shards {
            return;
        }
        if announcement.member == self.me {
            if let View::Blind(_) = self.view(now) {
                self.listening_since = now;
                // Those who went while nobody was heard have not expired yet.
                self.unchanged_since = now;
            }
            self.last_echo = Some(now);
            return;
        }
        self.ever_heard = true;
        let known = self.others.get(&announcement.member);
        if known.is_some_and(|known| known.sequence >= announcement.sequence) {
            return;
        }
        let heard = Heard {
            sequence: announcement.sequence,
            shards: announcement.shards.clone(),
            willing: announcement.willing,
            at: now,
        };
        self.others.insert(announcement.member, heard);
    }

    /// The shards worth a look: nobody is known to be subscribed to them. None while everything is as it
    /// should be, so that looking costs nothing then.
    pub fn worth_a_look(&self, own: &Subscriptions, now: Instant) -> BTreeSet<usize> {
        match self.view(now) {
            // At the start the others are not known yet, and may be about to subscribe.
            View::Listening => return BTreeSet::new(),
            View::Blind(since) if now.saturating_duration_since(since) < EXPIRY => {
                return BTreeSet::new();
            }
            View::Blind(_) | View::Clear => {}
        }
        if !own.willing {
            return BTreeSet::new();
        }
        let others = self.others.values().filter(|other| other.is_fresh(now));
        let known: BTreeSet<_> = others.flat_map(|other| &other.shards).collect();
        (0..self.shards)
            .filter(|shard| !own.shards.contains_key(shard) && !known.contains(shard))
            .collect()
    }

    /// Takes note of a look: these shards were asked for, and on these of them nobody was subscribed.
    pub fn looked(&mut self, asked: &BTreeSet<usize>, deserted: &BTreeSet<usize>) {
        self.deserted
            .retain(|shard, _| asked.contains(shard) && deserted.contains(shard));
        for &shard in deserted.intersection(asked) {
            *self.deserted.entry(shard).or_default() += 1;
        }
    }

    /// What to do now. To be asked after each announcement, and at least every [`ANNOUNCE_EVERY`].
    pub fn decide(&mut self, own: &Subscriptions, now: Instant) -> Decision {
        self.others
            .retain(|_, other| now.saturating_duration_since(other.at) < FORGET);
        self.unclaimed.retain(|shard| {
            self.owners
                .get(*shard)
                .is_none_or(|owner| *owner == self.me)
                || own.shards.contains_key(shard)
        });
        if !own.willing {
            // Willing again later is a change of the membership too.
            self.members.clear();
            self.deserted.clear();
            return Decision::default();
        }
        // Twice in a row: a subscriber may be about to come back.
        let deserted = self.deserted.iter().filter(|(_, looks)| **looks >= 2);
        let mut subscribe: BTreeSet<_> = deserted.map(|(shard, _)| *shard).collect();
        let mut give = Vec::new();
        if self.view(now) == View::Clear {
            self.know_members(now);
            let alone = !self.ever_heard;
            for shard in 0..self.shards {
                let subscribed = own.shards.get(&shard);
                let mine = self.owners[shard] == self.me;
                match subscribed {
                    None if mine => {
                        subscribe.insert(shard);
                        if alone {
                            self.unclaimed.insert(shard);
                        }
                    }
                    Some(since) if !mine && self.may_give(shard, *since, now) => give.push(shard),
                    _ => {}
                }
            }
        }
        Decision {
            subscribe: subscribe
                .into_iter()
                .filter(|shard| !own.shards.contains_key(shard))
                .collect(),
            give,
        }
    }

    fn view(&self, now: Instant) -> View {
        match self.last_echo {
            None => View::Blind(self.blind_since),
            Some(at) if now.saturating_duration_since(at) >= EXPIRY => View::Blind(at),
            Some(_) if now.saturating_duration_since(self.listening_since) < LISTEN => {
                View::Listening
            }
            Some(_) => View::Clear,
        }
    }

    fn know_members(&mut self, now: Instant) {
        let others = self.others.iter();
        let willing = others.filter(|(_, other)| other.willing && other.is_fresh(now));
        let mut members: Vec<_> = willing.map(|(member, _)| *member).collect();
        members.push(self.me);
        members.sort_unstable();
        if members != self.members {
            self.owners = assign(&members, self.shards);
            self.members = members;
            self.unchanged_since = now;
        }
    }

    /// Whether a shard that I am subscribed to and do not own may go to its owner.
    fn may_give(&self, shard: usize, since: Instant, now: Instant) -> bool {
        let stable = now.saturating_duration_since(self.unchanged_since) >= STABLE;
        let kept = self.unclaimed.contains(&shard) || now.saturating_duration_since(since) >= KEEP;
        let heir = self.others.get(&self.owners[shard]);
        // The broker's count of consumers could not tell: a quorum queue with three subscribers shows one
        // (FACTS 42).
        stable && kept && heir.is_some_and(|heir| heir.shards.contains(&shard))
    }
}
