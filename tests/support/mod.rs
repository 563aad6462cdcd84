//! What tests of the RabbitMQ transport share.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

pub mod broker;
pub mod foreign;
pub mod proxy;
