//! Cleanup: recorded rows older than the retention are deleted, in bounded batches that wait for nobody.
//!
//! `processed_on` is set by the transaction that records a verdict, so a row that has it is recorded, delivered or
//! parked; a row that waits, or waits for another attempt, does not.

use std::sync::Arc;

use deadpool_postgres::Pool;
use tokio_postgres::{Client, types::Type};
use tokio_util::sync::CancellationToken;

use crate::{
    database::{columns::ColumnTypes, from_postgres, pool, quote_identifier},
    error::Result,
    settings::{CleanupSettings, OutboxSettings, RowPolicy, Settings},
};

/// Deletes until `stop`, if the settings ask for it. With `keep` no row says that it is recorded, so nothing is deleted.
pub(super) async fn run(settings: Arc<Settings>, pool: Pool, stop: CancellationToken) {
    let Some(cleanup) = settings.cleanup.filter(|_| settings.ack.rows != RowPolicy::Keep) else { return };
    let mut ticks = tokio::time::interval(cleanup.interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while stop.run_until_cancelled(ticks.tick()).await.is_some() {
        match stop.run_until_cancelled(once(&settings.outbox, cleanup, &pool)).await {
            Some(Ok(0)) => {}
            Some(Ok(rows)) => tracing::debug!(rows, "recorded rows past their retention deleted"),
            // The stages say what is wrong with the database; this tries again at its next look.
            Some(Err(error)) => tracing::debug!(error = %error.chain(), "cleanup not done"),
            None => return,
        }
    }
}

/// Deletes everything that is past its retention now; returns how many rows that were.
async fn once(outbox: &OutboxSettings, cleanup: CleanupSettings, pool: &Pool) -> Result<u64> {
    const OP: &str = "delete recorded rows past their retention";
    let types = pool::ask(pool, OP, async |client| ColumnTypes::load(client, outbox).await).await?;
    let sql = statement(outbox, &types);
    let (age, limit) = (cleanup.retention.as_secs_f64(), i64::from(cleanup.batch_rows));
    let mut deleted = 0;
    loop {
        let batch = async |client: &Client| {
            let parameters: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 2] =
                [(&age, Type::FLOAT8), (&limit, Type::INT8)];
            client.execute_typed(&sql, &parameters).await.map_err(|error| from_postgres(error, OP))
        };
        let rows = pool::ask(pool, OP, batch).await?;
        deleted += rows;
        if rows < u64::from(cleanup.batch_rows) {
            return Ok(deleted);
        }
    }
}

/// Rows that somebody has locked are passed over; the next look finds them.
fn statement(outbox: &OutboxSettings, types: &ColumnTypes) -> String {
    let table = format!("{}.{}", quote_identifier(&outbox.schema), quote_identifier(&outbox.table));
    let processed = quote_identifier(&outbox.columns.processed_on);
    format!(
        "DELETE FROM {table} WHERE ctid = ANY (ARRAY(SELECT ctid FROM {table} \
         WHERE {processed} < {} - make_interval(secs => $1) LIMIT $2 FOR UPDATE SKIP LOCKED))",
        types.processed_on.now()
    )
}
