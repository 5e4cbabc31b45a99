//! The postrider program.

fn main() {}
