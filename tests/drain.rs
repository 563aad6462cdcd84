//! A drain finishes what runs, settles it, and gives the rest back.

use std::sync::Arc;
use std::time::Duration;

use laneway::prelude::*;
use laneway::testing::OrderLedger;
use tokio::sync::Notify;

#[path = "support/workload.rs"]
mod workload;
use workload::{KEY_HEADER, Numbered, Scripted, Step, publish};

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_acknowledges_the_last_message_it_finished() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let started = Arc::new(Notify::new());
    let tell = Arc::clone(&started);
    let bus = Bus::builder()
        .memory(broker.clone())
        .topology(|t| t.queue("orders", |q| q.durable().single_active_consumer()))
        .endpoint("orders", |e| {
            e.ordered_by_header(KEY_HEADER)
                .transport_affinity(TransportAffinity::SingleActiveConsumer)
                .discard_poison()
                .handler(Scripted::new(&ledger, move |_, _| {
                    tell.notify_one();
                    Step::Succeed(Duration::from_millis(50))
                }))
        })
        .publishes::<Numbered>(|r| r.to_queue("orders").keyed_by(|m| m.key.clone()))
        .build()
        .expect("valid")
        .start()
        .await
        .expect("starts");
    // Two of one key: one runs, the other must be given back.
    publish(&bus, &ledger, 2, 1).await;
    started.notified().await;
    let report = bus.shutdown(Duration::from_secs(5)).await;
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(ledger.figures().expect("in memory").handled, 1);
    assert_eq!(broker.status("orders").total(), 1, "one of two is left");
}
