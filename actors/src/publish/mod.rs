//! Publishing: from messages to verdicts.
