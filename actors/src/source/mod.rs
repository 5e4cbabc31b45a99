//! Sources: how rows arrive.

pub mod claim;
pub(crate) mod rows;
