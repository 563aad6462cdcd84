//! A session ends that has keyless messages.

use super::*;

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
