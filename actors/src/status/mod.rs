//! What the relay says about itself: one state, the reasons for it, and the figures behind it.

pub mod board;
pub mod figures;

pub use board::{Board, Condition, Phase, Reason, Report, State};
