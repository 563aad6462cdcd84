//! `ruststream-lapin` with keyed lanes.
