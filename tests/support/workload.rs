//! A workload for order tests: numbered messages per key, a handler with random times, the ledger.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test file uses its own part of it"
)]

use std::sync::Arc;
use std::time::Duration;

use laneway::prelude::*;
use laneway::testing::OrderLedger;
use serde::{Deserialize, Serialize};

/// One numbered message of a key.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Numbered {
    /// Its key.
    pub key: String,
    /// Its number within the key, from 1.
    pub seq: u64,
}

impl Message for Numbered {
    const TYPE: &'static str = "numbered";
}

/// The header that carries the key.
pub const KEY_HEADER: &str = "ordering-key";

/// What a handler shall do with a message: (message, attempt) to a result.
pub type Script = Arc<dyn Fn(&Numbered, u32) -> Step + Send + Sync>;

/// What an attempt does.
#[derive(Debug, Clone, Copy)]
pub enum Step {
    /// Takes this long and succeeds.
    Succeed(Duration),
    /// Takes this long and fails.
    Fail(Duration),
    /// Fails for good.
    FailForGood,
    /// Panics.
    Panic,
    /// Never returns.
    Hang,
    /// Blocks its thread this long, then succeeds.
    Block(Duration),
    /// Blocks its thread this long, then waits for ever.
    BlockAndHang(Duration),
}

/// Records every run in the ledger and does what the script says.
#[derive(Clone)]
pub struct Scripted {
    /// The record.
    pub ledger: OrderLedger,
    /// The script.
    pub script: Script,
}

impl Scripted {
    /// Succeeds after a random time of up to `at_most`.
    pub fn succeeding(ledger: &OrderLedger, at_most: Duration) -> Self {
        Self::new(ledger, move |_, _| {
            Step::Succeed(at_most.mul_f64(fastrand::f64()))
        })
    }

    /// Does what `script` says.
    pub fn new(
        ledger: &OrderLedger,
        script: impl Fn(&Numbered, u32) -> Step + Send + Sync + 'static,
    ) -> Self {
        Self {
            ledger: ledger.clone(),
            script: Arc::new(script),
        }
    }
}

impl Handler<Numbered> for Scripted {
    type Answer = ();

    async fn handle(&self, message: Numbered, cx: Context) -> Result<(), Failure> {
        let step = (self.script)(&message, cx.attempt());
        let run = self.ledger.run(&message.key, message.seq, cx.attempt());
        let pause = |time: Duration| async move {
            if !time.is_zero() {
                // Part of the scenario: the time a handler takes.
                tokio::time::sleep(time).await;
            }
        };
        match step {
            Step::Succeed(time) => {
                pause(time).await;
                run.end(true);
                Ok(())
            }
            Step::Fail(time) => {
                pause(time).await;
                run.end(false);
                Err(Failure::transient("as the script says"))
            }
            Step::FailForGood => {
                run.end(false);
                Err(Failure::permanent("as the script says"))
            }
            Step::Panic => panic!("as the script says"),
            Step::Hang => std::future::pending().await,
            Step::Block(time) => {
                std::thread::sleep(time);
                run.end(true);
                Ok(())
            }
            Step::BlockAndHang(time) => {
                std::thread::sleep(time);
                std::future::pending().await
            }
        }
    }
}

/// Publishes `messages` messages over `keys` keys round robin, `window` at a time, and records them.
pub async fn publish(bus: &Bus, ledger: &OrderLedger, messages: u64, keys: u64) {
    use futures::StreamExt;
    let sends = (0..messages).map(|number| async move {
        let message = Numbered {
            key: format!("key-{}", number % keys),
            seq: number / keys + 1,
        };
        bus.publish(&message).await.expect("published");
        ledger.published(&message.key, message.seq);
    });
    futures::stream::iter(sends)
        .buffer_unordered(256)
        .collect::<Vec<()>>()
        .await;
}
