//! lane
pub mod machine;
