//! A thousand equal rejections in a row: the world is wrong, not the rows. Pure.

use std::time::{Duration, Instant};

use crate::envelope::Reason;

/// So many equal rejections with no delivery between. Far above what a few bad rows produce, and few enough that a
/// missing binding charges at most this many rows an attempt.
pub const LIMIT: u32 = 1000;

/// The first pause between probes.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause between probes: what a recovery is noticed late by, at most.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// Counts rejections in a row and paces the probes once there are too many.
#[derive(Debug, Default)]
pub struct Streak {
    run: Option<(Reason, u32)>,
    probes: Option<Probes>,
}

#[derive(Debug)]
struct Probes {
    pause: Duration,
    next: Instant,
    /// Whether one is under way. What is rejected otherwise was sent before the hold, and says nothing new.
    out: bool,
}

impl Streak {
    /// Notes a delivery; true if that ends a hold.
    pub fn delivered(&mut self) -> bool {
        self.run = None;
        self.probes.take().is_some()
    }

    /// Notes a rejection by the broker; true if that begins a hold. What our own validation refuses says nothing about
    /// the world and must not be noted.
    pub fn rejected(&mut self, reason: Reason, now: Instant) -> bool {
        let run = match self.run {
            Some((same, run)) if same == reason => run.saturating_add(1),
            _ => 1,
        };
        self.run = Some((reason, run));
        match &mut self.probes {
            Some(probes) => {
                if std::mem::take(&mut probes.out) {
                    probes.pause = (probes.pause * 2).min(LONGEST_PAUSE);
                    probes.next = now + probes.pause;
                }
                false
            }
            None if run >= LIMIT => {
                self.probes = Some(Probes { pause: FIRST_PAUSE, next: now + FIRST_PAUSE, out: false });
                true
            }
            None => false,
        }
    }

    /// Whether publishing is held and only probes may be sent.
    pub fn holds(&self) -> bool {
        self.probes.is_some()
    }

    /// Takes the right to send one probe, if it is time.
    pub fn probe(&mut self, now: Instant) -> bool {
        match &mut self.probes {
            Some(probes) if now >= probes.next => {
                (probes.next, probes.out) = (now + probes.pause, true);
                true
            }
            _ => false,
        }
    }

    /// What the run consists of.
    pub fn reason(&self) -> Option<Reason> {
        self.run.map(|(reason, _)| reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thousand_equal_rejections_hold_and_one_delivery_frees() {
        let (mut streak, now) = (Streak::default(), Instant::now());
        for _ in 0..LIMIT - 1 {
            assert!(!streak.rejected(Reason::Unroutable, now));
        }
        assert!(!streak.holds());
        assert!(streak.rejected(Reason::Unroutable, now));
        assert!(streak.holds());
        assert!(streak.delivered());
        assert!(!streak.holds());
    }

    #[test]
    fn a_delivery_or_another_reason_between_begins_the_count_again() {
        let (mut streak, now) = (Streak::default(), Instant::now());
        for round in 0..5 {
            for _ in 0..LIMIT - 1 {
                assert!(!streak.rejected(Reason::Unroutable, now));
            }
            match round % 2 {
                0 => assert!(!streak.delivered()),
                _ => assert!(!streak.rejected(Reason::Nacked, now)),
            }
        }
        assert!(!streak.holds());
    }

    #[test]
    fn what_was_under_way_when_the_hold_began_does_not_put_the_first_probe_off() {
        let (mut streak, start) = (Streak::default(), Instant::now());
        for _ in 0..LIMIT + 256 {
            streak.rejected(Reason::Unroutable, start);
        }
        assert!(streak.probe(start + FIRST_PAUSE));
    }

    #[test]
    fn probes_are_one_a_pause_and_the_pause_doubles_to_its_limit() {
        let (mut streak, start) = (Streak::default(), Instant::now());
        for _ in 0..LIMIT {
            streak.rejected(Reason::Unroutable, start);
        }
        let mut now = start;
        assert!(!streak.probe(now));
        for pause in [1, 2, 4, 8, 10, 10] {
            now += Duration::from_secs(pause);
            assert!(streak.probe(now));
            assert!(!streak.probe(now), "one probe a pause");
            streak.rejected(Reason::Unroutable, now);
        }
    }
}
