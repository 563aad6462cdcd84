//! How much is remembered.

use super::*;

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
