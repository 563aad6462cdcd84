//! Guides: what the reference of single items cannot say.

#[doc = include_str!("ordering.md")]
pub mod ordering {}

#[doc = include_str!("affinity.md")]
pub mod affinity {}

#[doc = include_str!("failure.md")]
pub mod failure {}

#[cfg(any(feature = "postgres", feature = "sqlite"))]
#[doc = include_str!("durability.md")]
pub mod durability {}

#[doc = include_str!("shutdown.md")]
pub mod shutdown {}

#[doc = include_str!("architecture.md")]
pub mod architecture {}
