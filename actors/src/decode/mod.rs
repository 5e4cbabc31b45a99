//! Decoding: from rows to messages.

pub mod pgoutput;
pub mod timestamp;
