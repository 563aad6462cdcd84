//! x
#![allow(missing_docs)]
mod envelope;
mod handler;
mod key;
pub mod lane;
mod message;
mod observe;
mod outcome;
mod policy;
pub mod port;
mod session;
pub use envelope::*;
pub use handler::*;
pub use key::*;
pub use message::*;
pub use observe::*;
pub use outcome::*;
pub use policy::*;
pub use session::*;
