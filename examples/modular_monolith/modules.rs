//! The modules Shipping and Billing: each has its own queue, and writes its effect in its handler's transaction.

use std::sync::Arc;

use laneway::prelude::*;

use crate::crash::CrashAfter;
use crate::orders::OrderPlaced;
use crate::tables::{Database, Effect};

/// The names of the queues, under which messages wait.
pub(crate) const QUEUES: [&str; 2] = [SHIPPING, BILLING];
pub(crate) const SHIPPING: &str = "shipping";
pub(crate) const BILLING: &str = "billing";

/// Ships every order.
pub(crate) struct Shipping {
    pub database: Database,
    pub crash: Arc<CrashAfter>,
}

impl Handler<OrderPlaced> for Shipping {
    type Answer = ();

    async fn handle(&self, order: OrderPlaced, cx: Context) -> Result<(), Failure> {
        self.database.write(Effect::Shipment, &order, &cx).await?;
        self.crash.count();
        Ok(())
    }
}

/// Bills every order, but for those that cannot be billed.
pub(crate) struct Billing {
    pub database: Database,
    pub crash: Arc<CrashAfter>,
}

impl Handler<OrderPlaced> for Billing {
    type Answer = ();

    async fn handle(&self, order: OrderPlaced, cx: Context) -> Result<(), Failure> {
        self.database.write(Effect::Invoice, &order, &cx).await?;
        // Both failures come after the write, which goes with its transaction.
        if cannot_be_billed(&order) {
            return Err(Failure::permanent("there is no account to bill"));
        }
        if order.overall() % 25 == 7 && cx.attempt() == 1 {
            return Err(Failure::transient("the bank does not answer"));
        }
        self.crash.count();
        Ok(())
    }
}

/// Which orders become dead letters of Billing: the last of every 500.
fn cannot_be_billed(order: &OrderPlaced) -> bool {
    order.overall() % 500 == 499
}
