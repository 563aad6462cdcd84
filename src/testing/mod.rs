//! The test kit: the order ledger and the conformance suite of sources.

mod ledger;

pub use ledger::{Figures, OrderLedger, Run};
