//! One queue as a pure state machine: what is ready, who holds what, who is next.
//!
//! Owns the order of messages, tags, credits and the single active consumer. Knows no lock, no
//! task and no clock: each call changes the state, and [`Queue::take_woken`] tells which consumers
//! have something to fetch that had nothing before.
//!
//! Every message has a *place*, its number in the order of publishing. `ready` is always sorted by
//! it, so a message that comes back goes where it was, also when several consumers held neighbours.
//!
//! A message belongs to a consumer from the moment it is assigned, fetched or not, as on RabbitMQ,
//! where it may lie in a socket. So it counts against the credits, and it is marked redelivered when
//! it comes back.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use laneway_actors::port::Ack;
use laneway_actors::{DeliveryTag, Envelope};

/// What a queue holds, and who is on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct QueueStatus {
    /// Waiting for a session with a free credit.
    pub ready: usize,
    /// Handed to a session and not settled yet.
    pub unsettled: usize,
    /// Sessions that are open on it, the active one and those that stand by.
    pub sessions: usize,
}

impl QueueStatus {
    /// Whether the queue holds no message at all: everything published was acknowledged.
    pub fn is_empty(&self) -> bool {
        self.total() == 0
    }

    /// Ready and unsettled messages together.
    pub fn total(&self) -> usize {
        self.ready + self.unsettled
    }
}

/// Names a consumer within its queue. Never used again, so that a late call of an ended session
/// cannot reach another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ConsumerId(u64);

/// The queue has reached its length limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Full;

/// Acknowledged a tag that is not outstanding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct UnknownTag(pub(super) DeliveryTag);

/// A message for a consumer.
#[derive(Debug, Clone)]
pub(super) struct Fetched {
    pub(super) tag: DeliveryTag,
    pub(super) redelivered: bool,
    pub(super) message: Arc<Envelope>,
}

/// A message in the queue, ready or held.
#[derive(Debug)]
struct Stored {
    place: u64,
    redelivered: bool,
    message: Arc<Envelope>,
}

#[derive(Debug)]
struct Consumer {
    id: ConsumerId,
    credits: usize,
    last_tag: DeliveryTag,
    /// Up to where its stream has fetched; what is above waits for it.
    fetched: DeliveryTag,
    /// A map and not a ring addressed by tag: one message that is held for long while others come
    /// and go would let a ring grow without bound.
    unsettled: BTreeMap<DeliveryTag, Stored>,
}

impl Consumer {
    fn has_credit(&self) -> bool {
        self.unsettled.len() < self.credits
    }
}

/// The state of one queue.
#[derive(Debug, Default)]
pub(super) struct Queue {
    single_active_consumer: bool,
    max_length: Option<usize>,
    ready: VecDeque<Stored>,
    /// In the order of opening. With a single active consumer the first is the active one.
    consumers: Vec<Consumer>,
    /// Whose turn it is among competing consumers, as an index into `consumers`.
    turn: usize,
    next_place: u64,
    next_consumer: u64,
    woken: Vec<ConsumerId>,
}

impl Queue {
    pub(super) fn new(single_active_consumer: bool) -> Self {
        Self {
            single_active_consumer,
            ..Self::default()
        }
    }

    /// Refuses messages while this many are ready. Like RabbitMQ's, the limit does not count what
    /// consumers hold.
    pub(super) fn limit_length(&mut self, max: Option<usize>) {
        self.max_length = max;
    }

    pub(super) fn is_full(&self) -> bool {
        self.max_length.is_some_and(|max| self.ready.len() >= max)
    }

    pub(super) fn publish(&mut self, message: Arc<Envelope>) -> Result<(), Full> {
        if self.is_full() {
            return Err(Full);
        }
        self.ready.push_back(Stored {
            place: self.next_place,
            redelivered: false,
            message,
        });
        self.next_place += 1;
        self.assign();
        Ok(())
    }

    /// Adds a consumer that holds at most `credits` messages.
    pub(super) fn open(&mut self, credits: u16) -> ConsumerId {
        let id = ConsumerId(self.next_consumer);
        self.next_consumer += 1;
        self.consumers.push(Consumer {
            id,
            credits: usize::from(credits),
            last_tag: DeliveryTag(0),
            fetched: DeliveryTag(0),
            unsettled: BTreeMap::new(),
        });
        self.assign();
        id
    }

