//! Claims: rows locked by an open transaction that travels with them.
//!
//! ```text
//!  open ─▶ rows, claim ─▶ … publisher … ─▶ record (commits)      see `ack::rows`
//!                    └───── dropped anywhere ─▶ rolled back
//! ```
//!
//! Each claim bounds itself: a relay that is frozen, or cut off, holds its rows no longer than [`CLAIM_IDLE`].

use std::sync::Arc;

use deadpool_postgres::{Object, Pool};
use tokio::sync::oneshot;
use tokio_postgres::{
    RowStream,
    types::{ToSql, Type},
};

use crate::{
    ack::rows::Recorded,
    database::{
        from_postgres,
        outbox::Outbox,
        pool::{self, answered},
        values::Time,
    },
    deadlines::{CLAIM_IDLE, LOCK, STATEMENT},
    envelope::UnixMicros,
    error::{Error, Kind, Result},
    settings::RowPolicy,
};

/// What is claimed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    /// Unprocessed rows of the outbox, from a time on where given (see [`super::floor`]).
    Outbox {
        /// Nothing that occurred before.
        since: Option<UnixMicros>,
    },
    /// Rows of `postrider_retries` that are due.
    Retries,
    /// Unprocessed rows that are history: nothing that occurred after `until`, unless that is `None`.
    History {
        /// The latest time of any row when the sweep began; `None` if no row had one.
        until: Option<UnixMicros>,
    },
    /// History that stays as it is: a page by id, not locked. Its cursor moves when it is recorded.
    Page {
        /// The last id of the page before.
        after: Option<String>,
        /// The last id of history.
        until: String,
    },
}

/// A claim: connection and open transaction as one owned value. Dropping it rolls back.
#[derive(Debug)]
pub struct Claim {
    /// `None` once it is recorded or given back.
    connection: Option<Object>,
    /// What it claimed, which decides how it is recorded.
    pub(crate) wanted: Wanted,
    pub(crate) outbox: Arc<Outbox>,
    /// Of a claim of retries: each row's `seq`, by the row's number within the claim.
    pub(crate) seqs: Vec<i64>,
    /// Tells whoever made the claim how it ended; dropped without a word if the claim is.
    done: Option<oneshot::Sender<Recorded>>,
}

/// How a claim ends: what was recorded, or an error if it was dropped.
pub type Done = oneshot::Receiver<Recorded>;

impl Claim {
    /// Begins a transaction and sends the claim query with it, in one round trip; the rows are still to be read.
    ///
    /// # Errors
    /// As [`from_postgres`] classifies them; nothing is held then.
    pub async fn open(
        pool: &Pool,
        outbox: &Arc<Outbox>,
        wanted: Wanted,
        limit: u32,
    ) -> Result<(Claim, RowStream, Done)> {
        let connection = pool::get(pool).await?;
        let (done, on_done) = oneshot::channel();
        let mut claim = Claim {
            connection: Some(connection),
            wanted,
            outbox: Arc::clone(outbox),
            seqs: Vec::new(),
            done: Some(done),
        };
        let rows = claim.query(i64::from(limit)).await?;
        claim.seqs.reserve(if claim.wanted == Wanted::Retries { limit as usize } else { 0 });
        Ok((claim, rows, on_done))
    }

    async fn query(&self, limit: i64) -> Result<RowStream> {
        const OP: &str = "claim rows";
        let sql = &self.outbox.sql;
        let time_type = self.outbox.occurred_on.parameter();
        let mut parameters: Vec<(Box<dyn ToSql + Sync + Send>, Type)> = vec![(Box::new(limit), Type::INT8)];
        let sql = match &self.wanted {
            Wanted::Outbox { since: None } => &sql.claim,
            Wanted::Outbox { since: Some(since) } => {
                parameters.push((Box::new(Time::At(*since)), time_type));
                &sql.claim_since
            }
            Wanted::Retries => &sql.claim_retries,
            Wanted::History { until } => {
                parameters.push((Box::new(latest(*until)), time_type));
                &sql.claim_until
            }
            Wanted::Page { after, until } => {
                parameters.push((Box::new(until.clone()), Type::TEXT));
                match after {
                    None => &sql.page_first,
                    Some(after) => {
                        parameters.push((Box::new(after.clone()), Type::TEXT));
                        &sql.page_after
                    }
                }
            }
        };
        let client = self.connection()?;
        let begin = begin(&self.outbox, &self.wanted);
        // Both are queued by their first poll, in this order, before either is answered.
        let both =
            futures_util::future::join(client.batch_execute(&begin), client.query_typed_raw(sql, parameters));
        let (begun, rows) = answered(both, OP).await?;
        begun.map_err(|error| from_postgres(error, OP))?;
        rows.map_err(|error| from_postgres(error, OP))
    }

    /// The connection, while the transaction is open.
    pub(crate) fn connection(&self) -> Result<&Object> {
        self.connection.as_ref().ok_or_else(|| Error::new(Kind::Internal, "use a claim that has ended"))
    }

    /// Ends a claim whose transaction has been committed: the connection goes back to the pool, and whoever made the
    /// claim hears of it.
    pub(crate) fn committed(mut self, recorded: Recorded) {
        drop(self.connection.take());
        if let Some(done) = self.done.take() {
            // Nobody may be waiting any more.
            let _ = done.send(recorded);
        }
    }

    /// Rolls back and keeps the connection: for a claim that found nothing, or whose rows nothing became of.
    ///
    /// # Errors
    /// When the server does not answer; the connection is thrown away then.
    pub async fn release(self: Box<Self>) -> Result<()> {
        const OP: &str = "release a claim";
        answered(self.connection()?.batch_execute("ROLLBACK"), OP)
            .await?
            .map_err(|error| from_postgres(error, OP))?;
        self.committed(Recorded::default());
        Ok(())
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // Not to the pool: its transaction is open. The server rolls back when the connection is gone.
        if let Some(connection) = self.connection.take() {
            pool::discard(connection);
        }
    }
}

/// The start of a claim. The planner is told to walk the index in order: without fresh statistics it may think that few
/// rows wait, and would then read and sort all that do, in each claim. Where the index is missing, the claim still works.
///
/// Rows can be claimed under a lock that forbids marking them (`CREATE INDEX`), and would be published again and again while
/// it lasts: a claim takes what its recording needs first.
fn begin(outbox: &Outbox, wanted: &Wanted) -> String {
    let marks = outbox.policy != RowPolicy::Keep && !matches!(wanted, Wanted::Page { .. });
    format!(
        "BEGIN; SET LOCAL idle_in_transaction_session_timeout = {}; SET LOCAL lock_timeout = {}; \
         SET LOCAL statement_timeout = {}; SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; \
         SET LOCAL enable_sort = off; {}",
        CLAIM_IDLE.as_millis(),
        LOCK.as_millis(),
        STATEMENT.as_millis(),
        if marks { outbox.sql.will_mark.as_str() } else { "" }
    )
}

/// The latest time of history as a parameter: `None` stands for "no row has a time", `i64::MAX` for `infinity`.
pub(super) fn latest(until: Option<UnixMicros>) -> Time {
    match until {
        None => Time::Earliest,
        Some(i64::MAX) => Time::Latest,
        Some(micros) => Time::At(micros),
    }
}
