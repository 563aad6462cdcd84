//! The handlers: one that poison events break, and the mended one.

use std::sync::Arc;
use std::time::Duration;

use laneway::actors::header;
use laneway::prelude::*;

use crate::events::{MendedEvent, OrderEvent};
use crate::plan::Defect;
use crate::work::Work;

/// How long one attempt may take. Long enough for a busy machine to handle a healthy event.
pub(crate) const HANDLER_TIMEOUT: Duration = Duration::from_millis(250);

/// Handles the events, as long as nothing is wrong with them.
pub(crate) struct Ship(pub Arc<Work>);

impl Handler<OrderEvent> for Ship {
    type Answer = ();

    async fn handle(&self, event: OrderEvent, cx: Context) -> Result<(), Failure> {
        let work = &self.0;
        let Some(number) = work.plan.number(&event) else {
            return Err(Failure::permanent("not an event of this run"));
        };
        // Dropped without an end, by a panic or the time-out, it records a run that failed.
        let run = work.run(&event, event.seq, &cx);
        let Some(defect) = work.plan.defect(number) else {
            tokio::time::sleep(handler_time(number)).await;
            run.end(true);
            work.handled(number);
            return Ok(());
        };
        work.met_poison(number, &cx);
        match defect {
            Defect::Fails => {}
            // Like `panic!`, without its message on standard error for each of these attempts.
            Defect::Panics => std::panic::resume_unwind(Box::new("there is no such article")),
            Defect::Slow => std::future::pending().await,
            Defect::Undecodable => {
                unreachable!("its body does not decode, so no handler is called")
            }
        }
        run.end(false);
        Err(Failure::transient("the warehouse does not answer"))
    }
}

/// The same in the program that has been mended.
pub(crate) struct MendedShip(pub Arc<Work>);

impl Handler<MendedEvent> for MendedShip {
    type Answer = ();

    async fn handle(&self, event: MendedEvent, cx: Context) -> Result<(), Failure> {
        let (work, event) = (&self.0, OrderEvent::from(event));
        let Some(number) = work.plan.number(&event) else {
            return Err(Failure::permanent("not an event of this run"));
        };
        let is_replayed = cx.headers().get(header::REPLAY).is_some();
        let place = if is_replayed {
            work.plan.replay_place(&event)
        } else {
            event.seq
        };
        let run = work.run(&event, place, &cx);
        tokio::time::sleep(handler_time(number)).await;
        run.end(true);
        if is_replayed {
            work.replayed(number);
        } else {
            work.handled(number);
        }
        Ok(())
    }
}

/// From 0 to 2 ms; the same for an event in every run.
fn handler_time(number: u64) -> Duration {
    Duration::from_millis(2).mul_f64(fastrand::Rng::with_seed(number).f64())
}
