//! Where a message stands in the write-ahead log: LSNs and positions.

use std::{fmt, str::FromStr};

/// A log sequence number: a byte offset in PostgreSQL's write-ahead log.
///
/// LSNs compare within one cluster and timeline only; the slot, not a stored LSN, is the truth about where
/// streaming resumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Lsn(pub u64);

impl Lsn {
    /// No position: `0/0`, which a server reads as "where the slot stands".
    pub const ZERO: Lsn = Lsn(0);
}

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:X}/{:X}", self.0 >> 32, self.0 as u32)
    }
}

/// Text that is not an LSN of the form `16/B374D848`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotAnLsn(String);

impl fmt::Display for NotAnLsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is not an LSN of the form 16/B374D848", self.0)
    }
}

impl std::error::Error for NotAnLsn {}

impl FromStr for Lsn {
    type Err = NotAnLsn;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = || {
            let (high, low) = text.split_once('/')?;
            let half = |digits: &str| {
                let plain = (1..=8).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_hexdigit());
                plain.then(|| u64::from_str_radix(digits, 16).ok()).flatten()
            };
            Some(Lsn((half(high)? << 32) | half(low)?))
        };
        parse().ok_or_else(|| NotAnLsn(text.to_owned()))
    }
}

/// A row's place in the stream: its transaction's commit LSN, and which insert of that transaction it is.
///
/// `pgoutput` streams transactions in commit order and their rows in the order they were written, so positions
/// of one slot are totally ordered, and the same row has the same position each time it is streamed. Inserts
/// into other tables of the publication are counted too, so that the count depends on the stream alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Position {
    /// Commit LSN of the transaction (`final_lsn` of its BEGIN).
    pub commit: Lsn,
    /// 1 for the first insert of the transaction.
    pub row: u64,
}

impl Position {
    /// The place after every row of the transaction that commits at `commit`.
    pub fn end_of(commit: Lsn) -> Self {
        Self { commit, row: u64::MAX }
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}", self.commit, self.row)
    }
}

/// Which stream a position belongs to: positions of two streams do not compare.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamIdentity {
    /// The slot it is read from.
    pub slot: String,
    /// The cluster's system identifier.
    pub system_identifier: String,
    /// The cluster's timeline.
    pub timeline: u32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_lsn_survives_its_own_text(value: u64) {
            prop_assert_eq!(Lsn(value).to_string().parse::<Lsn>(), Ok(Lsn(value)));
        }

        #[test]
        fn arbitrary_text_never_panics(text in ".{0,40}") {
            let _ = text.parse::<Lsn>();
        }

        #[test]
        fn positions_order_by_commit_then_row(a: (u64, u64), b: (u64, u64)) {
            let position = |(commit, row): (u64, u64)| Position { commit: Lsn(commit), row };
            prop_assert_eq!(position(a).cmp(&position(b)), a.cmp(&b));
        }
    }

    #[test]
    fn an_lsn_with_a_sign_or_a_third_part_is_refused() {
        for text in ["+1/0", "0/0/0", "", "/", "1/", "123456789/0"] {
            assert!(text.parse::<Lsn>().is_err(), "{text:?}");
        }
    }
}
