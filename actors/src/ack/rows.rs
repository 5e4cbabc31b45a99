//! Recording the verdicts of a claim: in its own transaction, which ends with it.
//!
//! Delivered rows are marked (or deleted), rejected ones copied into our tables and told why, abandoned ones left as they
//! are: the commit releases them. All statements and the commit go in one round trip. That is safe because a statement that
//! fails aborts the transaction, and committing an aborted transaction rolls it back.

use futures_util::future::{BoxFuture, join_all};
use tokio_postgres::types::{ToSql, Type};

use super::rejected::{Decisions, Origin, text};
use crate::{
    database::{from_postgres, pool::answered},
    envelope::{Settlement, Verdict},
    error::Result,
    failpoints::{self, Point},
    settings::{PublishSettings, RowPolicy},
    source::claim::{Claim, Wanted},
};

const OP: &str = "record a claim";

/// What became of the rows of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Recorded {
    /// Delivered.
    pub delivered: u64,
    /// Rejected, and waiting for another attempt.
    pub retried: u64,
    /// Rejected for the last time.
    pub parked: u64,
    /// Abandoned: left for another claim.
    pub released: u64,
}

impl Recorded {
    /// Rows with a durable verdict.
    pub fn moved(&self) -> u64 {
        self.delivered + self.retried + self.parked
    }
}

/// A statement's parameter and its type.
pub(super) type Parameter<'a> = (&'a (dyn ToSql + Sync), Type);

/// A statement and its parameters, to be sent with others.
pub(super) type Step<'a> = (&'a str, Vec<Parameter<'a>>);

impl Claim {
    /// Records what became of its rows and commits. A row without a settlement is released.
    ///
    /// # Errors
    /// Nothing is recorded then: the claim is dropped, and its rows will be claimed again.
    pub async fn record(
        self: Box<Self>,
        settlements: &[Settlement],
        settings: &PublishSettings,
    ) -> Result<Recorded> {
        let mut recorded = Recorded::default();
        let (mut delivered, mut delivered_seqs) = (Vec::new(), Vec::new());
        let mut rejected = Decisions::default();
        for settlement in settlements {
            let row = &settlement.envelope.row;
            let seq = self.seqs.get(settlement.envelope.number as usize).copied();
            match &settlement.verdict {
                Verdict::Delivered => {
                    delivered.push(text(&row.id)?);
                    delivered_seqs.extend(seq);
                }
                Verdict::Rejected(why) => {
                    rejected.add(row, why, Origin { seq, marked: true }, (&self.outbox, settings))?;
                }
                Verdict::Abandoned => recorded.released += 1,
            }
        }
        recorded.delivered = delivered.len() as u64;
        recorded.retried = rejected.retried.len() as u64;
        recorded.parked = rejected.parked.len() as u64;
        if recorded.moved() == 0 {
            self.release().await?;
            return Ok(recorded);
        }
        let cursor = match &self.wanted {
            Wanted::Page { after, .. } => contiguous(settlements)?.or_else(|| after.clone()),
            _ => None,
        };
        let sql = &self.outbox.sql;
        let mut steps: Vec<Step<'_>> = Vec::with_capacity(6);
        let from_retries = self.wanted == Wanted::Retries;
        if from_retries && !delivered_seqs.is_empty() {
            steps.push((&sql.delete_retries, vec![(&delivered_seqs, Type::INT8_ARRAY)]));
        }
        for (rows, pauses, copy, update) in [
            (&rejected.retried, true, &sql.insert_retries, &sql.update_retries),
            (&rejected.parked, false, &sql.insert_dead_letters, &sql.park_retries),
        ] {
            if rows.is_empty() {
                continue;
            }
            failpoints::pass(Point::RetriesInsert)?;
            let step =
                if from_retries { (update, rows.updates(pauses)) } else { (copy, rows.copies(pauses)) };
            steps.push((step.0, step.1));
        }
        if self.outbox.policy != RowPolicy::Keep {
            if !delivered.is_empty() {
                steps.push((&sql.delivered, vec![(&delivered, Type::TEXT_ARRAY)]));
            }
            if !rejected.is_empty() {
                steps.push((&sql.rejected, rejected.marks().to_vec()));
            }
        }
        if cursor.is_some() {
            steps.push((&sql.sweep_cursor, vec![(&self.outbox.name, Type::TEXT), (&cursor, Type::TEXT)]));
        }
        self.run(&steps).await?;
        self.committed(recorded);
        Ok(recorded)
    }

    /// Sends all of `steps` and a commit, then reads all answers. Each is queued by its first poll, in order.
    async fn run(&self, steps: &[Step<'_>]) -> Result<()> {
        let client = self.connection()?;
        let mut answers: Vec<BoxFuture<'_, Result<(), tokio_postgres::Error>>> = Vec::new();
        for (sql, parameters) in steps {
            answers.push(Box::pin(async move { client.execute_typed(sql, parameters).await.map(drop) }));
        }
        answers.push(Box::pin(client.batch_execute("COMMIT")));
        failpoints::pass(Point::CommitBefore)?;
        for answer in answered(in_order(answers), OP).await? {
            answer.map_err(|error| from_postgres(error, OP))?;
        }
        failpoints::pass(Point::CommitAfter)
    }
}

/// Polls futures in order and waits for all. `join_all` keeps the order while it holds at most 30.
pub(super) async fn in_order<T>(futures: Vec<BoxFuture<'_, T>>) -> Vec<T> {
    debug_assert!(futures.len() <= 30, "join_all polls more than 30 in any order");
    join_all(futures).await
}

/// The id of the last row before the first one without a verdict: what a page's cursor may move to.
fn contiguous(settlements: &[Settlement]) -> Result<Option<String>> {
    let mut settled: Vec<_> = settlements.iter().filter(|s| s.verdict != Verdict::Abandoned).collect();
    settled.sort_unstable_by_key(|settlement| settlement.envelope.number);
    let prefix = settled.iter().enumerate().take_while(|(n, s)| s.envelope.number == *n as u64);
    prefix.last().map(|(_, s)| text(&s.envelope.row.id).map(str::to_owned)).transpose()
}
