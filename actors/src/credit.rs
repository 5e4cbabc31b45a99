//! Credits: what bounds memory. Every message holds 1 and its bytes from before it is taken until its verdict
//! is recorded; exposure bounds in the same way what was sent and is not recorded yet.
//!
//! A [`Credit`] is an owned value that travels with what it pays for. Dropping it gives it back, so a message
//! that is dropped anywhere (panic, cancel, restart) cannot leak its share of the budget. Exposure is different: it
//! is given back in so many words, when a message is recorded. What is dropped with a stage that ends was sent and
//! will be sent again; were its share free, the stages that still run would send as much once more.

use std::sync::Arc;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::error::{Error, Kind, Result};

/// How much a budget has, or something costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cost {
    /// Messages.
    pub messages: u32,
    /// Bytes of their rows.
    pub bytes: u32,
}

impl Cost {
    /// One message whose row is `bytes` long.
    pub fn message(bytes: usize) -> Self {
        Self { messages: 1, bytes: u32::try_from(bytes).unwrap_or(u32::MAX) }
    }
}

impl std::ops::Add for Cost {
    type Output = Cost;

    fn add(self, other: Cost) -> Cost {
        Cost {
            messages: self.messages.saturating_add(other.messages),
            bytes: self.bytes.saturating_add(other.bytes),
        }
    }
}

#[derive(Debug)]
struct Budget {
    /// `Semaphore` is fair: a large request at the head of the queue is not overtaken for ever by small ones.
    messages: Semaphore,
    bytes: Semaphore,
    size: Cost,
    /// Whether what is dropped stays taken.
    keeps: bool,
}

/// The budget of one generation of the pipeline, shared by its sources. Cloning shares it.
#[derive(Debug, Clone)]
pub struct Credits(Arc<Budget>);

impl Credits {
    /// A budget of `size`; both parts at least 1.
    pub fn new(size: Cost) -> Self {
        Self::build(size, false)
    }

    /// A budget of so many messages, which [`Credit::give_back`] alone gives back.
    pub fn exposure(messages: u32) -> Self {
        Self::build(Cost { messages, bytes: 1 }, true)
    }

    fn build(size: Cost, keeps: bool) -> Self {
        let size = Cost { messages: size.messages.max(1), bytes: size.bytes.max(1) };
        Self(Arc::new(Budget {
            messages: Semaphore::new(size.messages as usize),
            bytes: Semaphore::new(size.bytes as usize),
            size,
            keeps,
        }))
    }

    /// The whole budget.
    pub fn size(&self) -> Cost {
        self.0.size
    }

    /// What is held at this moment.
    pub fn in_use(&self) -> Cost {
        let Budget { messages, bytes, size, .. } = &*self.0;
        Cost {
            messages: size.messages.saturating_sub(messages.available_permits() as u32),
            bytes: size.bytes.saturating_sub(bytes.available_permits() as u32),
        }
    }

    /// What something costs here: no more than the whole budget, so that a row larger than all of it takes all
    /// of it and travels alone instead of waiting for ever.
    pub fn clamp(&self, cost: Cost) -> Cost {
        Cost { messages: cost.messages.min(self.0.size.messages), bytes: cost.bytes.min(self.0.size.bytes) }
    }

    /// Waits until `cost` (clamped to the budget) is free and takes it. Messages first, then bytes, always in
    /// this order, so two waiters cannot hold what the other needs.
    ///
    /// # Errors
    /// [`Kind::Stopped`] when `stop` is cancelled first; nothing is held then.
    pub async fn acquire(&self, cost: Cost, stop: &CancellationToken) -> Result<Credit> {
        let cost = self.clamp(cost);
        let take = async {
            let messages = self.0.messages.acquire_many(cost.messages).await;
            let bytes = self.0.bytes.acquire_many(cost.bytes).await;
            (messages, bytes)
        };
        let stopped = || Error::new(Kind::Stopped, "wait for credits");
        match stop.run_until_cancelled(take).await {
            Some((Ok(messages), Ok(bytes))) => {
                messages.forget();
                bytes.forget();
                Ok(Credit { budget: Arc::clone(&self.0), cost })
            }
            _ => Err(stopped()),
        }
    }

    /// Takes `cost` (clamped to the budget) if it is free now.
    pub fn try_acquire(&self, cost: Cost) -> Option<Credit> {
        let cost = self.clamp(cost);
        let messages = self.0.messages.try_acquire_many(cost.messages).ok()?;
        let bytes = self.0.bytes.try_acquire_many(cost.bytes).ok()?;
        messages.forget();
        bytes.forget();
        Some(Credit { budget: Arc::clone(&self.0), cost })
    }

    /// A credit of nothing, to merge others into.
    pub fn nothing(&self) -> Credit {
        Credit { budget: Arc::clone(&self.0), cost: Cost::default() }
    }

