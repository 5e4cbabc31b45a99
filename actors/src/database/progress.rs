//! `postrider_progress`: how far an outbox has been recorded, written in the transaction that records it.

use tokio_postgres::{
    Client,
    types::{ToSql, Type},
};

use super::{from_postgres, outbox::Outbox};
use crate::{
    error::{Error, Kind, Result},
    position::{Lsn, Position},
};

/// How far the contiguous prefix of the stream is recorded, and of which stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// The slot it was streamed from.
    pub slot: String,
    /// The cluster's identity.
    pub system_identifier: String,
    /// Its timeline: positions of two do not compare.
    pub timeline: u32,
    /// The last row that is recorded with all before it.
    pub position: Position,
    /// What the slot may be told.
    pub flush: Lsn,
}

/// Whether history has been delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sweep {
    /// Not yet, or not all of it.
    Pending,
    /// All of it.
    Done,
}

impl Sweep {
    fn as_str(self) -> &'static str {
        match self {
            Sweep::Pending => "pending",
            Sweep::Done => "done",
        }
    }
}

/// A row of `postrider_progress`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgressRow {
    /// The source mode that wrote it: `wal` or `poll`.
    pub mode: String,
    /// How far the stream is recorded, if anything of it is.
    pub progress: Option<Progress>,
    /// Whether history has been delivered.
    pub sweep: Sweep,
    /// Where a sweep by pages goes on.
    pub sweep_cursor: Option<String>,
    /// The server's position when the sweep ended: up to here the stream may repeat what was swept.
    pub sweep_end: Option<Lsn>,
}

/// Writes progress, whatever is there: seven parameters from `$first` on (outbox, slot, system identifier, timeline,
/// commit LSN, rows, flush LSN); `from` makes it conditional.
fn upsert(table: &str, first: usize, from: &str) -> String {
    let p = |n: usize| format!("${}", first + n);
    format!(
        "INSERT INTO {table} AS p (outbox, mode, slot, system_identifier, timeline, commit_lsn, rows_done, flush_lsn) \
         SELECT {}, 'wal', {}, {}, {}, {}::text::pg_lsn, {}, {}::text::pg_lsn {from} \
         ON CONFLICT (outbox) DO UPDATE SET mode = excluded.mode, slot = excluded.slot, \
         system_identifier = excluded.system_identifier, timeline = excluded.timeline, \
         commit_lsn = excluded.commit_lsn, rows_done = excluded.rows_done, flush_lsn = excluded.flush_lsn, \
         updated_at = now()",
        p(0),
        p(1),
        p(2),
        p(3),
        p(4),
        p(5),
        p(6)
    )
}

/// Sets progress, as [`store_progress`] does.
pub(super) fn set(table: &str) -> String {
    upsert(table, 1, "")
}

/// Moves progress on, and never back: a relay that was frozen, lost its slot meanwhile and thaws may still have a
/// recording to commit. Its marks are right; its progress is older than that of whoever took over, or another stream's.
pub(super) fn advance(table: &str, first: usize, from: &str) -> String {
    format!(
        "{} WHERE (p.slot, p.system_identifier, p.timeline) \
         IS NOT DISTINCT FROM (excluded.slot, excluded.system_identifier, excluded.timeline) \
         AND (coalesce(p.commit_lsn, '0/0'), p.rows_done, coalesce(p.flush_lsn, '0/0')) \
         <= (excluded.commit_lsn, excluded.rows_done, excluded.flush_lsn)",
        upsert(table, first, from)
    )
}

/// The seven parameters of [`upsert`], owned.
#[derive(Debug)]
pub(crate) struct Parameters {
    outbox: String,
    slot: String,
    system_identifier: String,
    timeline: i32,
    commit: String,
    rows: i64,
    flush: String,
}

impl Parameters {
    pub(crate) fn new(outbox: &Outbox, progress: &Progress) -> Self {
        Self {
            outbox: outbox.name.clone(),
            slot: progress.slot.clone(),
            system_identifier: progress.system_identifier.clone(),
            timeline: progress.timeline.cast_signed(),
            commit: progress.position.commit.to_string(),
            // `Position::end_of` has more rows than a bigint: the largest stands for all of them.
            rows: i64::try_from(progress.position.row).unwrap_or(i64::MAX),
            flush: progress.flush.to_string(),
        }
    }

