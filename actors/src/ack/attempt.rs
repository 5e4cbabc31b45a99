//! What becomes of a row that was rejected: another attempt, and when, or none.

use std::time::Duration;

use crate::{envelope::Reason, settings::PublishSettings};

/// The decision about a rejected row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attempt {
    /// How often it has been rejected, this time included.
    pub attempts: u32,
    /// The pause before the next attempt; `None` parks the row.
    pub pause: Option<Duration>,
}

/// Decides about a row that was rejected `before` times before. `spread` in 0..1 draws the jitter.
pub fn decide(reason: Reason, before: u32, settings: &PublishSettings, spread: f64) -> Attempt {
    let attempts = before.saturating_add(1);
    let last = reason.is_final() || attempts >= settings.max_attempts;
    Attempt { attempts, pause: (!last).then(|| pause(attempts, settings, spread)) }
}

/// Doubles from `retry_backoff` up to `retry_backoff_max`, then up to 20 % more or less: rows that failed together do not
/// come back together.
fn pause(attempts: u32, settings: &PublishSettings, spread: f64) -> Duration {
    let doublings = attempts.saturating_sub(1).min(31);
    let plain = settings.retry_backoff.saturating_mul(1 << doublings).min(settings.retry_backoff_max);
    plain.mul_f64(0.8 + 0.4 * spread.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Template;

    fn settings() -> PublishSettings {
        PublishSettings {
            exchange: Template(Vec::new()),
            routing_key: Template(Vec::new()),
            declare: false,
            window: 1,
            exposure: 1,
            lanes: 1,
            confirms: true,
            mandatory: true,
            persistent: true,
            max_attempts: 4,
            retry_backoff: Duration::from_millis(500),
            retry_backoff_max: Duration::from_millis(1500),
            confirm_timeout: Duration::from_secs(30),
        }
    }

    #[test]
    fn pauses_double_up_to_the_longest_and_the_last_attempt_parks() {
        let pauses: Vec<_> =
            (0..4).map(|before| decide(Reason::Nacked, before, &settings(), 0.5).pause).collect();
        let ms = |ms| Some(Duration::from_millis(ms));
        assert_eq!(pauses, [ms(500), ms(1000), ms(1500), None]);
    }

    #[test]
    fn jitter_stays_within_a_fifth() {
        for spread in [0.0, 0.3, 1.0, 7.0] {
            let pause = decide(Reason::Nacked, 0, &settings(), spread).pause.unwrap();
            assert!((400..=600).contains(&pause.as_millis()), "{pause:?}");
        }
    }

    #[test]
    fn what_can_never_work_is_parked_at_once() {
        assert_eq!(decide(Reason::Invalid, 0, &settings(), 0.5), Attempt { attempts: 1, pause: None });
    }

    #[test]
    fn huge_attempts_do_not_overflow() {
        let mut patient = settings();
        patient.max_attempts = u32::MAX;
        patient.retry_backoff_max = Duration::MAX / 2;
        assert!(decide(Reason::Nacked, 4_000_000, &patient, 1.0).pause.is_some());
    }
}
