//! Who is there, and who has what.

use std::collections::BTreeSet;

use futures::{FutureExt as _, StreamExt as _};
use laneway_actors::port::{Announcement, Membership, SourceError};

use super::super::membership::{self, Groups};
use super::*;
use crate::store::{Ownership, StoreError, StoreMembership};

/// The groups of a store's queues.
struct StoreGroups<A: StoreAdapter>(Stage<A>);

impl<A: StoreAdapter> Groups for StoreGroups<A> {
    fn group<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Arc<dyn Membership>> {
        async move {
            self.0.declare(name, ordered(2)).await;
            self.0.group(name)
        }
        .boxed()
    }

    fn remove_group<'a>(&'a self, _name: &'a str) -> BoxFuture<'a, ()> {
        // It goes with the tables.
        std::future::ready(()).boxed()
    }
}

impl<A: StoreAdapter> Stage<A> {
    fn group(&self, queue: &str) -> Arc<dyn Membership> {
        Arc::new(StoreMembership::new(self.store.clone(), queue))
    }

    async fn announce(&self, sequence: u64, ttl: Duration) {
        let announced = self.store.announce("q", &said(sequence), ttl).await;
        announced.expect("announces");
    }

    async fn announced(&self) -> Vec<Announcement> {
        let announced = self.store.announcements("q").await;
        announced.expect("answers")
    }
}

fn said(sequence: u64) -> Announcement {
    Announcement {
        member: MemberId::from_u128(7),
        sequence,
        of: 4,
        shards: BTreeSet::from([0, 3]),
        willing: true,
    }
}

/// The case of the same name of every group.
pub async fn what_is_announced_is_heard_by_every_member_the_speaker_included<A: StoreAdapter>(
    stage: Stage<A>,
) {
    let groups = StoreGroups(stage);
    membership::what_is_announced_is_heard_by_every_member_the_speaker_included(&groups).await;
}

/// The case of the same name of every group.
pub async fn an_older_announcement_is_never_heard_after_a_newer_one<A: StoreAdapter>(
    stage: Stage<A>,
) {
    let groups = StoreGroups(stage);
    membership::an_older_announcement_is_never_heard_after_a_newer_one(&groups).await;
}

/// The case of the same name of every group.
pub async fn who_joins_later_hears_what_is_announced_from_then_on<A: StoreAdapter>(
    stage: Stage<A>,
) {
    let groups = StoreGroups(stage);
    membership::who_joins_later_hears_what_is_announced_from_then_on(&groups).await;
}

/// The case of the same name of every group.
pub async fn groups_do_not_hear_each_other<A: StoreAdapter>(stage: Stage<A>) {
    membership::groups_do_not_hear_each_other(&StoreGroups(stage)).await;
}

/// The case of the same name of every group.
pub async fn a_member_that_leaves_does_not_disturb_the_others<A: StoreAdapter>(stage: Stage<A>) {
    membership::a_member_that_leaves_does_not_disturb_the_others(&StoreGroups(stage)).await;
}

/// Although it lasts, and is read with what is new.
pub async fn what_was_announced_before_a_place_was_taken_is_not_heard<A: StoreAdapter>(
    stage: Stage<A>,
) {
    stage.declare("q", ordered(1)).await;
    stage.announce(1, LONG).await;
    let mut place = stage.group("q").join().await.expect("joins");
    for sequence in 1..=2 {
        let other = Announcement {
            member: MemberId::from_u128(8),
            ..said(sequence)
        };
        let announced = place.announcer.announce(other.clone()).await;
        announced.expect("announces");
        // What was said before would come before the first of these or before the second.
        let heard = tokio::time::timeout(LONG, place.heard.next()).await;
        assert_eq!(heard.expect("in time"), Some(other));
    }
}

/// A store that cannot be asked ends the place, and nothing is announced through it; another place can be taken when
/// it is back. (The case of brokers cuts a connection; a store's connections are replaced without anybody noticing.)
pub async fn a_place_is_lost_with_the_store_and_can_be_taken_again<A: StoreAdapter>(
    mut stage: Stage<A>,
) {
    stage.declare("q", ordered(1)).await;
    let mut place = stage.group("q").join().await.expect("joins");
    let closed = stage.group("q");
    stage.restart().await;
    let end = tokio::time::timeout(LONG, place.heard.next()).await;
    assert_eq!(end.expect("it ends"), None);
    let said_there = place.announcer.announce(said(1)).await;
    assert!(matches!(said_there, Err(SourceError::Unavailable { .. })));
    let joined = closed.join().await;
    assert!(matches!(joined, Err(SourceError::Unavailable { .. })));

    stage.declare("q", ordered(1)).await;
    let mut place = stage.group("q").join().await.expect("joins");
    let announced = place.announcer.announce(said(2)).await;
    announced.expect("announces");
    let heard = tokio::time::timeout(LONG, place.heard.next()).await;
    assert_eq!(heard.expect("in time"), Some(said(2)));
}

