//! Memory does not depend on how many keys there are. Alone in its file: it looks at the whole process.

#![cfg(target_os = "linux")]

use laneway::prelude::*;

#[path = "support/orders.rs"]
mod support;
#[path = "support/workload.rs"]
mod workload;
use support::{ORDERS, envelope, orders, put, snapshot, started, stop, within};
use workload::Numbered;

/// The resident memory of this process, in bytes.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages = statm.split(' ').nth(1).expect("the second number");
    pages.parse::<u64>().expect("a number") * 4096
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_does_not_grow_with_the_number_of_keys_that_have_passed() {
    let keys: u64 = match std::env::var_os("LANEWAY_SOAK") {
        Some(_) => 5_000_000,
        None => 200_000,
    };
    let broker = MemoryBroker::new();
    let bus = started(orders(broker.clone(), |e| {
        e.max_in_flight(1_000)
            .handler(|_: Numbered, _: Context| async { Ok(()) })
    }))
    .await;
    let pass = |from: u64, to: u64| {
        let broker = broker.clone();
        async move {
            for number in from..to {
                put(&broker, ORDERS, envelope(&format!("key-{number}"), 1)).await;
                if number % 500 == 0 {
                    within("room", broker.wait_until(ORDERS, |q| q.total() < 2_000)).await;
                }
            }
            within("an empty queue", broker.wait_empty(ORDERS)).await;
        }
    };
    let warm = keys / 5;
    pass(0, warm).await;
    let before = resident();
    pass(warm, keys).await;
    let grown = resident().saturating_sub(before);
    let state = snapshot(&bus).await;
    assert_eq!(state.lane_depth.iter().sum::<usize>(), 0);
    assert_eq!(state.handled, keys);
    stop(&bus).await;
    // A remembered key would cost 100 bytes at least.
    let allowed = (keys - warm) * 50;
    assert!(grown < allowed, "{grown} bytes for {} keys", keys - warm);
}
