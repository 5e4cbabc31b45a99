//! Sources: how rows arrive.

pub mod claim;
mod collect;
pub mod feedback;
pub mod open;
pub mod slot;
pub mod wal;
mod wire;
