//! The pipeline as a whole: what its stages share, how they end, and who builds them again.

pub mod budget;
mod cleanup;
pub mod exit;
pub mod generation;
pub mod history;
pub mod plane;
pub mod relay;
pub mod shared;

pub use plane::Plane;
pub use relay::Relay;
