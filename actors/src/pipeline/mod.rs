//! The pipeline as a whole: what its stages share, how they end, and who builds them again.

pub mod exit;
pub mod shared;
