//! Which streamed rows were recorded already, where the stream overlaps with history that was swept.
//!
//! The sweep delivers rows by their state, not by their position, so for transactions that committed before its end
//! only the rows themselves can tell. A row that nobody can see *yet* (its commit waits for a synchronous standby) was
//! not swept: an absent row counts as recorded and deleted only if its transaction is visible in the same snapshot.

use deadpool_postgres::Pool;
use std::collections::HashSet;
use tokio_postgres::types::{ToSql, Type};

use super::stream::Candidate;
use crate::{
    database::{from_postgres, pool, quote_identifier},
    error::Result,
    settings::{OutboxSettings, RowPolicy},
};

const OP: &str = "ask which streamed rows were recorded before";

/// Marks those of `candidates` that were recorded before. `id_type` is the type of the id column, as a cast names it.
///
/// # Errors
/// When the database cannot be asked.
pub async fn mark(
    connections: &Pool,
    outbox: &OutboxSettings,
    policy: RowPolicy,
    id_type: &str,
    candidates: &mut [&mut Candidate],
) -> Result<()> {
    // Rows that are kept carry no trace of having been published.
    if policy == RowPolicy::Keep || candidates.is_empty() {
        return Ok(());
    }
    let mut ids: Vec<&str> = Vec::with_capacity(candidates.len());
    let mut xids: Vec<i64> = Vec::with_capacity(candidates.len());
    for candidate in candidates.iter() {
        // What is not UTF-8 cannot be asked for; it is refused by validation.
        let Ok(id) = std::str::from_utf8(&candidate.envelope.row.id) else { continue };
        ids.push(id);
        xids.push(candidate.envelope.place.map_or(0, |place| i64::from(place.xid)));
    }
    let statement = statement(outbox, policy, id_type);
    let rows = pool::ask(connections, OP, async |client| {
        let parameters: [(&(dyn ToSql + Sync), Type); 2] =
            [(&ids, Type::TEXT_ARRAY), (&xids, Type::INT8_ARRAY)];
        client.query_typed(&statement, &parameters).await.map_err(|error| from_postgres(error, OP))
    })
    .await?;
    let recorded: HashSet<String> = rows
        .iter()
        .map(|row| row.try_get(0))
        .collect::<Result<_, _>>()
        .map_err(|error| from_postgres(error, OP))?;
    for candidate in candidates {
        candidate.recorded =
            std::str::from_utf8(&candidate.envelope.row.id).is_ok_and(|id| recorded.contains(id));
    }
    Ok(())
}

/// The ids among `$1` (text) that were recorded; `$2` are their 32-bit transaction ids.
///
/// The snapshot is the statement's own, the one the table is read with. Transaction ids are extended to 64 bits by the
/// snapshot's: they are within 2^31 of it.
fn statement(outbox: &OutboxSettings, policy: RowPolicy, id_type: &str) -> String {
    let column = |name: &str| format!("t.{}", quote_identifier(name));
    let columns = &outbox.columns;
    let (id, processed, error) = (column(&columns.id), column(&columns.processed_on), column(&columns.error));
    let table = format!("{}.{}", quote_identifier(&outbox.schema), quote_identifier(&outbox.table));
    let seen = format!("({processed} IS NOT NULL OR {error} IS NOT NULL)");
    let absent = match policy {
        RowPolicy::Delete => format!(
            "({id} IS NULL AND pg_visible_in_snapshot((s.next - CASE WHEN (s.next - asked.xid) & 4294967295 > 2147483647 \
             THEN ((s.next - asked.xid) & 4294967295) - 4294967296 \
             ELSE (s.next - asked.xid) & 4294967295 END)::text::xid8, s.snapshot))"
        ),
        RowPolicy::Update | RowPolicy::Keep => "false".to_owned(),
    };
    format!(
        "SELECT asked.id FROM unnest($1::text[], $2::int8[]) AS asked(id, xid) \
         CROSS JOIN (SELECT snapshot, pg_snapshot_xmax(snapshot)::text::int8 AS next \
         FROM pg_current_snapshot() AS snapshot) AS s \
         LEFT JOIN {table} AS t ON {id} = asked.id::{id_type} \
         WHERE {seen} OR {absent}"
    )
}
