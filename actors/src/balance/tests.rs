//! Unit tests of the rules; the simulation of several instances is in `world`.

use super::*;

mod owners;
mod world;

const ME: MemberId = MemberId::from_u128(1);
const OTHER: MemberId = MemberId::from_u128(2);
const SHARDS: usize = 8;

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// An instance in slow motion.
struct One {
    balance: Balance,
    own: Subscriptions,
    start: Instant,
    now: Duration,
    sequence: u64,
}

impl One {
    fn new() -> Self {
        let start = Instant::now();
        Self {
            balance: Balance::new(ME, SHARDS, start),
            own: Subscriptions {
                shards: BTreeMap::new(),
                willing: true,
            },
            start,
            now: Duration::ZERO,
            sequence: 0,
        }
    }

    fn now(&self) -> Instant {
        self.start + self.now
    }

    fn hear(&mut self, member: MemberId, shards: impl IntoIterator<Item = usize>, willing: bool) {
        self.sequence += 1;
        let announcement = Announcement {
            member,
            sequence: self.sequence,
            of: SHARDS,
            shards: shards.into_iter().collect(),
            willing,
        };
        self.balance.heard(&announcement, self.start + self.now);
    }

    /// Lets time pass, in which the own announcements come back and `others` are heard.
    fn pass(&mut self, time: Duration, others: &[(MemberId, &[usize])]) -> Decision {
        let until = self.now + time;
        while self.now < until {
            self.now += ANNOUNCE_EVERY.min(until - self.now);
            self.hear(ME, [], true);
            for (member, shards) in others {
                self.hear(*member, shards.iter().copied(), true);
            }
            self.decide();
        }
        self.decide()
    }

    fn decide(&mut self) -> Decision {
        let now = self.now();
        self.balance.decide(&self.own, now)
    }

    /// Subscribes to what was decided.
    fn obey(&mut self, decision: &Decision) {
        let now = self.now();
        let taken = decision.subscribe.iter().map(|shard| (*shard, now));
        self.own.shards.extend(taken);
        for shard in &decision.give {
            self.own.shards.remove(shard);
        }
    }

    fn look(&mut self, deserted: &[usize]) {
        let asked = self.balance.worth_a_look(&self.own, self.now());
        let deserted = deserted.iter().copied().collect();
        self.balance.looked(&asked, &deserted);
    }
}

fn owned_by(member: MemberId) -> Vec<usize> {
    let owners = assign(&[ME, OTHER], SHARDS);
    let of_member = owners.iter().enumerate();
    of_member
        .filter_map(|(shard, owner)| (*owner == member).then_some(shard))
        .collect()
}

#[test]
fn a_new_instance_listens_before_it_takes() {
    let mut one = One::new();
    one.hear(ME, [], true);
    assert!(one.pass(ms(999), &[]).is_empty());
    assert_eq!(one.pass(ms(1), &[]).subscribe, Vec::from_iter(0..SHARDS));
}

#[test]
fn a_new_instance_takes_only_its_own_when_another_is_there() {
    let mut one = One::new();
    one.hear(ME, [], true);
    let everything = Vec::from_iter(0..SHARDS);
    let decision = one.pass(LISTEN, &[(OTHER, &everything)]);
    assert_eq!(decision.subscribe, owned_by(ME));
    assert!(decision.give.is_empty());
}

#[test]
fn an_instance_that_does_not_hear_itself_takes_nothing_that_is_attended() {
    let mut one = One::new();
    one.now = EXPIRY - ms(1);
    assert!(one.balance.worth_a_look(&one.own, one.now()).is_empty());
    one.now = EXPIRY;
    for _ in 0..2 {
        assert!(one.decide().is_empty());
        one.look(&[3]);
    }
    assert_eq!(one.decide().subscribe, [3]);
}

#[test]
fn what_was_taken_at_the_start_is_given_as_soon_as_the_heir_is_subscribed_and_all_is_stable() {
    let mut one = One::new();
    one.hear(ME, [], true);
    let all = one.pass(LISTEN, &[]);
    one.obey(&all);
    let theirs = owned_by(OTHER);

    one.hear(OTHER, [], true);
    one.decide();
    assert!(
        one.pass(STABLE + KEEP, &[(OTHER, &[])]).is_empty(),
        "the heir has subscribed to none"
    );
    assert_eq!(
        one.pass(ms(500), &[(OTHER, &theirs[..1])]).give,
        theirs[..1]
    );
    assert_eq!(one.pass(ms(500), &[(OTHER, &theirs)]).give, theirs);
}

#[test]
fn nothing_is_given_before_the_membership_was_stable() {
    let mut one = One::new();
    one.hear(ME, [], true);
    let all = one.pass(LISTEN, &[]);
    one.obey(&all);
    let theirs = owned_by(OTHER);
    one.hear(OTHER, theirs.clone(), true);
    one.decide();
    assert!(one.pass(STABLE - ms(1), &[(OTHER, &theirs)]).is_empty());
    assert_eq!(one.pass(ms(1), &[(OTHER, &theirs)]).give, theirs);
}

#[test]
fn a_shard_that_was_received_is_kept() {
    let mut one = One::new();
    one.hear(ME, [], true);
    let theirs = owned_by(OTHER);
    let mine = one.pass(LISTEN, &[(OTHER, &theirs)]);
    one.obey(&mine);
    one.hear(OTHER, [], false);
    let inherited = one.decide();
    assert_eq!(inherited.subscribe, theirs, "a goodbye counts at once");
    one.obey(&inherited);

    one.hear(OTHER, theirs.clone(), true);
    one.decide();
    assert!(one.pass(KEEP - ms(1), &[(OTHER, &theirs)]).is_empty());
    assert_eq!(one.pass(ms(1), &[(OTHER, &theirs)]).give, theirs);
}

