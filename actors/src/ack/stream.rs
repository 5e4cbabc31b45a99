//! Recording streamed rows, with how far the stream has come in the same transaction.
//!
//! A mark that hits fewer rows than expected means *not yet*, never *already done*: progress then stays where it is. The
//! caller asks which rows are [`missing`], and whether their transaction is [`visible`]. If it is not, it waits and records
//! them again; if it is, the rows are gone, and it records without them.

use std::{collections::HashSet, sync::Arc};

use futures_util::future::BoxFuture;
use tokio_postgres::{Client, types::Type};

use super::{
    rejected::{Decisions, Origin, text},
    rows::{Parameter, Step, in_order},
};
use crate::{
    database::{
        from_postgres,
        outbox::Outbox,
        pool::answered,
        progress::{Parameters, Progress},
    },
    deadlines::{LOCK, STATEMENT},
    envelope::{Settlement, Verdict},
    error::{Error, Kind, Result},
    failpoints::{self, Point},
    settings::{PublishSettings, RowPolicy},
};

const OP: &str = "record streamed rows";

/// What was recorded of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StreamRecorded {
    /// Delivered rows among the settlements, an id counted once.
    pub delivered: u64,
    /// Rejected rows that wait for another attempt now.
    pub retried: u64,
    /// Rejected rows that were parked.
    pub parked: u64,
    /// Rows of the outbox that should be hit.
    pub expected: u64,
    /// Rows that were.
    pub marked: u64,
}

impl StreamRecorded {
    /// Whether every row was hit; only then has progress moved.
    pub fn complete(&self) -> bool {
        self.marked == self.expected
    }
}

