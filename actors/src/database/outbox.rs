//! The statements about rows, as text: from names and types to SQL, no connection needed.
//!
//! Every statement is sent unnamed, because a transaction pooler may lead each to another session. What is read is
//! cast to text (or is `bytea`, or a time in binary), so no session setting changes it.

use tokio_postgres::Client;

use super::{
    columns::{ColumnTypes, TimeType},
    quote_identifier,
};
use crate::{
    envelope::ContentKind,
    error::Result,
    settings::{OutboxSettings, RowPolicy, Settings},
};

/// One outbox: its names, its types and its statements. Made once for a pool and shared.
#[derive(Debug, Clone)]
pub struct Outbox {
    /// `schema.table`, the key of our tables' rows.
    pub name: String,
    /// The id's type as SQL text, without modifier.
    pub id_type: String,
    /// What the content column holds.
    pub content_kind: ContentKind,
    /// Of `occurred_on`.
    pub occurred_on: TimeType,
    /// What becomes of a delivered row.
    pub policy: RowPolicy,
    /// Names of the template columns.
    pub template_columns: Vec<String>,
    /// The statements.
    pub sql: Statements,
}

impl Outbox {
    /// Looks up the types and writes the statements.
    ///
    /// # Errors
    /// [`Kind::SchemaChanged`](crate::error::Kind::SchemaChanged) when the table cannot be used.
    pub async fn load(client: &Client, settings: &Settings) -> Result<Self> {
        let types = ColumnTypes::load(client, &settings.outbox).await?;
        Ok(Self::new(&settings.outbox, &settings.database.schema, &types, settings.ack.rows))
    }

    /// The outbox behind `settings`, of these types.
    pub fn new(settings: &OutboxSettings, schema: &str, types: &ColumnTypes, policy: RowPolicy) -> Self {
        Self {
            name: settings.name(),
            id_type: types.id.clone(),
            content_kind: types.content,
            occurred_on: types.occurred_on,
            policy,
            template_columns: settings.template_columns.clone(),
            sql: Statements::new(settings, schema, types, policy),
        }
    }
}

/// The columns of a retry or a dead letter that are the row itself, in the order they are written and read.
pub const COPIED: &str =
    "message_id, type, content, content_kind, occurred_on, key, headers, exchange, routing_key, columns";

/// The statements. `$1` and on are documented with each; arrays stand for many rows.
#[derive(Debug, Clone)]
pub struct Statements {
    /// Unprocessed rows in order: `$1` limit.
    pub claim: String,
    /// The same from a time on: `$1` limit, `$2` time.
    pub claim_since: String,
    /// History: `$1` limit, `$2` the latest time that counts as history.
    pub claim_until: String,
    /// A page of history by id, nothing locked: `$1` limit, `$2` id to end with, `$3` id to begin after.
    pub page_after: String,
    /// The first page: `$1` limit, `$2` id to end with.
    pub page_first: String,
    /// The highest id of all unprocessed rows.
    pub last_id: String,
    /// The latest time of all unprocessed rows.
    pub last_time: String,
    /// Whether an unprocessed row is there, locked or not: `$1` the latest time that counts.
    pub any_until: String,
    /// Due retries: `$1` limit.
    pub claim_retries: String,
    /// Milliseconds until the next retry is due; null if there is none.
    pub next_retry: String,
    /// Takes the lock that marking will need, and marks nothing.
    pub will_mark: String,
    /// Marks or deletes the oldest rows that wait: `$1` how many. Only ever rolled back.
    pub trial: String,
    /// Marks or deletes what was delivered: `$1` ids.
    pub delivered: String,
    /// Marks what was rejected: `$1` ids, `$2` errors, `$3` whether each is parked.
    pub rejected: String,
    /// Says of rows that were parked that they wait for another attempt: a further `WITH` clause over `gone`, which holds
    /// the dead letters that were requeued.
    pub unpark: String,
    /// Which of these ids no row has: `$1` ids.
    pub missing: String,
    /// Copies rejected rows: `$1`–`$10` [`COPIED`], `$11` attempts, `$12` reasons, `$13` details, `$14` pauses in ms.
    pub insert_retries: String,
    /// Parks rejected rows: `$1`–`$13` as for `insert_retries`.
    pub insert_dead_letters: String,
    /// Ends retries that were delivered: `$1` seqs.
    pub delete_retries: String,
    /// Puts retries off: `$1` seqs, `$2` attempts, `$3` reasons, `$4` details, `$5` pauses in ms.
    pub update_retries: String,
    /// Parks retries: `$1`–`$4` as for `update_retries`.
    pub park_retries: String,
    /// `delivered`, and progress if all `$2` were hit: see [`super::progress`] for `$3`–`$9`.
    pub stream_delivered: String,
    /// Progress alone, onwards: `$1`–`$7`.
    pub progress: String,
    /// Progress, whatever is there: `$1`–`$7`.
    pub set_progress: String,
    /// `delivered` and `rejected` (`$3`–`$5`), and progress (`$6`–`$12`) if all `$2` were hit.
    pub stream_all: String,
    /// Where the sweep stands: `$1` outbox, `$2` cursor.
    pub sweep_cursor: String,
    /// The table of progress.
    pub progress_table: String,
    /// The table of what the operator asked for.
    pub control_table: String,
    /// The table of retries.
    pub retries_table: String,
    /// The table of dead letters.
    pub dead_letters_table: String,
    /// Age of the oldest unprocessed row, in seconds, as an expression.
    pub oldest_age: String,
    /// Number of unprocessed rows up to a bound (`$2`), as an expression.
    pub unprocessed: String,
}

