//! One story per promise, written down event by event.

use super::*;

/// A lane with one machine; every event gives back what is to be done.
struct Lane(Machine<Msg>);

impl Lane {
    fn new(max_attempts: u32) -> Self {
        Self(Machine::new(policy(max_attempts), PoisonPlan::Park, 100))
    }

    fn tell(&mut self, event: Event<Msg>) -> Vec<Effect<Msg>> {
        let mut effects = Vec::new();
        self.0.handle(event, &mut effects);
        effects
    }

    /// Offers a delivery that must ask for a permit at once.
    fn offer(&mut self, delivery: &Msg) -> Ticket {
        asked(&self.tell(Event::Offered(delivery.clone())))
    }

    /// Offers a delivery that must wait behind others.
    fn offer_behind(&mut self, delivery: &Msg) {
        assert_eq!(self.tell(Event::Offered(delivery.clone())), []);
    }

    /// Grants a permit to the message that must start now.
    fn start(&mut self, ask: Ticket, message: &Msg, attempt: u32) -> Ticket {
        match &self.tell(Event::Granted(ask))[..] {
            [
                Effect::Start {
                    ticket,
                    delivery,
                    attempt: counted,
                },
            ] => {
                assert_eq!((delivery, *counted), (message, attempt));
                *ticket
            }
            other => panic!("not started: {other:?}"),
        }
    }

    fn run(&mut self, message: &Msg) -> Ticket {
        let ask = self.offer(message);
        self.start(ask, message, 1)
    }

    fn finish(&mut self, ticket: Ticket, result: RunResult) -> Vec<Effect<Msg>> {
        self.tell(Event::Finished { ticket, result })
    }

    /// Lets a run fail, so that its key backs off; the ticket of the pause.
    fn fail(&mut self, ticket: Ticket) -> Ticket {
        match &self.finish(ticket, failed(FailureKind::Transient))[..] {
            [
                Effect::AttemptFailed { .. },
                Effect::ArmTimer { ticket, after },
            ] => {
                assert_eq!(*after, PAUSE);
                *ticket
            }
            other => panic!("no back-off: {other:?}"),
        }
    }

    /// Lets a run fail for good, so that it is parked; the ticket of the parking.
    fn poison(&mut self, ticket: Ticket) -> Ticket {
        match &self.finish(ticket, failed(FailureKind::Permanent))[..] {
            [Effect::AttemptFailed { .. }, Effect::Park { ticket, .. }] => *ticket,
            other => panic!("not parked: {other:?}"),
        }
    }

    /// Lets a run fail for good, so that it is held; the ticket of the hold.
    fn held(&mut self, ticket: Ticket, message: &Msg) -> Ticket {
        match &self.finish(ticket, failed(FailureKind::Permanent))[..] {
            [
                Effect::AttemptFailed { .. },
                Effect::Hold {
                    ticket,
                    delivery,
                    at_most: HOUR,
                    ..
                },
            ] if delivery == message => *ticket,
            other => panic!("not held: {other:?}"),
        }
    }

    fn parked(&mut self, ticket: Ticket, settled: bool) -> Vec<Effect<Msg>> {
        self.tell(Event::Parked { ticket, settled })
    }

    fn end(&mut self, session: SessionId) -> Vec<Effect<Msg>> {
        self.tell(Event::SessionEnded(session))
    }

    fn empty(&self) -> bool {
        (self.0.depth(), self.0.tracks()) == (0, 0)
    }
}

/// The one request for a permit, at the end of the effects.
#[track_caller]
fn asked(effects: &[Effect<Msg>]) -> Ticket {
    match effects.last() {
        Some(Effect::AskPermit(ticket)) => *ticket,
        _ => panic!("asks for no permit: {effects:?}"),
    }
}

/// The ticket of the one settlement with barrier.
#[track_caller]
fn settled_with_barrier(effects: &[Effect<Msg>], message: &Msg, how: Outcome) -> Ticket {
    match effects {
        [
            Effect::SettleWithBarrier {
                ticket,
                delivery,
                outcome,
            },
        ] if (delivery, *outcome) == (message, how) => *ticket,
        _ => panic!("not settled with barrier: {effects:?}"),
    }
}

fn settle(delivery: &Msg) -> Effect<Msg> {
    Effect::Settle {
        delivery: delivery.clone(),
        outcome: Outcome::Handled,
    }
}

fn orphaned(delivery: &Msg, outcome: Outcome) -> Effect<Msg> {
    Effect::Orphaned {
        delivery: delivery.clone(),
        outcome,
    }
}

fn forgotten(delivery: &Msg, attempts: u32) -> Effect<Msg> {
    Effect::Forgotten {
        delivery: delivery.clone(),
        attempts,
    }
}

fn gap(delivery: &Msg, outcome: Outcome) -> Effect<Msg> {
    Effect::Gap {
        delivery: delivery.clone(),
        reason: PoisonReason::Permanent,
        outcome,
        attempts: 1,
    }
}

fn message(session: SessionId, key: Option<&str>, number: usize) -> Msg {
    Msg {
        number,
        key: key.map(OrderingKey::from),
        session,
        identity: identity(Some(&number.to_string()), "body"),
        redelivered: false,
        earlier: 0,
        counted: None,
    }
}

/// Message `number` of key "k".
fn of_k(session: SessionId, number: usize) -> Msg {
    message(session, Some("k"), number)
}

