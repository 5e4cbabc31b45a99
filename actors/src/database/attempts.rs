//! The pace of attempts to connect.

use std::sync::Arc;

use tokio::{
    sync::Mutex,
    time::{Instant, sleep_until},
};

use crate::deadlines::ATTEMPT_EVERY;

/// Lets one attempt through at a time, and after one that failed the next no sooner than [`ATTEMPT_EVERY`]. However many
/// parts of the relay want a connection back, a server that is down is asked once a second. Clones share the pace.
#[derive(Debug, Clone, Default)]
pub struct Attempts(Arc<Mutex<Option<Instant>>>);

impl Attempts {
    /// Makes `attempt` when its turn has come.
    pub(crate) async fn make<T, E>(&self, attempt: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        let mut failed = self.0.lock().await;
        if let Some(last) = *failed {
            sleep_until(last + ATTEMPT_EVERY.mul_f64(1.0 + 0.2 * fastrand::f64())).await;
        }
        // Said before it is true: whoever gives an attempt up drops it here.
        *failed = Some(Instant::now());
        let made = attempt.await;
        if made.is_ok() {
            *failed = None;
        }
        made
    }
}

#[cfg(test)]
mod tests {
    use std::{future::pending, time::Duration};

    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn attempts_that_fail_or_are_given_up_come_one_a_second_and_after_a_success_at_once() {
        let (attempts, began) = (Attempts::default(), Instant::now());
        futures_util::future::join_all((0..2).map(|_| attempts.make(async { Err::<(), ()>(()) }))).await;
        let given_up = attempts.make(pending::<Result<(), ()>>());
        assert!(timeout(ATTEMPT_EVERY + Duration::from_millis(500), given_up).await.is_err());
        attempts.make(async { Ok::<(), ()>(()) }).await.unwrap();
        assert!(began.elapsed() >= 3 * ATTEMPT_EVERY, "{:?}", began.elapsed());
        assert!(timeout(ATTEMPT_EVERY / 2, attempts.make(async { Ok::<(), ()>(()) })).await.is_ok());
    }
}