    pub(crate) fn typed(&self) -> [(&(dyn ToSql + Sync), Type); 7] {
        [
            (&self.outbox, Type::TEXT),
            (&self.slot, Type::TEXT),
            (&self.system_identifier, Type::TEXT),
            (&self.timeline, Type::INT4),
            (&self.commit, Type::TEXT),
            (&self.rows, Type::INT8),
            (&self.flush, Type::TEXT),
        ]
    }
}

/// The outbox's row, if it has one.
pub async fn load_progress(client: &Client, outbox: &Outbox) -> Result<Option<ProgressRow>> {
    const OP: &str = "read the recorded progress";
    let sql = format!(
        "SELECT mode, slot, system_identifier, timeline, commit_lsn::text, rows_done, flush_lsn::text, \
         sweep, sweep_cursor, sweep_end_lsn::text FROM {} WHERE outbox = $1",
        outbox.sql.progress_table
    );
    let failed = |error| from_postgres(error, OP);
    let row = client.query_typed_opt(&sql, &[(&outbox.name, Type::TEXT)]).await.map_err(failed)?;
    let Some(row) = row else { return Ok(None) };
    let text = |n: usize| row.try_get::<_, Option<String>>(n).map_err(failed);
    let lsn = |n: usize| match text(n)? {
        None => Ok(None),
        Some(text) => text
            .parse::<Lsn>()
            .map(Some)
            .map_err(|error| Error::new(Kind::SchemaChanged, OP).with_source(error)),
    };
    let timeline: Option<i32> = row.try_get(3).map_err(failed)?;
    let rows: i64 = row.try_get(5).map_err(failed)?;
    let row_number = if rows == i64::MAX { u64::MAX } else { u64::try_from(rows).unwrap_or(0) };
    let progress = match (text(1)?, text(2)?, timeline, lsn(4)?, lsn(6)?) {
        (Some(slot), Some(system_identifier), Some(timeline), Some(commit), Some(flush)) => Some(Progress {
            slot,
            system_identifier,
            timeline: timeline.cast_unsigned(),
            position: Position { commit, row: row_number },
            flush,
        }),
        _ => None,
    };
    Ok(Some(ProgressRow {
        mode: text(0)?.unwrap_or_default(),
        progress,
        sweep: if text(7)?.as_deref() == Some(Sweep::Done.as_str()) { Sweep::Done } else { Sweep::Pending },
        sweep_cursor: text(8)?,
        sweep_end: lsn(9)?,
    }))
}

/// Stores progress as it is, whatever is there: the beginning of a stream.
pub async fn store_progress(client: &Client, outbox: &Outbox, progress: &Progress) -> Result<()> {
    let parameters = Parameters::new(outbox, progress);
    let done = client.execute_typed(&outbox.sql.set_progress, &parameters.typed()).await;
    done.map(drop).map_err(|error| from_postgres(error, "record which stream is read"))
}

/// Says that history is to be swept (from its beginning), or that all of it is, the server then being at `end`.
pub async fn set_sweep(client: &Client, outbox: &Outbox, sweep: Sweep, end: Option<Lsn>) -> Result<()> {
    let sql = format!(
        "INSERT INTO {} (outbox, mode, sweep, sweep_end_lsn) VALUES ($1, 'wal', $2, $3::text::pg_lsn) \
         ON CONFLICT (outbox) DO UPDATE SET sweep = excluded.sweep, sweep_cursor = NULL, \
         sweep_end_lsn = excluded.sweep_end_lsn, updated_at = now()",
        outbox.sql.progress_table
    );
    let (word, end) = (sweep.as_str(), end.map(|lsn| lsn.to_string()));
    let parameters: [(&(dyn ToSql + Sync), Type); 3] =
        [(&outbox.name, Type::TEXT), (&word, Type::TEXT), (&end, Type::TEXT)];
    let done = client.execute_typed(&sql, &parameters).await;
    done.map(drop).map_err(|error| from_postgres(error, "record where the sweep stands"))
}

/// Says which source mode (`wal` or `poll`) moves the outbox now.
pub async fn set_mode(client: &Client, outbox: &Outbox, mode: &str) -> Result<()> {
    let sql = format!(
        "INSERT INTO {} (outbox, mode) VALUES ($1, $2) \
         ON CONFLICT (outbox) DO UPDATE SET mode = excluded.mode, updated_at = now()",
        outbox.sql.progress_table
    );
    let done = client.execute_typed(&sql, &[(&outbox.name, Type::TEXT), (&mode, Type::TEXT)]).await;
    done.map(drop).map_err(|error| from_postgres(error, "record the source mode"))
}