fn without_id(session: SessionId) -> Msg {
    Msg {
        identity: identity(None, "body"),
        ..of_k(session, 0)
    }
}

fn keyless(session: SessionId, number: usize) -> Msg {
    message(session, None, number)
}

/// Two sessions, one after the other.
fn sessions() -> [SessionId; 2] {
    [SessionId::next(), SessionId::next()]
}

// ---- one session

#[test]
fn messages_of_one_key_start_in_order_and_one_at_a_time() {
    let [s, _] = sessions();
    let (a, b, c) = (of_k(s, 1), of_k(s, 2), of_k(s, 3));
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    lane.offer_behind(&b);
    lane.offer_behind(&c);
    assert_eq!(lane.0.depth(), 3);
    let effects = lane.finish(run, RunResult::Handled);
    assert_eq!(effects[0], settle(&a));
    let run = lane.start(asked(&effects), &b, 1);
    let effects = lane.finish(run, RunResult::Handled);
    let run = lane.start(asked(&effects), &c, 1);
    assert_eq!(lane.finish(run, RunResult::Handled), [settle(&c)]);
    assert!(lane.empty());
}

#[test]
fn a_key_that_runs_or_backs_off_delays_no_other() {
    let [s, _] = sessions();
    let mut lane = Lane::new(3);
    let run = lane.run(&of_k(s, 1));
    lane.run(&message(s, Some("other"), 2));
    lane.fail(run);
    lane.run(&message(s, Some("third"), 3));
}

#[test]
fn keyless_messages_wait_for_nobody() {
    let [s, _] = sessions();
    let mut lane = Lane::new(3);
    let first = lane.run(&keyless(s, 1));
    let second = lane.run(&keyless(s, 2));
    assert_eq!(
        lane.finish(second, RunResult::Handled),
        [settle(&keyless(s, 2))]
    );
    assert_eq!(
        lane.finish(first, RunResult::Handled),
        [settle(&keyless(s, 1))]
    );
    assert!(lane.empty());
}

#[test]
fn a_retry_happens_in_place_before_the_successor() {
    let [s, _] = sessions();
    let (a, b) = (of_k(s, 1), of_k(s, 2));
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    lane.offer_behind(&b);
    let pause = lane.fail(run);
    let again = lane.tell(Event::BackoffElapsed(pause));
    let run = lane.start(asked(&again), &a, 2);
    let effects = lane.finish(run, RunResult::Handled);
    lane.start(asked(&effects), &b, 1);
}

#[test]
fn two_failing_keys_keep_separate_attempt_counts() {
    let [s, _] = sessions();
    let (a, b) = (of_k(s, 1), message(s, Some("other"), 2));
    let mut lane = Lane::new(3);
    let (of_a, of_b) = (lane.run(&a), lane.run(&b));
    let pause = lane.fail(of_a);
    let again = lane.tell(Event::BackoffElapsed(pause));
    let of_a = lane.start(asked(&again), &a, 2);
    let (pause_of_a, pause_of_b) = (lane.fail(of_a), lane.fail(of_b));
    let again = lane.tell(Event::BackoffElapsed(pause_of_b));
    lane.start(asked(&again), &b, 2);
    let again = lane.tell(Event::BackoffElapsed(pause_of_a));
    lane.start(asked(&again), &a, 3);
}

#[test]
fn the_last_allowed_attempt_is_followed_by_parking() {
    let [s, _] = sessions();
    let a = of_k(s, 1);
    let mut lane = Lane::new(1);
    let run = lane.run(&a);
    let effects = lane.finish(run, failed(FailureKind::Transient));
    assert!(matches!(
        effects[..],
        [
            Effect::AttemptFailed { retry_in: None, .. },
            Effect::Park {
                reason: PoisonReason::Failed,
                attempts: 1,
                ..
            }
        ]
    ));
}

#[test]
fn poison_is_parked_then_settled_then_reported_and_only_then_the_next_starts() {
    let [s, _] = sessions();
    let (a, b) = (of_k(s, 1), of_k(s, 2));
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    lane.offer_behind(&b);
    let parking = lane.poison(run);
    assert_eq!(lane.0.depth(), 2);
    let effects = lane.parked(parking, true);
    assert_eq!(effects[0], gap(&a, Outcome::Parked));
    assert_eq!(effects.len(), 2);
    lane.start(asked(&effects), &b, 1);
    assert_eq!(lane.0.depth(), 1);
}

#[test]
fn discarded_poison_is_settled_with_a_barrier_too() {
    let [s, _] = sessions();
    let (a, b) = (of_k(s, 1), of_k(s, 2));
    let mut lane = Lane(Machine::new(policy(3), PoisonPlan::Discard, 100));
    let run = lane.run(&a);
    lane.offer_behind(&b);
    let effects = lane.finish(run, failed(FailureKind::Permanent));
    let barrier = settled_with_barrier(&effects[1..], &a, Outcome::Discarded);
    let effects = lane.parked(barrier, true);
    assert_eq!(effects[0], gap(&a, Outcome::Discarded));
    lane.start(asked(&effects), &b, 1);
}

/// A lane that holds keys, with `a` held and `b` behind it; the ticket of the hold.
fn holding(a: &Msg, b: &Msg) -> (Lane, Ticket) {
    let mut lane = Lane(Machine::new(policy(3), PoisonPlan::Hold(HOUR), 100));
    let run = lane.run(a);
    lane.offer_behind(b);
    let ticket = lane.held(run, a);
    assert_eq!(lane.0.held(ticket), Some(2));
    (lane, ticket)
}

