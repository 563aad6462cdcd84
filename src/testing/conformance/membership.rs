//! What every [`Membership`] promises; see the [suite](super) that this belongs to.
//!
//! Apart, because a transport need not have groups:
//! [`membership_conformance_suite!`](crate::membership_conformance_suite) is for those that have. The cases about
//! announcements alone need no transport, only [`Groups`]: a store's suite has them too.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures::future::BoxFuture;
use futures::stream::BoxStream;
use futures::{FutureExt as _, StreamExt as _};
use laneway_actors::port::{
    Announcement, Announcer, Joined, MemberId, Membership, Source, SourceError,
};

use super::Adapter;
use super::stage::{Reader, unique_name, within};
use crate::topology::{QueueSpec, Topology};

/// Makes one `#[tokio::test]` of each case of the
/// [membership suite](crate::testing::conformance::membership). To be used like
/// [`conformance_suite!`](crate::conformance_suite).
#[macro_export]
macro_rules! membership_conformance_suite {
    ($make_adapter:path) => {
        $crate::membership_conformance_suite! { @cases $make_adapter;
            what_is_announced_is_heard_by_every_member_the_speaker_included
            announcements_of_one_member_are_heard_in_their_order
            an_older_announcement_is_never_heard_after_a_newer_one
            who_joins_later_hears_what_is_announced_from_then_on
            groups_do_not_hear_each_other
            a_member_that_leaves_does_not_disturb_the_others
            the_stream_ends_when_the_connection_is_lost_and_joining_again_works
            a_shard_is_unattended_while_no_session_is_open_on_it
            a_standby_attends_a_shard_too
            a_look_at_a_missing_queue_is_refused_by_name
        }
    };
    (@cases $make_adapter:path; $($case:ident)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $case() {
            let adapter = $make_adapter().await;
            $crate::testing::conformance::membership::$case(&adapter).await;
        }
    )*};
}

/// What the cases about announcements need. Every [`Adapter`] whose transport has groups has it.
pub trait Groups: Send + Sync {
    /// The group of this name, which nobody has used before.
    fn group<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Arc<dyn Membership>>;

    /// Removes what is left of a group; called after a case has passed.
    fn remove_group<'a>(&'a self, name: &'a str) -> BoxFuture<'a, ()>;
}

impl<A: Adapter> Groups for A {
    fn group<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Arc<dyn Membership>> {
        let membership = self.transport().membership(name, &[]);
        let membership = membership.expect("a transport of this suite has groups");
        std::future::ready(membership).boxed()
    }

    fn remove_group<'a>(&'a self, name: &'a str) -> BoxFuture<'a, ()> {
        async move {
            // Where there is such a thing: RabbitMQ carries announcements through it.
            self.remove_exchange(&format!("{name}.members")).await;
        }
        .boxed()
    }
}

/// Every member hears an announcement with everything in it, also who made it.
pub async fn what_is_announced_is_heard_by_every_member_the_speaker_included(groups: &dyn Groups) {
    let group = Group::new(groups).await;
    let mut members = [group.join().await, group.join().await, group.join().await];
    let said = Announcement {
        member: MemberId::from_u128(u128::MAX - 1),
        sequence: u64::MAX,
        of: 64,
        shards: (0..64).step_by(3).collect(),
        willing: false,
    };
    members[1].say(said.clone()).await;
    for member in &mut members {
        assert_eq!(member.hear().await, said);
    }
    group.clean_up().await;
}

/// What one member announces, one after the other, is heard in that order. That all of it is heard is more than a
/// [`Membership`] promises; this case is for those who send each announcement, and not for a store, which keeps the
/// last one only.
pub async fn announcements_of_one_member_are_heard_in_their_order(groups: &dyn Groups) {
    let group = Group::new(groups).await;
    let (speaker, mut listener) = (group.join().await, group.join().await);
    let who = MemberId::unique();
    for sequence in 1..=50 {
        speaker.say(numbered(who, sequence)).await;
    }
    for sequence in 1..=50 {
        assert_eq!(listener.hear().await.sequence, sequence);
    }
    group.clean_up().await;
}

