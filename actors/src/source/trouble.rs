//! What a loop does about an error of the database: outages are waited out in place, everything else ends the stage.

use std::time::Duration;

use crate::{
    error::{Error, Kind, Result},
    pipeline::shared::Shared,
    status::Reason,
};

/// First pause after an outage: most are a restart, over in a second or two.
const FIRST: Duration = Duration::from_millis(100);
/// Longest pause: a database that comes back is noticed within this.
const LONGEST: Duration = Duration::from_secs(5);

/// What this loop may have put on the board: also what one before it did, whose generation ended meanwhile.
const MINE: [Reason; 3] = [Reason::DatabaseDown, Reason::DatabaseReadonly, Reason::TableLocked];

/// One loop's troubles.
#[derive(Debug)]
pub(super) struct Trouble {
    pause: Duration,
    /// Whether a condition may be up.
    raised: bool,
}

impl Trouble {
    pub(super) fn new() -> Self {
        Self { pause: FIRST, raised: true }
    }

    /// The database answered.
    pub(super) fn over(&mut self, shared: &Shared) {
        if self.raised {
            MINE.into_iter().for_each(|reason| shared.board.clear(reason));
            *self = Self { pause: FIRST, raised: false };
        }
    }

    /// Puts an outage on the board and waits a while.
    ///
    /// # Errors
    /// `error` itself if waiting cannot help, and [`Kind::Stopped`] if the wait is.
    pub(super) async fn endure(&mut self, error: Error, shared: &Shared) -> Result<()> {
        match error.kind() {
            Kind::DatabaseDown | Kind::DatabaseRefused | Kind::DatabaseReadonly | Kind::TableLocked => {}
            _ => return Err(error),
        }
        tracing::debug!(error = %error.chain(), "cannot claim");
        shared.board.raise_error(&error);
        self.raised = true;
        let pause = self.pause.mul_f64(0.5 + fastrand::f64());
        self.pause = (self.pause * 2).min(LONGEST);
        let slept = shared.stop.run_until_cancelled(tokio::time::sleep(pause)).await;
        slept.ok_or_else(|| Error::new(Kind::Stopped, "wait for the database"))
    }
}