#[test]
fn a_held_head_keeps_its_key_until_it_is_released_and_then_is_parked() {
    let [s, _] = sessions();
    let (a, b) = (of_k(s, 1), of_k(s, 2));
    let (mut lane, hold) = holding(&a, &b);
    assert_eq!(lane.0.depth(), 2);
    let parking = match &lane.tell(Event::HoldEnded(hold, HoldEnd::Release))[..] {
        [
            Effect::Park {
                ticket,
                delivery,
                reason: PoisonReason::Permanent,
                attempts: 1,
                place: Place::Parking,
            },
        ] if *delivery == a => *ticket,
        other => panic!("not parked: {other:?}"),
    };
    let again = Event::HoldEnded(hold, HoldEnd::Retry);
    assert_eq!(lane.tell(again), [], "an outdated ticket");
    let effects = lane.parked(parking, true);
    assert_eq!(effects[0], gap(&a, Outcome::Parked));
    lane.start(asked(&effects), &b, 1);
}

#[test]
fn a_retried_hold_counts_attempts_anew_and_a_skipped_one_is_settled_with_a_barrier() {
    let [s, _] = sessions();
    let (a, b) = (of_k(s, 1), of_k(s, 2));
    let (mut lane, hold) = holding(&a, &b);
    let effects = lane.tell(Event::HoldEnded(hold, HoldEnd::Retry));
    let run = lane.start(asked(&effects), &a, 1);
    let hold = lane.held(run, &a);
    let effects = lane.tell(Event::HoldEnded(hold, HoldEnd::Skip));
    let barrier = settled_with_barrier(&effects, &a, Outcome::Discarded);
    let effects = lane.parked(barrier, true);
    assert_eq!(effects[0], gap(&a, Outcome::Discarded));
    lane.start(asked(&effects), &b, 1);
}

#[test]
fn a_hold_goes_on_with_the_copy_of_its_head_after_a_lost_session_and_after_a_drain() {
    for drained in [false, true] {
        let [s, next] = sessions();
        let (a, b) = (of_k(s, 1), of_k(s, 2));
        let (mut lane, hold) = holding(&a, &b);
        if drained {
            assert_eq!(lane.tell(Event::Drain(s)), [Effect::Quiet(s)]);
        }
        assert_eq!(lane.end(s), []);
        assert_eq!(lane.0.depth(), 0);
        let (a, b) = (a.again(next), b.again(next));
        lane.offer_behind(&a);
        lane.offer_behind(&b);
        assert_eq!(lane.0.held(hold), Some(2));
        let effects = lane.tell(Event::HoldEnded(hold, HoldEnd::Retry));
        lane.start(asked(&effects), &a, 1);
    }
}

#[test]
fn a_hold_that_ends_between_two_sessions_decides_about_the_copy() {
    for (end, outcome) in [
        (HoldEnd::Release, Outcome::Parked),
        (HoldEnd::Skip, Outcome::Discarded),
    ] {
        let [s, next] = sessions();
        let (a, b) = (of_k(s, 1), of_k(s, 2));
        let (mut lane, hold) = holding(&a, &b);
        lane.end(s);
        assert_eq!(lane.tell(Event::HoldEnded(hold, end)), []);
        match &lane.tell(Event::Offered(a.again(next)))[..] {
            [Effect::Park { .. }] => assert_eq!(outcome, Outcome::Parked),
            effects => {
                settled_with_barrier(effects, &a.again(next), outcome);
            }
        }
    }
}

#[test]
fn another_first_message_in_the_next_session_ends_the_hold() {
    let [s, next] = sessions();
    let (a, b) = (of_k(s, 1), of_k(s, 2));
    let (mut lane, hold) = holding(&a, &b);
    lane.end(s);
    let b = b.again(next);
    let ask = lane.offer(&b);
    assert_eq!(lane.0.held(hold), None);
    lane.start(ask, &b, 1);
}

#[test]
fn a_keyless_poison_message_is_parked_where_keys_are_held() {
    let [s, _] = sessions();
    let a = message(s, None, 1);
    let mut lane = Lane(Machine::new(policy(3), PoisonPlan::Hold(HOUR), 100));
    let run = lane.run(&a);
    lane.poison(run);
}

#[test]
fn a_rule_that_discards_holds_nothing() {
    let [s, _] = sessions();
    let a = of_k(s, 1);
    let mut lane = Lane(Machine::new(policy(3), PoisonPlan::Hold(HOUR), 100));
    let run = lane.run(&a);
    let effects = lane.finish(run, failed_by(FailureKind::Transient, DISCARD));
    settled_with_barrier(&effects[1..], &a, Outcome::Discarded);
}

#[test]
fn an_aborted_attempt_does_not_count() {
    let [s, _] = sessions();
    let a = of_k(s, 1);
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    let again = lane.finish(run, RunResult::Aborted);
    lane.start(asked(&again), &a, 1);
}

