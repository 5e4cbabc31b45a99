//! From what a claim query returns to a [`Row`].

use bytes::Bytes;
use tokio_postgres::Row as PgRow;

use crate::{
    database::{
        from_postgres,
        outbox::Outbox,
        values::{Raw, Time},
    },
    envelope::{ContentKind, Reason, Row},
    error::{Error, Kind, Result},
};

const OP: &str = "read a claimed row";

/// The columns of [`Statements::claim`] before the template columns.
///
/// [`Statements::claim`]: crate::database::outbox::Statements::claim
const FIXED: usize = 8;

/// A row of the outbox.
pub(super) fn of_outbox(row: &PgRow, outbox: &Outbox) -> Result<Row> {
    Ok(Row {
        id: required(row, 0)?,
        kind: required(row, 1)?,
        content: required(row, 2)?,
        content_kind: outbox.content_kind,
        occurred_on: time(row, 3)?,
        key: bytes(row, 4)?,
        headers: bytes(row, 5)?,
        exchange: bytes(row, 6)?,
        routing_key: bytes(row, 7)?,
        columns: (0..outbox.template_columns.len()).map(|n| bytes(row, FIXED + n)).collect::<Result<_>>()?,
        attempts: 0,
        refused: false,
    })
}

/// A row of the retries, and its `seq`: exactly the row that was rejected.
pub(super) fn of_retries(row: &PgRow, outbox: &Outbox) -> Result<(i64, Row)> {
    let seq: i64 = row.try_get(0).map_err(failed)?;
    let attempts: i32 = row.try_get(1).map_err(failed)?;
    let word: &str = row.try_get(5).map_err(failed)?;
    let row = Row {
        id: required(row, 2)?,
        kind: required(row, 3)?,
        content: required(row, 4)?,
        content_kind: ContentKind::from_word(word)
            .ok_or_else(|| Error::new(Kind::SchemaChanged, OP).with_source("unknown content_kind"))?,
        occurred_on: time(row, 6)?,
        key: bytes(row, 7)?,
        headers: bytes(row, 8)?,
        exchange: bytes(row, 9)?,
        routing_key: bytes(row, 10)?,
        columns: read_columns(row.try_get(11).map_err(failed)?, &outbox.template_columns)?,
        attempts: u32::try_from(attempts).unwrap_or(0),
        refused: row.try_get::<_, &str>(12).map_err(failed)? == Reason::Refused.as_str(),
    };
    Ok((seq, row))
}

/// The template columns as a JSON object's text; `None` where there are none.
pub(crate) fn write_columns(columns: &[Option<Bytes>], names: &[String]) -> Option<String> {
    if columns.is_empty() {
        return None;
    }
    let object: serde_json::Map<String, serde_json::Value> = names
        .iter()
        .zip(columns)
        .map(|(name, value)| {
            let text = value.as_ref().map(|value| String::from_utf8_lossy(value).into_owned());
            (name.clone(), text.map_or(serde_json::Value::Null, serde_json::Value::String))
        })
        .collect();
    Some(serde_json::Value::Object(object).to_string())
}

/// By name: the configured columns may have changed since the row was rejected; one it does not have is null.
fn read_columns(text: Option<&str>, names: &[String]) -> Result<Box<[Option<Bytes>]>> {
    let object: serde_json::Map<String, serde_json::Value> = match text {
        None => serde_json::Map::new(),
        // The error would quote the text.
        Some(text) => serde_json::from_str(text).map_err(|_| {
            Error::new(Kind::SchemaChanged, OP).with_source("the columns of a retry are no JSON object")
        })?,
    };
    let value = |name: &String| object.get(name).and_then(|value| value.as_str()).map(copy_text);
    Ok(names.iter().map(value).collect())
}

fn copy_text(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

fn bytes(row: &PgRow, n: usize) -> Result<Option<Bytes>> {
    let raw: Option<Raw<'_>> = row.try_get(n).map_err(failed)?;
    Ok(raw.map(|raw| Bytes::copy_from_slice(raw.0)))
}

fn required(row: &PgRow, n: usize) -> Result<Bytes> {
    let missing = || Error::new(Kind::SchemaChanged, OP).with_source("a row's id, type or content is null");
    bytes(row, n)?.ok_or_else(missing)
}

fn time(row: &PgRow, n: usize) -> Result<Option<i64>> {
    let time: Option<Time> = row.try_get(n).map_err(failed)?;
    Ok(time.and_then(Time::micros))
}

fn failed(error: tokio_postgres::Error) -> Error {
    from_postgres(error, OP)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn template_columns_survive_the_table_by_name() {
        let names = ["tenant".to_owned(), "region".to_owned()];
        let columns = [Some(Bytes::from_static("k\"ö".as_bytes())), None];
        let text = write_columns(&columns, &names).unwrap();
        assert_eq!(*read_columns(Some(&text), &names).unwrap(), columns);
        let renamed = ["area".to_owned(), "tenant".to_owned()];
        assert_eq!(*read_columns(Some(&text), &renamed).unwrap(), [None, columns[0].clone()]);
        assert_eq!(write_columns(&[], &[]), None);
    }
}
