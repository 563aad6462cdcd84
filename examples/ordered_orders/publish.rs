//! Publishes the events: of one order one after the other, of different orders at the same time.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use laneway::{Bus, PublishError};
use tokio_util::sync::CancellationToken;

use crate::work::{OrderEvent, Work};

/// So many events may be unconfirmed at once, each of another order.
const WINDOW: usize = 256;
/// How long a broker may refuse or not answer before the publisher gives up.
const PATIENCE: Duration = Duration::from_secs(60);
/// Pause before an event is sent again.
const PAUSE: Duration = Duration::from_millis(500);

/// Publishes what is not yet published, round robin over the orders. `published` holds the last
/// published event of each order. Ends early, with everything sent confirmed, when `stop` is cancelled.
///
/// # Errors
/// When an event could not be published for [`PATIENCE`].
pub(crate) async fn publish_all(
    bus: &Bus,
    work: &Work,
    published: &[u64],
    stop: &CancellationToken,
) -> Result<(), PublishError> {
    let next = |event: OrderEvent| {
        let next = OrderEvent {
            order: event.order,
            seq: event.seq + 1,
        };
        (next.seq <= work.events_of(next.order)).then_some(next)
    };
    let mut turns: VecDeque<_> = (0..work.keys())
        .zip(published)
        .filter_map(|(order, &seq)| next(OrderEvent { order, seq }))
        .collect();
    // An order that has fewer events behind it comes first, as it would have without interruption.
    turns.make_contiguous().sort_by_key(|event| event.seq);
    let mut sending = FuturesUnordered::new();
    loop {
        while sending.len() < WINDOW
            && !stop.is_cancelled()
            && let Some(event) = turns.pop_front()
        {
            sending.push(send(bus, work, event, stop));
        }
        match sending.next().await {
            Some(event) => turns.extend(event?.and_then(next)),
            None => return Ok(()),
        }
    }
}

/// Sends one event until it is confirmed. `None` if that was given up because of `stop`.
///
/// Laneway never sends a message twice by itself: after an unknown outcome it may be at the broker.
/// This program prefers a duplicate, which the summary counts.
async fn send(
    bus: &Bus,
    work: &Work,
    event: OrderEvent,
    stop: &CancellationToken,
) -> Result<Option<OrderEvent>, PublishError> {
    let began = Instant::now();
    loop {
        match bus.publish(&event).await {
            Ok(()) => {
                work.ledger.published(&event.order.to_string(), event.seq);
                return Ok(Some(event));
            }
            Err(_) if stop.is_cancelled() => return Ok(None),
            Err(error @ (PublishError::Refused(_) | PublishError::Unknown(_)))
                if began.elapsed() < PATIENCE =>
            {
                work.complain(&error);
            }
            Err(error) => return Err(error),
        }
        tokio::select! {
            () = tokio::time::sleep(PAUSE) => {}
            () = stop.cancelled() => return Ok(None),
        }
    }
}
