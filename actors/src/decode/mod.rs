//! Decoding: from rows to messages.

pub mod headers;
pub mod pgoutput;
pub mod relation;
pub mod timestamp;

#[cfg(test)]
pub(crate) mod testing;
