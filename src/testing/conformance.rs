//! One suite of promises for [`Source`], [`Session`], [`Parking`] and [`Publisher`], run by every
//! adapter.
//!
//! Owns the list of cases; they are beside it, by what they promise: what arrives, what comes back, how a session ends,
//! a single active consumer, parking, publishing, verifying. Each is an `async fn` whose name is the promise; it returns
//! if the promise is kept and panics otherwise. [`conformance_suite!`](crate::conformance_suite) makes a test of each.
//!
//! What an adapter must bring beside its [`Transport`] is little ([`Adapter`]): a way to cut a
//! connection, and a way to take an exchange away. Everything else is done and seen through the ports.
//!
//! Waiting is for events, each wait bounded by [`PATIENCE`]. That something does *not* happen is
//! proven by a later event that would have come second: a marker message, or the same message at
//! another session.
//!
//! It does not check speed, durability across a restart of the broker, nor what an adapter does on a
//! tag that is not outstanding (no owner sends one).
//!
//! [`Source`]: laneway_actors::port::Source
//! [`Session`]: laneway_actors::port::Session
//! [`Parking`]: laneway_actors::port::Parking
//! [`Publisher`]: laneway_actors::port::Publisher

use std::time::Duration;

use futures::future::BoxFuture;

use crate::topology::QueueSpec;
use crate::transport::Transport;

mod arriving;
mod ending;
mod giving_back;
pub mod membership;
mod parking;
mod publishing;
mod single_active_consumer;
mod stage;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub mod store;
mod verifying;

pub use arriving::*;
pub use ending::*;
pub use giving_back::*;
pub use parking::*;
pub use publishing::*;
pub use single_active_consumer::*;
pub use verifying::*;

/// How long any single step may take before the case fails. Generous: a loaded machine is slow, and
/// a case that passes never waits this long.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// What the suite needs of an adapter. Made anew for each case.
pub trait Adapter: Send + Sync {
    /// The transport under test.
    fn transport(&self) -> &dyn Transport;

    /// Changes how queues are declared, to run the suite over another kind of queue
    /// (`|queue| queue.quorum()`). Applied to every queue that a case declares.
    fn describe(&self, queue: QueueSpec) -> QueueSpec {
        queue
    }

    /// Ends, from the outside, the connection of every session that is open on the queue, so that
    /// they notice without having asked for it. Resolves when it is done; when the sessions notice is
    /// up to them. The broker and the queue stay. It may cut publishing connections too: no case
    /// publishes after it.
    fn cut<'a>(&'a self, queue: &'a str) -> BoxFuture<'a, ()>;

    /// Ends, from the outside, the connection of every member of a group, so that they notice without
    /// having asked for it. It may end their sessions too. By default it does what [`cut`](Self::cut)
    /// does, for an adapter that cuts everything whatever it is given.
    fn cut_members<'a>(&'a self, group: &'a str) -> BoxFuture<'a, ()> {
        self.cut(group)
    }

    /// Removes an exchange from the broker, from the outside. Resolves when it is gone.
    fn remove_exchange<'a>(&'a self, exchange: &'a str) -> BoxFuture<'a, ()>;

    /// Removes what a case has declared; called after it has passed. By default it is left to the
    /// broker's own end.
    fn clean_up<'a>(&'a self, _queue: &'a QueueSpec) -> BoxFuture<'a, ()> {
        Box::pin(std::future::ready(()))
    }
}

/// Makes one `#[tokio::test]` of each case of the [suite](crate::testing::conformance).
///
/// The argument is a path to an `async fn() -> impl Adapter`. Put the invocation into a module of its
/// own to run the suite more than once in a test file. The calling crate needs `tokio` with `macros`
/// and `rt-multi-thread`.
#[macro_export]
macro_rules! conformance_suite {
    ($make_adapter:path) => {
        $crate::conformance_suite! { @cases $make_adapter;
            messages_arrive_in_the_order_of_publishing
            tags_rise_from_message_to_message
            the_properties_of_a_message_survive
            credits_bound_what_is_unsettled
            competing_sessions_share_the_messages
            unsettled_messages_come_back_in_order_after_close
            unsettled_messages_come_back_in_order_after_a_cut
            a_dropped_session_gives_its_messages_back_in_order
            messages_that_come_back_precede_newer_ones
            acknowledged_messages_do_not_come_back
            nothing_acknowledged_before_a_barrier_comes_back
            an_acknowledgement_on_a_closed_session_changes_nothing
            a_stale_tag_settles_nothing_of_the_next_session
            the_stream_ends_without_an_error_after_close
            the_stream_ends_with_an_error_after_a_cut
            closing_again_is_harmless
            a_single_active_consumer_hands_over_in_order
            a_single_active_consumer_leaves_no_room_for_a_second
            parking_keeps_the_message_and_adds_its_provenance
            parking_again_replaces_the_provenance
            parking_without_its_exchange_is_refused_and_works_once_restored
            a_parked_message_comes_back_with_everything_and_its_replay_number
            a_look_at_parked_messages_counts_as_a_session_and_gives_them_back_in_order
            a_parked_message_is_not_sent_back_to_a_missing_queue
            publishing_to_a_missing_queue_is_refused
            publishing_to_a_missing_exchange_is_refused
            publishing_to_an_exchange_reaches_the_bound_queue
            a_missing_queue_is_refused_by_name
            a_missing_parking_place_of_an_existing_queue_is_refused_by_name
            verifying_twice_changes_nothing
            a_different_single_active_consumer_argument_is_refused_by_name
        }
    };
    (@cases $make_adapter:path; $($case:ident)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $case() {
            let adapter = $make_adapter().await;
            $crate::testing::conformance::$case(&adapter).await;
        }
    )*};
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    #[test]
    fn every_case_is_in_the_suite() {
        let suite = include_str!("conformance.rs");
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/testing/conformance");
        let mut cases = 0;
        for group in suite
            .lines()
            .filter_map(|line| line.strip_prefix("pub use "))
        {
            let file = folder.join(group.replace("::*;", ".rs"));
            let group = std::fs::read_to_string(file).expect("a file of cases");
            let names = group
                .lines()
                .filter_map(|line| line.strip_prefix("pub async fn "))
                .filter_map(|line| line.split_once('('));
            for (name, _) in names {
                let listed = suite.lines().any(|line| line.trim() == name);
                assert!(listed, "`{name}` is not listed in conformance_suite!");
                cases += 1;
            }
        }
        assert!(cases > 0, "the cases moved");
    }
}
