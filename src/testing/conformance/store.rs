//! One suite of promises for [`Store`] and [`TransactionalStore`], run by every database.
//!
//! Owns the cases, each an `async fn` whose name is the promise; [`store_conformance_suite!`](crate::store_conformance_suite)
//! makes a test of each. What a database must bring beside its store is little ([`StoreAdapter`]).
//!
//! Times that must pass (a lease that expires, a retry that becomes due) do pass, by the database's clock, which no
//! test can move: [`SHORT`] or [`LATER`] for each. Everything else waits for events.
//!
//! It does not check durability, nor what happens when the database goes away.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use laneway_actors::port::MemberId;
use laneway_actors::{Envelope, MessageId, OrderingKey, ShardCount};

use crate::store::{
    Ending, Lease, NewMessage, QueueIdentity, QueueOrder, Sequence, Settlement, Shard, Start,
    Store, Stored, TransactionalStore, Window,
};

pub mod claims;
pub mod enqueuing;
pub mod holds;
pub mod leases;
pub mod load;
pub mod members;
pub mod settling;

/// A time that is waited for: a lease that is to expire, a message that is to become due.
pub const SHORT: Duration = Duration::from_millis(60);

/// A time that must not pass before the next few steps, and is waited for after them.
pub const LATER: Duration = Duration::from_millis(1_500);

/// A lease that is not to expire within a case.
pub const LONG: Duration = Duration::from_secs(120);

/// What the suite needs of a database. Made anew for each case, with tables of its own.
pub trait StoreAdapter: Send + Sync + 'static {
    /// The store under test.
    type Store: TransactionalStore;

    /// Opens a store on the tables of this case. When it is called again, the one before is closed.
    fn open(&self) -> BoxFuture<'_, Self::Store>;

    /// Writes headers that cannot be read into the row of a message or dead letter, past the store.
    fn break_headers<'a>(&'a self, table: &'a str, id: &'a str) -> BoxFuture<'a, ()>;

    /// Removes everything. Called also after a case that failed.
    fn clean_up(&self) -> BoxFuture<'_, ()>;
}

/// Makes one `#[tokio::test]` of each case of the [suite](crate::testing::conformance::store).
///
/// The argument is a path to an `async fn() -> impl StoreAdapter`. The calling crate needs `tokio` with `macros`
/// and `rt-multi-thread`.
#[macro_export]
macro_rules! store_conformance_suite {
    ($make_adapter:path) => {
        $crate::store_conformance_suite! { @cases $make_adapter;
            enqueuing::what_is_rolled_back_never_existed
            enqueuing::what_is_committed_is_read_in_order_with_all_its_properties
            enqueuing::a_copy_is_recognised_while_the_first_waits_and_after_it_was_handled
            enqueuing::copies_within_one_batch_are_recognised
            enqueuing::an_id_with_another_body_is_a_dead_letter
            enqueuing::the_same_id_in_two_queues_is_two_messages
            enqueuing::handled_ids_are_pruned_in_small_batches
            enqueuing::a_scheduled_message_gets_its_place_when_it_is_due_and_holds_nobody
            enqueuing::a_queue_keeps_its_identity
            enqueuing::queues_with_messages_are_listed_whoever_declared_them
            enqueuing::a_batch_with_an_undeclared_queue_stores_nothing
            enqueuing::a_commit_gives_a_hint
            leases::a_fresh_lease_is_refused_and_an_expired_one_is_taken
            leases::a_renewed_lease_lasts_and_a_released_one_is_free
            leases::a_stale_owner_cannot_read_start_or_settle
            leases::a_take_waits_for_a_settling_that_has_begun
            leases::the_shards_of_a_queue_have_owners_of_their_own
            claims::backlog_is_read_before_new_arrivals_after_a_restart
            claims::rows_of_held_keys_do_not_fill_the_window
            claims::what_is_skipped_is_not_read_again
            claims::claims_of_two_nodes_do_not_overlap
            claims::claims_of_an_expired_node_are_claimed_by_another
            claims::what_is_given_back_is_claimed_again
            claims::a_broken_row_hides_no_other
            claims::windows_agree_with_a_plain_model
            settling::what_was_handled_is_gone_and_settling_it_again_does_nothing
            settling::a_retry_keeps_its_place_and_holds_its_key
            settling::a_held_message_waits_until_it_is_let_go
            settling::attempts_are_counted_over_restarts
            settling::a_first_attempt_is_uncounted_and_no_other
            settling::only_its_own_node_uncounts_what_it_has_claimed
            settling::a_dead_letter_keeps_the_message_and_its_whole_past
            settling::a_handlers_writes_and_its_mark_commit_together
            settling::an_ended_transaction_is_not_repeated
            settling::a_copy_that_meets_a_settling_waits_for_its_end
            holds::what_is_held_is_listed_in_pages_oldest_first
            holds::a_hold_that_is_retried_runs_at_once_with_attempts_counted_anew
            holds::a_hold_that_is_given_up_lets_its_key_go
            holds::what_is_not_held_is_left_as_it_is
            holds::of_several_who_end_a_hold_one_does
            members::what_is_announced_is_heard_by_every_member_the_speaker_included
            members::an_older_announcement_is_never_heard_after_a_newer_one
            members::who_joins_later_hears_what_is_announced_from_then_on
            members::groups_do_not_hear_each_other
            members::a_member_that_leaves_does_not_disturb_the_others
            members::what_was_announced_before_a_place_was_taken_is_not_heard
            members::a_place_is_lost_with_the_store_and_can_be_taken_again
            members::an_announcement_lasts_for_its_time
            members::an_announcement_that_comes_late_replaces_none
            members::owners_are_shown_with_whether_their_lease_lasts
            members::a_shard_is_unattended_while_its_lease_is_free_or_expired
            load::commits_of_one_key_are_never_read_out_of_order
            load::writers_of_many_keys_lose_nothing_and_never_dead_lock
            load::several_calls_dead_lock_only_as_a_retryable_conflict
            load::two_nodes_empty_a_queue_and_handle_each_message_once
        }
    };
    (@cases $make_adapter:path; $($group:ident :: $case:ident)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $case() {
            let make = $make_adapter();
            $crate::testing::conformance::store::run(
                make.await,
                $crate::testing::conformance::store::$group::$case,
            )
            .await;
        }
    )*};
}

