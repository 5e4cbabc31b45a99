//! Sources: how rows arrive.

pub mod claim;
