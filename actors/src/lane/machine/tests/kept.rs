//! Sources that keep messages themselves, and count attempts: stores.

use super::*;

fn lane(plan: PoisonPlan) -> Machine<Msg> {
    let policy = Policy {
        keep_from: Some(PAUSE),
        ..policy(3)
    };
    Machine::new(policy, plan, 100)
}

fn tell(lane: &mut Machine<Msg>, event: Event<Msg>) -> Vec<Effect<Msg>> {
    let mut effects = Vec::new();
    lane.handle(event, &mut effects);
    effects
}

/// A message of a source that has counted so many attempts.
fn counted(session: SessionId, key: Option<&str>, attempts: u32) -> Msg {
    Msg {
        number: 1,
        key: key.map(OrderingKey::from),
        session,
        identity: identity(Some("1"), "body"),
        redelivered: attempts > 0,
        earlier: 0,
        counted: Some(attempts),
    }
}

/// Offers a message, which must start as this attempt.
fn run(lane: &mut Machine<Msg>, message: &Msg, expected: u32) -> Ticket {
    let asked = tell(lane, Event::Offered(message.clone()));
    let [Effect::AskPermit(asked)] = asked[..] else {
        panic!("{asked:?}")
    };
    match &tell(lane, Event::Granted(asked))[..] {
        [
            Effect::Start {
                ticket, attempt, ..
            },
        ] => {
            assert_eq!(*attempt, expected);
            *ticket
        }
        other => panic!("not started: {other:?}"),
    }
}

fn fail(lane: &mut Machine<Msg>, ticket: Ticket, kind: FailureKind) -> Vec<Effect<Msg>> {
    let result = RunResult::Failed {
        kind,
        plan: None,
        chance: 0.5,
    };
    tell(lane, Event::Finished { ticket, result })
}

/// What must be the only thing to park.
fn parking(effects: &[Effect<Msg>]) -> (Ticket, PoisonReason, Place) {
    match effects.last() {
        Some(Effect::Park {
            ticket,
            reason,
            place,
            ..
        }) => (*ticket, *reason, *place),
        other => panic!("not parked: {other:?}"),
    }
}

fn parked(lane: &mut Machine<Msg>, ticket: Ticket) -> Vec<Effect<Msg>> {
    let settled = true;
    tell(lane, Event::Parked { ticket, settled })
}

#[test]
fn a_long_pause_is_spent_in_the_source_which_gives_the_message_again() {
    let s = SessionId::next();
    let mut lane = lane(PoisonPlan::Park);
    let ticket = run(&mut lane, &counted(s, Some("k"), 0), 1);
    let effects = fail(&mut lane, ticket, FailureKind::Transient);
    let (ticket, _, place) = parking(&effects);
    assert_eq!(place, Place::Kept(Some(PAUSE)));
    assert_eq!(parked(&mut lane, ticket), [], "no gap: it is not over");
    assert_eq!((lane.tracks(), lane.depth()), (0, 0));
    run(&mut lane, &counted(s, Some("k"), 1), 2);
}

#[test]
fn a_short_pause_is_spent_in_the_lane() {
    let s = SessionId::next();
    let mut lane = lane(PoisonPlan::Park);
    let ticket = run(&mut lane, &counted(s, Some("k"), 0), 1);
    let effects = fail(&mut lane, ticket, FailureKind::RetryAfter(PAUSE / 2));
    assert!(
        matches!(effects.last(), Some(Effect::ArmTimer { .. })),
        "{effects:?}"
    );
}

#[test]
fn a_key_is_held_by_the_source_and_a_keyless_message_is_parked() {
    for (key, place) in [(Some("k"), Place::Kept(None)), (None, Place::Parking)] {
        let s = SessionId::next();
        let mut lane = lane(PoisonPlan::Keep(None));
        let ticket = run(&mut lane, &counted(s, key, 0), 1);
        let effects = fail(&mut lane, ticket, FailureKind::Permanent);
        let (ticket, reason, to) = parking(&effects);
        assert_eq!((reason, to), (PoisonReason::Permanent, place));
        let gap = parked(&mut lane, ticket);
        assert_eq!(gap.is_empty(), key.is_some(), "{gap:?}");
        assert_eq!((lane.tracks(), lane.depth()), (0, 0));
    }
}

#[test]
fn a_message_whose_attempts_all_began_and_never_ended_does_not_run_again() {
    let s = SessionId::next();
    let mut lane = lane(PoisonPlan::Park);
    let effects = tell(&mut lane, Event::Offered(counted(s, Some("k"), 3)));
    let (_, reason, place) = parking(&effects);
    assert_eq!((reason, place), (PoisonReason::Abandoned, Place::Parking));
}

