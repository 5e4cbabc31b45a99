//! The publisher: sends messages, and finds out for each what became of it.

pub mod streak;
pub mod verdict;
