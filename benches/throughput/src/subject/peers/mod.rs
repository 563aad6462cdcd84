//! Other libraries, each by its public API in the best configuration that its documentation describes.

pub(super) mod beavers;
pub(super) mod ruststream;