/// However many are passed over, what is heard of one member rises, and the newest is heard.
pub async fn an_older_announcement_is_never_heard_after_a_newer_one(groups: &dyn Groups) {
    let group = Group::new(groups).await;
    let (speaker, mut listener) = (group.join().await, group.join().await);
    let who = MemberId::unique();
    let speaking = async move {
        for sequence in 1..=50 {
            speaker.say(numbered(who, sequence)).await;
        }
    };
    let hearing = async {
        let mut last = 0;
        while last < 50 {
            let heard = listener.hear().await.sequence;
            assert!(heard > last, "{heard} after {last}");
            last = heard;
        }
    };
    futures::join!(speaking, hearing);
    group.clean_up().await;
}

/// Joining is enough to hear the next announcement of everybody, and nothing of before.
pub async fn who_joins_later_hears_what_is_announced_from_then_on(groups: &dyn Groups) {
    let group = Group::new(groups).await;
    let first = group.join().await;
    let who = MemberId::unique();
    first.say(numbered(who, 1)).await;
    let mut later = group.join().await;
    first.say(numbered(who, 2)).await;
    assert_eq!(later.hear().await.sequence, 2);
    group.clean_up().await;
}

/// What is announced in one group is not heard in another.
pub async fn groups_do_not_hear_each_other(groups: &dyn Groups) {
    let (group, other) = (Group::new(groups).await, Group::new(groups).await);
    let (here, mut there) = (group.join().await, other.join().await);
    let who = MemberId::unique();
    here.say(numbered(who, 1)).await;
    // It would come first, because it was sent, and confirmed, first.
    there.say(numbered(who, 2)).await;
    assert_eq!(there.hear().await.sequence, 2);
    group.clean_up().await;
    other.clean_up().await;
}

/// A member leaves by dropping its place; the others hear one another as before.
pub async fn a_member_that_leaves_does_not_disturb_the_others(groups: &dyn Groups) {
    let group = Group::new(groups).await;
    let mut stays = group.join().await;
    let leaves = group.join().await;
    drop(leaves);
    let who = MemberId::unique();
    for sequence in 1..=3 {
        stays.say(numbered(who, sequence)).await;
        assert_eq!(stays.hear().await.sequence, sequence);
    }
    group.clean_up().await;
}

/// A lost connection ends the stream, so that the member knows that it is deaf; it can join again.
pub async fn the_stream_ends_when_the_connection_is_lost_and_joining_again_works<A: Adapter>(
    adapter: &A,
) {
    let group = Group::new(adapter).await;
    let mut member = group.join().await;
    within("the connection to be cut", adapter.cut_members(&group.name)).await;
    within("the stream to end", async {
        while member.heard.next().await.is_some() {}
    })
    .await;

    let mut again = group.join().await;
    let who = MemberId::unique();
    // The connection that speaks may be the last to notice that it was cut.
    within("an announcement to be sent", async {
        while again.announcer.announce(numbered(who, 1)).await.is_err() {}
    })
    .await;
    assert_eq!(again.hear().await.member, who);
    group.clean_up().await;
}

/// A look finds the shards without a session, among those that were asked for, and again once the
/// session on one was lost or closed.
pub async fn a_shard_is_unattended_while_no_session_is_open_on_it(adapter: &dyn Adapter) {
    let shards = Shards::declare(adapter, 3).await;
    assert_eq!(shards.unattended([0, 1, 2]).await, [0, 1, 2]);
    assert_eq!(shards.unattended([2]).await, [2]);
    assert!(shards.unattended([]).await.is_empty());

    let mut lost = Reader::open(&*shards.sources[0], 1).await;
    let closed = Reader::open(&*shards.sources[1], 1).await;
    assert_eq!(shards.unattended([0, 1, 2]).await, [2]);
    closed.close().await;
    shards.until_unattended([0, 1, 2], [1, 2]).await;
    within("the cut", adapter.cut(&shards.queues[0].name)).await;
    lost.ended_by_itself().await;
    shards.until_unattended([0, 1, 2], [0, 1, 2]).await;
    shards.clean_up().await;
}

/// One subscriber of several is left: the shard is attended until that one has gone too.
pub async fn a_standby_attends_a_shard_too(adapter: &dyn Adapter) {
    let shards = Shards::declare(adapter, 1).await;
    let active = Reader::open(&*shards.sources[0], 1).await;
    let standby = Reader::open(&*shards.sources[0], 1).await;
    active.close().await;
    assert!(shards.unattended([0]).await.is_empty());
    standby.close().await;
    shards.until_unattended([0], [0]).await;
    shards.clean_up().await;
}

