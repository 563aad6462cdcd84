//! Case O23: what only was in a prefetch, and never ran, has used up no attempt, however often it comes
//! again; the broker's own count of deliveries rises each time.
#![cfg(feature = "rabbitmq")]

use std::sync::Arc;
use std::time::Duration;

use laneway::prelude::*;
use laneway::{EndpointState, EventKind};
use tokio::sync::{Barrier, Semaphore};

#[path = "support/orders.rs"]
mod orders;
#[path = "support/stand.rs"]
mod stand;
mod support;
#[path = "support/workload.rs"]
mod workload;
use orders::{ORDERS, Seen, handled, in_flight, started, within};
use stand::{Stand, on_both, once};
use support::broker::PrivateBroker;
use workload::{Numbered, Scripted, Step};

const PREFETCH: u32 = 100;

/// Each run takes one permit.
#[derive(Clone)]
struct Permitted {
    inner: Scripted,
    permits: Arc<Semaphore>,
}

impl Handler<Numbered> for Permitted {
    type Answer = ();

    async fn handle(&self, message: Numbered, cx: Context) -> Result<(), Failure> {
        self.permits.acquire().await?.forget();
        self.inner.handle(message, cx).await
    }
}

async fn start(stand: &Stand, handler: &Permitted) -> (Bus, Seen) {
    let bus = started(stand.bus(RabbitMq::at(&stand.url), |e| {
        e.concurrency(1)
            .max_in_flight(PREFETCH)
            .max_delivery_attempts(3)
            .handler(handler.clone())
    }))
    .await;
    let seen = Seen::of(&bus);
    (bus, seen)
}

/// An orderly end: the one handler that runs may finish, the prefetched messages go back.
async fn drain(bus: Bus, permits: &Semaphore) {
    let mut state = bus.endpoint(ORDERS).expect("it exists").state();
    let draining = async {
        let draining = state.wait_for(|state| *state == EndpointState::Draining);
        draining.await.expect("the endpoint lives");
        permits.add_permits(1);
    };
    let both = futures::future::join(bus.shutdown(Duration::from_secs(20)), draining);
    let (report, ()) = within("the end of a bus", both).await;
    assert!(report.is_clean(), "{report:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_closures_and_five_clean_restarts_with_a_prefetch_of_a_hundred_park_nothing() {
    const CLOSURES: usize = 10;
    const RESTARTS: u64 = 5;
    const MESSAGES: u64 = 200;
    let node = PrivateBroker::start();
    // Before and after each closure; the two buses and whoever closes.
    let (full, closed) = (Barrier::new(3), Barrier::new(3));
    let closing = async {
        for _ in 0..CLOSURES {
            full.wait().await;
            node.close_all_connections();
            closed.wait().await;
        }
    };
    let consuming = on_both(async |queue_type| {
        let stand = Stand::new(&node.url(), "uncounted", queue_type);
        let permits = Arc::new(Semaphore::new(0));
        let handler = Permitted {
            inner: stand.handler(|_, _| Step::Succeed(Duration::ZERO)),
            permits: Arc::clone(&permits),
        };
        let (mut bus, seen) = start(&stand, &handler).await;
        stand.publish(MESSAGES, 20).await;
        let connected = |kind: &EventKind| matches!(kind, EventKind::Connected { .. });
        for closure in 1..=CLOSURES {
            in_flight(&bus, PREFETCH as usize).await;
            // One message a session. One of no use at all would be followed by a longer pause each time.
            permits.add_permits(1);
            handled(&bus, closure as u64).await;
            in_flight(&bus, PREFETCH as usize).await;
            let sessions = seen.count(connected);
            full.wait().await;
            closed.wait().await;
            seen.until("the next session", sessions + 1, connected)
                .await;
        }
        let mut runs = CLOSURES as u64;
        for _ in 0..RESTARTS {
            in_flight(&bus, PREFETCH as usize).await;
            drain(bus, &permits).await;
            bus = start(&stand, &handler).await.0;
            // One a life.
            runs += 1;
            let figures = stand.ledger.figures().expect("in memory");
            assert_eq!((figures.attempts, figures.handled), (runs, runs));
        }
        in_flight(&bus, PREFETCH as usize).await;
        permits.add_permits(10_000);
        let (copies, figures) = stand.finish(bus).await;
        assert_eq!(copies, once([]), "{queue_type:?}");
        assert_eq!((figures.handled, figures.duplicates), (MESSAGES + 1, 0));
    });
    futures::future::join(closing, consuming).await;
}
