//! Rejected rows as arrays, one element a row, for the statements that copy, put off and park them.

use std::sync::Arc;

use tokio_postgres::types::Type;

use super::{
    attempt::{Attempt, decide},
    rows::Parameter,
};
use crate::{
    database::{outbox::Outbox, values::Time},
    envelope::{Rejection, Row},
    error::{Error, Kind, Result},
    settings::PublishSettings,
    source::rows::write_columns,
};

/// Words about a rejection are kept up to here: a broker's reply text is shorter, and they are there to be read.
const DETAIL_CHARS: usize = 500;

/// Rows with the decision about each, as columns.
#[derive(Debug, Default)]
pub(super) struct Rejected<'a> {
    ids: Vec<&'a str>,
    kinds: Vec<&'a str>,
    contents: Vec<&'a [u8]>,
    content_kinds: Vec<&'a str>,
    times: Vec<Option<Time>>,
    keys: Vec<Option<&'a str>>,
    headers: Vec<Option<&'a str>>,
    exchanges: Vec<Option<&'a str>>,
    routing_keys: Vec<Option<&'a str>>,
    columns: Vec<Option<String>>,
    attempts: Vec<i32>,
    reasons: Vec<&'static str>,
    details: Vec<String>,
    pauses: Vec<i64>,
    /// Of rows that come from the retries.
    seqs: Vec<i64>,
}

impl<'a> Rejected<'a> {
    /// Adds a row; `seq` is its place in the retries, if it comes from there.
    fn push(
        &mut self,
        row: &'a Row,
        why: &Rejection,
        attempt: Attempt,
        seq: Option<i64>,
        outbox: &Outbox,
    ) -> Result<()> {
        self.ids.push(text(&row.id)?);
        self.attempts.push(i32::try_from(attempt.attempts).unwrap_or(i32::MAX));
        self.reasons.push(why.reason.as_str());
        self.details.push(why.detail.chars().filter(|c| *c != '\0').take(DETAIL_CHARS).collect());
        let millis = attempt.pause.unwrap_or_default().as_millis();
        self.pauses.push(i64::try_from(millis).unwrap_or(i64::MAX));
        if let Some(seq) = seq {
            self.seqs.push(seq);
            return Ok(());
        }
        self.kinds.push(text(&row.kind)?);
        self.contents.push(&row.content);
        self.content_kinds.push(row.content_kind.as_str());
        self.times.push(row.occurred_on.map(Time::At));
        self.keys.push(optional(row.key.as_ref())?);
        self.headers.push(optional(row.headers.as_ref())?);
        self.exchanges.push(optional(row.exchange.as_ref())?);
        self.routing_keys.push(optional(row.routing_key.as_ref())?);
        self.columns.push(write_columns(&row.columns, &outbox.template_columns));
        Ok(())
    }

    pub(super) fn len(&self) -> usize {
        self.ids.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// The parameters of `insert_retries` (with `pauses`) or `insert_dead_letters`.
    pub(super) fn copies(&self, pauses: bool) -> Vec<Parameter<'_>> {
        let mut copies: Vec<Parameter<'_>> = vec![
            (&self.ids, Type::TEXT_ARRAY),
            (&self.kinds, Type::TEXT_ARRAY),
            (&self.contents, Type::BYTEA_ARRAY),
            (&self.content_kinds, Type::TEXT_ARRAY),
            (&self.times, Type::TIMESTAMPTZ_ARRAY),
            (&self.keys, Type::TEXT_ARRAY),
            (&self.headers, Type::TEXT_ARRAY),
            (&self.exchanges, Type::TEXT_ARRAY),
            (&self.routing_keys, Type::TEXT_ARRAY),
            (&self.columns, Type::TEXT_ARRAY),
        ];
        copies.extend(self.decisions(pauses));
        copies
    }

    /// The parameters of `update_retries` (with `pauses`) or `park_retries`.
    pub(super) fn updates(&self, pauses: bool) -> Vec<Parameter<'_>> {
        let mut updates: Vec<Parameter<'_>> = vec![(&self.seqs, Type::INT8_ARRAY)];
        updates.extend(self.decisions(pauses));
        updates
    }

    fn decisions(&self, pauses: bool) -> impl Iterator<Item = Parameter<'_>> {
        let decisions: [Parameter<'_>; 4] = [
            (&self.attempts, Type::INT4_ARRAY),
            (&self.reasons, Type::TEXT_ARRAY),
            (&self.details, Type::TEXT_ARRAY),
            (&self.pauses, Type::INT8_ARRAY),
        ];
        decisions.into_iter().take(if pauses { 4 } else { 3 })
    }
}

/// Rejected rows by what becomes of them, and what their outbox rows are told.
#[derive(Debug, Default)]
pub(super) struct Decisions<'a> {
    /// Come back later.
    pub(super) retried: Rejected<'a>,
    /// Do not.
    pub(super) parked: Rejected<'a>,
    /// `$1`–`$3` of `rejected`: all of both.
    ids: Vec<&'a str>,
    errors: Vec<String>,
    parks: Vec<bool>,
}

impl<'a> Decisions<'a> {
    /// Decides about one row.
    pub(super) fn add(
        &mut self,
        row: &'a Row,
        why: &Rejection,
        seq: Option<i64>,
        (outbox, settings): (&Arc<Outbox>, &PublishSettings),
    ) -> Result<()> {
        let attempt = decide(why.reason, row.attempts, settings, fastrand::f64());
        let into = if attempt.pause.is_some() { &mut self.retried } else { &mut self.parked };
        into.push(row, why, attempt, seq, outbox)?;
        let detail = into.details.last().map_or("", String::as_str);
        self.ids.push(text(&row.id)?);
        self.errors.push(format!("{}: {detail}", why.reason.as_str()));
        self.parks.push(attempt.pause.is_none());
        Ok(())
    }

    pub(super) fn len(&self) -> usize {
        self.ids.len()
    }

    /// The parameters of `rejected`.
    pub(super) fn marks(&self) -> [Parameter<'_>; 3] {
        [(&self.ids, Type::TEXT_ARRAY), (&self.errors, Type::TEXT_ARRAY), (&self.parks, Type::BOOL_ARRAY)]
    }
}

/// A column's text. PostgreSQL sends UTF-8, as we asked; the error does not repeat what is not.
pub(super) fn text(bytes: &[u8]) -> Result<&str> {
    std::str::from_utf8(bytes)
        .map_err(|_| Error::new(Kind::Protocol, "record a row").with_source("a text column is not UTF-8"))
}

fn optional(bytes: Option<&bytes::Bytes>) -> Result<Option<&str>> {
    bytes.map(|bytes| text(bytes)).transpose()
}
