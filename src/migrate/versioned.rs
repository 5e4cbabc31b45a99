//! postrider's own tables: numbered migrations, embedded in the program and applied once, each in a transaction with
//! its entry in the history.

use postrider_actors::{
    database::{from_postgres, quote_identifier, quote_literal},
    error::{Error, Kind, Result},
};
use refinery::Migration;
use refinery_core::{
    AsyncMigrate,
    traits::r#async::{AsyncQuery, AsyncTransaction},
};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use super::executor::Executor;

mod embedded {
    #![allow(missing_docs, unreachable_pub, clippy::unwrap_used)]
    refinery::embed_migrations!("migrations");
}

/// The history of applied migrations.
pub(super) const HISTORY: &str = "postrider_schema_history";

/// Applies the migrations the history does not have, and refuses to go on from a history it does not know.
pub(super) async fn apply(executor: &mut Executor<'_>, schema: &str) -> Result<()> {
    let history = format!("{}.{HISTORY}", quote_identifier(schema));
    let mut target = Target { executor, history: history.clone() };
    let mut runner = embedded::migrations::runner();
    runner.set_migration_table_name(&history);
    runner.run_async(&mut target).await.map(drop).map_err(|error| match error.kind() {
        refinery::error::Kind::Connection(..) => {
            let what = error.to_string();
            Error::new(Kind::Internal, what.trim_matches('`').to_owned()).with_source(root_cause(&error))
        }
        _ => Error::new(Kind::SchemaChanged, "migrate: compare the history with this program")
            .with_source(error.to_string())
            .with_remedy("use a postrider at least as new as the one that migrated this database"),
    })
}

fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}

/// Where refinery runs its SQL: through the executor, so that a dry run tells the same statements.
struct Target<'a, 'b> {
    executor: &'a mut Executor<'b>,
    history: String,
}

impl Target<'_, '_> {
    async fn has_history(&mut self) -> Result<bool, tokio_postgres::Error> {
        let statement = format!("select to_regclass({}) is not null", quote_literal(&self.history));
        let row = self.executor.client.query_typed_one(&statement, &[]).await?;
        Ok(row.get(0))
    }
}

impl AsyncTransaction for Target<'_, '_> {
    type Error = tokio_postgres::Error;

    async fn execute<'a, T: Iterator<Item = &'a str> + Send + 'a>(
        &mut self,
        queries: T,
    ) -> Result<usize, Self::Error> {
        let queries: Vec<&str> = queries.collect();
        // Alone, it is the history's `CREATE TABLE IF NOT EXISTS`, which needs privileges even where it does nothing.
        if let [_history] = queries.as_slice() {
            if !self.has_history().await? {
                self.executor.run_all("create the history of migrations", &queries).await?;
            }
            return Ok(1);
        }
        let done = self.transaction(&queries).await;
        if done.is_err() && !self.executor.dry_run {
            // The error that matters is the first one.
            let _ = self.executor.client.batch_execute("ROLLBACK").await;
        }
        done.map(|()| queries.len())
    }
}

impl Target<'_, '_> {
    async fn transaction(&mut self, queries: &[&str]) -> Result<(), tokio_postgres::Error> {
        self.executor.run_all("begin a migration", &["BEGIN"]).await?;
        self.executor.run_all(&purpose(queries), queries).await?;
        self.executor.run_all("commit the migration", &["COMMIT"]).await
    }
}

/// What a migration is for, by the tables it creates.
fn purpose(queries: &[&str]) -> String {
    let created = |line: &&str| line.starts_with("create table ");
    let tables = queries.iter().flat_map(|sql| sql.lines()).filter(created);
    let tables: Vec<_> = tables.filter_map(|line| line.split([' ', '(']).nth(2)).collect();
    if tables.is_empty() {
        "alter postrider's tables".to_owned()
    } else {
        format!("create {}", tables.join(", "))
    }
}

impl AsyncQuery<Vec<Migration>> for Target<'_, '_> {
    async fn query(&mut self, query: &str) -> Result<Vec<Migration>, Self::Error> {
        // In a dry run the history may not be there yet.
        if !self.has_history().await? {
            return Ok(Vec::new());
        }
        let rows = self.executor.client.query_typed(query, &[]).await?;
        let applied = rows.iter().map(|row| {
            // What refinery wrote; a value it cannot have written makes the migration differ, which is refused.
            let on = OffsetDateTime::parse(row.get(2), &Rfc3339).unwrap_or(OffsetDateTime::UNIX_EPOCH);
            Migration::applied(
                row.get(0),
                row.get(1),
                on,
                row.get::<_, String>(3).parse().unwrap_or_default(),
            )
        });
        Ok(applied.collect())
    }
}

impl AsyncMigrate for Target<'_, '_> {}

/// How many migrations of this program the history lacks.
pub async fn pending(client: &tokio_postgres::Client, schema: &str) -> Result<usize> {
    const OP: &str = "read the history of migrations";
    let history = format!("{}.{HISTORY}", quote_identifier(schema));
    let exists = format!("select to_regclass({}) is not null", quote_literal(&history));
    let all = embedded::migrations::runner().get_migrations().len();
    let exists = client.query_typed_one(&exists, &[]).await.map_err(|error| from_postgres(error, OP))?;
    if !exists.get::<_, bool>(0) {
        return Ok(all);
    }
    let count = format!("select count(*) from {history}");
    let row = client.query_typed_one(&count, &[]).await.map_err(|error| from_postgres(error, OP))?;
    Ok(all.saturating_sub(usize::try_from(row.get::<_, i64>(0)).unwrap_or_default()))
}
