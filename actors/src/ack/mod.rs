//! Recording: from verdicts to durable state.

pub mod attempt;
mod rejected;
pub mod rows;
mod snapshot;
pub mod stream;
