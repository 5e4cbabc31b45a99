//! Where a drain ends: a position in the log, or a snapshot of the table.

use tokio_postgres::{Client, types::Type};

use super::{from_postgres, quote_identifier};
use crate::{
    error::{Error, Kind, Result},
    position::Lsn,
    settings::OutboxSettings,
};

/// Rows of a drain are counted up to here: the exact number matters only near its end.
const REMAINING_BOUND: i64 = 100_000;

/// Where the server writes now: every transaction that has committed commits before it.
///
/// # Errors
/// When the database cannot be asked.
pub async fn current_lsn(client: &Client) -> Result<Lsn> {
    const OP: &str = "read the server's position";
    let row = client
        .query_typed("SELECT pg_current_wal_insert_lsn()::text", &[])
        .await
        .map_err(|error| from_postgres(error, OP))?;
    let text: Option<&str> = row.first().and_then(|row| row.get(0));
    text.and_then(|text| text.parse().ok()).ok_or_else(|| Error::new(Kind::Protocol, OP))
}

/// The server's position as a drain's target, with a message written behind it. An idle server's position may lie a page
/// header beyond what it ever streams; with something behind it, the stream is bound to pass it.
///
/// # Errors
/// When the database cannot be asked.
pub async fn mark(client: &Client) -> Result<Lsn> {
    let target = current_lsn(client).await?;
    client
        .query_typed("SELECT pg_logical_emit_message(false, 'postrider', 'drain')", &[])
        .await
        .map_err(|error| from_postgres(error, "write behind a drain's target"))?;
    Ok(target)
}

/// The snapshot of this moment, as text.
///
/// # Errors
/// When the database cannot be asked.
pub async fn current_snapshot(client: &Client) -> Result<String> {
    const OP: &str = "take a snapshot";
    let rows = client
        .query_typed("SELECT pg_current_snapshot()::text", &[])
        .await
        .map_err(|error| from_postgres(error, OP))?;
    rows.first().and_then(|row| row.get(0)).ok_or_else(|| Error::new(Kind::Protocol, OP))
}

/// How many unprocessed rows were committed when `snapshot` was taken, up to a bound. Rows that wait for another attempt
/// are not counted: a drain does not wait for them.
///
/// A row carries 32 bits of the id of the transaction that wrote it; the rest is the snapshot's epoch, or the one before
/// it where that would lie in the snapshot's future.
///
/// # Errors
/// When the database cannot be asked.
pub async fn remaining(client: &Client, outbox: &OutboxSettings, snapshot: &str) -> Result<u64> {
    let table = format!("{}.{}", quote_identifier(&outbox.schema), quote_identifier(&outbox.table));
    let (processed, error) =
        (quote_identifier(&outbox.columns.processed_on), quote_identifier(&outbox.columns.error));
    let sql = format!(
        "WITH s AS (SELECT $1::text::pg_snapshot AS snapshot, pg_snapshot_xmax($1::text::pg_snapshot)::text::int8 AS top), \
         e AS (SELECT snapshot, top, top >> 32 AS epoch FROM s) \
         SELECT count(*) FROM (SELECT 1 FROM {table} AS o, e WHERE o.{processed} IS NULL AND o.{error} IS NULL AND \
         pg_visible_in_snapshot(((CASE WHEN (epoch << 32) + o.xmin::text::int8 > top + 1000000000 THEN epoch - 1 \
         ELSE epoch END << 32) + o.xmin::text::int8)::text::xid8, snapshot) LIMIT $2) AS waiting"
    );
    let rows = client
        .query_typed(&sql, &[(&snapshot, Type::TEXT), (&REMAINING_BOUND, Type::INT8)])
        .await
        .map_err(|error| from_postgres(error, "count what a drain has left"))?;
    let count: i64 = rows.first().map_or(0, |row| row.get(0));
    Ok(u64::try_from(count).unwrap_or(0))
}
