//! How often the pipeline may be rebuilt for errors nobody has an explanation for, and how long it waits in between.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// Unexplained ends within [`RESTART_WINDOW`] that the relay survives. One is bad luck, five are a fault that a
/// supervisor outside (and a person) should see.
pub const RESTARTS: usize = 5;

/// The window in which they are counted.
pub const RESTART_WINDOW: Duration = Duration::from_secs(300);

/// First pause before a rebuild: at most one connection attempt a second.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// Longest pause: an outage that ends is noticed within this.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// A generation that lived this long was healthy: the next pause starts over.
const HEALTHY: Duration = Duration::from_secs(30);

/// Counts unexplained restarts. Outages never consume it.
#[derive(Debug, Default)]
pub struct RestartBudget {
    spent: VecDeque<Instant>,
}

impl RestartBudget {
    /// Spends one restart at `now`; `false` when there is none left.
    #[must_use]
    pub fn spend(&mut self, now: Instant) -> bool {
        while self.spent.front().is_some_and(|then| now.duration_since(*then) > RESTART_WINDOW) {
            self.spent.pop_front();
        }
        self.spent.push_back(now);
        self.spent.len() <= RESTARTS
    }
}

/// Doubling pauses with ±20 % jitter, so that many relays do not return to one server at once.
#[derive(Debug, Default)]
pub struct Pauses {
    attempts: u32,
}

impl Pauses {
    /// The next pause, after a generation that lived for `lived`.
    pub fn next(&mut self, lived: Duration) -> Duration {
        if lived >= HEALTHY {
            self.attempts = 0;
        }
        let doubled = FIRST_PAUSE.saturating_mul(1 << self.attempts.min(10)).min(LONGEST_PAUSE);
        self.attempts += 1;
        doubled.mul_f64(0.8 + 0.4 * fastrand::f64()).max(FIRST_PAUSE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_budget_is_spent_by_a_burst_and_regained_with_time() {
        let mut budget = RestartBudget::default();
        let start = Instant::now();
        assert!((0..RESTARTS).all(|_| budget.spend(start)));
        assert!(!budget.spend(start));
        assert!(budget.spend(start + RESTART_WINDOW + Duration::from_secs(1)));
    }

    #[test]
    fn pauses_grow_to_a_bound_never_below_a_second_and_start_over_after_a_healthy_run() {
        let mut pauses = Pauses::default();
        for _ in 0..20 {
            let pause = pauses.next(Duration::ZERO);
            assert!(pause >= FIRST_PAUSE && pause <= LONGEST_PAUSE.mul_f64(1.2));
        }
        assert!(pauses.next(HEALTHY) <= FIRST_PAUSE.mul_f64(1.2));
    }
}