#[test]
fn outdated_tickets_change_nothing_and_their_grants_go_back() {
    let [s, _] = sessions();
    let a = of_k(s, 1);
    let mut lane = Lane::new(3);
    let ask = lane.offer(&a);
    let run = lane.start(ask, &a, 1);
    assert_eq!(lane.tell(Event::Granted(ask)), [Effect::ReturnPermit]);
    let pause = lane.fail(run);
    assert_eq!(lane.finish(run, RunResult::Handled), []);
    assert_eq!(lane.tell(Event::StillRunning(run)), []);
    assert_eq!(lane.parked(run, true), []);
    lane.tell(Event::BackoffElapsed(pause));
    assert_eq!(lane.tell(Event::BackoffElapsed(pause)), []);
    lane.end(s);
    assert_eq!(lane.tell(Event::Granted(pause)), [Effect::ReturnPermit]);
}

#[test]
fn nothing_starts_while_paused_and_everything_ready_asks_when_resumed() {
    let [s, _] = sessions();
    let (a, b) = (of_k(s, 1), keyless(s, 2));
    let mut lane = Lane::new(3);
    let before = lane.offer(&a);
    assert_eq!(lane.tell(Event::Paused), []);
    assert!(lane.0.is_paused());
    assert_eq!(lane.tell(Event::Granted(before)), [Effect::ReturnPermit]);
    lane.offer_behind(&b);
    let [Effect::AskPermit(of_a), Effect::AskPermit(of_b)] = lane.tell(Event::Resumed)[..] else {
        panic!("both must ask");
    };
    // A request from before the pause may be answered after it: the permit is not needed twice.
    assert_eq!(lane.tell(Event::Granted(before)), [Effect::ReturnPermit]);
    lane.start(of_a, &a, 1);
    lane.start(of_b, &b, 1);
    assert_eq!(lane.tell(Event::Resumed), []);
}

#[test]
fn a_pause_lets_running_messages_finish_and_holds_their_successors() {
    let [s, _] = sessions();
    let (a, b) = (of_k(s, 1), of_k(s, 2));
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    lane.offer_behind(&b);
    lane.tell(Event::Paused);
    assert_eq!(lane.finish(run, RunResult::Handled), [settle(&a)]);
    let again = lane.tell(Event::Resumed);
    lane.start(asked(&again), &b, 1);
}

#[test]
fn what_does_not_move_is_shown() {
    let [s, _] = sessions();
    let mut lane = Lane::new(3);
    let run = lane.run(&of_k(s, 1));
    lane.offer_behind(&of_k(s, 2));
    assert_eq!(lane.0.waiting().count(), 0);
    let pause = lane.fail(run);
    let shown: Vec<_> = lane
        .0
        .waiting()
        .map(|(ticket, _, why, behind)| (ticket, why, behind))
        .collect();
    assert_eq!(shown, [(pause, Waiting::BackingOff, 1)]);
}

// ---- the end of a session

#[test]
fn an_ended_session_leaves_nothing_of_what_had_not_started() {
    let [s, next] = sessions();
    let mut lane = Lane::new(3);
    let ask = lane.offer(&of_k(s, 1));
    lane.offer_behind(&of_k(s, 2));
    lane.offer(&keyless(s, 3));
    assert_eq!(lane.end(s), []);
    assert!(lane.empty());
    assert_eq!(lane.tell(Event::Granted(ask)), [Effect::ReturnPermit]);
    lane.run(&of_k(next, 1).again(next));
}

#[test]
fn the_end_of_one_session_does_not_concern_another() {
    let [s, other] = sessions();
    let (a, b) = (of_k(s, 1), message(other, Some("other"), 2));
    let mut lane = Lane::new(3);
    let (ask, run) = (lane.offer(&a), lane.run(&b));
    lane.offer_behind(&message(other, Some("other"), 3));
    lane.end(s);
    assert_eq!(lane.0.depth(), 2);
    assert_eq!(lane.tell(Event::Granted(ask)), [Effect::ReturnPermit]);
    let effects = lane.finish(run, RunResult::Handled);
    assert_eq!(effects[0], settle(&b));
    asked(&effects);
}

#[test]
fn a_ready_head_keeps_its_count_for_its_copy() {
    let [s, next] = sessions();
    let a = of_k(s, 1);
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    let pause = lane.fail(run);
    lane.tell(Event::BackoffElapsed(pause));
    assert_eq!(lane.end(s), []);
    assert_eq!((lane.0.depth(), lane.0.tracks()), (0, 1));
    let copy = a.again(next);
    let ask = lane.offer(&copy);
    lane.start(ask, &copy, 2);
}

#[test]
fn a_copy_waits_for_the_running_orphan_and_ends_with_it() {
    let [s, next] = sessions();
    let (a, b) = (of_k(s, 1), of_k(s, 2));
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    lane.offer_behind(&b);
    assert_eq!(lane.end(s), [Effect::Cancel(run)]);
    let (copy, b) = (a.again(next), b.again(next));
    lane.offer_behind(&copy);
    lane.offer_behind(&b);
    let effects = lane.finish(run, RunResult::Handled);
    assert_eq!(
        effects[..2],
        [orphaned(&a, Outcome::Handled), settle(&copy)]
    );
    lane.start(asked(&effects), &b, 1);
}

#[test]
fn a_copy_that_comes_after_its_orphan_was_handled_is_settled_without_running() {
    let [s, next] = sessions();
    let a = of_k(s, 1);
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    lane.end(s);
    assert_eq!(
        lane.finish(run, RunResult::Handled),
        [orphaned(&a, Outcome::Handled)]
    );
    let copy = a.again(next);
    assert_eq!(lane.tell(Event::Offered(copy.clone())), [settle(&copy)]);
    assert!(lane.empty());
}

