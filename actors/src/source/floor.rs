//! Where claims begin to look.
//!
//! A recorded row's entry stays in the index until no snapshot needs it. With one long-open snapshot, every claim would
//! walk over every row recorded since: milliseconds become seconds. So once a walk from the beginning has become slow,
//! claims begin at the time of what was claimed last, and only now and then at the beginning, for rows whose transaction
//! committed late.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use crate::envelope::UnixMicros;

/// A claim from the beginning that is answered within this costs nothing worth saving.
const CHEAP: Duration = Duration::from_millis(10);

/// Claims from the beginning are at least this far apart once they are slow: how late a row may be found that committed
/// more than [`SLACK`] after it says it occurred.
const PACE: Duration = Duration::from_secs(2);

/// ... and take no more than one part in this many of the time.
const SHARE: u32 = 20;

/// Rows commit out of order: those that committed this late are found at once.
const SLACK: i64 = 1_000_000;

/// Shared by the workers of one source.
#[derive(Debug, Default)]
pub struct Floor(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Nothing is expected to wait that occurred before; `None` before the first claim.
    since: Option<UnixMicros>,
    /// When the next claim begins at the beginning; `None` for at once.
    full_at: Option<Instant>,
}

impl Floor {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where a claim made at `now` begins; `None` is the beginning. While one worker looks there, the others do not.
    pub fn next(&self, now: Instant) -> Option<UnixMicros> {
        let mut state = self.state();
        match state.full_at {
            Some(at) if now < at => state.since,
            Some(_) => {
                state.full_at = Some(now + PACE);
                None
            }
            None => None,
        }
    }

    /// Learns from a claim that began at `since`, was answered within `took` and whose first row occurred at `first`.
    pub fn learn(&self, since: Option<UnixMicros>, took: Duration, first: Option<UnixMicros>, now: Instant) {
        let mut state = self.state();
        if since.is_none() {
            state.full_at = (took > CHEAP).then(|| now + PACE.max(took * SHARE));
        }
        // A claim that began elsewhere knows nothing about the rows from here on: a claim from the beginning may just have
        // found older ones, of which there are more.
        if (since.is_none() || since == state.since) && first.is_some() {
            state.since = first.map(|first| first.saturating_sub(SLACK));
        }
    }

    /// Rows were released: they wait again, wherever they are.
    pub fn reset(&self) {
        *self.state() = State::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOW: Duration = Duration::from_millis(200);
    const FAST: Duration = Duration::from_millis(1);
    const S: i64 = 1_000_000;

    #[test]
    fn while_claims_are_cheap_they_all_begin_at_the_beginning() {
        let (floor, now) = (Floor::default(), Instant::now());
        floor.learn(None, FAST, Some(50 * S), now);
        assert_eq!(floor.next(now), None);
    }

    #[test]
    fn once_slow_most_begin_a_second_before_what_was_claimed_last() {
        let (floor, now) = (Floor::default(), Instant::now());
        floor.learn(None, SLOW, Some(50 * S), now);
        assert_eq!(floor.next(now), Some(49 * S));
        let later = now + SLOW * SHARE;
        assert_eq!(floor.next(later), None, "now and then one looks at the beginning");
        assert_eq!(floor.next(later), Some(49 * S), "and only one");
    }

    #[test]
    fn older_rows_found_at_the_beginning_are_claimed_to_their_end() {
        let (floor, now) = (Floor::default(), Instant::now());
        floor.learn(None, SLOW, Some(50 * S), now);
        floor.learn(None, SLOW, Some(10 * S), now);
        floor.learn(Some(49 * S), FAST, Some(51 * S), now);
        assert_eq!(floor.next(now), Some(9 * S), "a claim that was under way does not skip them");
    }

    #[test]
    fn released_rows_are_looked_for_at_once() {
        let (floor, now) = (Floor::default(), Instant::now());
        floor.learn(None, SLOW, Some(50 * S), now);
        floor.reset();
        assert_eq!(floor.next(now), None);
    }
}