/// Runs a case, and cleans up whether it passes or not.
pub async fn run<A, F>(adapter: A, case: impl FnOnce(Stage<A>) -> F)
where
    A: StoreAdapter,
    F: Future<Output = ()> + Send + 'static,
{
    let adapter = Arc::new(adapter);
    let store = Arc::new(adapter.open().await);
    let case = case(Stage {
        adapter: adapter.clone(),
        store,
    });
    let result = tokio::spawn(case).await;
    adapter.clean_up().await;
    if let Err(error) = result {
        std::panic::resume_unwind(error.into_panic());
    }
}

/// A store with nothing in it, and short words for what the cases do.
pub struct Stage<A: StoreAdapter> {
    adapter: Arc<A>,
    store: Arc<A::Store>,
}

impl<A: StoreAdapter> Stage<A> {
    async fn restart(&mut self) {
        self.store.close().await;
        self.store = Arc::new(self.adapter.open().await);
    }

    /// Declares an ordered queue of one shard and takes it.
    async fn ordered(&self, queue: &str) -> Lease {
        self.declare(queue, ordered(1)).await;
        self.take(queue, MemberId::unique(), LONG)
            .await
            .expect("nobody has it")
    }

    /// Declares an unordered queue and joins it.
    async fn unordered(&self, queue: &str) -> Lease {
        self.declare(queue, QueueOrder::Unordered).await;
        self.join(queue, LONG).await
    }

    async fn declare(&self, queue: &str, order: QueueOrder) {
        let queue = QueueIdentity {
            name: queue.into(),
            order,
        };
        let declared = self.store.declare(&[queue]).await;
        declared.expect("declares");
    }

    async fn take(&self, queue: &str, owner: MemberId, ttl: Duration) -> Option<Lease> {
        let taken = self.store.take(queue, Shard(0), owner, ttl).await;
        taken.expect("answers")
    }

    async fn join(&self, queue: &str, ttl: Duration) -> Lease {
        let joined = self.store.join(queue, MemberId::unique(), ttl).await;
        joined.expect("joins")
    }

    async fn enqueue(&self, batch: Vec<NewMessage>) -> Vec<crate::store::Placed> {
        let enqueued = self.store.enqueue(batch).await;
        enqueued.expect("stores").committed()
    }

    async fn read(&self, lease: &Lease, limit: u32) -> Vec<Stored> {
        self.window(lease, Window::of(limit)).await
    }

    async fn window(&self, lease: &Lease, window: Window) -> Vec<Stored> {
        self.store.read(lease, &window).await.expect("reads")
    }

    async fn handled(&self, lease: &Lease, sequences: &[Sequence]) -> crate::store::Settled {
        let settled = self.store.settle(lease, &handled(sequences)).await;
        settled.expect("settles")
    }

    async fn count(&self, queue: &str) -> crate::store::Counts {
        self.store.count(queue).await.expect("counts")
    }
}

/// The numbers of no messages.
const NONE: [u64; 0] = [];

fn ordered(shards: u32) -> QueueOrder {
    QueueOrder::Ordered(ShardCount::new(shards).expect("a number that is allowed"))
}

/// A message with an id of its own; its body is `number`.
fn message(queue: &str, key: &str, number: u64) -> NewMessage {
    NewMessage {
        queue: queue.into(),
        key: Some(OrderingKey::from(key)),
        envelope: Envelope {
            id: Some(MessageId::unique()),
            body: number.to_string().into(),
            ..Envelope::default()
        },
        due: None,
    }
}

fn with_id(mut message: NewMessage, id: &str) -> NewMessage {
    message.envelope.id = Some(id.into());
    message
}

fn number_of(message: &Stored) -> u64 {
    let body = std::str::from_utf8(&message.envelope.body).expect("a number");
    body.parse().expect("a number")
}

fn numbers(messages: &[Stored]) -> Vec<u64> {
    messages.iter().map(number_of).collect()
}

fn attempt(sequence: Sequence, attempt: u32) -> Start {
    Start { sequence, attempt }
}

/// The first attempt of each.
fn firsts(messages: &[Stored]) -> Vec<Start> {
    let messages = messages.iter();
    messages.map(|m| attempt(m.sequence, 1)).collect()
}

fn sequences(messages: &[Stored]) -> Vec<Sequence> {
    messages.iter().map(|message| message.sequence).collect()
}

fn settlement(sequence: Sequence, ending: Ending) -> Settlement {
    Settlement { sequence, ending }
}

fn handled(sequences: &[Sequence]) -> Vec<Settlement> {
    let settlements = sequences.iter().map(|s| settlement(*s, Ending::Handled));
    settlements.collect()
}
