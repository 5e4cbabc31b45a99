//! What all connections to the database have in common: the pace of attempts, and the end of those that fell silent.

use std::sync::{Arc, Mutex as StdMutex, PoisonError};

use tokio::{
    sync::Mutex,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use crate::deadlines::ATTEMPT_EVERY;

/// Shared by its clones.
#[derive(Debug, Clone, Default)]
pub struct Link(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// When the last attempt began, unless it succeeded. Held while one is made.
    failed: Mutex<Option<Instant>>,
    /// Ends every connection that was made while it was here.
    severed: StdMutex<CancellationToken>,
}

impl Link {
    /// Makes `attempt` when its turn has come: one at a time, and after one that failed the next no sooner than
    /// [`ATTEMPT_EVERY`]. However many parts of the relay want a connection back, a server that is down is asked once a
    /// second.
    pub(crate) async fn attempt<T, E>(&self, attempt: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        let mut failed = self.0.failed.lock().await;
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

    /// Ends when the connections that exist now are severed: run a connection with it.
    pub(crate) fn severed(&self) -> CancellationToken {
        self.0.severed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends every connection that exists now. For a server that was asked and did not answer: what silenced one connection
    /// has silenced the others, and each would cost whoever waits on it a long deadline. The server rolls back what was
    /// open on them.
    pub(crate) fn sever(&self) {
        let mut severed = self.0.severed.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *severed).cancel();
    }
}

#[cfg(test)]
mod tests {
    use std::{future::pending, time::Duration};

    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn attempts_that_fail_or_are_given_up_come_one_a_second_and_after_a_success_at_once() {
        let (link, began) = (Link::default(), Instant::now());
        futures_util::future::join_all((0..2).map(|_| link.attempt(async { Err::<(), ()>(()) }))).await;
        let given_up = link.attempt(pending::<Result<(), ()>>());
        assert!(timeout(ATTEMPT_EVERY + Duration::from_millis(500), given_up).await.is_err());
        link.attempt(async { Ok::<(), ()>(()) }).await.unwrap();
        assert!(began.elapsed() >= 3 * ATTEMPT_EVERY, "{:?}", began.elapsed());
        assert!(timeout(ATTEMPT_EVERY / 2, link.attempt(async { Ok::<(), ()>(()) })).await.is_ok());
    }

    #[test]
    fn only_what_was_there_is_severed() {
        let link = Link::default();
        let (before, clone) = (link.severed(), link.clone());
        clone.sever();
        assert!(before.is_cancelled() && !link.severed().is_cancelled());
    }
}