#[test]
fn without_an_id_a_copy_of_a_handled_orphan_runs_again() {
    let [s, next] = sessions();
    let a = without_id(s);
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    lane.end(s);
    lane.finish(run, RunResult::Handled);
    lane.run(&a.again(next));
}

#[test]
fn the_same_message_published_again_is_no_copy() {
    let [s, next] = sessions();
    let a = of_k(s, 1);
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    lane.end(s);
    lane.finish(run, RunResult::Handled);
    // Not marked redelivered.
    lane.run(&of_k(next, 1));
}

#[test]
fn another_first_message_waits_for_the_orphan_and_clears_the_memory_of_it() {
    let [s, next] = sessions();
    let (a, b) = (of_k(s, 1), of_k(next, 2));
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    lane.end(s);
    lane.offer_behind(&b);
    let effects = lane.finish(run, RunResult::Handled);
    let run = lane.start(asked(&effects), &b, 1);
    lane.finish(run, RunResult::Handled);
    assert!(lane.empty());
}

#[test]
fn a_copy_goes_on_with_the_count_of_an_orphan_that_failed() {
    let [s, next] = sessions();
    let a = of_k(s, 1);
    let copy = a.again(next);
    // The copy is there before the orphan fails: it takes over the pause.
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    lane.end(s);
    lane.offer_behind(&copy);
    let pause = lane.fail(run);
    let again = lane.tell(Event::BackoffElapsed(pause));
    lane.start(asked(&again), &copy, 2);
    // It comes during the pause.
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    lane.end(s);
    let pause = lane.fail(run);
    lane.offer_behind(&copy);
    let again = lane.tell(Event::BackoffElapsed(pause));
    lane.start(asked(&again), &copy, 2);
    // It comes after the pause.
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    lane.end(s);
    let pause = lane.fail(run);
    assert_eq!(lane.tell(Event::BackoffElapsed(pause)), []);
    let ask = lane.offer(&copy);
    lane.start(ask, &copy, 2);
}

#[test]
fn an_aborted_orphan_does_not_count() {
    let [s, next] = sessions();
    let (a, b) = (of_k(s, 1), of_k(s, 2));
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    lane.end(s);
    lane.offer_behind(&a.again(next));
    lane.offer_behind(&b.again(next));
    let again = lane.finish(run, RunResult::Aborted);
    lane.start(asked(&again), &a.again(next), 1);
}

#[test]
fn a_copy_of_an_orphan_that_is_poison_is_parked_without_another_run() {
    let [s, next] = sessions();
    let a = of_k(s, 1);
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    lane.end(s);
    // Nothing can settle it now, so it is not parked now.
    let effects = lane.finish(run, failed(FailureKind::Permanent));
    assert!(matches!(effects[..], [Effect::AttemptFailed { .. }]));
    let effects = lane.tell(Event::Offered(a.again(next)));
    let [Effect::Park { ticket, .. }] = effects[..] else {
        panic!("not parked: {effects:?}");
    };
    assert_eq!(
        lane.parked(ticket, true),
        [gap(&a.again(next), Outcome::Parked)]
    );
    assert!(lane.empty());
}

#[test]
fn a_back_off_goes_on_with_the_copy() {
    let [s, next] = sessions();
    let a = of_k(s, 1);
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    let pause = lane.fail(run);
    assert_eq!(lane.end(s), []);
    assert_eq!(lane.0.depth(), 0);
    lane.offer_behind(&a.again(next));
    let again = lane.tell(Event::BackoffElapsed(pause));
    lane.start(asked(&again), &a.again(next), 2);
}

#[test]
fn another_first_message_ends_the_back_off() {
    let [s, next] = sessions();
    let b = of_k(next, 2);
    let mut lane = Lane::new(3);
    let run = lane.run(&of_k(s, 1));
    let pause = lane.fail(run);
    lane.end(s);
    let ask = lane.offer(&b);
    assert_eq!(lane.tell(Event::BackoffElapsed(pause)), []);
    let run = lane.start(ask, &b, 1);
    lane.finish(run, RunResult::Handled);
    assert!(lane.empty());
}

#[test]
fn the_same_message_published_again_does_not_join_a_back_off() {
    let [s, next] = sessions();
    let mut lane = Lane::new(3);
    let run = lane.run(&of_k(s, 1));
    lane.fail(run);
    lane.end(s);
    lane.run(&of_k(next, 1));
}

#[test]
fn a_stuck_orphan_keeps_its_key() {
    let [s, next] = sessions();
    let a = of_k(s, 1);
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    assert_eq!(lane.end(s), [Effect::Cancel(run)]);
    assert_eq!(
        lane.tell(Event::StillRunning(run)),
        [Effect::Stuck(a.clone())]
    );
    assert_eq!(lane.tell(Event::StillRunning(run)), []);
    lane.offer_behind(&a.again(next));
    lane.run(&message(next, Some("other"), 2));
    let effects = lane.finish(run, RunResult::Aborted);
    assert_eq!(effects[0], Effect::Unstuck(a.clone()));
    lane.start(asked(&effects), &a.again(next), 1);
}

