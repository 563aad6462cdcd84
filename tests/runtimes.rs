//! A bus works from a multi-threaded runtime, from a current-thread one, and from none.

use std::time::Duration;

use laneway::prelude::*;
use laneway::testing::OrderLedger;

#[path = "support/orders.rs"]
mod support;
#[path = "support/workload.rs"]
mod workload;
use support::{ORDERS, orders, send, started, stop, within};
use workload::{Numbered, Scripted, publish};

#[tokio::test(flavor = "current_thread")]
async fn a_bus_works_from_a_current_thread_runtime_and_its_handlers_do_not_run_there() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let here = std::thread::current().id();
    let record = ledger.clone();
    let bus = started(orders(broker.clone(), |e| {
        e.handler(move |message: Numbered, cx: Context| {
            let record = record.clone();
            async move {
                assert_ne!(std::thread::current().id(), here);
                let run = record.run(&message.key, message.seq, cx.attempt());
                // Timers must work in the handlers' runtime.
                tokio::time::sleep(Duration::from_millis(1)).await;
                run.end(true);
                Ok(())
            }
        })
    }))
    .await;
    publish(&bus, &ledger, 500, 20).await;
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!((figures.handled, figures.attempts), (500, 500));
}

#[test]
fn a_bus_works_without_any_runtime() {
    // No time-out can be had without a runtime; the test's own thread is watched from another.
    let (done, watched) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        futures::executor::block_on(async {
            let broker = MemoryBroker::new();
            let ledger = OrderLedger::in_memory();
            let handler = Scripted::succeeding(&ledger, Duration::from_millis(1));
            let ready = orders(broker.clone(), |e| e.handler(handler)).build();
            let bus = ready.expect("valid").start().await.expect("starts");
            publish(&bus, &ledger, 500, 20).await;
            broker.wait_empty(ORDERS).await;
            assert_eq!(bus.snapshot().await.endpoints[0].handled, 500);
            assert!(bus.shutdown(Duration::from_secs(20)).await.is_clean());
            let figures = ledger.figures().expect("in memory");
            figures.assert_ordered();
            assert_eq!((figures.handled, figures.attempts), (500, 500));
        });
        done.send(()).expect("the test waits");
    });
    let result = watched.recv_timeout(Duration::from_secs(60));
    result.expect("all done within a minute");
}

#[test]
fn a_current_thread_runtime_for_the_handlers_is_refused_at_start() {
    let single = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let own = tokio::runtime::Runtime::new().expect("a runtime");
    own.block_on(async {
        let ready = orders(MemoryBroker::new(), |e| {
            e.handler(|_: Numbered, _: Context| async { Ok(()) })
        })
        .handler_runtime(single.handle().clone())
        .build()
        .expect("valid");
        let error = within("the start", ready.start())
            .await
            .expect_err("refused");
        let text = error.to_string();
        assert!(
            text.contains("runtime") && text.contains("multi-threaded"),
            "{text}"
        );
    });
}

#[test]
fn a_runtime_without_timers_is_refused_at_start() {
    let timeless = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .build()
        .expect("a runtime");
    let own = tokio::runtime::Runtime::new().expect("a runtime");
    own.block_on(async {
        let ready = orders(MemoryBroker::new(), |e| {
            e.handler(|_: Numbered, _: Context| async { Ok(()) })
        })
        .handler_runtime(timeless.handle().clone())
        .build()
        .expect("valid");
        let error = within("the start", ready.start())
            .await
            .expect_err("refused");
        assert!(error.to_string().contains("enable_time()"), "{error}");
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bus_that_is_dropped_like_in_a_crash_gives_everything_back() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let handler = Scripted::new(&ledger, |_, _| workload::Step::Hang);
    let bus = started(orders(broker.clone(), |e| e.handler(handler))).await;
    for seq in 1..=10 {
        send(&bus, &ledger, "a", seq).await;
    }
    drop(bus);
    within(
        "all given back",
        broker.wait_until(ORDERS, |q| q.ready == 10 && q.sessions == 0),
    )
    .await;
    let handler = Scripted::succeeding(&ledger, Duration::ZERO);
    let bus = started(orders(broker.clone(), |e| e.handler(handler))).await;
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!(figures.handled, 10);
}
