//! Publishes the events: of one order one after the other, of different orders at the same time, and no
//! faster than the run wants them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use laneway::testing::OrderLedger;
use laneway::{Bus, PublishError};
use tokio::sync::{RwLock, RwLockWriteGuard, watch};

use crate::plan::OrderEvent;

/// So many events may be unconfirmed at once, each of another order.
const WINDOW: usize = 256;
/// How long a broker may refuse or not answer before the publisher gives up.
const PATIENCE: Duration = Duration::from_secs(120);
/// Pause before an event is sent again.
const PAUSE: Duration = Duration::from_millis(200);

/// How fast it goes.
pub(crate) struct Pace {
    /// So many events may have been published.
    allowed: watch::Sender<u64>,
    /// Held shared by each event that is under way.
    open: RwLock<()>,
}

impl Pace {
    pub(crate) fn new() -> Self {
        Self {
            allowed: watch::Sender::new(0),
            open: RwLock::new(()),
        }
    }

    /// So many events may have been published from now on.
    pub(crate) fn allow(&self, events: u64) {
        self.allowed.send_replace(events);
    }

    /// Waits until everything that is under way is confirmed; publishing goes on when the guard is dropped.
    ///
    /// A broker that goes away may have taken a message whose confirm is lost. This publisher would send it
    /// again, and the run of the second copy would look like a duplicate of the consumers.
    pub(crate) async fn pause(&self) -> RwLockWriteGuard<'_, ()> {
        self.open.write().await
    }
}

/// Publishes all events, round robin over the orders.
///
/// # Errors
/// When an event could not be published for [`PATIENCE`].
pub(crate) async fn publish_all(
    bus: &Bus,
    ledger: &OrderLedger,
    (messages, keys): (u64, u64),
    pace: &Pace,
) -> Result<(), PublishError> {
    let mut allowed = pace.allowed.subscribe();
    let mut turns: VecDeque<_> = (0..keys)
        .map(|order| OrderEvent { order, seq: 1 })
        .collect();
    let mut sending = FuturesUnordered::new();
    let mut begun = 0;
    while begun < messages || !sending.is_empty() {
        let now = (*allowed.borrow_and_update()).min(messages);
        while sending.len() < WINDOW
            && begun < now
            && let Some(event) = turns.pop_front()
        {
            begun += 1;
            sending.push(send(bus, ledger, event, pace));
        }
        tokio::select! {
            Some(sent) = sending.next() => {
                let OrderEvent { order, seq } = sent?;
                if seq < messages / keys + u64::from(order < messages % keys) {
                    turns.push_back(OrderEvent { order, seq: seq + 1 });
                }
            }
            // An error cannot come: `pace` holds the sender.
            _ = allowed.changed() => {}
        }
    }
    Ok(())
}

/// Sends one event until it is confirmed. Laneway never sends a message twice by itself.
async fn send(
    bus: &Bus,
    ledger: &OrderLedger,
    event: OrderEvent,
    pace: &Pace,
) -> Result<OrderEvent, PublishError> {
    let began = Instant::now();
    loop {
        let result = {
            let _open = pace.open.read().await;
            bus.publish(&event).await
        };
        match result {
            Ok(()) => {
                ledger.published(&event.order.to_string(), event.seq);
                return Ok(event);
            }
            Err(PublishError::Refused(_) | PublishError::Unknown(_))
                if began.elapsed() < PATIENCE =>
            {
                tokio::time::sleep(PAUSE).await;
            }
            Err(error) => return Err(error),
        }
    }
}
