//! The module Orders: places orders, each in a transaction of the application's own.

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

/// How many of so many orders are this customer's.
fn share(customer: u64, orders: u64) -> u64 {
    orders / CUSTOMERS + u64::from(customer < orders % CUSTOMERS)
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

/// Places orders, until every customer has their share of so many, whoever placed them. Waits while `open` says so.
///
/// # Errors
/// When orders could not be placed many times in sequence.
pub(crate) async fn place_all(
    bus: &Bus,
    database: &Database,
    orders: u64,
    mut open: watch::Receiver<bool>,
) -> Result<(), String> {
    let customers = 0..CUSTOMERS;
    let mut left: Vec<_> = customers.filter(|one| share(*one, orders) > 0).collect();
    let mut failures = 0;
    while !left.is_empty() {
        // An error is the end of whoever looks after the backlog, and with it of this run.
        let _ = open.wait_for(|open| *open).await;
        let place = fastrand::usize(..left.len());
        let customer = left[place];
        match database
            .place_next(bus, customer, share(customer, orders))
            .await
        {
            Ok(Did::Order | Did::ChangeTheirMind) => failures = 0,
            Ok(Did::Nothing) => drop(left.swap_remove(place)),
            // Whether it was placed after all does not matter here: the next look at the customer's count tells.
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
