//! What the relay's own role may do: no more than running needs.

use postrider_actors::{
    database::quote_identifier,
    error::{Error, Kind, Result},
};
use tokio_postgres::types::Type;

use super::{ensure::qualified, executor::Executor, versioned::HISTORY};
use crate::config::{AckRows, Config, SourceMode};

/// The tables `run` reads and writes.
pub const TABLES: [&str; 4] =
    ["postrider_retries", "postrider_dead_letters", "postrider_progress", "postrider_control"];

/// The privileges on the outbox table, as `GRANT` spells them.
///
/// Locking a row takes `UPDATE` on some column, and a rejection is noted in `error` whatever becomes of delivered rows.
pub fn on_outbox(config: &Config) -> Vec<String> {
    let columns = &config.outbox.columns;
    let mark =
        format!("UPDATE ({}, {})", quote_identifier(&columns.processed_on), quote_identifier(&columns.error));
    let mut privileges = vec!["SELECT".to_owned()];
    if config.ack.rows != AckRows::Keep {
        privileges.push(mark);
    }
    if config.ack.rows == AckRows::Delete || config.cleanup.retention_secs > 0 {
        privileges.push("DELETE".to_owned());
    }
    privileges
}

/// Grants `role` what it needs. Repeated grants change nothing, so they are not looked for first.
pub(super) async fn grant(executor: &mut Executor<'_>, config: &Config, role: &str) -> Result<()> {
    let statement = "select rolreplication or rolsuper from pg_roles where rolname = $1";
    let parameters = [(&role as _, Type::TEXT)];
    let question = executor.client.query_typed_opt(statement, &parameters);
    let quoted = quote_identifier(role);
    let Some(row) = executor.ask("look for the role", question).await? else {
        return Err(Error::new(Kind::DatabaseUnprepared, format!("migrate: grant to {role}"))
            .with_source("there is no such role")
            .with_remedy(format!("CREATE ROLE {quoted} LOGIN REPLICATION PASSWORD '…';")));
    };
    let own = config.database.schema.as_str();
    let (schema, table) = config.outbox_table();
    let mut schemas = vec![own, schema];
    schemas.dedup();
    for schema in schemas {
        let sql = format!("GRANT USAGE ON SCHEMA {} TO {quoted}", quote_identifier(schema));
        executor.run(&format!("let {role} use schema {schema}"), &sql).await?;
    }
    let privileges = on_outbox(config).join(", ");
    let sql = format!("GRANT {privileges} ON {} TO {quoted}", qualified(schema, table));
    executor.run(&format!("let {role} work on the outbox table"), &sql).await?;
    let ours: Vec<_> = TABLES.iter().map(|table| qualified(own, table)).collect();
    let sql = format!("GRANT SELECT, INSERT, UPDATE, DELETE ON {} TO {quoted}", ours.join(", "));
    executor.run(&format!("let {role} work on postrider's tables"), &sql).await?;
    let sql = format!("GRANT SELECT ON {} TO {quoted}", qualified(own, HISTORY));
    executor.run(&format!("let {role} read the history of migrations"), &sql).await?;
    if config.source.mode == SourceMode::Wal && !row.get::<_, bool>(0) {
        executor.note(format!(
            "{role} may not stream yet; as an administrator run: ALTER ROLE {quoted} REPLICATION;"
        ));
    }
    Ok(())
}