#[test]
fn what_was_taken_at_the_start_and_came_back_is_kept_like_anything_received() {
    let mut one = One::new();
    one.hear(ME, [], true);
    let all = one.pass(LISTEN, &[]);
    one.obey(&all);
    let theirs = owned_by(OTHER);
    one.hear(OTHER, theirs.clone(), true);
    one.decide();
    let given = one.pass(STABLE, &[(OTHER, &theirs)]);
    one.obey(&given);
    one.pass(ms(500), &[(OTHER, &theirs)]);
    one.hear(OTHER, [], false);
    let inherited = one.decide();
    assert_eq!(inherited.subscribe, theirs);
    one.obey(&inherited);

    one.hear(OTHER, theirs.clone(), true);
    one.decide();
    assert!(one.pass(KEEP - ms(1), &[(OTHER, &theirs)]).is_empty());
}

#[test]
fn a_member_that_is_not_heard_any_more_leaves_its_shards() {
    let mut one = One::new();
    one.hear(ME, [], true);
    let theirs = owned_by(OTHER);
    let mine = one.pass(LISTEN, &[(OTHER, &theirs)]);
    one.obey(&mine);
    assert!(one.pass(EXPIRY - ms(1), &[]).is_empty());
    assert_eq!(one.pass(ms(1), &[]).subscribe, theirs);
}

#[test]
fn an_older_announcement_changes_nothing() {
    let mut one = One::new();
    one.hear(ME, [], true);
    one.pass(LISTEN, &[(OTHER, &[])]);
    let goodbye = |sequence| Announcement {
        member: OTHER,
        sequence,
        of: SHARDS,
        shards: BTreeSet::new(),
        willing: false,
    };
    let now = one.now();
    let mine = one.decide();
    one.balance.heard(&goodbye(1), now);
    assert_eq!(one.decide(), mine);
    one.balance.heard(&goodbye(99), now);
    assert_eq!(one.decide().subscribe.len(), SHARDS);
    one.sequence = 10;
    one.hear(OTHER, [], true);
    assert_eq!(one.decide().subscribe.len(), SHARDS, "it has said goodbye");
}

#[test]
fn a_shard_is_taken_when_two_looks_in_a_row_find_nobody_on_it() {
    let mut one = One::new();
    one.hear(ME, [], true);
    let mine = one.pass(LISTEN, &[(OTHER, &[])]);
    one.obey(&mine);
    let theirs = owned_by(OTHER);
    one.look(&theirs[..1]);
    one.look(&[]);
    one.look(&theirs[..1]);
    assert!(one.decide().is_empty(), "not in a row");
    one.look(&theirs[..1]);
    assert_eq!(one.decide().subscribe, theirs[..1]);

    let known = one.balance.worth_a_look(&one.own, one.now());
    assert_eq!(Vec::from_iter(known), theirs);
    one.hear(OTHER, theirs, true);
    let known = one.balance.worth_a_look(&one.own, one.now());
    assert!(known.is_empty(), "all are announced, by one or the other");
}

#[test]
fn after_a_stop_of_its_own_an_instance_listens_again_before_it_gives() {
    let mut one = One::new();
    one.hear(ME, [], true);
    let all = one.pass(LISTEN, &[]);
    one.obey(&all);
    let theirs = owned_by(OTHER);
    one.hear(OTHER, theirs.clone(), true);
    one.pass(STABLE - ms(500), &[(OTHER, &theirs)]);

    one.now += ms(10_000);
    // What lay in its socket is old, and looks new.
    one.hear(ME, [], true);
    one.hear(OTHER, theirs.clone(), true);
    assert!(one.decide().is_empty());
    assert!(one.pass(STABLE - ms(1), &[(OTHER, &theirs)]).is_empty());
    assert_eq!(one.pass(LISTEN, &[(OTHER, &theirs)]).give, theirs);
}

#[test]
fn while_nobody_can_announce_nothing_moves() {
    let mut one = One::new();
    one.hear(ME, [], true);
    let theirs = owned_by(OTHER);
    let mine = one.pass(LISTEN, &[(OTHER, &theirs)]);
    one.obey(&mine);
    one.pass(ms(2_000), &[(OTHER, &theirs)]);
    for _ in 0..60 {
        one.now += ANNOUNCE_EVERY;
        assert!(one.decide().is_empty());
        one.look(&[]);
    }
    assert!(one.pass(ms(20_000), &[(OTHER, &theirs)]).is_empty());
}

#[test]
fn an_unwilling_instance_decides_nothing() {
    let mut one = One::new();
    one.own.willing = false;
    one.hear(ME, [], false);
    assert!(one.pass(ms(5_000), &[]).is_empty());
    assert!(one.balance.worth_a_look(&one.own, one.now()).is_empty());
    one.own.willing = true;
    assert_eq!(one.decide().subscribe.len(), SHARDS);
}

#[test]
fn an_instance_that_counts_other_shards_is_not_a_member() {
    let mut one = One::new();
    one.hear(ME, [], true);
    let stranger = Announcement {
        member: OTHER,
        sequence: 1,
        of: SHARDS + 1,
        shards: BTreeSet::new(),
        willing: true,
    };
    one.balance.heard(&stranger, one.now());
    assert_eq!(one.pass(LISTEN, &[]).subscribe.len(), SHARDS);
}
