//! A trigger that sends NOTIFY for every row makes commits wait for each other.

use postrider_actors::database::quote_identifier;
use tokio_postgres::types::Type;

use super::{Finding, Patient};

pub(super) async fn examine(patient: &Patient<'_>) -> Result<Vec<Finding>, tokio_postgres::Error> {
    let Some(table) = &patient.table else { return Ok(Vec::new()) };
    let statement =
        "select t.tgname::text, p.proname::text from pg_trigger t join pg_proc p on p.oid = t.tgfoid
        where t.tgrelid = $1 and not t.tgisinternal and t.tgenabled <> 'D'
          and p.prosrc ~* '\\m(pg_notify|notify)\\M' order by 1";
    let rows = patient.client.query_typed(statement, &[(&table.oid, Type::OID)]).await?;
    let (schema, name) = patient.config.outbox_table();
    let findings = rows.iter().map(|row| {
        let (trigger, function): (String, String) = (row.get(0), row.get(1));
        let remedy = format!(
            "ALTER TABLE {}.{} DISABLE TRIGGER {};",
            quote_identifier(schema),
            quote_identifier(name),
            quote_identifier(&trigger)
        );
        let message = format!(
            "{trigger} calls {function}, which sends NOTIFY: transactions that do commit one at a time"
        );
        Finding::warn("trigger", message, remedy)
    });
    Ok(findings.collect())
}
