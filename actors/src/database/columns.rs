//! The types of the outbox table's columns: looked up once, because a table is configured by names alone.

use std::collections::HashMap;

use tokio_postgres::{Client, types::Type};

use super::{from_postgres, quote_identifier};
use crate::{
    envelope::ContentKind,
    error::{Error, Kind, Result},
    settings::OutboxSettings,
};

const OP: &str = "read the outbox table's columns";

/// `timestamptz` or `timestamp`; the latter is read and written as UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimeType {
    /// With time zone.
    Timestamptz,
    /// Without.
    Timestamp,
}

impl TimeType {
    /// The SQL for "now" that such a column is set to.
    pub fn now(self) -> &'static str {
        match self {
            TimeType::Timestamptz => "now()",
            TimeType::Timestamp => "(now() AT TIME ZONE 'UTC')",
        }
    }

    /// The type of a parameter compared with such a column.
    pub fn parameter(self) -> Type {
        match self {
            TimeType::Timestamptz => Type::TIMESTAMPTZ,
            TimeType::Timestamp => Type::TIMESTAMP,
        }
    }
}

/// What of the columns' types the statements depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColumnTypes {
    /// The id's type as SQL text, without modifier.
    pub id: String,
    /// What the content column holds.
    pub content: ContentKind,
    /// Of `occurred_on`.
    pub occurred_on: TimeType,
    /// Of `processed_on`.
    pub processed_on: TimeType,
    /// The error column's type as SQL text with its modifier, so that a cast to it shortens what is too long.
    pub error: String,
}

impl ColumnTypes {
    /// Looks the types up.
    ///
    /// # Errors
    /// [`Kind::SchemaChanged`] when the table or a configured column is missing or of a type that cannot be used.
    pub async fn load(client: &Client, outbox: &OutboxSettings) -> Result<Self> {
        let table = format!("{}.{}", quote_identifier(&outbox.schema), quote_identifier(&outbox.table));
        let sql = "SELECT a.attname::text, coalesce(b.typname, t.typname)::text, \
                   format_type(a.atttypid, -1), format_type(a.atttypid, a.atttypmod) \
                   FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid \
                   LEFT JOIN pg_type b ON b.oid = t.typbasetype AND t.typbasetype <> 0 \
                   WHERE a.attrelid = to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped";
        let rows = client
            .query_typed(sql, &[(&table, Type::TEXT)])
            .await
            .map_err(|error| from_postgres(error, OP))?;
        if rows.is_empty() {
            return Err(changed(format!("table {table} does not exist")));
        }
        let mut found = HashMap::with_capacity(rows.len());
        for row in &rows {
            let get = |n| row.try_get::<_, String>(n).map_err(|error| from_postgres(error, OP));
            found.insert(get(0)?, Found { base: get(1)?, plain: get(2)?, full: get(3)? });
        }
        Self::of(outbox, &found)
    }

    fn of(outbox: &OutboxSettings, found: &HashMap<String, Found>) -> Result<Self> {
        let get = |name: &String| {
            found
                .get(name)
                .ok_or_else(|| changed(format!("column {} does not exist", quote_identifier(name))))
        };
        let c = &outbox.columns;
        for name in [&c.key, &c.headers, &c.exchange, &c.routing_key].into_iter().flatten() {
            get(name)?;
        }
        for name in outbox.template_columns.iter().chain([&c.kind]) {
            get(name)?;
        }
        let id = get(&c.id)?;
        if !matches!(id.base.as_str(), "uuid" | "int2" | "int4" | "int8" | "text" | "varchar") {
            return Err(unusable(&c.id, &id.plain, "uuid, integer, bigint or text"));
        }
        let content = get(&c.content)?;
        if !matches!(content.base.as_str(), "jsonb" | "json" | "text" | "varchar" | "bytea") {
            return Err(unusable(&c.content, &content.plain, "jsonb, json, text or bytea"));
        }
        let time = |name| {
            let column: &Found = get(name)?;
            match column.base.as_str() {
                "timestamptz" => Ok(TimeType::Timestamptz),
                "timestamp" => Ok(TimeType::Timestamp),
                _ => Err(unusable(name, &column.plain, "timestamptz or timestamp")),
            }
        };
        Ok(Self {
            id: id.plain.clone(),
            content: ContentKind::of_type(&content.base),
            occurred_on: time(&c.occurred_on)?,
            processed_on: time(&c.processed_on)?,
            error: get(&c.error)?.full.clone(),
        })
    }
}

/// A column's type: the name of its base type, and as SQL text without and with its modifier.
struct Found {
    base: String,
    plain: String,
    full: String,
}

fn changed(what: String) -> Error {
    Error::new(Kind::SchemaChanged, OP).with_source(what)
}

fn unusable(column: &str, is: &str, must: &str) -> Error {
    changed(format!("column {} is of type {is}, and must be {must}", quote_identifier(column)))
}
