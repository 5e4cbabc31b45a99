//! Looking at rejected rows: a page of them, newest first, or one with its content.

use tokio_postgres::{
    Client, Row,
    types::{ToSql, Type},
};

use super::{Filter, Letter, Opened, Shelf};
use crate::{
    database::{from_postgres, outbox::Outbox, values::Time},
    error::{Error, Result},
};

/// Newest first: at most `limit` that the filter lets through, older than `before` (a [`Letter::seq`]) where given.
///
/// # Errors
/// As the server's errors are classified.
pub async fn list(
    client: &Client,
    outbox: &Outbox,
    shelf: Shelf,
    filter: &Filter,
    limit: u32,
    before: Option<i64>,
) -> Result<Vec<Letter>> {
    let (table, times) = table(outbox, shelf);
    let sql = format!(
        "SELECT {} FROM {table} AS d WHERE {} AND ($5::int8 IS NULL OR d.seq < $5) ORDER BY d.seq DESC LIMIT $6",
        columns(times),
        condition(times),
    );
    let limit = i64::from(limit);
    let filter = Parameters::of(filter);
    let mut parameters = filter.typed().to_vec();
    parameters.extend([(&before as _, Type::INT8), (&limit as _, Type::INT8)]);
    let rows = client.query_typed(&sql, &parameters).await.map_err(failed)?;
    rows.iter().map(|row| letter(row, shelf)).collect()
}

/// Everything about one message, wherever it waits; nothing if it waits nowhere.
///
/// # Errors
/// As the server's errors are classified.
pub async fn show(client: &Client, outbox: &Outbox, id: &str) -> Result<Vec<Opened>> {
    let mut found = Vec::new();
    for shelf in [Shelf::Parked, Shelf::Retrying] {
        let (table, times) = table(outbox, shelf);
        let sql = format!(
            "SELECT {}, d.headers, d.columns, d.content FROM {table} AS d \
             WHERE hashtextextended(d.message_id, 0) = hashtextextended($1, 0) AND d.message_id = $1 ORDER BY d.seq",
            columns(times)
        );
        for row in client.query_typed(&sql, &[(&id, Type::TEXT)]).await.map_err(failed)? {
            found.push(Opened {
                shelf,
                letter: letter(&row, shelf)?,
                headers: row.try_get("headers").map_err(failed)?,
                columns: row.try_get("columns").map_err(failed)?,
                content: row.try_get("content").map_err(failed)?,
            });
        }
    }
    Ok(found)
}

/// The columns that differ between the two tables.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    /// What filters compare with.
    pub(super) filtered: &'static str,
    shown: &'static str,
}

pub(super) const PARKED: Times = Times { filtered: "parked_at", shown: "parked_at" };
const RETRYING: Times = Times { filtered: "last_failed_at", shown: "next_attempt_at" };

fn table(outbox: &Outbox, shelf: Shelf) -> (&str, Times) {
    match shelf {
        Shelf::Parked => (&outbox.sql.dead_letters_table, PARKED),
        Shelf::Retrying => (&outbox.sql.retries_table, RETRYING),
    }
}

/// What a filter means, in `$1`–`$4`.
pub(super) fn condition(times: Times) -> String {
    let at = times.filtered;
    format!(
        "($1::text IS NULL OR d.reason = $1) AND ($2::text IS NULL OR d.type = $2) \
         AND ($3::timestamptz IS NULL OR d.{at} >= $3) AND ($4::timestamptz IS NULL OR d.{at} < $4)"
    )
}

/// A filter's values.
pub(super) struct Parameters<'a> {
    reason: Option<&'static str>,
    kind: Option<&'a str>,
    from: Option<Time>,
    to: Option<Time>,
}

impl<'a> Parameters<'a> {
    pub(super) fn of(filter: &'a Filter) -> Self {
        Self {
            reason: filter.reason.map(|reason| reason.as_str()),
            kind: filter.kind.as_deref(),
            from: filter.from.map(Time::At),
            to: filter.to.map(Time::At),
        }
    }

    pub(super) fn typed(&self) -> [(&(dyn ToSql + Sync), Type); 4] {
        [
            (&self.reason, Type::TEXT),
            (&self.kind, Type::TEXT),
            (&self.from, Type::TIMESTAMPTZ),
            (&self.to, Type::TIMESTAMPTZ),
        ]
    }
}

fn columns(times: Times) -> String {
    let time = |column: &str| {
        format!("to_char(d.{column} AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"') AS {column}")
    };
    let times = ["occurred_on", "first_failed_at", "last_failed_at", times.shown].map(time).join(", ");
    format!(
        "d.seq, d.message_id, d.type, d.reason, d.detail, d.attempts, d.exchange, d.routing_key, d.key, d.content_kind, \
         octet_length(d.content)::int8 AS content_bytes, {times}"
    )
}

fn letter(row: &Row, shelf: Shelf) -> Result<Letter> {
    let text = |column: &str| row.try_get::<_, String>(column).map_err(failed);
    let optional = |column: &str| row.try_get::<_, Option<String>>(column).map_err(failed);
    let (parked_at, next_attempt_at) = match shelf {
        Shelf::Parked => (optional("parked_at")?, None),
        Shelf::Retrying => (None, optional("next_attempt_at")?),
    };
    Ok(Letter {
        seq: row.try_get("seq").map_err(failed)?,
        id: text("message_id")?,
        kind: text("type")?,
        reason: text("reason")?,
        detail: text("detail")?,
        attempts: row.try_get("attempts").map_err(failed)?,
        exchange: optional("exchange")?,
        routing_key: optional("routing_key")?,
        key: optional("key")?,
        occurred_on: optional("occurred_on")?,
        first_failed_at: text("first_failed_at")?,
        last_failed_at: text("last_failed_at")?,
        parked_at,
        next_attempt_at,
        content_kind: text("content_kind")?,
        content_bytes: row.try_get("content_bytes").map_err(failed)?,
    })
}

fn failed(error: tokio_postgres::Error) -> Error {
    from_postgres(error, "look at rejected rows")
}
