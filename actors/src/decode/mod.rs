//! Decoding: from what a source took to messages.