#[test]
fn several_sessions_may_end_while_one_orphan_runs() {
    let [s, next] = sessions();
    let last = SessionId::next();
    let (a, b) = (of_k(s, 1), of_k(s, 2));
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    assert_eq!(lane.end(s), [Effect::Cancel(run)]);
    lane.offer_behind(&a.again(next));
    assert_eq!(lane.end(next), []);
    lane.offer_behind(&a.again(last));
    lane.offer_behind(&b.again(last));
    assert_eq!(lane.0.depth(), 2);
    let effects = lane.finish(run, RunResult::Handled);
    assert_eq!(effects[1], settle(&a.again(last)));
    lane.start(asked(&effects), &b.again(last), 1);
}

#[test]
fn attempts_survive_several_sessions() {
    let [s, next] = sessions();
    let last = SessionId::next();
    let a = of_k(s, 1);
    let mut lane = Lane::new(5);
    let run = lane.run(&a);
    let pause = lane.fail(run);
    lane.end(s);
    lane.offer_behind(&a.again(next));
    let again = lane.tell(Event::BackoffElapsed(pause));
    let run = lane.start(asked(&again), &a.again(next), 2);
    lane.end(next);
    let pause = lane.fail(run);
    lane.tell(Event::BackoffElapsed(pause));
    let ask = lane.offer(&a.again(last));
    lane.start(ask, &a.again(last), 3);
}

// ---- parking and the end of a session

/// Both orders of the answer and the end of the session, with the copy before or after.
#[test]
fn a_copy_of_a_parked_head_is_only_settled_and_its_successor_waits_for_that() {
    #[derive(Clone, Copy, PartialEq)]
    enum Order {
        AnswerEndCopy,
        EndAnswerCopy,
        EndCopyAnswer,
    }
    for order in [
        Order::AnswerEndCopy,
        Order::EndAnswerCopy,
        Order::EndCopyAnswer,
    ] {
        let [s, next] = sessions();
        let (a, b) = (of_k(s, 1), of_k(s, 2));
        let (copy, b_again) = (a.again(next), b.again(next));
        let mut lane = Lane::new(3);
        let run = lane.run(&a);
        lane.offer_behind(&b);
        let parking = lane.poison(run);
        let told = vec![gap(&a, Outcome::Parked)];
        let effects = match order {
            Order::AnswerEndCopy => {
                assert_eq!(lane.parked(parking, false), told);
                assert_eq!(lane.0.depth(), 2);
                assert_eq!(lane.end(s), []);
                lane.tell(Event::Offered(copy.clone()))
            }
            Order::EndAnswerCopy => {
                assert_eq!(lane.end(s), []);
                assert_eq!(lane.parked(parking, false), told);
                lane.tell(Event::Offered(copy.clone()))
            }
            Order::EndCopyAnswer => {
                assert_eq!(lane.end(s), []);
                lane.offer_behind(&copy);
                let effects = lane.parked(parking, false);
                assert_eq!(effects[..1], told);
                effects[1..].to_vec()
            }
        };
        let barrier = settled_with_barrier(&effects, &copy, Outcome::Parked);
        lane.offer_behind(&b_again);
        // The gap has been reported already.
        let effects = lane.parked(barrier, true);
        assert_eq!(effects.len(), 1);
        lane.start(asked(&effects), &b_again, 1);
        assert_eq!(lane.0.depth(), 1);
    }
}

#[test]
fn a_parked_head_may_lose_several_sessions_before_it_is_settled() {
    let [s, next] = sessions();
    let last = SessionId::next();
    let a = of_k(s, 1);
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    let parking = lane.poison(run);
    lane.end(s);
    lane.parked(parking, false);
    let effects = lane.tell(Event::Offered(a.again(next)));
    let barrier = settled_with_barrier(&effects, &a.again(next), Outcome::Parked);
    assert_eq!(lane.parked(barrier, false), []);
    lane.end(next);
    let effects = lane.tell(Event::Offered(a.again(last)));
    let barrier = settled_with_barrier(&effects, &a.again(last), Outcome::Parked);
    assert_eq!(lane.parked(barrier, true), []);
    assert!(lane.empty());
}

#[test]
fn another_first_message_shows_that_the_parked_head_was_settled() {
    let [s, next] = sessions();
    let b = of_k(s, 2);
    let mut lane = Lane::new(3);
    let run = lane.run(&of_k(s, 1));
    lane.offer_behind(&b);
    let parking = lane.poison(run);
    lane.end(s);
    lane.parked(parking, false);
    let run = lane.run(&b.again(next));
    lane.finish(run, RunResult::Handled);
    assert!(lane.empty());
}

#[test]
fn a_head_known_to_be_settled_leaves_no_memory_even_if_its_session_ended() {
    let [s, next] = sessions();
    let a = of_k(s, 1);
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    let parking = lane.poison(run);
    lane.end(s);
    lane.offer_behind(&of_k(next, 2));
    let effects = lane.parked(parking, true);
    assert_eq!(effects[0], gap(&a, Outcome::Parked));
    lane.start(asked(&effects), &of_k(next, 2), 1);
    assert_eq!(lane.0.depth(), 1);
}

#[test]
fn a_session_that_ends_twice_ends_once() {
    let [s, _] = sessions();
    let (a, b) = (of_k(s, 1), message(s, Some("other"), 2));
    let mut lane = Lane::new(3);
    let (run, poison) = (lane.run(&a), lane.run(&b));
    lane.poison(poison);
    assert_eq!(lane.end(s), [Effect::Cancel(run)]);
    assert_eq!(lane.end(s), []);
    assert_eq!(lane.0.depth(), 0);
}

