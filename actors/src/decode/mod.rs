//! Decoding: from rows to messages.

pub mod headers;
pub mod message;
pub mod pgoutput;
pub mod relation;
pub mod template;
pub mod timestamp;

#[cfg(test)]
pub(crate) mod testing;
