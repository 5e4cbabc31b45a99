//! Sources: how rows arrive.

pub mod claim;
pub mod claims;
pub mod floor;
pub(crate) mod rows;
pub mod sweep;
mod take;
mod trouble;
mod wake;
