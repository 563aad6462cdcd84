//! Within one session: order, retries, poison, holds, pauses.

use super::*;

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