/// A shard that does not exist is not taken for one that nobody is on.
pub async fn a_look_at_a_missing_queue_is_refused_by_name(adapter: &dyn Adapter) {
    let missing = unique_name("missing");
    let shards = Shards::over(adapter, Vec::new(), vec![missing.clone()]);
    match shards.membership.unattended(BTreeSet::from([0])).await {
        Err(SourceError::Refused { what, .. }) => assert!(what.contains(&missing), "{what}"),
        other => panic!("refused, but: {other:?}"),
    }
    shards.clean_up().await;
}

// ---- helpers --------------------------------------------------------------------------------

fn numbered(member: MemberId, sequence: u64) -> Announcement {
    Announcement {
        member,
        sequence,
        of: 2,
        shards: BTreeSet::from([1]),
        willing: true,
    }
}

/// A group of its own.
struct Group<'a> {
    groups: &'a dyn Groups,
    name: String,
    membership: Arc<dyn Membership>,
}

impl<'a> Group<'a> {
    async fn new(groups: &'a dyn Groups) -> Self {
        let name = unique_name("group");
        let membership = groups.group(&name).await;
        assert_eq!(membership.name(), name);
        Self {
            groups,
            name,
            membership,
        }
    }

    async fn join(&self) -> Member {
        let joined = within("a place in the group", self.membership.join()).await;
        let Joined { heard, announcer } = joined.expect("the group can be reached");
        Member { heard, announcer }
    }

    async fn clean_up(self) {
        self.groups.remove_group(&self.name).await;
    }
}

/// A group that shares queues.
struct Shards<'a> {
    adapter: &'a dyn Adapter,
    membership: Arc<dyn Membership>,
    queues: Vec<QueueSpec>,
    sources: Vec<Arc<dyn Source>>,
}

impl<'a> Shards<'a> {
    fn over(adapter: &'a dyn Adapter, queues: Vec<QueueSpec>, names: Vec<String>) -> Self {
        let transport = adapter.transport();
        let membership = transport.membership(&unique_name("group"), &names);
        Self {
            adapter,
            membership: membership.expect("a transport of this suite has groups"),
            sources: queues.iter().map(|one| transport.source(one)).collect(),
            queues,
        }
    }

    async fn declare(adapter: &'a dyn Adapter, shards: usize) -> Self {
        let name = unique_name("shard");
        let mut topology = Topology::default();
        for shard in 0..shards {
            topology = topology.queue(&format!("{name}-{shard}"), |queue| {
                adapter.describe(queue.single_active_consumer())
            });
        }
        let queues = topology.queues().to_vec();
        let names = queues.iter().map(|queue| queue.name.clone()).collect();
        let shards = Self::over(adapter, queues, names);
        for source in &shards.sources {
            let verified = within("a queue to be declared", source.verify()).await;
            verified.expect("a fresh queue can be declared");
        }
        shards
    }

    async fn look(&self, shards: &BTreeSet<usize>) -> Result<BTreeSet<usize>, SourceError> {
        let looking = self.membership.unattended(shards.clone());
        within("a look at the shards", looking).await
    }

    async fn unattended(&self, shards: impl IntoIterator<Item = usize>) -> Vec<usize> {
        let found = self.look(&shards.into_iter().collect()).await;
        found.expect("the shards exist").into_iter().collect()
    }

    /// Looks until it is so: a queue may learn of the end of a session after its client. While the
    /// connection that was cut is replaced, a look may fail.
    async fn until_unattended(
        &self,
        shards: impl IntoIterator<Item = usize>,
        expected: impl IntoIterator<Item = usize>,
    ) {
        let (shards, expected) = (shards.into_iter().collect(), BTreeSet::from_iter(expected));
        within("the shards to be unattended", async {
            while !matches!(self.look(&shards).await, Ok(found) if found == expected) {}
        })
        .await;
    }

    async fn clean_up(self) {
        for queue in &self.queues {
            self.adapter.clean_up(queue).await;
        }
    }
}

struct Member {
    heard: BoxStream<'static, Announcement>,
    announcer: Arc<dyn Announcer>,
}

impl Member {
    /// Borrows nothing, because a stream cannot be shared between threads.
    fn say(&self, announcement: Announcement) -> impl Future<Output = ()> + use<> {
        let announcing = self.announcer.announce(announcement);
        async {
            let said = within("an announcement to be sent", announcing).await;
            said.expect("the group can be reached");
        }
    }

    async fn hear(&mut self) -> Announcement {
        let heard = within("an announcement to be heard", self.heard.next()).await;
        heard.expect("the place is not lost")
    }
}