#[test]
fn what_the_source_counts_wins_over_what_the_lane_remembers() {
    let (s, next) = (SessionId::next(), SessionId::next());
    let mut lane = lane(PoisonPlan::Park);
    let ticket = run(&mut lane, &counted(s, Some("k"), 1), 2);
    fail(&mut lane, ticket, FailureKind::RetryAfter(PAUSE / 2));
    tell(&mut lane, Event::SessionEnded(s));
    // An operator has had its attempts counted anew.
    let ticket = {
        let again = Msg {
            redelivered: true,
            ..counted(next, Some("k"), 0)
        };
        tell(&mut lane, Event::Offered(again));
        let waits: Vec<_> = lane.waiting().map(|(ticket, ..)| ticket).collect();
        let effects = tell(&mut lane, Event::BackoffElapsed(waits[0]));
        let [Effect::AskPermit(asked)] = effects[..] else {
            panic!("{effects:?}")
        };
        asked
    };
    let started = tell(&mut lane, Event::Granted(ticket));
    assert!(
        matches!(started[..], [Effect::Start { attempt: 1, .. }]),
        "{started:?}"
    );
}

#[test]
fn what_could_not_be_parked_with_its_session_is_parked_with_its_copy() {
    for session_first in [false, true] {
        let (s, next) = (SessionId::next(), SessionId::next());
        let mut lane = lane(PoisonPlan::Park);
        let ticket = run(&mut lane, &counted(s, Some("k"), 0), 1);
        let effects = fail(&mut lane, ticket, FailureKind::Permanent);
        let (ticket, ..) = parking(&effects);
        let mut events = [Event::ParkingEnded(ticket), Event::SessionEnded(s)];
        if session_first {
            events.reverse();
        }
        for event in events {
            assert_eq!(tell(&mut lane, event), []);
        }
        assert_eq!(lane.depth(), 0);
        let effects = tell(&mut lane, Event::Offered(counted(next, Some("k"), 1)));
        let (ticket, reason, place) = parking(&effects);
        assert_eq!((reason, place), (PoisonReason::Permanent, Place::Parking));
        assert!(matches!(
            parked(&mut lane, ticket)[..],
            [Effect::Gap { .. }]
        ));
    }
}

#[test]
fn what_the_source_has_kept_runs_again_even_if_its_session_ended_before_the_answer() {
    let (s, next) = (SessionId::next(), SessionId::next());
    let mut lane = lane(PoisonPlan::Keep(None));
    let ticket = run(&mut lane, &counted(s, Some("k"), 0), 1);
    let effects = fail(&mut lane, ticket, FailureKind::Permanent);
    let (ticket, ..) = parking(&effects);
    tell(&mut lane, Event::SessionEnded(s));
    let settled = false;
    assert_eq!(tell(&mut lane, Event::Parked { ticket, settled }), []);
    // An operator lets it try again.
    let again = Msg {
        redelivered: true,
        ..counted(next, Some("k"), 0)
    };
    run(&mut lane, &again, 1);
}

/// The step that was to keep the head (or to park it) took place, but its answer was lost with the session. So the
/// lane waits for a copy that it would park; and what comes is what an operator lets try again.
#[test]
fn what_an_operator_lets_try_again_runs_even_if_its_keeping_was_never_answered() {
    for plan in [PoisonPlan::Keep(None), PoisonPlan::Park] {
        for answered in [false, true] {
            let (s, next) = (SessionId::next(), SessionId::next());
            let mut lane = lane(plan);
            let ticket = run(&mut lane, &counted(s, Some("k"), 0), 1);
            let effects = fail(&mut lane, ticket, FailureKind::Permanent);
            let (ticket, ..) = parking(&effects);
            let settled = false;
            let answer = match answered {
                true => Event::Parked { ticket, settled },
                false => Event::ParkingEnded(ticket),
            };
            tell(&mut lane, answer);
            tell(&mut lane, Event::SessionEnded(s));
            let again = Msg {
                redelivered: true,
                ..counted(next, Some("k"), 0)
            };
            run(&mut lane, &again, 1);
        }
    }
}

/// A handler that takes its session down each time: every attempt is aborted, and only the source counts them.
#[test]
fn attempts_that_end_with_their_session_have_an_end_too() {
    let mut lane = lane(PoisonPlan::Park);
    for made in 0..3 {
        let s = SessionId::next();
        let ticket = run(&mut lane, &counted(s, Some("k"), made), made + 1);
        tell(&mut lane, Event::SessionEnded(s));
        let result = RunResult::Aborted;
        tell(&mut lane, Event::Finished { ticket, result });
    }
    let copy = counted(SessionId::next(), Some("k"), 3);
    let (_, reason, _) = parking(&tell(&mut lane, Event::Offered(copy)));
    assert_eq!(reason, PoisonReason::Abandoned);
}

/// The source hands out the next message of a key when it has parked the one before, which the lane hears later.
#[test]
fn a_message_with_no_attempt_left_does_not_run_because_it_came_behind_another() {
    let s = SessionId::next();
    let mut lane = lane(PoisonPlan::Park);
    let ticket = run(&mut lane, &counted(s, Some("k"), 0), 1);
    let (ticket, ..) = parking(&fail(&mut lane, ticket, FailureKind::Permanent));
    let behind = Msg {
        number: 2,
        identity: identity(Some("2"), "body"),
        ..counted(s, Some("k"), 3)
    };
    assert_eq!(tell(&mut lane, Event::Offered(behind)), []);
    let (_, reason, _) = parking(&parked(&mut lane, ticket));
    assert_eq!(reason, PoisonReason::Abandoned);
}
