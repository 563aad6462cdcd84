//! Messages of one key are handled in order, whatever their handlers do.

use std::time::Duration;

use laneway::prelude::*;
use laneway::testing::OrderLedger;

#[path = "support/workload.rs"]
mod workload;
use workload::{KEY_HEADER, Numbered, Scripted, publish};

#[tokio::test(flavor = "multi_thread")]
async fn messages_of_one_key_run_in_order_and_keys_in_parallel() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let bus = Bus::builder()
        .memory(broker.clone())
        .topology(|t| {
            t.queue("orders", |q| {
                q.durable()
                    .single_active_consumer()
                    .parking("orders-dlx", "orders-parked")
            })
        })
        .endpoint("orders", |e| {
            e.ordered_by_header(KEY_HEADER)
                .transport_affinity(TransportAffinity::SingleActiveConsumer)
                .concurrency(16)
                .handler(Scripted::succeeding(&ledger, Duration::from_millis(2)))
        })
        .publishes::<Numbered>(|r| r.to_queue("orders").keyed_by(|m| m.key.clone()))
        .build()
        .expect("valid")
        .start()
        .await
        .expect("starts");
    publish(&bus, &ledger, 20_000, 500).await;
    broker.wait_empty("orders").await;
    let report = bus.shutdown(Duration::from_secs(5)).await;
    assert!(report.is_clean(), "{report:?}");
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!(figures.handled, 20_000);
}
