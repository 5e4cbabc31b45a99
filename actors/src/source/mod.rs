//! Sources: how rows arrive.

pub mod claim;
mod collect;
pub mod feedback;
pub mod open;
pub mod slot;
pub mod wal;
mod wire;
pub mod claims;
pub mod floor;
pub(crate) mod rows;
pub mod sweep;
mod take;
mod trouble;
mod wake;

pub use claims::ClaimSource;
