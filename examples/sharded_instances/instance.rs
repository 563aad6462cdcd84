//! One instance: a process that handles what the broker gives it, until SIGTERM or the end of its parent.
//!
//! It is told the plan by a line on standard input, and says what the parent should know by lines on
//! standard output ([`News`]).

use std::error::Error;
use std::io::{Read, Write, stdin, stdout};
use std::time::Duration;

use laneway::prelude::*;
use laneway::testing::OrderLedger;
use laneway::{Event, EventKind};
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast::{Receiver, error::RecvError};
use tokio::sync::oneshot;

use crate::plan::{OrderEvent, Plan};

/// How long running handlers may take after SIGTERM. The longest that an option allows is 4 s.
const DRAIN: Duration = Duration::from_secs(12);

/// What an instance tells its parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum News {
    /// It is connected.
    Ready,
    /// To how many queues it is subscribed now.
    Subscribed(usize),
}

/// Handles the events: takes its time, and writes down that it ran.
struct Ship {
    ledger: OrderLedger,
    time: Duration,
}

impl Handler<OrderEvent> for Ship {
    type Answer = ();

    async fn handle(&self, event: OrderEvent, cx: Context) -> Result<(), Failure> {
        let order = event.order.to_string();
        let run = self.ledger.run(&order, event.seq, cx.attempt());
        tokio::time::sleep(self.time.mul_f64(2.0 * fastrand::f64())).await;
        run.end(true);
        Ok(())
    }
}

/// What an application writes.
async fn start(plan: &Plan) -> Result<Bus, Box<dyn Error>> {
    let handler = Ship {
        ledger: OrderLedger::in_folder(&plan.ledger)?,
        time: plan.handler_time,
    };
    let ready = Bus::builder()
        .rabbitmq(RabbitMq::at(&plan.url))
        .topology(|t| plan.topology(t))
        .endpoint(&plan.queue, |e| plan.endpoint(e).handler(handler))
        .drain_deadline(DRAIN)
        .build()?;
    Ok(ready.start().await?)
}

/// The whole life of an instance.
pub(crate) async fn live() -> Result<(), Box<dyn Error>> {
    let mut line = String::new();
    stdin().read_line(&mut line)?;
    let plan: Plan = serde_json::from_str(&line)?;
    let bus = start(&plan).await?;
    let mut signal = Box::pin(shutdown_signal());
    // Asked once, so that it listens before the parent may send it.
    let asked = futures::poll!(&mut signal).is_ready();
    say(News::Ready)?;
    let telling = tokio::spawn(tell(bus.clone(), bus.events(), plan.queue));
    let orphaned = parent_gone();
    let ended = bus
        .run_until(async {
            tokio::select! {
                () = signal, if !asked => {}
                // An error is the end of the thread that waits: the same.
                _ = orphaned => {}
            }
        })
        .await;
    telling.abort();
    let report = ended?;
    if !report.is_clean() {
        return Err("handlers were still running at the end of the drain".into());
    }
    Ok(())
}

/// Tells the parent how many subscriptions there are, whenever that changes.
async fn tell(bus: Bus, mut events: Receiver<Event>, endpoint: String) {
    let mut told = None;
    loop {
        let snapshot = bus.snapshot().await;
        let shards = snapshot
            .endpoint(&endpoint)
            .map_or(&[][..], |endpoint| &endpoint.shards);
        let subscribed = shards.iter().filter(|shard| shard.subscribed).count();
        if told.replace(subscribed) != Some(subscribed)
            && let Err(error) = say(News::Subscribed(subscribed))
        {
            // Nobody listens: the parent is gone, which ends this process too.
            eprintln!("an instance cannot tell its parent anything: {error}");
            return;
        }
        loop {
            match events.recv().await {
                Ok(event) => match event.kind {
                    EventKind::Connected { .. }
                    | EventKind::Disconnected { .. }
                    | EventKind::SessionClosed { .. } => break,
                    _ => {}
                },
                Err(RecvError::Lagged(_)) => break,
                Err(RecvError::Closed) => return,
            }
        }
    }
}

fn say(news: News) -> Result<(), Box<dyn Error>> {
    let mut out = stdout().lock();
    writeln!(out, "{}", serde_json::to_string(&news)?)?;
    out.flush()?;
    Ok(())
}

/// Resolves when standard input ends, as it does when the parent ends, however it does. (On a thread of its
/// own, which nobody waits for: tokio's would hold up the end of this process.)
fn parent_gone() -> oneshot::Receiver<()> {
    let (gone, waiting) = oneshot::channel();
    std::thread::spawn(move || {
        let mut nothing = [0; 16];
        while stdin().read(&mut nothing).is_ok_and(|count| count > 0) {}
        // An error means that this process is ending already.
        let _ = gone.send(());
    });
    waiting
}