impl Statements {
    /// Writes them all.
    pub fn new(o: &OutboxSettings, schema: &str, types: &ColumnTypes, policy: RowPolicy) -> Self {
        let q = |name: &str| quote_identifier(name);
        let ours = |name: &str| format!("{}.{}", q(schema), q(name));
        let (retries, dead) = (ours("postrider_retries"), ours("postrider_dead_letters"));
        let (progress, control) = (ours("postrider_progress"), ours("postrider_control"));
        let c = &o.columns;
        let table = format!("{}.{}", q(&o.schema), q(&o.table));
        let (id, at) = (q(&c.id), q(&c.occurred_on));
        let (processed, error) = (q(&c.processed_on), q(&c.error));
        let id_type = &types.id;
        // `o.` throughout: a bare name in ORDER BY means the output column, which is text and has no index.
        let unprocessed = format!("FROM {table} AS o WHERE o.{processed} IS NULL AND o.{error} IS NULL");
        let select = format!("SELECT {} {unprocessed}", select_list(o, types));
        let order = format!("ORDER BY o.{at}, o.{id} LIMIT $1 FOR UPDATE SKIP LOCKED");
        let page = format!("AND o.{id} <= $2::text::{id_type}");
        let (now, age_now) = (types.processed_on.now(), clock(types.occurred_on));
        let marks = match policy {
            RowPolicy::Delete => format!("DELETE FROM {table} AS o"),
            RowPolicy::Update | RowPolicy::Keep => {
                format!("UPDATE {table} AS o SET {processed} = {now}, {error} = NULL")
            }
        };
        let delivered = format!("{marks} WHERE o.{id} = ANY($1::text[]::{id_type}[])");
        let rejected = |first: usize| {
            format!(
                "UPDATE {table} AS o SET {error} = v.error::{}, {processed} = CASE WHEN v.parked THEN {now} END \
                 FROM unnest(${}::text[], ${}::text[], ${}::bool[]) AS v(id, error, parked) \
                 WHERE o.{id} = v.id::{id_type}",
                types.error,
                first,
                first + 1,
                first + 2
            )
        };
        Self {
            claim: format!("{select} {order}"),
            claim_since: format!("{select} AND o.{at} >= $2 {order}"),
            claim_until: format!("{select} AND (o.{at} <= $2 OR o.{at} IS NULL) {order}"),
            page_after: format!("{select} {page} AND o.{id} > $3::text::{id_type} ORDER BY o.{id} LIMIT $1"),
            page_first: format!("{select} {page} ORDER BY o.{id} LIMIT $1"),
            last_id: format!("SELECT o.{id}::text {unprocessed} ORDER BY o.{id} DESC LIMIT 1"),
            last_time: format!("SELECT max(o.{at}) {unprocessed}"),
            any_until: format!("SELECT EXISTS (SELECT {unprocessed} AND (o.{at} <= $1 OR o.{at} IS NULL))"),
            claim_retries: format!(
                "SELECT seq, attempts, {COPIED}, reason FROM {retries} WHERE next_attempt_at <= now() \
                 ORDER BY next_attempt_at LIMIT $1 FOR UPDATE SKIP LOCKED"
            ),
            next_retry: format!(
                "SELECT (extract(epoch FROM min(next_attempt_at) - clock_timestamp()) * 1000)::float8 FROM {retries}"
            ),
            // LOCK TABLE asks for a privilege on the whole table, and an UPDATE of no rows fires triggers; planning one does neither
            will_mark: format!("EXPLAIN UPDATE {table} AS o SET {error} = NULL WHERE false"),
            trial: format!(
                "{marks} WHERE o.{id} = ANY(ARRAY(SELECT w.{id} FROM {table} AS w WHERE w.{processed} IS NULL \
                 ORDER BY w.{at}, w.{id} LIMIT $1 FOR UPDATE SKIP LOCKED))"
            ),
            rejected: rejected(1),
            unpark: format!(
                ", told AS (UPDATE {table} AS o SET {processed} = NULL FROM gone \
                 WHERE o.{id} = gone.message_id::{id_type} AND o.{processed} IS NOT NULL AND o.{error} IS NOT NULL)"
            ),
            missing: format!(
                "SELECT v.id FROM unnest($1::text[]) AS v(id) \
                 WHERE NOT EXISTS (SELECT FROM {table} AS o WHERE o.{id} = v.id::{id_type})"
            ),
            insert_retries: insert_copies(&retries, Some("$14")),
            insert_dead_letters: insert_copies(&dead, None),
            delete_retries: format!("DELETE FROM {retries} WHERE seq = ANY($1)"),
            update_retries: format!(
                "UPDATE {retries} AS r SET attempts = v.attempts, reason = v.reason, detail = v.detail, \
                 last_failed_at = now(), next_attempt_at = {} \
                 FROM unnest($1::int8[], $2::int4[], $3::text[], $4::text[], $5::int8[]) \
                 AS v(seq, attempts, reason, detail, pause) WHERE r.seq = v.seq",
                due("v.pause")
            ),
            park_retries: format!(
                "WITH parked AS (DELETE FROM {retries} AS r \
                 USING unnest($1::int8[], $2::int4[], $3::text[], $4::text[]) \
                 AS v(seq, attempts, reason, detail) WHERE r.seq = v.seq \
                 RETURNING {}, v.attempts AS last_attempts, v.reason AS last_reason, v.detail AS last_detail, \
                 r.first_failed_at) \
                 INSERT INTO {dead} ({COPIED}, attempts, reason, detail, first_failed_at) \
                 SELECT {COPIED}, last_attempts, last_reason, last_detail, first_failed_at FROM parked",
                qualified("r")
            ),
            stream_delivered: format!(
                "WITH marked AS ({delivered} RETURNING 1), counted AS (SELECT count(*) AS n FROM marked), \
                 moved AS ({} RETURNING 1) SELECT n, (SELECT count(*) FROM moved) FROM counted",
                super::progress::advance(&progress, 3, "FROM counted WHERE n = $2")
            ),
            stream_all: format!(
                "WITH marked AS ({delivered} RETURNING 1), failed AS ({} RETURNING 1), \
                 counted AS (SELECT (SELECT count(*) FROM marked) + (SELECT count(*) FROM failed) AS n), \
                 moved AS ({} RETURNING 1) SELECT n, (SELECT count(*) FROM moved) FROM counted",
                rejected(3),
                super::progress::advance(&progress, 6, "FROM counted WHERE n = $2")
            ),
            progress: super::progress::advance(&progress, 1, ""),
            set_progress: super::progress::set(&progress),
            delivered,
            sweep_cursor: format!(
                "INSERT INTO {progress} (outbox, mode, sweep_cursor) VALUES ($1, 'wal', $2) \
                 ON CONFLICT (outbox) DO UPDATE SET sweep_cursor = excluded.sweep_cursor, updated_at = now()"
            ),
            oldest_age: format!(
                "(SELECT extract(epoch FROM {age_now} - o.{at})::float8 {unprocessed} ORDER BY o.{at}, o.{id} LIMIT 1)"
            ),
            unprocessed: format!("(SELECT count(*) FROM (SELECT {unprocessed} LIMIT $2) AS waiting)"),
            progress_table: progress,
            control_table: control,
            retries_table: retries,
            dead_letters_table: dead,
        }
    }
}

