//! What the operator asked for, and the figures that need SQL.

use std::time::Duration;

use tokio_postgres::{
    Client, Row,
    types::{ToSql, Type},
};

use super::{from_postgres, outbox::Outbox, values::Time};
use crate::{
    control::Desired,
    envelope::UnixMicros,
    error::{Error, Kind, Result},
    position::Lsn,
    settings::RowPolicy,
};

/// Makes sure that the server lets us write, by its own word.
///
/// # Errors
/// [`Kind::DatabaseReadonly`] on a standby, and where `default_transaction_read_only` says so.
pub async fn writable(client: &Client) -> Result<()> {
    const OP: &str = "ask whether the database may be written";
    let sql = "SELECT current_setting('transaction_read_only') = 'on', pg_is_in_recovery()";
    let failed = |error| from_postgres(error, OP);
    let row = client.query_typed_one(sql, &[]).await.map_err(failed)?;
    if !row.try_get::<_, bool>(0).map_err(failed)? {
        return Ok(());
    }
    let standby: bool = row.try_get(1).map_err(failed)?;
    Err(Error::new(Kind::DatabaseReadonly, OP).with_source(if standby {
        "the server is a standby"
    } else {
        "default_transaction_read_only is on"
    }))
}

/// A row of `postrider_control`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Request {
    /// What was asked for.
    pub desired: Desired,
    /// Up to where a drain runs: an LSN in wal mode, a snapshot in poll mode.
    pub drain_target: Option<String>,
}

/// What was asked for last; no row means run.
pub async fn load_request(client: &Client, outbox: &Outbox) -> Result<Request> {
    const OP: &str = "read what the operator asked for";
    let sql = format!("SELECT desired, drain_target FROM {} WHERE outbox = $1", outbox.sql.control_table);
    let failed = |error| from_postgres(error, OP);
    let row = client.query_typed_opt(&sql, &[(&outbox.name, Type::TEXT)]).await.map_err(failed)?;
    let Some(row) = row else { return Ok(Request::default()) };
    let word: String = row.try_get(0).map_err(failed)?;
    let desired = Desired::from_word(&word)
        .ok_or_else(|| Error::new(Kind::SchemaChanged, OP).with_source(format!("{word:?} is no request")))?;
    Ok(Request { desired, drain_target: row.try_get(1).map_err(failed)? })
}

/// Stores a request: it holds for every process on the outbox.
pub async fn store_request(client: &Client, outbox: &Outbox, request: &Request) -> Result<()> {
    let sql = format!(
        "INSERT INTO {} (outbox, desired, drain_target) VALUES ($1, $2, $3) ON CONFLICT (outbox) DO UPDATE SET \
         desired = excluded.desired, drain_target = excluded.drain_target, requested_at = now()",
        outbox.sql.control_table
    );
    let word = request.desired.as_str();
    let parameters: [(&(dyn ToSql + Sync), Type); 3] =
        [(&outbox.name, Type::TEXT), (&word, Type::TEXT), (&request.drain_target, Type::TEXT)];
    let done = client.execute_typed(&sql, &parameters).await;
    done.map(drop).map_err(|error| from_postgres(error, "store what the operator asked for"))
}

/// Unprocessed rows are counted up to here: beyond it, "very many" says enough and counting costs.
pub const UNPROCESSED_BOUND: i64 = 100_000;

/// What `/api/status` and the gauges know from the database, read in one statement.
#[derive(Debug, Clone, PartialEq)]
pub struct Health {
    /// Rows waiting for another attempt.
    pub retries: u64,
    /// Rows parked.
    pub dead_letters: u64,
    /// Age of the oldest unprocessed row; `None` with `keep`, or if there is none.
    pub oldest_unprocessed: Option<Duration>,
    /// Unprocessed rows, counted up to [`UNPROCESSED_BOUND`]; `None` with `keep`.
    pub unprocessed: Option<u64>,
    /// The slot, if it exists.
    pub slot: Option<SlotHealth>,
    /// Where the server writes (on a standby: where it replays).
    pub wal_lsn: Lsn,
    /// The server's clock.
    pub now: UnixMicros,
    /// Whether the server is a standby.
    pub in_recovery: bool,
}

