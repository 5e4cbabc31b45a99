//! When history is delivered, and where streaming resumes: what a start decides from what earlier ones left behind.
//!
//! [`plan`] is pure. A stored position is ignored, not trusted, when the system identifier, the timeline or the slot
//! differ; rows are swept whenever it is not certain that the stream alone covers them.

use deadpool_postgres::Pool;

use crate::{
    ack::{rows::Progress, stream::StreamIdentity},
    database::{
        control,
        pool,
        progress::{self, ProgressRow},
    },
    error::Result,
    ledger::Watermark,
    position::{Lsn, Position},
    settings::{FirstStart, Settings, WalSettings},
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

/// Decides what to do, from what is stored and from which stream was opened.
pub fn plan(stored: Option<ProgressRow>, opened: &StreamIdentity, wal: &WalSettings) -> Plan {
    let Some(stored) = stored else {
        let sweep = wal.first_start == FirstStart::Sweep;
        return Plan { sweep, resume: Watermark::default(), overlap: None, anew: true };
    };
    let same_slot = stored.mode == "wal"
        && stored.slot.as_deref() == Some(opened.slot.as_str())
        && stored.system_identifier.as_deref() == Some(opened.system_identifier.as_str());
    if !same_slot {
        // Another mode, slot or cluster: rows may wait that this stream will never show.
        return Plan { sweep: true, resume: Watermark::default(), overlap: None, anew: true };
    }
    let same_timeline = stored.timeline == Some(opened.timeline);
    let resume = if same_timeline {
        Watermark { position: stored.position, flush: stored.flush }
    } else {
        Watermark::default()
    };
    Plan { sweep: !stored.swept, resume, overlap: stored.sweep_end, anew: !same_timeline }
}

/// What earlier starts left behind.
///
/// # Errors
/// When the database cannot be asked.
pub async fn progress(pool: &Pool, settings: &Settings) -> Result<Option<ProgressRow>> {
    let client = pool::get(pool).await?;
    progress::load(&client, &settings.database.schema, &settings.outbox.name()).await
}

/// Stores which stream is about to be read, before anything of it is.
///
/// # Errors
/// When it cannot be stored.
pub async fn begin_streaming(
    pool: &Pool,
    settings: &Settings,
    identity: &StreamIdentity,
    plan: &Plan,
) -> Result<()> {
    if !plan.anew {
        return Ok(());
    }
    let client = pool::get(pool).await?;
    let progress = Progress {
        slot: identity.slot.clone(),
        system_identifier: identity.system_identifier.clone(),
        timeline: identity.timeline,
        position: plan.resume.position,
        flush: plan.resume.flush,
    };
    progress::begin_wal(&client, &settings.database.schema, &settings.outbox.name(), &progress, !plan.sweep).await
}

/// Stores that history is delivered, up to now.
///
/// # Errors
/// When it cannot be stored; the sweep is repeated then, and finds nothing.
pub async fn swept(pool: &Pool, settings: &Settings, plan: Plan) -> Result<Plan> {
    let client = pool::get(pool).await?;
    let end = control::current_lsn(&client).await?;
    progress::sweep_done(&client, &settings.database.schema, &settings.outbox.name(), end).await?;
    Ok(Plan { sweep: false, overlap: Some(end), anew: false, ..plan })
}

/// Stores that rows are claimed from now on, so that a later stream sweeps what was committed meanwhile.
///
/// # Errors
/// When it cannot be stored.
pub async fn begin_polling(pool: &Pool, settings: &Settings) -> Result<()> {
    let client = pool::get(pool).await?;
    progress::begin_poll(&client, &settings.database.schema, &settings.outbox.name()).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wal(first_start: FirstStart) -> WalSettings {
        WalSettings {
            slot: "s".into(),
            publication: "p".into(),
            first_start,
            recover_lost_slot: false,
        }
    }

    fn opened() -> StreamIdentity {
        StreamIdentity { slot: "s".into(), system_identifier: "7".into(), timeline: 1 }
    }

    fn stored() -> ProgressRow {
        ProgressRow {
            mode: "wal".into(),
            slot: Some("s".into()),
            system_identifier: Some("7".into()),
            timeline: Some(1),
            position: Position { commit: Lsn(100), row: 3 },
            flush: Lsn(90),
            swept: true,
            sweep_cursor: None,
            sweep_end: Some(Lsn(50)),
        }
    }

    #[test]
    fn the_first_start_sweeps_unless_told_to_stream() {
        assert!(plan(None, &opened(), &wal(FirstStart::Sweep)).sweep);
        assert!(!plan(None, &opened(), &wal(FirstStart::Stream)).sweep);
    }

    #[test]
    fn the_same_stream_resumes_where_it_was_and_does_not_sweep() {
        let plan = plan(Some(stored()), &opened(), &wal(FirstStart::Sweep));
        assert_eq!(plan.position(), Some(Position { commit: Lsn(100), row: 3 }));
        assert!(!plan.sweep && !plan.anew);
        assert_eq!(plan.overlap, Some(Lsn(50)));
    }

    #[test]
    fn a_stored_position_of_another_slot_cluster_or_mode_is_ignored_and_history_swept() {
        let others = [
            ProgressRow { slot: Some("other".into()), ..stored() },
            ProgressRow { system_identifier: Some("8".into()), ..stored() },
            ProgressRow { mode: "poll".into(), ..stored() },
        ];
        for other in others {
            let plan = plan(Some(other), &opened(), &wal(FirstStart::Stream));
            assert!(plan.sweep && plan.anew);
            assert_eq!(plan.position(), None);
        }
    }

    #[test]
    fn a_position_of_another_timeline_is_ignored() {
        let plan = plan(Some(ProgressRow { timeline: Some(2), ..stored() }), &opened(), &wal(FirstStart::Sweep));
        assert_eq!(plan.position(), None);
        assert!(plan.anew && !plan.sweep);
    }

    #[test]
    fn a_sweep_that_was_killed_goes_on() {
        assert!(plan(Some(ProgressRow { swept: false, ..stored() }), &opened(), &wal(FirstStart::Stream)).sweep);
    }
}