    /// The next messages of a consumer, at most `max`, in order of their tags.
    pub(super) fn fetch(&mut self, id: ConsumerId, max: usize) -> Vec<Fetched> {
        let Some(consumer) = self.consumers.iter_mut().find(|known| known.id == id) else {
            return Vec::new();
        };
        let from = DeliveryTag(consumer.fetched.0 + 1);
        let batch: Vec<_> = consumer
            .unsettled
            .range(from..)
            .take(max)
            .map(|(tag, stored)| Fetched {
                tag: *tag,
                redelivered: stored.redelivered,
                message: Arc::clone(&stored.message),
            })
            .collect();
        if let Some(last) = batch.last() {
            consumer.fetched = last.tag;
        }
        batch
    }

    /// Settles, in the order given. Stops at the first tag that is not outstanding; what came before
    /// it stays settled, and ending the consumer is up to the caller. A consumer that has ended
    /// settles nothing.
    ///
    /// `multiple` needs a tag that is itself outstanding, as on RabbitMQ. AMQP's tag 0 ("all") is not
    /// known here: the port never sends it.
    pub(super) fn acknowledge(&mut self, id: ConsumerId, acks: &[Ack]) -> Result<(), UnknownTag> {
        let Some(consumer) = self.consumers.iter_mut().find(|known| known.id == id) else {
            return Ok(());
        };
        let mut result = Ok(());
        for ack in acks {
            // A tag that was assigned and never fetched is as unknown to the other side as one
            // that does not exist.
            let known =
                ack.tag <= consumer.fetched && consumer.unsettled.remove(&ack.tag).is_some();
            if !known {
                result = Err(UnknownTag(ack.tag));
                break;
            }
            if ack.multiple {
                while let Some(first) = consumer.unsettled.first_entry()
                    && *first.key() < ack.tag
                {
                    first.remove();
                }
            }
        }
        // Not after an unknown tag: this consumer is about to end, and new messages would only be
        // marked redelivered for nothing.
        if result.is_ok() {
            self.assign();
        }
        result
    }

    /// Ends consumers: what they hold goes back to its original place, marked redelivered, and then
    /// the remaining consumers are served. All at once, so that no survivor is served between two
    /// of them and sees a later message before an earlier one.
    pub(super) fn end(&mut self, ids: &[ConsumerId]) {
        let mut returned = Vec::new();
        let mut before_turn = 0;
        let mut index = 0;
        self.consumers.retain_mut(|consumer| {
            let ends = ids.contains(&consumer.id);
            if ends {
                returned.extend(std::mem::take(&mut consumer.unsettled).into_values());
                before_turn += usize::from(index < self.turn);
            }
            index += 1;
            !ends
        });
        self.turn -= before_turn;
        self.woken.retain(|id| !ids.contains(id));
        self.give_back(returned);
        self.assign();
    }

    fn give_back(&mut self, mut returned: Vec<Stored>) {
        // Tags do not follow places when a consumer was given what another one had held before.
        returned.sort_unstable_by_key(|stored| stored.place);
        let Some(last) = returned.last() else { return };
        // What is ready and belongs between the returned ones; almost always nothing.
        let between = self
            .ready
            .partition_point(|stored| stored.place < last.place);
        let mut merged: Vec<_> = self.ready.drain(..between).collect();
        for stored in &mut returned {
            stored.redelivered = true;
        }
        merged.append(&mut returned);
        merged.sort_by_key(|stored| stored.place);
        for stored in merged.into_iter().rev() {
            self.ready.push_front(stored);
        }
    }

    /// Gives ready messages to consumers with credit, in order.
    fn assign(&mut self) {
        while !self.ready.is_empty()
            && let Some(index) = self.next_consumer()
            && let Some(stored) = self.ready.pop_front()
        {
            let consumer = &mut self.consumers[index];
            if consumer.last_tag == consumer.fetched {
                self.woken.push(consumer.id);
            }
            consumer.last_tag.0 += 1;
            consumer.unsettled.insert(consumer.last_tag, stored);
            self.turn = index + 1;
        }
    }