/// What the server says about the slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotHealth {
    /// Whether somebody streams from it.
    pub active: bool,
    /// `reserved`, `extended`, `unreserved` or `lost`.
    pub wal_status: Option<String>,
    /// What was acknowledged.
    pub confirmed_flush: Option<Lsn>,
    /// From where the server keeps WAL.
    pub restart: Option<Lsn>,
    /// How much WAL that is.
    pub retained_bytes: u64,
}

/// Reads [`Health`]; `slot` names the slot, if there is to be one.
pub async fn health(client: &Client, outbox: &Outbox, slot: Option<&str>) -> Result<Health> {
    let sql = &outbox.sql;
    let (oldest, unprocessed) = match outbox.policy {
        RowPolicy::Keep => ("NULL::float8", "CASE WHEN $2 < 0 THEN 0::int8 END"),
        RowPolicy::Update | RowPolicy::Delete => (sql.oldest_age.as_str(), sql.unprocessed.as_str()),
    };
    let sql = format!(
        "SELECT (SELECT count(*) FROM {}), (SELECT count(*) FROM {}), {oldest}, {unprocessed}, \
         w.lsn::text, clock_timestamp(), pg_is_in_recovery(), s.slot_name IS NOT NULL, s.active, s.wal_status, \
         s.confirmed_flush_lsn::text, s.restart_lsn::text, (w.lsn - s.restart_lsn)::int8 \
         FROM (SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() \
         ELSE pg_current_wal_insert_lsn() END AS lsn) AS w \
         LEFT JOIN pg_replication_slots AS s ON s.slot_name = $1",
        sql.retries_table, sql.dead_letters_table
    );
    let parameters: [(&(dyn ToSql + Sync), Type); 2] =
        [(&slot, Type::TEXT), (&UNPROCESSED_BOUND, Type::INT8)];
    let row = client.query_typed_one(&sql, &parameters).await.map_err(failed)?;
    let slot = match row.try_get(7).map_err(failed)? {
        false => None,
        true => Some(SlotHealth {
            active: row.try_get::<_, Option<bool>>(8).map_err(failed)?.unwrap_or(false),
            wal_status: row.try_get(9).map_err(failed)?,
            confirmed_flush: lsn(&row, 10)?,
            restart: lsn(&row, 11)?,
            retained_bytes: count(&row, 12)?.unwrap_or(0),
        }),
    };
    let seconds: Option<f64> = row.try_get(2).map_err(failed)?;
    Ok(Health {
        retries: count(&row, 0)?.unwrap_or(0),
        dead_letters: count(&row, 1)?.unwrap_or(0),
        oldest_unprocessed: seconds
            .map(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)),
        unprocessed: count(&row, 3)?,
        slot,
        wal_lsn: lsn(&row, 4)?.unwrap_or_default(),
        now: row.try_get::<_, Time>(5).map_err(failed)?.micros().unwrap_or(0),
        in_recovery: row.try_get(6).map_err(failed)?,
    })
}

fn failed(error: tokio_postgres::Error) -> Error {
    from_postgres(error, "read the database's figures")
}

fn count(row: &Row, n: usize) -> Result<Option<u64>> {
    let count: Option<i64> = row.try_get(n).map_err(failed)?;
    Ok(count.map(|count| u64::try_from(count).unwrap_or(0)))
}

fn lsn(row: &Row, n: usize) -> Result<Option<Lsn>> {
    let text: Option<&str> = row.try_get(n).map_err(failed)?;
    text.map(|text| text.parse().map_err(failed_text)).transpose()
}

fn failed_text(error: crate::position::NotAnLsn) -> Error {
    Error::new(Kind::Internal, "read the database's figures").with_source(error)
}
