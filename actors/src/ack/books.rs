//! The books of the stream: which verdicts are in, what a recording has to write, and what is durable.
//!
//! Pure: no database, no clock. The [`StreamRecorder`](super::recorder::StreamRecorder) does the writing; between
//! [`Books::enter`] and [`Books::durable`] is one transaction, or none where nothing has to be written.

use crate::{
    envelope::{Passed, Settlement, Verdict},
    error::{Error, Kind, Result},
    ledger::{Ledger, Mark, Watermark},
    position::Lsn,
};

/// What is known of the stream, and what of it is durable.
#[derive(Debug)]
pub(super) struct Books {
    ledger: Ledger,
    /// The watermark that is durable.
    written: Watermark,
    /// Numbers of rows that were sent and have their verdict, beyond the contiguous prefix.
    ahead: Vec<u64>,
}

impl Books {
    /// Books of a stream whose rows up to `resume` are recorded already.
    pub(super) fn behind(resume: Watermark) -> Self {
        Self { ledger: Ledger::behind(resume), written: resume, ahead: Vec::new() }
    }

    /// Enters what needs no recording, and verdicts. An abandoned message has none.
    ///
    /// # Errors
    /// [`Kind::Internal`] for a settlement that was not streamed.
    pub(super) fn enter(&mut self, passed: &[Passed], settlements: &[Settlement]) -> Result<()> {
        for passed in passed {
            self.ledger.settle(passed.number, passed.mark);
        }
        for Settlement { envelope, verdict, exposed } in settlements {
            if *verdict == Verdict::Abandoned {
                continue;
            }
            let place = envelope
                .place
                .ok_or_else(|| Error::new(Kind::Internal, "record a streamed row without a place"))?;
            self.ledger.settle(envelope.number, Mark::Row(place.position));
            if *exposed {
                self.ahead.push(envelope.number);
            }
        }
        let next = self.ledger.next();
        self.ahead.retain(|number| *number >= next);
        Ok(())
    }

    /// How far everything has its verdict: what a recording of all that was entered may claim.
    pub(super) fn watermark(&self) -> Watermark {
        self.ledger.watermark()
    }

    /// Whether something is known that is not durable.
    pub(super) fn owe(&self) -> bool {
        self.watermark() != self.written
    }

    /// Whether progress must be written: rows are settled beyond what it says. Where only ends moved, there is nothing that
    /// a restart could repeat.
    pub(super) fn moved(&self) -> bool {
        self.watermark().position != self.written.position
    }

    /// All that was entered is recorded now, up to `watermark`; returns what the slot may be told.
    pub(super) fn durable(&mut self, watermark: Watermark) -> Lsn {
        self.written = watermark;
        watermark.flush
    }

    /// Rows that were sent and have their verdict beyond the contiguous prefix: after a crash they are streamed, and so
    /// sent, again. Ends and refused rows are known long before what stands before them is sent, and are not among them.
    pub(super) fn exposed_ahead(&self) -> u32 {
        u32::try_from(self.ahead.len()).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
#[path = "books_tests.rs"]
mod tests;
