//! A session drains: nothing starts, and it is quiet when nothing of it runs or parks.

use super::*;

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