/// As long as it was told to, and no longer; a repetition prolongs it.
pub async fn an_announcement_lasts_for_its_time<A: StoreAdapter>(stage: Stage<A>) {
    stage.declare("q", ordered(1)).await;
    stage.announce(1, SHORT).await;
    stage.announce(1, LONG).await;
    tokio::time::sleep(SHORT * 2).await;
    assert_eq!(stage.announced().await, [said(1)]);
    stage.announce(2, SHORT).await;
    tokio::time::sleep(SHORT * 2).await;
    assert_eq!(stage.announced().await, []);
    stage.announce(3, LONG).await;
    assert_eq!(stage.announced().await, [said(3)]);
}

/// One that was on its way for too long has no effect, not even when the newer one has expired.
pub async fn an_announcement_that_comes_late_replaces_none<A: StoreAdapter>(stage: Stage<A>) {
    stage.declare("q", ordered(1)).await;
    // Beyond what a signed number holds.
    let high = u64::MAX - 1;
    stage.announce(high, LONG).await;
    stage.announce(9, LONG).await;
    assert_eq!(stage.announced().await, [said(high)]);
    stage.announce(high + 1, SHORT).await;
    tokio::time::sleep(SHORT * 2).await;
    stage.announce(high, LONG).await;
    assert_eq!(stage.announced().await, []);
}

/// Free, taken, expired, given back; none of a queue without order.
pub async fn owners_are_shown_with_whether_their_lease_lasts<A: StoreAdapter>(stage: Stage<A>) {
    stage.declare("q", ordered(4)).await;
    stage.declare("other", ordered(1)).await;
    stage.unordered("u").await;
    let (one, two) = (MemberId::unique(), MemberId::unique());
    let take = async |queue, shard, owner, ttl| {
        let taken = stage.store.take(queue, Shard(shard), owner, ttl).await;
        taken.expect("answers").expect("it is free")
    };
    take("other", 0, one, LONG).await;
    take("q", 1, one, LONG).await;
    take("q", 2, two, SHORT).await;
    let given_back = take("q", 3, two, LONG).await;
    let owners = async || {
        let owners = stage.store.owners("q").await.expect("answers");
        let row = |o: Ownership| (o.shard.0, o.owner, o.fresh);
        owners.into_iter().map(row).collect::<Vec<_>>()
    };
    let before = owners().await;
    assert_eq!(before[3], (3, Some(two), true));
    stage.store.release(&given_back).await.expect("releases");
    tokio::time::sleep(SHORT * 2).await;
    let expected = [
        (0, None, false),
        (1, Some(one), true),
        (2, Some(two), false),
        (3, None, false),
    ];
    assert_eq!(owners().await, expected);
    assert_eq!(stage.store.owners("u").await.expect("answers"), []);
    let undeclared = stage.store.owners("nowhere").await;
    assert!(matches!(undeclared, Err(StoreError::Refused { .. })));
}

/// Among those that were asked for; one that does not exist is not taken for one that nobody has.
pub async fn a_shard_is_unattended_while_its_lease_is_free_or_expired<A: StoreAdapter>(
    stage: Stage<A>,
) {
    stage.declare("q", ordered(3)).await;
    let group = stage.group("q");
    let look = async |shards: &[usize]| group.unattended(shards.iter().copied().collect()).await;
    let unattended = async |shards: &[usize]| -> Vec<usize> {
        let found = look(shards).await.expect("the shards exist");
        found.into_iter().collect()
    };
    assert_eq!(unattended(&[0, 1, 2]).await, [0, 1, 2]);
    assert_eq!(unattended(&[]).await, [0; 0]);
    for (shard, ttl) in [(0, LONG), (1, SHORT)] {
        let taken = stage.store.take("q", Shard(shard), MemberId::unique(), ttl);
        taken.await.expect("answers").expect("it is free");
    }
    tokio::time::sleep(SHORT * 2).await;
    assert_eq!(unattended(&[0, 1, 2]).await, [1, 2]);
    assert_eq!(unattended(&[0, 2]).await, [2]);
    let missing = look(&[0, 3]).await;
    assert!(matches!(missing, Err(SourceError::Refused { .. })));
    let undeclared = stage.group("nowhere").unattended(BTreeSet::new()).await;
    match undeclared {
        Err(SourceError::Refused { what, .. }) => assert!(what.contains("nowhere"), "{what}"),
        other => panic!("refused, but: {other:?}"),
    }
}