    /// *Settling*: waits until everything that was taken has been given back.
    ///
    /// # Errors
    /// [`Kind::Stopped`] when `stop` is cancelled first.
    pub async fn settle(&self, stop: &CancellationToken) -> Result<()> {
        self.acquire(self.0.size, stop).await.map(Credit::give_back)
    }
}

/// A share of a budget. Dropping it gives it back, unless it is of an exposure.
#[derive(Debug)]
pub struct Credit {
    budget: Arc<Budget>,
    cost: Cost,
}

impl Credit {
    /// What is held.
    pub fn cost(&self) -> Cost {
        self.cost
    }

    /// Takes the share `part` out of this one; of what is not there, what is there.
    #[must_use]
    pub fn split(&mut self, part: Cost) -> Credit {
        let part =
            Cost { messages: part.messages.min(self.cost.messages), bytes: part.bytes.min(self.cost.bytes) };
        self.cost.messages -= part.messages;
        self.cost.bytes -= part.bytes;
        Credit { budget: Arc::clone(&self.budget), cost: part }
    }

    /// Adds `other`, a share of the same budget, to this one.
    pub fn merge(&mut self, mut other: Credit) {
        debug_assert!(Arc::ptr_eq(&self.budget, &other.budget), "credits of two budgets do not mix");
        self.cost = self.cost + std::mem::take(&mut other.cost);
    }

    /// Gives it back.
    pub fn give_back(mut self) {
        self.free();
    }

    fn free(&mut self) {
        let Cost { messages, bytes } = std::mem::take(&mut self.cost);
        if messages > 0 {
            self.budget.messages.add_permits(messages as usize);
        }
        if bytes > 0 {
            self.budget.bytes.add_permits(bytes as usize);
        }
    }
}

impl Drop for Credit {
    fn drop(&mut self) {
        if !self.budget.keeps {
            self.free();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cost(messages: u32, bytes: u32) -> Cost {
        Cost { messages, bytes }
    }

    proptest! {
        #[test]
        fn what_is_held_is_never_more_than_the_budget_and_all_comes_back(
            steps in prop::collection::vec((0u8..4, 0u32..20, 0u32..2000), 0..200)
        ) {
            let credits = Credits::new(cost(16, 1000));
            let mut held: Vec<Credit> = Vec::new();
            for (step, messages, bytes) in steps {
                match step {
                    0 => held.extend(credits.try_acquire(cost(messages, bytes))),
                    1 => drop(held.pop()),
                    2 => if let Some(last) = held.last_mut() {
                        let part = last.split(cost(messages, bytes));
                        held.push(part);
                    },
                    _ => if held.len() > 1 {
                        let other = held.swap_remove(0);
                        held[0].merge(other);
                    },
                }
                let sum = held.iter().fold(Cost::default(), |sum, credit| sum + credit.cost());
                prop_assert_eq!(credits.in_use(), sum);
                prop_assert!(sum.messages <= 16 && sum.bytes <= 1000);
            }
            held.clear();
            prop_assert_eq!(credits.in_use(), Cost::default());
        }
    }

    #[tokio::test]
    async fn a_row_larger_than_the_budget_takes_all_of_it() {
        let credits = Credits::new(cost(4, 100));
        let stop = CancellationToken::new();
        let credit = credits.acquire(cost(1, 5_000_000), &stop).await.unwrap();
        assert_eq!(credit.cost(), cost(1, 100));
        assert!(credits.try_acquire(cost(1, 1)).is_none());
    }

    #[tokio::test]
    async fn exposure_that_is_dropped_stays_taken_and_only_what_is_given_back_is_free() {
        let exposure = Credits::exposure(4);
        let mut held = exposure.try_acquire(cost(4, 0)).unwrap();
        drop(held.split(cost(1, 0)));
        assert!(exposure.try_acquire(cost(1, 0)).is_none());
        held.split(cost(2, 0)).give_back();
        assert_eq!(exposure.in_use(), cost(2, 0));
    }

    #[tokio::test]
    async fn settling_waits_for_the_last_credit() {
        let credits = Credits::new(cost(4, 100));
        let stop = CancellationToken::new();
        let held = credits.acquire(cost(1, 10), &stop).await.unwrap();
        let settle = credits.settle(&stop);
        tokio::pin!(settle);
        assert!(futures_util::poll!(&mut settle).is_pending());
        drop(held);
        settle.await.unwrap();
        assert_eq!(credits.in_use(), Cost::default());
    }

    #[tokio::test]
    async fn a_wait_that_is_stopped_holds_nothing() {
        let credits = Credits::new(cost(4, 100));
        let stop = CancellationToken::new();
        let _held = credits.acquire(cost(1, 100), &stop).await.unwrap();
        let waiting = credits.acquire(cost(2, 10), &stop);
        tokio::pin!(waiting);
        assert!(futures_util::poll!(&mut waiting).is_pending());
        stop.cancel();
        assert_eq!(waiting.await.unwrap_err().kind(), Kind::Stopped);
        assert_eq!(credits.in_use(), cost(1, 100));
    }
}