    fn next_consumer(&self) -> Option<usize> {
        if self.single_active_consumer {
            // Standbys get nothing, not even while the active one is out of credits.
            return self.consumers.first()?.has_credit().then_some(0);
        }
        let count = self.consumers.len();
        (0..count)
            .map(|step| (self.turn + step) % count)
            .find(|index| self.consumers[*index].has_credit())
    }

    /// The consumers that got something to fetch and had nothing before, since the last call.
    pub(super) fn take_woken(&mut self) -> impl Iterator<Item = ConsumerId> {
        self.woken.drain(..)
    }

    pub(super) fn status(&self) -> QueueStatus {
        QueueStatus {
            ready: self.ready.len(),
            unsettled: self.consumers.iter().map(|held| held.unsettled.len()).sum(),
            sessions: self.consumers.len(),
        }
    }

    /// Everything in the queue, ready or held, in the order of publishing.
    pub(super) fn messages(&self) -> Vec<Arc<Envelope>> {
        let held = self.consumers.iter().flat_map(|one| one.unsettled.values());
        let mut all: Vec<_> = held.chain(&self.ready).collect();
        all.sort_unstable_by_key(|stored| stored.place);
        all.into_iter()
            .map(|stored| Arc::clone(&stored.message))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(number: u8) -> Arc<Envelope> {
        Arc::new(Envelope {
            body: vec![number].into(),
            ..Envelope::default()
        })
    }

    fn queue_of(count: u8, single_active_consumer: bool) -> Queue {
        let mut queue = Queue::new(single_active_consumer);
        publish(&mut queue, 1..=count);
        queue
    }

    fn publish(queue: &mut Queue, numbers: impl IntoIterator<Item = u8>) {
        for number in numbers {
            queue.publish(message(number)).expect("there is no limit");
        }
    }

    /// (number, redelivered) of all that a consumer can fetch now.
    fn fetch(queue: &mut Queue, consumer: ConsumerId) -> Vec<(u8, bool)> {
        let batch = queue.fetch(consumer, usize::MAX);
        batch
            .iter()
            .map(|fetched| (fetched.message.body[0], fetched.redelivered))
            .collect()
    }

    fn new(numbers: impl IntoIterator<Item = u8>) -> Vec<(u8, bool)> {
        numbers.into_iter().map(|number| (number, false)).collect()
    }

    fn again(numbers: impl IntoIterator<Item = u8>) -> Vec<(u8, bool)> {
        numbers.into_iter().map(|number| (number, true)).collect()
    }

    fn one(tag: u64) -> Ack {
        Ack {
            tag: DeliveryTag(tag),
            multiple: false,
        }
    }

    fn up_to(tag: u64) -> Ack {
        Ack {
            tag: DeliveryTag(tag),
            multiple: true,
        }
    }

    #[test]
    fn messages_leave_in_the_order_of_publishing_with_tags_from_one() {
        let mut queue = queue_of(3, false);
        let consumer = queue.open(10);
        let batch = queue.fetch(consumer, 2);
        let tags: Vec<_> = batch.iter().map(|fetched| fetched.tag.0).collect();
        assert_eq!(tags, [1, 2]);
        assert_eq!(fetch(&mut queue, consumer), new([3]));
    }

    #[test]
    fn a_consumer_never_holds_more_than_its_credits() {
        let mut queue = queue_of(5, false);
        let consumer = queue.open(2);
        assert_eq!(fetch(&mut queue, consumer), new([1, 2]));
        assert_eq!(fetch(&mut queue, consumer), []);
        queue.acknowledge(consumer, &[one(2)]).expect("outstanding");
        assert_eq!(fetch(&mut queue, consumer), new([3]));
        let status = queue.status();
        assert_eq!((status.ready, status.unsettled), (2, 2));
    }

    #[test]
    fn a_consumer_without_credits_gets_nothing() {
        let mut queue = queue_of(1, false);
        let consumer = queue.open(0);
        assert_eq!(fetch(&mut queue, consumer), []);
    }

    #[test]
    fn acknowledgements_settle_exactly_what_they_name() {
        let cases: &[(&[Ack], &[u8])] = &[
            (&[one(2)], &[1, 3, 4, 5]),
            (&[one(5), one(3)], &[1, 2, 4]),
            (&[up_to(3)], &[4, 5]),
            (&[one(2), up_to(3), one(5)], &[4]),
            (&[up_to(5)], &[]),
        ];
        for (acks, left) in cases {
            let mut queue = queue_of(5, false);
            let consumer = queue.open(10);
            fetch(&mut queue, consumer);
            queue.acknowledge(consumer, acks).expect("outstanding");
            queue.end(&[consumer]);
            let next = queue.open(10);
            assert_eq!(
                fetch(&mut queue, next),
                again(left.iter().copied()),
                "{acks:?}"
            );
        }
    }

    #[test]
    fn an_unknown_tag_is_refused_and_settles_nothing_after_it() {
        let cases: &[(&[Ack], u64)] = &[
            (&[one(9)], 9),
            (&[one(0)], 0),
            (&[up_to(0)], 0),
            (&[one(1), one(1)], 1),
            (&[one(1), up_to(1)], 1),
            (&[up_to(2), one(1), one(3)], 1),
            // Assigned, but not fetched.
            (&[one(4)], 4),
        ];
        for (acks, unknown) in cases {
            let mut queue = queue_of(4, false);
            let consumer = queue.open(10);
            queue.fetch(consumer, 3);
            assert_eq!(
                queue.acknowledge(consumer, acks),
                Err(UnknownTag(DeliveryTag(*unknown))),
                "{acks:?}"
            );
            assert!(queue.messages().contains_body(3), "{acks:?}");
        }
    }

    trait ContainsBody {
        fn contains_body(&self, number: u8) -> bool;
    }

    impl ContainsBody for Vec<Arc<Envelope>> {
        fn contains_body(&self, number: u8) -> bool {
            self.iter().any(|message| message.body[0] == number)
        }
    }

    #[test]
    fn an_ended_consumer_settles_nothing() {
        let mut queue = queue_of(2, false);
        let stale = queue.open(10);
        fetch(&mut queue, stale);
        queue.end(&[stale]);
        let next = queue.open(10);
        assert_eq!(fetch(&mut queue, next), again([1, 2]));
        assert_eq!(queue.acknowledge(stale, &[up_to(2)]), Ok(()));
        assert_eq!(queue.status().unsettled, 2);
    }

    #[test]
    fn what_comes_back_goes_before_newer_messages() {
        let mut queue = queue_of(3, false);
        let consumer = queue.open(2);
        fetch(&mut queue, consumer);
        publish(&mut queue, [4]);
        queue.end(&[consumer]);
        let next = queue.open(10);
        assert_eq!(
            fetch(&mut queue, next),
            [(1, true), (2, true), (3, false), (4, false)]
        );
    }

    #[test]
    fn neighbours_held_by_competing_consumers_come_back_to_their_places() {
        let mut queue = Queue::new(false);
        let left = queue.open(10);
        let right = queue.open(10);
        publish(&mut queue, 1..=6);
        assert_eq!(fetch(&mut queue, left), new([1, 3, 5]));
        assert_eq!(fetch(&mut queue, right), new([2, 4, 6]));
        // `right` takes over 1, 3 and 5 under later tags, and then loses everything.
        queue.end(&[left]);
        assert_eq!(fetch(&mut queue, right), again([1, 3, 5]));
        queue.end(&[right]);
        let next = queue.open(10);
        assert_eq!(fetch(&mut queue, next), again(1..=6));
    }

    #[test]
    fn consumers_that_end_together_leave_nothing_out_of_order_to_a_survivor() {
        let mut queue = Queue::new(false);
        let consumers = [queue.open(2), queue.open(2), queue.open(8)];
        publish(&mut queue, 1..=6);
        let held = fetch(&mut queue, consumers[2]);
        assert_eq!(held, new([3, 6]));
        queue.end(&consumers[..2]);
        assert_eq!(fetch(&mut queue, consumers[2]), again([1, 2, 4, 5]));
    }

    #[test]
    fn competing_consumers_take_turns_and_skip_one_without_credit() {
        let mut queue = Queue::new(false);
        let narrow = queue.open(1);
        let wide = queue.open(10);
        publish(&mut queue, 1..=5);
        assert_eq!(fetch(&mut queue, narrow), new([1]));
        assert_eq!(fetch(&mut queue, wide), new([2, 3, 4, 5]));
    }

    #[test]
    fn the_turn_stays_right_when_an_earlier_consumer_ends() {
        let mut queue = Queue::new(false);
        let consumers = [queue.open(10), queue.open(10), queue.open(10)];
        publish(&mut queue, [1, 2]);
        queue.acknowledge(consumers[0], &[]).expect("empty");
        fetch(&mut queue, consumers[0]);
        queue
            .acknowledge(consumers[0], &[one(1)])
            .expect("outstanding");
        queue.end(&[consumers[0]]);
        publish(&mut queue, [3]);
        assert_eq!(fetch(&mut queue, consumers[2]), new([3]));
    }

    #[test]
    fn only_the_first_opened_consumer_of_a_single_active_queue_receives() {
        let mut queue = Queue::new(true);
        let active = queue.open(2);
        let standby = queue.open(10);
        publish(&mut queue, 1..=4);
        assert_eq!(fetch(&mut queue, active), new([1, 2]));
        assert_eq!(fetch(&mut queue, standby), []);
    }

    #[test]
    fn a_single_active_queue_hands_over_in_order_to_the_next_opened() {
        let mut queue = queue_of(4, true);
        let consumers = [queue.open(3), queue.open(10), queue.open(10)];
        fetch(&mut queue, consumers[0]);
        queue
            .acknowledge(consumers[0], &[one(2)])
            .expect("outstanding");
        // The freed credit took 4 before the end.
        queue.end(&[consumers[0]]);
        assert_eq!(fetch(&mut queue, consumers[1]), again([1, 3, 4]));
        assert_eq!(fetch(&mut queue, consumers[2]), []);
        queue.end(&consumers[..2]);
        assert_eq!(fetch(&mut queue, consumers[2]), again([1, 3, 4]));
    }

    #[test]
    fn the_end_of_a_standby_changes_nothing_for_the_active_one() {
        let mut queue = queue_of(2, true);
        let active = queue.open(1);
        let standby = queue.open(10);
        fetch(&mut queue, active);
        queue.end(&[standby]);
        queue.acknowledge(active, &[one(1)]).expect("outstanding");
        assert_eq!(fetch(&mut queue, active), new([2]));
    }

    #[test]
    fn a_full_queue_refuses_and_counts_only_what_is_ready() {
        let mut queue = Queue::new(false);
        queue.limit_length(Some(1));
        assert_eq!(queue.publish(message(1)), Ok(()));
        assert_eq!(queue.publish(message(2)), Err(Full));
        let consumer = queue.open(1);
        assert_eq!(queue.publish(message(3)), Ok(()));
        assert_eq!(fetch(&mut queue, consumer), new([1]));
        queue.limit_length(None);
        assert_eq!(queue.publish(message(4)), Ok(()));
    }

    #[test]
    fn a_consumer_is_woken_once_until_it_fetches() {
        let mut queue = Queue::new(false);
        let consumer = queue.open(10);
        publish(&mut queue, [1, 2]);
        assert_eq!(queue.take_woken().collect::<Vec<_>>(), [consumer]);
        fetch(&mut queue, consumer);
        publish(&mut queue, [3]);
        assert_eq!(queue.take_woken().collect::<Vec<_>>(), [consumer]);
        assert_eq!(queue.take_woken().count(), 0);
    }

    #[test]
    fn a_queue_lists_ready_and_held_messages_in_order() {
        let mut queue = queue_of(3, false);
        let consumer = queue.open(2);
        fetch(&mut queue, consumer);
        let bodies: Vec<_> = queue.messages().iter().map(|one| one.body[0]).collect();
        assert_eq!(bodies, [1, 2, 3]);
    }
}