#[test]
fn a_drain_does_not_wait_for_parkings_of_earlier_sessions() {
    let [s, next] = sessions();
    let a = of_k(s, 1);
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    let parking = lane.poison(run);
    lane.end(s);
    assert_eq!(lane.tell(Event::Drain(next)), [Effect::Quiet(next)]);
    assert_eq!(lane.parked(parking, false), [gap(&a, Outcome::Parked)]);
}

#[test]
fn a_session_that_ends_while_it_drains_waits_for_its_runs_and_not_for_its_parkings() {
    let [s, _] = sessions();
    let (a, b) = (of_k(s, 1), message(s, Some("other"), 2));
    let mut lane = Lane::new(3);
    let (run, poison) = (lane.run(&a), lane.run(&b));
    lane.poison(poison);
    assert_eq!(lane.tell(Event::Drain(s)), []);
    assert_eq!(lane.end(s), [Effect::Cancel(run)]);
    assert!(
        lane.finish(run, RunResult::Aborted)
            .contains(&Effect::Quiet(s))
    );
}

#[test]
fn a_hold_whose_head_was_given_back_uses_no_credit() {
    let [s, next] = sessions();
    let (a, b) = (of_k(s, 1), of_k(s, 2));
    let (mut lane, hold) = holding(&a, &b);
    lane.tell(Event::Drain(s));
    assert_eq!(lane.0.held(hold), Some(0));
    lane.end(s);
    lane.tell(Event::Offered(a.again(next)));
    assert_eq!(lane.0.held(hold), Some(1));
}

// ---- keyless messages and the end of a session

#[test]
fn a_keyless_message_hands_its_attempts_on_when_it_is_dropped() {
    // While it backs off: nothing of it may stay, no copy would ever find it.
    let [s, next] = sessions();
    let a = keyless(s, 1);
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    let pause = lane.fail(run);
    assert_eq!(lane.end(s), [forgotten(&a, 1)]);
    assert!(lane.empty());
    assert_eq!(lane.tell(Event::BackoffElapsed(pause)), []);
    // While it is ready.
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    let pause = lane.fail(run);
    lane.tell(Event::BackoffElapsed(pause));
    assert_eq!(lane.end(s), [forgotten(&a, 1)]);
    // While it runs.
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    lane.end(s);
    let effects = lane.finish(run, failed(FailureKind::Transient));
    assert_eq!(effects[1..], [forgotten(&a, 1)]);
    assert!(lane.empty());
    // Its copy, wherever it comes to, goes on from there.
    let copy = Msg {
        earlier: 1,
        counted: None,
        ..a.again(next)
    };
    let ask = lane.offer(&copy);
    lane.start(ask, &copy, 2);
}

#[test]
fn a_keyless_copy_without_attempts_left_is_parked_without_another_run() {
    let [s, _] = sessions();
    let mut lane = Lane::new(2);
    let spent = Msg {
        earlier: 2,
        counted: None,
        ..keyless(s, 1)
    };
    let effects = lane.tell(Event::Offered(spent.clone()));
    assert!(matches!(effects[..], [Effect::Park { attempts: 2, .. }]));
    // Without an id it may be another message, which has never run.
    let unsure = Msg {
        identity: identity(None, "body"),
        ..spent
    };
    let ask = lane.offer(&unsure);
    lane.start(ask, &unsure, 3);
}

#[test]
fn a_keyless_orphan_tells_how_it_ended() {
    let [s, _] = sessions();
    let (a, b) = (keyless(s, 1), keyless(s, 2));
    let mut lane = Lane::new(3);
    let (handled, poison) = (lane.run(&a), lane.run(&b));
    let parking = lane.poison(poison);
    lane.end(s);
    assert_eq!(
        lane.finish(handled, RunResult::Handled),
        [orphaned(&a, Outcome::Handled)]
    );
    let told = [gap(&b, Outcome::Parked), orphaned(&b, Outcome::Parked)];
    assert_eq!(lane.parked(parking, false), told);
    assert!(lane.empty());
}

// ---- drain

#[test]
fn a_drain_starts_nothing_and_is_quiet_when_the_last_run_has_ended() {
    let [s, _] = sessions();
    let (a, b) = (of_k(s, 1), of_k(s, 2));
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    lane.offer_behind(&b);
    let ask = lane.offer(&message(s, Some("other"), 3));
    assert_eq!(lane.tell(Event::Drain(s)), []);
    assert_eq!(lane.0.depth(), 1);
    assert_eq!(lane.tell(Event::Granted(ask)), [Effect::ReturnPermit]);
    lane.offer_behind(&of_k(s, 4));
    assert_eq!(
        lane.finish(run, RunResult::Handled),
        [settle(&a), Effect::Quiet(s)]
    );
    assert!(lane.empty());
}

#[test]
fn a_drain_of_an_idle_session_is_quiet_at_once() {
    let [s, _] = sessions();
    assert_eq!(Lane::new(3).tell(Event::Drain(s)), [Effect::Quiet(s)]);
}

#[test]
fn a_drain_waits_for_parking() {
    let [s, _] = sessions();
    let a = of_k(s, 1);
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    assert_eq!(lane.tell(Event::Drain(s)), []);
    let parking = lane.poison(run);
    assert_eq!(
        lane.parked(parking, true),
        [gap(&a, Outcome::Parked), Effect::Quiet(s)]
    );
}

