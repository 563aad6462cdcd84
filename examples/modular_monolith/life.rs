//! The life of one process of the program: all three modules on one bus, until everything is done or somebody says
//! stop.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::FutureExt;
use futures::future::FusedFuture;
use laneway::ConfigError;
use laneway::prelude::*;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::Ended;
use crate::crash::CrashAfter;
use crate::modules::{BILLING, Billing, SHIPPING, Shipping};
use crate::orders::{OrderPlaced, place_all};
use crate::place::Place;
use crate::progress::{until_done, watch_backlog};
use crate::tables::Database;

/// Over how many shards the nodes share out each queue.
pub(crate) const SHARDS: u32 = 8;
/// Handlers of a queue that run at once, in each node.
const LANES: u32 = 8;
/// How long running handlers may take when the process is asked to stop.
const DRAIN: Duration = Duration::from_secs(10);

/// What a process is to do.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub place: Place,
    /// How many orders there are to be in the end.
    pub orders: u64,
    /// How many of them are whose, by customer.
    pub shares: Vec<u64>,
    pub crash_after: Option<u64>,
}

/// What an application writes.
pub(crate) async fn start(plan: &Plan, database: &Database) -> Result<Bus, ConfigError> {
    let crash = Arc::new(CrashAfter::new(plan.crash_after));
    let shipping = Shipping {
        database: database.clone(),
        crash: Arc::clone(&crash),
    };
    let billing = Billing {
        database: database.clone(),
        crash,
    };
    plan.place
        .under(Bus::builder())
        .keyed::<OrderPlaced>()
        .module("shipping", |m| {
            m.separated::<OrderPlaced, _>(SHIPPING, shipping)
        })
        .module("billing", |m| {
            m.separated::<OrderPlaced, _>(BILLING, billing)
        })
        .local_queues(|q| {
            q.durable()
                .partitioned(LANES)
                .shards(SHARDS)
                .transactional()
                .backoff(Backoff::constant(Duration::from_millis(20)))
        })
        .drain_deadline(DRAIN)
        .build()?
        .start()
        .await
}

/// The only process: it sees for itself when everything is done.
pub(crate) async fn alone(plan: &Plan, database: &Database) -> Result<Ended, String> {
    let bus = start(plan, database)
        .await
        .map_err(|error| error.to_string())?;
    let store = bus.store().ok_or("the store has stopped by itself")?;
    let until = async {
        tokio::select! {
            done = until_done(database, &*store, plan.orders) => done.map(|()| Ended::Done),
            () = shutdown_signal() => Ok(Ended::Interrupted),
        }
    };
    work(&bus, plan, database, until).await
}

/// Places orders and handles messages until `until` resolves, then drains.
pub(crate) async fn work<T>(
    bus: &Bus,
    plan: &Plan,
    database: &Database,
    until: impl Future<Output = Result<T, String>>,
) -> Result<T, String> {
    let store = bus.store().ok_or("the store has stopped by itself")?;
    let (opens, open) = watch::channel(false);
    let stop = AtomicBool::new(false);
    let placing = async {
        let place = || place_all(bus, database, &plan.shares, open.clone(), &stop);
        match database {
            // It has one writer, for which handlers wait as well.
            Database::Sqlite(_) => place().await,
            Database::Postgres(_) => tokio::try_join!(place(), place()).map(drop),
        }
    };
    let mut worked = Err("the bus has stopped by itself".to_owned());
    let ended = bus
        .run_until(async {
            let mut placing = std::pin::pin!(placing.fuse());
            worked = tokio::select! {
                worked = until => worked,
                // The rest is to handle them.
                Err(failed) = &mut placing => Err(failed),
                () = watch_backlog(&*store, opens) => Err("nobody looks after the backlog".to_owned()),
            };
            // Not dropped in the middle: a transaction whose beginning is dropped can stay open in its connection, and
            // in SQLite nobody else writes then.
            stop.store(true, Ordering::Relaxed);
            if !placing.is_terminated() {
                let stopped = tokio::time::timeout(DRAIN, placing).await;
                if !matches!(stopped, Ok(Ok(()))) && worked.is_ok() {
                    worked = Err(format!("an order was still being placed after {DRAIN:?}"));
                }
            }
        })
        .await;
    let report = ended.map_err(|error| error.to_string())?;
    if !report.is_clean() {
        return Err(format!("handlers still ran after {DRAIN:?}"));
    }
    worked
}
