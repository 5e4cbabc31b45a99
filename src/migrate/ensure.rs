//! The steps that depend on the configuration. Each looks first, so repeating one is free.

use postrider_actors::{
    database::quote_identifier,
    error::{Error, Kind, Result},
};
use tokio_postgres::types::Type;

use super::executor::Executor;
use crate::{
    catalog::{self, Table},
    config::{AckRows, Columns, Config, SourceMode, template},
};

/// How long building or dropping an index concurrently may wait. It lets everybody read and write meanwhile and waits
/// for transactions older than itself, so patience costs nothing, and giving up leaves an invalid index behind.
const INDEX_LOCK_TIMEOUT: &str = "15min";

/// `"schema"."table"`.
pub(super) fn qualified(schema: &str, table: &str) -> String {
    format!("{}.{}", quote_identifier(schema), quote_identifier(table))
}

/// The schemas, where absent.
pub(super) async fn schemas(executor: &mut Executor<'_>, names: &[&str]) -> Result<()> {
    let mut names = names.to_vec();
    names.dedup();
    for name in names {
        let statement = "select exists (select from pg_namespace where nspname = $1)";
        let parameters = [(&name as _, Type::TEXT)];
        let question = executor.client.query_typed_one(statement, &parameters);
        let row = executor.ask("look for the schema", question).await?;
        if !row.get::<_, bool>(0) {
            let sql = format!("CREATE SCHEMA IF NOT EXISTS {}", quote_identifier(name));
            executor.run(&format!("create schema {name}"), &sql).await?;
        }
    }
    Ok(())
}

