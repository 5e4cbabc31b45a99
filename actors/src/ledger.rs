//! The ledger: verdicts in any order go in, the contiguous prefix comes out.
//!
//! Every element of the stream (a row, the end of a transaction, a keepalive) is numbered by the decoder in stream
//! order. The ledger knows one number, the first that is not settled, and what was settled beyond it; so it holds
//! only what is out of order, which the exposure bounds, and a transaction of any size passes.

use std::collections::VecDeque;

use crate::position::{Lsn, Position};

/// What settling one element of the stream lets the relay say, once everything before it is settled too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// A row: restarts may skip everything up to this position.
    Row(Position),
    /// The end of a transaction, or a keepalive, which is an empty one: the slot may advance to this LSN.
    End(Lsn),
}

/// How far the contiguous prefix of settled elements reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Watermark {
    /// The last row in it.
    pub position: Position,
    /// The LSN the slot may be told: the end of the last transaction in it. Never one in the middle of a transaction.
    pub flush: Lsn,
}

/// Turns settled elements into a [`Watermark`] that only ever advances.
#[derive(Debug, Default)]
pub struct Ledger {
    /// Number of the first element that is not settled.
    next: u64,
    /// From `next` on: the mark of each element that is settled already.
    ahead: VecDeque<Option<Mark>>,
    watermark: Watermark,
}

impl Ledger {
    /// An empty ledger; the first element of the stream has number 0.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty ledger of a stream whose rows up to `watermark` were settled before.
    pub fn behind(watermark: Watermark) -> Self {
        Self { watermark, ..Self::default() }
    }

    /// Settles element `number`. Settling one twice changes nothing.
    pub fn settle(&mut self, number: u64, mark: Mark) {
        let Some(ahead) = number.checked_sub(self.next) else { return };
        let ahead = ahead as usize;
        if ahead >= self.ahead.len() {
            self.ahead.resize(ahead + 1, None);
        }
        self.ahead[ahead] = Some(mark);
        while let Some(Some(mark)) = self.ahead.front().copied() {
            self.ahead.pop_front();
            self.next += 1;
            match mark {
                Mark::Row(position) => self.watermark.position = self.watermark.position.max(position),
                // A keepalive may repeat an older LSN than a commit already passed: never go back.
                Mark::End(lsn) => self.watermark.flush = self.watermark.flush.max(lsn),
            }
        }
    }

    /// How far everything is settled.
    pub fn watermark(&self) -> Watermark {
        self.watermark
    }

    /// Number of the first element that is not settled: all before it are.
    pub fn next(&self) -> u64 {
        self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn row(commit: u64, row: u64) -> Mark {
        Mark::Row(Position { commit: Lsn(commit), row })
    }

    /// A stream of transactions with keepalives between: commit LSNs ascend, each ends 10 after its commit LSN.
    fn stream(sizes: &[u8]) -> Vec<Mark> {
        let mut marks = Vec::new();
        for (n, size) in sizes.iter().enumerate() {
            let commit = 100 * (n as u64 + 1);
            marks.extend((1..=u64::from(*size)).map(|n| row(commit, n)));
            marks.push(Mark::End(Lsn(commit + 10)));
            if size % 3 == 0 {
                marks.push(Mark::End(Lsn(commit + 20)));
            }
        }
        marks
    }

    proptest! {
        #[test]
        fn the_watermark_is_the_contiguous_prefix_whatever_the_order(
            sizes in prop::collection::vec(0u8..6, 1..12),
            seed: u64,
        ) {
            let marks = stream(&sizes);
            let mut order: Vec<usize> = (0..marks.len()).collect();
            fastrand::Rng::with_seed(seed).shuffle(&mut order);
            let mut ledger = Ledger::new();
            let mut settled = vec![false; marks.len()];
            let mut before = Watermark::default();
            for n in order {
                ledger.settle(n as u64, marks[n]);
                settled[n] = true;
                let prefix = settled.iter().take_while(|settled| **settled).count();
                let flush = marks[..prefix].iter().rev().find_map(|mark| match mark {
                    Mark::End(lsn) => Some(*lsn),
                    Mark::Row(_) => None,
                });
                let position = marks[..prefix].iter().rev().find_map(|mark| match mark {
                    Mark::Row(position) => Some(*position),
                    Mark::End(_) => None,
                });
                let now = ledger.watermark();
                prop_assert_eq!(now.flush, flush.unwrap_or_default());
                prop_assert_eq!(now.position, position.unwrap_or_default());
                prop_assert!(now.flush >= before.flush && now.position >= before.position);
                before = now;
            }
            prop_assert_eq!(ledger.next(), marks.len() as u64);
        }
    }

    #[test]
    fn a_row_without_a_verdict_holds_the_slot_back_and_nothing_else() {
        let mut ledger = Ledger::new();
        ledger.settle(1, row(100, 2));
        ledger.settle(2, Mark::End(Lsn(110)));
        ledger.settle(3, Mark::End(Lsn(500)));
        assert_eq!(ledger.watermark(), Watermark::default());
        assert_eq!(ledger.next(), 0);
        ledger.settle(0, row(100, 1));
        assert_eq!(ledger.watermark().flush, Lsn(500));
    }

    #[test]
    fn the_slot_never_stands_inside_a_transaction() {
        let mut ledger = Ledger::new();
        ledger.settle(0, Mark::End(Lsn(10)));
        ledger.settle(1, row(100, 1));
        assert_eq!(
            ledger.watermark(),
            Watermark { position: Position { commit: Lsn(100), row: 1 }, flush: Lsn(10) }
        );
    }
}
