//! Claims: rows locked by an open transaction that travels with them.

/// A claim: connection and open transaction as one owned value. Dropping it rolls back.
#[derive(Debug)]
pub struct Claim {}