/// The outbox table, where absent: the schema the .NET world has, under the configured names.
pub(super) async fn outbox(
    executor: &mut Executor<'_>,
    config: &Config,
    found: Option<&Table>,
) -> Result<()> {
    let name = config.outbox_name();
    match found {
        Some(table) if matches!(table.kind.as_str(), "r" | "p") => return Ok(()),
        Some(_) => {
            return Err(Error::new(Kind::SchemaChanged, format!("migrate: use {name}"))
                .with_source("it is not a table")
                .with_remedy("name the table that applications insert into in outbox.table"));
        }
        None => {}
    }
    let columns = &config.outbox.columns;
    let mut definitions = vec![
        (columns.id.as_str(), "uuid PRIMARY KEY"),
        (&columns.r#type, "varchar(255) NOT NULL"),
        (&columns.content, "jsonb NOT NULL"),
        (&columns.occurred_on, "timestamptz NOT NULL"),
        (&columns.processed_on, "timestamptz"),
        (&columns.error, "text"),
    ];
    for (column, definition) in [
        (&columns.key, "text"),
        (&columns.headers, "jsonb"),
        (&columns.exchange, "text"),
        (&columns.routing_key, "text"),
    ] {
        definitions.extend(column.as_deref().map(|column| (column, definition)));
    }
    let pieces: Vec<_> = [&config.publish.exchange, &config.publish.routing_key]
        .into_iter()
        .flat_map(|text| template::parse(text).unwrap_or_default())
        .collect();
    for column in template::columns(&pieces) {
        if !definitions.iter().any(|(name, _)| *name == column) {
            definitions.push((column, "text"));
        }
    }
    let definitions: Vec<_> = definitions
        .iter()
        .map(|(name, definition)| format!("    {} {definition}", quote_identifier(name)))
        .collect();
    let (schema, table) = config.outbox_table();
    let sql =
        format!("CREATE TABLE IF NOT EXISTS {} (\n{}\n)", qualified(schema, table), definitions.join(",\n"));
    executor.run(&format!("create the outbox table {name}"), &sql).await
}

/// The index on waiting rows, unless one that serves is there, whoever made it.
pub(super) async fn index(executor: &mut Executor<'_>, config: &Config, found: Option<&Table>) -> Result<()> {
    // Kept rows are never marked: all of them would stay in the index for ever.
    if config.ack.rows == AckRows::Keep {
        return Ok(());
    }
    let (schema, table) = config.outbox_table();
    let name = catalog::waiting_index_name(table);
    let create = create_index(config, found);
    if let Some(found) = found {
        let indexes =
            executor.ask("look at the indexes", catalog::indexes(executor.client, found.oid)).await?;
        if catalog::claim_index(&indexes, &config.outbox.columns).is_some() {
            return Ok(());
        }
        if found.is_partitioned() {
            executor.note(format!(
                "{} is partitioned and PostgreSQL cannot index it concurrently; when writes may wait, run: {}",
                config.outbox_name(),
                create.replace(" CONCURRENTLY", "")
            ));
            return Ok(());
        }
        if indexes.iter().any(|index| index.name == name) {
            // Ours by its name and of no use: invalid since an interruption, or made for other columns.
            let what = "drop the unusable index on waiting rows";
            let sql = format!("DROP INDEX CONCURRENTLY IF EXISTS {}", qualified(schema, &name));
            patient(executor, what, &sql).await?;
        }
    }
    patient(executor, "build the index on waiting rows (writes go on meanwhile)", &create).await
}

async fn patient(executor: &mut Executor<'_>, what: &str, sql: &str) -> Result<()> {
    executor.run("be patient", &format!("SET lock_timeout = '{INDEX_LOCK_TIMEOUT}'")).await?;
    executor.run(what, sql).await?;
    executor.run("be prompt again", &format!("SET lock_timeout = '{}'", super::LOCK_TIMEOUT)).await
}

/// The statement that creates the index on waiting rows of the outbox.
///
/// No column of it is unbounded: a text id would make the application's INSERT fail from some length on. There is no
/// INCLUDE either: a claim locks rows, so PostgreSQL never reads the index alone.
pub fn create_index(config: &Config, found: Option<&Table>) -> String {
    let Columns { id, occurred_on, processed_on, error, .. } = &config.outbox.columns;
    let fixed_id = match found.and_then(|table| table.column(id)) {
        Some(column) => matches!(column.type_name.as_str(), "uuid" | "integer" | "bigint"),
        None => found.is_none(),
    };
    let (schema, table) = config.outbox_table();
    let mut keys = quote_identifier(occurred_on);
    if fixed_id {
        keys = format!("{keys}, {}", quote_identifier(id));
    }
    format!(
        "CREATE INDEX CONCURRENTLY IF NOT EXISTS {} ON {} ({keys}) WHERE {} IS NULL AND {} IS NULL",
        quote_identifier(&catalog::waiting_index_name(table)),
        qualified(schema, table),
        quote_identifier(processed_on),
        quote_identifier(error),
    )
}

/// The statement that creates the publication: inserts of the outbox table and nothing else.
pub fn create_publication(config: &Config, partitioned: bool) -> String {
    let (schema, table) = config.outbox_table();
    // Otherwise rows arrive under the names of the partitions.
    let root = if partitioned { ", publish_via_partition_root = true" } else { "" };
    format!(
        "CREATE PUBLICATION {} FOR TABLE {} WITH (publish = 'insert'{root})",
        quote_identifier(&config.source.wal.publication),
        qualified(schema, table),
    )
}

/// The publication, where absent; where present, that it has what the relay needs.
pub(super) async fn publication(
    executor: &mut Executor<'_>,
    config: &Config,
    found: Option<&Table>,
) -> Result<()> {
    if config.source.mode != SourceMode::Wal {
        return Ok(());
    }
    let name = &config.source.wal.publication;
    let (schema, table) = config.outbox_table();
    let question = catalog::publication(executor.client, name, schema, table);
    let Some(publication) = executor.ask("look for the publication", question).await? else {
        let sql = create_publication(config, found.is_some_and(Table::is_partitioned));
        return executor.run(&format!("create the publication {name}"), &sql).await;
    };
    let quoted = quote_identifier(name);
    let remedy = if !publication.has_table {
        format!("ALTER PUBLICATION {quoted} ADD TABLE {};", qualified(schema, table))
    } else if !publication.insert {
        format!("ALTER PUBLICATION {quoted} SET (publish = 'insert');")
    } else {
        return Ok(());
    };
    // It exists and we did not make it like this: somebody else may rely on what it is.
    Err(Error::new(Kind::DatabaseUnprepared, format!("migrate: use the publication {name}"))
        .with_source(format!("it does not publish inserts of {}", config.outbox_name()))
        .with_remedy(format!("{remedy} or name another in source.wal.publication")))
}