/// What a claim reads of the outbox, in the order [`crate::source::rows`] takes it apart.
fn select_list(o: &OutboxSettings, types: &ColumnTypes) -> String {
    let c = &o.columns;
    let text = |name: &str| format!("o.{}::text", quote_identifier(name));
    let optional = |name: &Option<String>| name.as_deref().map_or_else(|| "NULL::text".to_owned(), text);
    let content = match types.content {
        ContentKind::Json | ContentKind::Text => text(&c.content),
        ContentKind::Bytes => format!("o.{}", quote_identifier(&c.content)),
    };
    let mut list =
        vec![text(&c.id), text(&c.kind), content, format!("o.{}", quote_identifier(&c.occurred_on))];
    list.extend([&c.key, &c.headers, &c.exchange, &c.routing_key].map(optional));
    list.extend(o.template_columns.iter().map(|name| text(name)));
    list.join(", ")
}

/// Copies rows into one of our tables, unless the message waits there already.
///
/// It may: a stream whose position was not trusted repeats a rejection. The copy that is there is kept, not replaced:
/// a claim of ours may hold its lock, and would wait for us.
fn insert_copies(table: &str, pause: Option<&str>) -> String {
    let (column, value, parameter, name) = match pause {
        Some(parameter) => (
            ", next_attempt_at",
            format!(", {}", due("v.pause")),
            format!(", {parameter}::int8[]"),
            ", pause",
        ),
        None => ("", String::new(), String::new(), ""),
    };
    format!(
        "INSERT INTO {table} ({COPIED}, attempts, reason, detail{column}) \
         SELECT {}, v.attempts, v.reason, v.detail{value} \
         FROM unnest($1::text[], $2::text[], $3::bytea[], $4::text[], $5::timestamptz[], $6::text[], $7::text[], \
         $8::text[], $9::text[], $10::text[], $11::int4[], $12::text[], $13::text[]{parameter}) \
         AS v({COPIED}, attempts, reason, detail{name}) \
         WHERE NOT EXISTS (SELECT FROM {table} AS r \
         WHERE hashtextextended(r.message_id, 0) = hashtextextended(v.message_id, 0) \
         AND r.message_id = v.message_id)",
        qualified("v")
    )
}

