//! Sources: how rows arrive.

pub mod claim;
pub mod claims;
mod collect;
pub mod feedback;
pub mod floor;
pub mod open;
pub(crate) mod rows;
pub mod slot;
pub mod sweep;
mod take;
mod trouble;
mod wake;
pub mod wal;
mod wire;

pub use claims::ClaimSource;
