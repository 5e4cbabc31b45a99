//! What the relay's role may do, and whether postrider's own tables are there.

use postrider_actors::database::{quote_identifier, quote_literal};
use tokio_postgres::types::Type;

use super::{Finding, Patient};
use crate::migrate;

const SUBJECT: &str = "privileges";

pub(super) async fn examine(patient: &Patient<'_>) -> Result<Vec<Finding>, tokio_postgres::Error> {
    let statement =
        "select current_user::text, rolsuper, rolreplication from pg_roles where rolname = current_user";
    let row = patient.client.query_typed_one(statement, &[]).await?;
    let (role, superuser, replication): (String, bool, bool) = (row.get(0), row.get(1), row.get(2));
    let quoted = quote_identifier(&role);
    let mut findings = Vec::new();
    if patient.streams() && !superuser && !replication && patient.config.database.direct_url.is_none() {
        findings.push(Finding::fail(
            SUBJECT,
            format!("{role} may not stream"),
            format!("ALTER ROLE {quoted} REPLICATION;"),
        ));
    }
    if let Some(table) = &patient.table {
        findings.extend(outbox(patient, table.oid, &role).await?);
    }
    findings.extend(ours(patient, &role).await?);
    if findings.is_empty() {
        findings.push(Finding::ok(SUBJECT, format!("{role} may do what running needs")));
    }
    Ok(findings)
}

async fn outbox(
    patient: &Patient<'_>,
    table: u32,
    role: &str,
) -> Result<Vec<Finding>, tokio_postgres::Error> {
    let (schema, name) = patient.config.outbox_table();
    let mut findings = Vec::new();
    for privilege in migrate::on_outbox(patient.config) {
        let bare = privilege.split(' ').next().unwrap_or_default();
        let columns = &patient.config.outbox.columns;
        // The columns that are marked, where the privilege is theirs; a missing column is another finding's.
        let marked = vec![columns.processed_on.as_str(), columns.error.as_str()];
        let has = if bare == "UPDATE" {
            let statement = "select coalesce(bool_and(has_column_privilege($1, attnum, 'UPDATE')), true)
                from pg_attribute where attrelid = $1 and attname::text = any($2)";
            let parameters = [(&table as _, Type::OID), (&marked as _, Type::TEXT_ARRAY)];
            patient.client.query_typed_one(statement, &parameters).await?
        } else {
            let statement = "select has_table_privilege($1, $2)";
            let parameters = [(&table as _, Type::OID), (&bare as _, Type::TEXT)];
            patient.client.query_typed_one(statement, &parameters).await?
        };
        if !has.get::<_, bool>(0) {
            let target = format!("{}.{}", quote_identifier(schema), quote_identifier(name));
            let remedy = format!("GRANT {privilege} ON {target} TO {};", quote_identifier(role));
            findings.push(Finding::fail(SUBJECT, format!("{role} lacks {bare} on {schema}.{name}"), remedy));
        }
    }
    Ok(findings)
}

async fn ours(patient: &Patient<'_>, role: &str) -> Result<Vec<Finding>, tokio_postgres::Error> {
    let schema = patient.config.database.schema.as_str();
    let tables: Vec<_> =
        migrate::TABLES.iter().map(|table| format!("{}.{table}", quote_identifier(schema))).collect();
    // A table that is not there yet is another finding's.
    let statement = "select t from unnest($1) t where to_regclass(t) is not null
        and not (select bool_and(has_table_privilege(to_regclass(t), p))
                 from unnest(array['SELECT', 'INSERT', 'UPDATE', 'DELETE']) p)";
    let rows = patient.client.query_typed(statement, &[(&tables, Type::TEXT_ARRAY)]).await?;
    let lacking: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    if lacking.is_empty() {
        return Ok(Vec::new());
    }
    let tables = lacking.join(", ");
    let remedy = format!("GRANT SELECT, INSERT, UPDATE, DELETE ON {tables} TO {};", quote_identifier(role));
    Ok(vec![Finding::fail(SUBJECT, format!("{role} may not work on {tables}"), remedy)])
}

/// Whether postrider's own tables are there.
pub(super) async fn migrations(patient: &Patient<'_>) -> Result<Vec<Finding>, tokio_postgres::Error> {
    const SUBJECT: &str = "migrations";
    let schema = patient.config.database.schema.as_str();
    let tables: Vec<_> = migrate::TABLES
        .iter()
        .map(|table| quote_literal(&format!("{}.{table}", quote_identifier(schema))))
        .collect();
    let statement =
        format!("select t from unnest(array[{}]::text[]) t where to_regclass(t) is null", tables.join(", "));
    let missing: Vec<String> =
        patient.client.query_typed(&statement, &[]).await?.iter().map(|row| row.get(0)).collect();
    if !missing.is_empty() {
        let message = format!("missing: {}", missing.join(", "));
        return Ok(vec![Finding::fail(SUBJECT, message, "postrider migrate")]);
    }
    let pending = migrate::pending(patient.client, schema).await;
    Ok(vec![match pending {
        Ok(0) => Finding::ok(SUBJECT, format!("postrider's tables are up to date in schema {schema}")),
        Ok(count) => {
            Finding::fail(SUBJECT, format!("{count} migrations are not applied"), "postrider migrate")
        }
        Err(error) => {
            Finding::warn(SUBJECT, error.chain(), "postrider migrate --role NAME lets the role read it")
        }
    }])
}