#[test]
fn a_drain_does_not_wait_for_a_stuck_run() {
    let [s, _] = sessions();
    let a = of_k(s, 1);
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    lane.tell(Event::Drain(s));
    assert_eq!(
        lane.tell(Event::StillRunning(run)),
        [Effect::Stuck(a), Effect::Quiet(s)]
    );
}

#[test]
fn a_drain_waits_for_orphans_of_earlier_sessions() {
    let [s, next] = sessions();
    let a = of_k(s, 1);
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    lane.end(s);
    lane.offer_behind(&a.again(next));
    assert_eq!(lane.tell(Event::Drain(next)), []);
    let told = [orphaned(&a, Outcome::Handled), Effect::Quiet(next)];
    assert_eq!(lane.finish(run, RunResult::Handled), told);
}

#[test]
fn a_drain_gives_back_what_backs_off_and_the_copy_goes_on_where_it_was() {
    let [s, next] = sessions();
    let (a, b) = (of_k(s, 1), message(s, Some("other"), 2));
    let mut lane = Lane::new(3);
    let (backs_off, runs) = (lane.run(&a), lane.run(&b));
    let pause = lane.fail(backs_off);
    lane.tell(Event::Drain(s));
    assert_eq!(lane.0.depth(), 1);
    // What fails during the drain does not stay here either.
    let effects = lane.finish(runs, failed(FailureKind::Transient));
    let other_pause = match effects[..] {
        [
            Effect::AttemptFailed { .. },
            Effect::ArmTimer { ticket, .. },
            Effect::Quiet(_),
        ] => ticket,
        _ => panic!("{effects:?}"),
    };
    assert_eq!(lane.end(s), []);
    assert_eq!(lane.0.depth(), 0);
    for (copy, pause) in [(a.again(next), pause), (b.again(next), other_pause)] {
        lane.offer_behind(&copy);
        let ask = asked(&lane.tell(Event::BackoffElapsed(pause)));
        lane.start(ask, &copy, 2);
    }
}

#[test]
fn a_session_that_ends_while_it_drains_is_quiet_when_its_last_run_is_gone() {
    let [s, next] = sessions();
    let (a, b) = (of_k(s, 1), message(next, Some("other"), 2));
    let mut lane = Lane::new(3);
    let run = lane.run(&a);
    assert_eq!(lane.tell(Event::Drain(s)), []);
    assert_eq!(lane.end(s), [Effect::Cancel(run)]);
    let told = [orphaned(&a, Outcome::Handled), Effect::Quiet(s)];
    assert_eq!(lane.finish(run, RunResult::Handled), told);
    let run = lane.run(&b);
    assert_eq!(lane.finish(run, RunResult::Handled), [settle(&b)]);
}

// ---- limits

#[test]
fn only_so_many_keys_are_remembered_and_the_oldest_goes_first() {
    let [s, next] = sessions();
    let mut lane = Lane(Machine::new(policy(3), PoisonPlan::Park, 2));
    let keys: Vec<_> = ["a", "b", "c"].iter().enumerate().collect();
    let all: Vec<_> = keys
        .iter()
        .map(|(number, key)| message(s, Some(key), *number))
        .collect();
    let runs: Vec<_> = all.iter().map(|message| lane.run(message)).collect();
    lane.end(s);
    for run in runs {
        lane.finish(run, RunResult::Handled);
    }
    assert_eq!(lane.0.tracks(), 2);
    lane.run(&all[0].again(next));
    for message in &all[1..] {
        let copy = message.again(next);
        assert_eq!(lane.tell(Event::Offered(copy.clone())), [settle(&copy)]);
    }
}

#[test]
fn memories_that_are_used_up_do_not_push_out_others() {
    let [s, _] = sessions();
    let mut lane = Lane(Machine::new(policy(3), PoisonPlan::Park, 2));
    let (kept, other) = (of_k(s, 1), message(s, Some("other"), 2));
    let run = lane.run(&kept);
    lane.end(s);
    lane.finish(run, RunResult::Handled);
    for _ in 0..3 {
        let next = SessionId::next();
        let run = lane.run(&Msg {
            session: next,
            ..other.clone()
        });
        lane.end(next);
        lane.finish(run, RunResult::Handled);
        let used = other.again(SessionId::next());
        assert_eq!(lane.tell(Event::Offered(used.clone())), [settle(&used)]);
    }
    let copy = kept.again(SessionId::next());
    assert_eq!(lane.tell(Event::Offered(copy.clone())), [settle(&copy)]);
}

#[test]
fn a_session_may_end_that_leaves_more_than_can_be_remembered() {
    let [s, next] = sessions();
    let last = SessionId::next();
    let mut lane = Lane(Machine::new(policy(3), PoisonPlan::Park, 1));
    let (a, b) = (message(next, Some("a"), 1), message(s, Some("b"), 2));
    let of_a = lane.run(&a);
    let of_b = lane.run(&b);
    lane.end(s);
    lane.finish(of_b, RunResult::Handled);
    let pause = lane.fail(of_a);
    lane.tell(Event::BackoffElapsed(pause));
    // The slot of "a" comes first, and what it leaves takes the place of what is known of "b".
    assert_eq!(lane.end(next), []);
    assert_eq!(lane.0.tracks(), 1);
    let ask = lane.offer(&a.again(last));
    lane.start(ask, &a.again(last), 2);
}
