//! The test kit: the order ledger and the conformance suite of sources.

pub mod conformance;
mod ledger;

pub use ledger::{Figures, OrderLedger, Run};
