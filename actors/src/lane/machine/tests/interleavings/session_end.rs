//! A session ends: what is forgotten, what goes on, and what a copy meets.

use super::*;

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