/// [`COPIED`], each with a table's alias before it.
fn qualified(alias: &str) -> String {
    COPIED.split(", ").map(|column| format!("{alias}.{column}")).collect::<Vec<_>>().join(", ")
}

/// When a pause of so many milliseconds ends. By the clock, not by `now()`: a claim may have begun long ago.
fn due(pause: &str) -> String {
    format!("clock_timestamp() + {pause} * interval '1 millisecond'")
}

fn clock(of: TimeType) -> &'static str {
    match of {
        TimeType::Timestamptz => "clock_timestamp()",
        TimeType::Timestamp => "(clock_timestamp() AT TIME ZONE 'UTC')",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Columns;

    fn settings() -> OutboxSettings {
        OutboxSettings {
            schema: "app".into(),
            table: "out\"box".into(),
            columns: Columns {
                id: "id".into(),
                kind: "type".into(),
                content: "content".into(),
                occurred_on: "at".into(),
                processed_on: "done".into(),
                error: "error".into(),
                key: None,
                headers: Some("Headers".into()),
                exchange: None,
                routing_key: None,
            },
            template_columns: vec!["tenant".into()],
        }
    }

    fn types() -> ColumnTypes {
        ColumnTypes {
            id: "uuid".into(),
            content: ContentKind::Json,
            occurred_on: TimeType::Timestamptz,
            processed_on: TimeType::Timestamp,
            error: "character varying(80)".into(),
        }
    }

    #[test]
    fn the_claim_reads_text_and_orders_by_the_columns_themselves() {
        let sql = Statements::new(&settings(), "public", &types(), RowPolicy::Update);
        assert_eq!(
            sql.claim,
            "SELECT o.\"id\"::text, o.\"type\"::text, o.\"content\"::text, o.\"at\", NULL::text, \
             o.\"Headers\"::text, NULL::text, NULL::text, o.\"tenant\"::text \
             FROM \"app\".\"out\"\"box\" AS o WHERE o.\"done\" IS NULL AND o.\"error\" IS NULL \
             ORDER BY o.\"at\", o.\"id\" LIMIT $1 FOR UPDATE SKIP LOCKED"
        );
    }

    #[test]
    fn bytes_are_read_as_they_are() {
        let bytes = ColumnTypes { content: ContentKind::Bytes, ..types() };
        let sql = Statements::new(&settings(), "public", &bytes, RowPolicy::Update);
        assert!(sql.claim.contains("::text, o.\"content\", o.\"at\""), "{}", sql.claim);
    }

    #[test]
    fn marks_and_deletes_touch_rows_by_typed_id_alone() {
        let update = Statements::new(&settings(), "public", &types(), RowPolicy::Update).delivered;
        assert_eq!(
            update,
            "UPDATE \"app\".\"out\"\"box\" AS o SET \"done\" = (now() AT TIME ZONE 'UTC'), \"error\" = NULL \
             WHERE o.\"id\" = ANY($1::text[]::uuid[])"
        );
        let delete = Statements::new(&settings(), "public", &types(), RowPolicy::Delete).delivered;
        assert_eq!(
            delete,
            "DELETE FROM \"app\".\"out\"\"box\" AS o WHERE o.\"id\" = ANY($1::text[]::uuid[])"
        );
    }
}
