//! When history is delivered, and where streaming resumes: what a start decides from what earlier ones left behind.
//!
//! [`plan`] is pure. A stored position is ignored, not trusted, when the system identifier, the timeline or the slot
//! differ; rows are swept whenever it is not certain that the stream alone covers them.

use deadpool_postgres::Pool;

use crate::{
    database::{
        outbox::Outbox,
        pool,
        progress::{self, ProgressRow, Sweep},
    },
    error::Result,
    ledger::Watermark,
    position::{Lsn, Position, StreamIdentity},
    settings::{FirstStart, WalSettings},
};

/// What a start in `wal` mode does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Deliver history before the stream.
    pub sweep: bool,
    /// Everything up to here is recorded: streamed rows at or before it are skipped.
    pub resume: Watermark,
    /// History was delivered up to here: streamed rows up to it may be recorded already.
    pub overlap: Option<Lsn>,
    /// Whether what is stored belongs to another stream and is to be replaced.
    pub anew: bool,
}

impl Plan {
    /// The position to skip up to, if any.
    pub fn position(&self) -> Option<Position> {
        (self.resume.position != Position::default()).then_some(self.resume.position)
    }
}

/// Decides what to do, from what is stored, which stream was opened, and whether its slot was created for that.
pub fn plan(stored: Option<ProgressRow>, opened: &StreamIdentity, created: bool, wal: &WalSettings) -> Plan {
    let Some(stored) = stored else {
        let sweep = wal.first_start == FirstStart::Sweep;
        return Plan { sweep, resume: Watermark::default(), overlap: None, anew: true };
    };
    let same_stream = |progress: &&progress::Progress| {
        stored.mode == "wal"
            && !created
            && progress.slot == opened.slot
            && progress.system_identifier == opened.system_identifier
    };
    let Some(progress) = stored.progress.as_ref().filter(same_stream) else {
        // Another mode, slot or cluster, or a slot that was lost: rows may wait that this stream will never show.
        return Plan { sweep: true, resume: Watermark::default(), overlap: None, anew: true };
    };
    let same_timeline = progress.timeline == opened.timeline;
    let resume = if same_timeline {
        Watermark { position: progress.position, flush: progress.flush }
    } else {
        Watermark::default()
    };
    Plan { sweep: stored.sweep == Sweep::Pending, resume, overlap: stored.sweep_end, anew: !same_timeline }
}

/// Which stream earlier starts have recorded progress of, if any.
pub fn identity(stored: &ProgressRow) -> Option<StreamIdentity> {
    let progress = stored.progress.as_ref()?;
    Some(StreamIdentity {
        slot: progress.slot.clone(),
        system_identifier: progress.system_identifier.clone(),
        timeline: progress.timeline,
    })
}

/// What earlier starts left behind.
///
/// # Errors
/// When the database cannot be asked.
pub async fn stored(pool: &Pool, outbox: &Outbox) -> Result<Option<ProgressRow>> {
    const OP: &str = "read the recorded progress";
    pool::ask(pool, OP, async |client| progress::load_progress(client, outbox).await).await
}

/// Stores which stream is about to be read, before anything of it is.
///
/// # Errors
/// When it cannot be stored.
pub async fn begin_streaming(
    pool: &Pool,
    outbox: &Outbox,
    identity: &StreamIdentity,
    plan: &Plan,
) -> Result<()> {
    if !plan.anew {
        return Ok(());
    }
    const OP: &str = "record which stream is read";
    let sweep = if plan.sweep { Sweep::Pending } else { Sweep::Done };
    let progress = progress::Progress {
        slot: identity.slot.clone(),
        system_identifier: identity.system_identifier.clone(),
        timeline: identity.timeline,
        position: plan.resume.position,
        flush: plan.resume.flush,
    };
    pool::ask(pool, OP, async |client| {
        // The sweep first: a start that is killed between the two sweeps again instead of not at all.
        progress::set_sweep(client, outbox, sweep, plan.overlap).await?;
        progress::store_progress(client, outbox, &progress).await
    })
    .await
}

/// Stores that rows are claimed from now on, so that a later stream sweeps what was committed meanwhile.
///
/// # Errors
/// When it cannot be stored.
pub async fn begin_polling(pool: &Pool, outbox: &Outbox) -> Result<()> {
    const OP: &str = "record the source mode";
    pool::ask(pool, OP, async |client| progress::set_mode(client, outbox, "poll").await).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wal(first_start: FirstStart) -> WalSettings {
        WalSettings { slot: "s".into(), publication: "p".into(), first_start, recover_lost_slot: false }
    }

    fn opened() -> StreamIdentity {
        StreamIdentity { slot: "s".into(), system_identifier: "7".into(), timeline: 1 }
    }

    fn progress() -> progress::Progress {
        progress::Progress {
            slot: "s".into(),
            system_identifier: "7".into(),
            timeline: 1,
            position: Position { commit: Lsn(100), row: 3 },
            flush: Lsn(90),
        }
    }

    fn stored() -> ProgressRow {
        ProgressRow {
            mode: "wal".into(),
            progress: Some(progress()),
            sweep: Sweep::Done,
            sweep_cursor: None,
            sweep_end: Some(Lsn(50)),
        }
    }

    #[test]
    fn the_first_start_sweeps_unless_told_to_stream() {
        assert!(plan(None, &opened(), false, &wal(FirstStart::Sweep)).sweep);
        assert!(!plan(None, &opened(), false, &wal(FirstStart::Stream)).sweep);
    }

    #[test]
    fn the_same_stream_resumes_where_it_was_and_does_not_sweep() {
        let plan = plan(Some(stored()), &opened(), false, &wal(FirstStart::Sweep));
        assert_eq!(plan.position(), Some(Position { commit: Lsn(100), row: 3 }));
        assert!(!plan.sweep && !plan.anew);
        assert_eq!(plan.overlap, Some(Lsn(50)));
    }

    #[test]
    fn a_stored_position_of_another_slot_cluster_or_mode_is_ignored_and_history_swept() {
        let others = [
            ProgressRow {
                progress: Some(progress::Progress { slot: "other".into(), ..progress() }),
                ..stored()
            },
            ProgressRow {
                progress: Some(progress::Progress { system_identifier: "8".into(), ..progress() }),
                ..stored()
            },
            ProgressRow { mode: "poll".into(), ..stored() },
            ProgressRow { progress: None, ..stored() },
        ];
        for other in others {
            let plan = plan(Some(other), &opened(), false, &wal(FirstStart::Stream));
            assert!(plan.sweep && plan.anew);
            assert_eq!(plan.position(), None);
        }
    }

    #[test]
    fn a_slot_that_had_to_be_made_anew_sweeps_whatever_is_stored() {
        let plan = plan(Some(stored()), &opened(), true, &wal(FirstStart::Stream));
        assert!(plan.sweep && plan.anew);
        assert_eq!(plan.position(), None);
    }

    #[test]
    fn a_position_of_another_timeline_is_ignored() {
        let plan = plan(
            Some(ProgressRow {
                progress: Some(progress::Progress { timeline: 2, ..progress() }),
                ..stored()
            }),
            &opened(),
            false,
            &wal(FirstStart::Sweep),
        );
        assert_eq!(plan.position(), None);
        assert!(plan.anew && !plan.sweep);
    }

    #[test]
    fn a_sweep_that_was_killed_goes_on() {
        assert!(
            plan(
                Some(ProgressRow { sweep: Sweep::Pending, ..stored() }),
                &opened(),
                false,
                &wal(FirstStart::Stream)
            )
            .sweep
        );
    }
}
