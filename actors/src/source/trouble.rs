//! What a loop does about an error of the database: outages are waited out in place, everything else ends the stage.

use std::time::Duration;

use crate::{
    ack::rows::Recorded,
    error::{Disposition, Error, Kind, Result},
    pipeline::shared::Shared,
    status::Reason,
};

/// First pause after an outage: most are a restart, over in a second or two.
const FIRST: Duration = Duration::from_millis(100);
/// Longest pause: a database that comes back is noticed within this.
const LONGEST: Duration = Duration::from_secs(5);

/// What an answer of the database disproves, whoever said it.
const ANSWERS: &[Reason] = &[Reason::DatabaseDown];

/// What rows that could be locked disprove: a server that is read-only still answers.
const WRITES: &[Reason] = &[Reason::DatabaseDown, Reason::DatabaseReadonly];

/// One loop's troubles.
#[derive(Debug)]
pub(super) struct Trouble {
    pause: Duration,
    /// Whether this loop may have said that the table is locked, or one before it whose generation ended meanwhile. Another
    /// loop's answer disproves nothing: it may be about another table.
    locked: bool,
    /// Whether what this loop claimed last was not recorded: the acker has said why, and only a recording, or nothing to
    /// record, disproves that.
    unrecorded: bool,
}

impl Trouble {
    pub(super) fn new() -> Self {
        Self { pause: FIRST, locked: true, unrecorded: false }
    }

    /// What became of this loop's last claim: nothing, where the acker could not record it.
    pub(super) fn claimed(&mut self, recorded: Option<Recorded>) {
        match recorded {
            None => (self.locked, self.unrecorded) = (true, true),
            Some(recorded) if recorded.moved() > 0 => self.unrecorded = false,
            Some(_) => {}
        }
    }

    /// There was nothing to claim.
    pub(super) fn idle(&mut self) {
        self.unrecorded = false;
    }

    /// The database let us claim, or there was nothing to claim.
    pub(super) fn over(&mut self, shared: &Shared) {
        self.disprove(shared, WRITES);
    }

    /// The database answered a question.
    pub(super) fn answered(&mut self, shared: &Shared) {
        self.disprove(shared, ANSWERS);
    }

    fn disprove(&mut self, shared: &Shared, disproved: &[Reason]) {
        self.pause = FIRST;
        if self.locked && !self.unrecorded {
            self.locked = false;
            shared.board.clear(Reason::TableLocked);
        }
        for reason in disproved {
            if shared.board.holds(*reason) {
                shared.board.clear(*reason);
            }
        }
    }

    /// Puts an outage on the board and waits a while.
    ///
    /// # Errors
    /// `error` itself if waiting cannot help, and [`Kind::Stopped`] if the wait is.
    pub(super) async fn endure(&mut self, error: Error, shared: &Shared) -> Result<()> {
        if error.kind().disposition() != Disposition::Retry {
            return Err(error);
        }
        tracing::debug!(error = %error.chain(), "cannot claim");
        shared.board.raise_error(&error);
        self.locked |= error.kind() == Kind::TableLocked;
        let pause = self.pause.mul_f64(0.5 + fastrand::f64());
        self.pause = (self.pause * 2).min(LONGEST);
        let slept = shared.stop.run_until_cancelled(tokio::time::sleep(pause)).await;
        slept.ok_or_else(|| Error::new(Kind::Stopped, "wait for the database"))
    }
}
