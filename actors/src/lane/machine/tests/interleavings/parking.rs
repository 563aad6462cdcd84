//! A session ends while a head is parked or held.

use super::*;

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
