//! Runs statements, or only tells them: the same code decides in both cases.

use postrider_actors::error::{Error, Result};
use tokio_postgres::Client;

use super::{Event, Narrator, failed};

/// Runs the statements of one migrate.
pub(super) struct Executor<'a> {
    pub(super) client: &'a Client,
    pub(super) dry_run: bool,
    /// Settings of the session, made before the first statement, so that a run with nothing to do runs nothing.
    prologue: Vec<String>,
    narrate: Narrator<'a>,
}

impl<'a> Executor<'a> {
    pub(super) fn new(
        client: &'a Client,
        dry_run: bool,
        prologue: Vec<String>,
        narrate: Narrator<'a>,
    ) -> Self {
        Self { client, dry_run, prologue, narrate }
    }

    /// Runs one statement outside any transaction of ours.
    pub(super) async fn run(&mut self, what: &str, sql: &str) -> Result<()> {
        self.run_all(what, &[sql]).await.map_err(|error| failed(error, what))
    }

    /// Runs statements one after the other; the caller opens and closes the transaction where they need one.
    pub(super) async fn run_all(
        &mut self,
        what: &str,
        statements: &[&str],
    ) -> Result<(), tokio_postgres::Error> {
        for sql in std::mem::take(&mut self.prologue) {
            self.one("prepare the session", &sql).await?;
        }
        for sql in statements {
            self.one(what, sql).await?;
        }
        Ok(())
    }

    async fn one(&mut self, what: &str, sql: &str) -> Result<(), tokio_postgres::Error> {
        let sql = sql.trim().trim_end_matches(';');
        (self.narrate)(Event::Statement { what: what.to_owned(), sql: sql.to_owned() });
        if self.dry_run { Ok(()) } else { self.client.batch_execute(sql).await }
    }

    /// Awaits a question to the catalog.
    pub(super) async fn ask<T>(
        &self,
        what: &str,
        question: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T, Error> {
        question.await.map_err(|error| failed(error, what))
    }

    pub(super) fn note(&mut self, text: impl Into<String>) {
        (self.narrate)(Event::Note(text.into()));
    }
}
