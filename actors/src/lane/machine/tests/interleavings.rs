//! One story per promise, written down event by event. Here is what they are told with.

mod draining;
mod keyless;
mod limits;
mod one_session;
mod parking;
mod session_end;

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

/// A lane that holds keys, with `a` held and `b` behind it; the ticket of the hold.
fn holding(a: &Msg, b: &Msg) -> (Lane, Ticket) {
    let mut lane = Lane(Machine::new(policy(3), PoisonPlan::Hold(HOUR), 100));
    let run = lane.run(a);
    lane.offer_behind(b);
    let ticket = lane.held(run, a);
    assert_eq!(lane.0.held(ticket), Some(2));
    (lane, ticket)
}