/// Records settlements, and `progress` if every outbox row was hit. Abandoned ones are passed over.
///
/// Recording a settlement again changes nothing more. After an error the connection must be thrown away
/// ([`crate::database::pool::discard`]): its answers may still be on their way.
///
/// # Errors
/// As the server's errors are classified; nothing is recorded then, unless the answer to the commit was lost.
pub async fn record_stream(
    client: &Client,
    outbox: &Arc<Outbox>,
    settlements: &[Settlement],
    progress: Option<&Progress>,
    settings: &PublishSettings,
) -> Result<StreamRecorded> {
    let mut delivered = Vec::with_capacity(settlements.len());
    let mut rejected = Decisions::default();
    // An id may come twice (its row was deleted and inserted again), and its row is hit once.
    let mut marked = HashSet::with_capacity(settlements.len());
    for settlement in settlements {
        let row = &settlement.envelope.row;
        match &settlement.verdict {
            Verdict::Delivered => delivered.extend(Some(text(&row.id)?).filter(|id| marked.insert(*id))),
            Verdict::Rejected(why) => {
                let first = marked.insert(text(&row.id)?);
                rejected.add(row, why, Origin { seq: None, marked: first }, (outbox, settings))?;
            }
            Verdict::Abandoned => {}
        }
    }
    let keep = outbox.policy == RowPolicy::Keep;
    let mut recorded = StreamRecorded {
        delivered: delivered.len() as u64,
        retried: rejected.retried.len() as u64,
        parked: rejected.parked.len() as u64,
        expected: if keep { 0 } else { marked.len() as u64 },
        marked: 0,
    };
    let sql = &outbox.sql;
    let progress = progress.map(|progress| Parameters::new(outbox, progress));
    let expected = recorded.expected.cast_signed();
    let mut steps: Vec<(Answer, Step<'_>)> = Vec::with_capacity(4);
    if !rejected.retried.is_empty() {
        failpoints::pass(Point::RetriesInsert)?;
        steps.push((Answer::Done, (&sql.insert_retries, rejected.retried.copies(true))));
    }
    if !rejected.parked.is_empty() {
        steps.push((Answer::Done, (&sql.insert_dead_letters, rejected.parked.copies(false))));
    }
    match &progress {
        Some(progress) if expected == 0 => {
            steps.push((Answer::Done, (&sql.progress, progress.typed().to_vec())))
        }
        Some(progress) => {
            let mut all: Vec<Parameter<'_>> = vec![(&delivered, Type::TEXT_ARRAY), (&expected, Type::INT8)];
            let text = if rejected.is_empty() {
                &sql.stream_delivered
            } else {
                all.extend(rejected.marks());
                &sql.stream_all
            };
            all.extend(progress.typed());
            steps.push((Answer::Told, (text, all)));
        }
        None if expected == 0 => {}
        None => {
            steps.push((Answer::Hit, (&sql.delivered, vec![(&delivered, Type::TEXT_ARRAY)])));
            if !rejected.is_empty() {
                steps.push((Answer::Hit, (&sql.rejected, rejected.marks().to_vec())));
            }
        }
    }
    if !steps.is_empty() {
        // Progress alone may be lost in a crash of the server: what it covers is repeated, not missed. A rejection may not.
        let relaxed = keep && rejected.is_empty();
        recorded.marked = run(client, &begin(relaxed), &steps).await?;
    }
    Ok(recorded)
}

/// Which of these ids no visible row has.
pub async fn missing(client: &Client, outbox: &Outbox, ids: &[&str]) -> Result<Vec<String>> {
    const OP: &str = "look for rows that were not hit";
    let rows = answered(client.query_typed(&outbox.sql.missing, &[(&ids, Type::TEXT_ARRAY)]), OP).await?;
    let rows = rows.map_err(|error| from_postgres(error, OP))?;
    rows.iter().map(|row| row.try_get(0).map_err(|error| from_postgres(error, OP))).collect()
}

/// Whether the transaction that BEGIN named by its 32-bit `xid` is visible to others.
///
/// One that hangs in COMMIT, waiting for a synchronous standby, is streamed and not visible yet.
pub async fn visible(client: &Client, xid: u32) -> Result<bool> {
    const OP: &str = "ask which transactions are visible";
    let row = answered(client.query_typed_one("SELECT pg_current_snapshot()::text", &[]), OP).await?;
    let row = row.map_err(|error| from_postgres(error, OP))?;
    let snapshot: &str = row.try_get(0).map_err(|error| from_postgres(error, OP))?;
    super::snapshot::shows(snapshot, xid)
        .ok_or_else(|| Error::new(Kind::Protocol, OP).with_source("a snapshot of an unknown form"))
}

/// What a step's answer means.
#[derive(Debug, Clone, Copy)]
enum Answer {
    /// Nothing that is counted.
    Done,
    /// It hit as many outbox rows as it changed.
    Hit,
    /// It says in its first column how many outbox rows it hit.
    Told,
}

/// Sends BEGIN, all of `steps` and COMMIT at once; returns how many outbox rows were hit. A step that fails aborts the
/// transaction, and the COMMIT behind it rolls back.
async fn run(client: &Client, begin: &str, steps: &[(Answer, Step<'_>)]) -> Result<u64> {
    let mut answers: Vec<BoxFuture<'_, Result<u64, tokio_postgres::Error>>> =
        Vec::with_capacity(steps.len() + 2);
    answers.push(Box::pin(async move { client.batch_execute(begin).await.map(|()| 0) }));
    for (answer, (sql, parameters)) in steps {
        answers.push(Box::pin(async move {
            match answer {
                Answer::Done => client.execute_typed(sql, parameters).await.map(|_| 0),
                Answer::Hit => client.execute_typed(sql, parameters).await,
                Answer::Told => {
                    let row = client.query_typed_one(sql, parameters).await?;
                    row.try_get::<_, i64>(0).map(|n| u64::try_from(n).unwrap_or(0))
                }
            }
        }));
    }
    answers.push(Box::pin(async move { client.batch_execute("COMMIT").await.map(|()| 0) }));
    failpoints::pass(Point::CommitBefore)?;
    let mut hit = 0;
    for answer in answered(in_order(answers), OP).await? {
        hit += answer.map_err(|error| from_postgres(error, OP))?;
    }
    failpoints::pass(Point::CommitAfter)?;
    Ok(hit)
}

/// The start of a recording. A database whose commits are asynchronous may forget them in a crash while the slot, told
/// that they are recorded, has moved on: so they are not, whatever its default.
fn begin(relaxed: bool) -> String {
    let commit = if relaxed {
        "SET LOCAL synchronous_commit = off"
    } else {
        "SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'"
    };
    format!(
        "BEGIN; SET LOCAL lock_timeout = {}; SET LOCAL statement_timeout = {}; {commit}",
        LOCK.as_millis(),
        STATEMENT.as_millis()
    )
}
