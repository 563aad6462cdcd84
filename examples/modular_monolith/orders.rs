//! The module Orders: places orders, each in a transaction of the application's own.

use std::sync::atomic::{AtomicBool, Ordering};

use laneway::Bus;
use laneway::durable::EnqueueError;
use laneway::prelude::*;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::tables::{Database, on_either};

/// How many customers there are. No divisor of 500, so that the orders that cannot be billed are of many customers.
pub(crate) const CUSTOMERS: u64 = 101;

/// An order was placed. What Orders tells the other modules.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct OrderPlaced {
    /// Whose it is: the ordering key.
    pub customer: u64,
    /// Its number among the customer's orders, from 1.
    pub number: u64,
}

impl Message for OrderPlaced {
    const TYPE: &'static str = "order-placed";
}

impl Keyed for OrderPlaced {
    fn key(&self) -> OrderingKey {
        self.customer.into()
    }
}

impl OrderPlaced {
    /// Its number among all orders, from 0. The first N orders have the numbers below N.
    pub(crate) fn overall(&self) -> u64 {
        (self.number - 1) * CUSTOMERS + self.customer
    }
}

/// How many orders each customer is to have, given how many they have, so that there are `orders` in all: more for
/// those who have the fewest. If there are as many already, nobody gets more.
///
/// Orders that were placed meanwhile towards this change nothing: so every run comes to the same shares.
pub(crate) fn shares(mut have: Vec<u64>, orders: u64) -> Vec<u64> {
    let in_all = |have: &[u64], least: u64| have.iter().map(|one| least.max(*one)).sum::<u64>();
    if in_all(&have, 0) >= orders {
        return have;
    }
    let mut least = orders / have.len() as u64;
    while in_all(&have, least) > orders {
        least -= 1;
    }
    let mut rest = orders - in_all(&have, least);
    for one in have.iter_mut().filter(|one| **one <= least) {
        *one = least + rest.min(1);
        rest -= rest.min(1);
    }
    have
}

/// Why an order was not placed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PlaceError {
    /// The application's own part.
    #[error("the database: {0}")]
    Database(#[from] sqlx::Error),
    /// Laneway's part.
    #[error(transparent)]
    Enqueue(#[from] EnqueueError),
}

/// What a customer did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Did {
    Order,
    /// Ordered, and thought better of it before the commit: there is no order, and no message.
    ChangeTheirMind,
    /// Had ordered everything before.
    Nothing,
}

impl Database {
    /// The order's row, the customer's count and the message commit together, or nothing of it does.
    async fn place_next(&self, bus: &Bus, customer: u64, most: u64) -> Result<Did, PlaceError> {
        on_either!(self, tables => {
            let mut transaction = tables.pool.begin_with(tables.begin).await?;
            // Locks the customer, on whichever node: so the number is the next one, without gaps.
            let number: Option<i64> = sqlx::query_scalar(&tables.count_one_more)
                .bind(customer as i64)
                .bind(most as i64)
                .fetch_optional(&mut *transaction)
                .await?;
            let Some(number) = number else {
                return Ok(Did::Nothing);
            };
            sqlx::query(&tables.insert_order)
                .bind(customer as i64)
                .bind(number)
                .execute(&mut *transaction)
                .await?;
            let number = number as u64;
            let enqueued = bus
                .enqueue_in(&mut transaction, OrderPlaced { customer, number })
                .await?;
            if fastrand::u8(..) < 8 {
                transaction.rollback().await?;
                return Ok(Did::ChangeTheirMind);
            }
            transaction.commit().await?;
            enqueued.committed();
            Ok(Did::Order)
        })
    }
}

/// Places orders, until every customer has their share, whoever placed them, or until `stop`. Waits while `open` says
/// so.
///
/// # Errors
/// When orders could not be placed many times in sequence.
pub(crate) async fn place_all(
    bus: &Bus,
    database: &Database,
    shares: &[u64],
    mut open: watch::Receiver<bool>,
    stop: &AtomicBool,
) -> Result<(), String> {
    let mut left: Vec<_> = (0..).zip(shares).filter(|(_, most)| **most > 0).collect();
    let mut failures = 0;
    while !left.is_empty() && !stop.load(Ordering::Relaxed) {
        // An error is the end of whoever looks after the backlog, and with it of this run.
        let _ = open.wait_for(|open| *open).await;
        let place = fastrand::usize(..left.len());
        let (customer, most) = left[place];
        match database.place_next(bus, customer, *most).await {
            Ok(Did::Order | Did::ChangeTheirMind) => failures = 0,
            Ok(Did::Nothing) => drop(left.swap_remove(place)),
            // Whether it was placed after all does not matter here: the next look at the customer's count tells.
            Err(_) if stop.load(Ordering::Relaxed) => break,
            Err(error) if failures == MOST_FAILURES => {
                return Err(format!("orders cannot be placed: {error}"));
            }
            Err(_) => {
                failures += 1;
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            }
        }
    }
    Ok(())
}

/// Failures in sequence that are taken for those of a database that is busy or away for a moment.
const MOST_FAILURES: u32 = 100;
