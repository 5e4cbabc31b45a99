//! Whether the publication lets every row of the outbox through.

use postrider_actors::database::quote_identifier;

use super::{Finding, Patient};
use crate::{
    catalog::{self, Publication, Table},
    config::Config,
    migrate,
};

const SUBJECT: &str = "publication";

pub(super) async fn examine(patient: &Patient<'_>) -> Result<Vec<Finding>, tokio_postgres::Error> {
    if !patient.streams() {
        return Ok(Vec::new());
    }
    let (schema, table) = patient.config.outbox_table();
    let name = &patient.config.source.wal.publication;
    let partitioned = patient.table.as_ref().is_some_and(Table::is_partitioned);
    Ok(match catalog::publication(patient.client, name, schema, table).await? {
        Some(publication) => judge(patient.config, &publication, partitioned),
        None => {
            let remedy = format!(
                "postrider migrate, or {};",
                migrate::create_publication(patient.config, partitioned)
            );
            vec![Finding::fail(SUBJECT, format!("{name} does not exist"), remedy)]
        }
    })
}

fn judge(config: &Config, publication: &Publication, partitioned: bool) -> Vec<Finding> {
    let name = &config.source.wal.publication;
    let quoted = quote_identifier(name);
    let (schema, table) = config.outbox_table();
    let target = format!("{}.{}", quote_identifier(schema), quote_identifier(table));
    let outbox = config.outbox_name();
    let mut findings = Vec::new();
    if partitioned && !publication.via_root {
        let remedy = format!("ALTER PUBLICATION {quoted} SET (publish_via_partition_root = true);");
        findings.push(Finding::fail(SUBJECT, format!("{name} streams {outbox} as its partitions"), remedy));
    } else if !publication.has_table {
        let remedy = format!("ALTER PUBLICATION {quoted} ADD TABLE {target};");
        findings.push(Finding::fail(SUBJECT, format!("{name} does not hold {outbox}"), remedy));
    }
    if !publication.insert {
        let remedy = format!("ALTER PUBLICATION {quoted} SET (publish = 'insert');");
        findings.push(Finding::fail(SUBJECT, format!("{name} does not publish inserts"), remedy));
    }
    let whole = format!(
        "ALTER PUBLICATION {quoted} DROP TABLE {target}; ALTER PUBLICATION {quoted} ADD TABLE {target};"
    );
    if let Some(filter) = &publication.row_filter {
        let message = format!("{name} publishes only rows WHERE {filter}; the others are never seen");
        findings.push(Finding::warn(SUBJECT, message, whole.clone()));
    }
    if let Some(columns) = &publication.column_list {
        let message = format!("{name} is limited to the columns {}", columns.join(", "));
        findings.push(Finding::warn(SUBJECT, message, whole));
    }
    if publication.others > 0 {
        let message = format!(
            "{name} also publishes {} other tables, streamed to the relay in vain",
            publication.others
        );
        findings.push(Finding::warn(
            SUBJECT,
            message,
            format!("ALTER PUBLICATION {quoted} SET TABLE {target};"),
        ));
    }
    if publication.more && publication.insert {
        let remedy = format!("ALTER PUBLICATION {quoted} SET (publish = 'insert');");
        let message =
            format!("{name} publishes more than inserts: every mark comes back over the wire in vain");
        findings.push(Finding::warn(SUBJECT, message, remedy));
    }
    if findings.is_empty() {
        findings.push(Finding::ok(SUBJECT, format!("{name} publishes inserts of {outbox}")));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::{super::Verdict, *};

    const GOOD: Publication = Publication {
        insert: true,
        more: false,
        via_root: false,
        has_table: true,
        row_filter: None,
        column_list: None,
        others: 0,
    };

    #[test]
    fn what_migrate_creates_is_fine() {
        let findings = judge(&Config::default(), &GOOD, false);
        assert_eq!(
            findings,
            [Finding::ok("publication", "postrider publishes inserts of public.outbox_messages")]
        );
    }

    #[test]
    fn what_keeps_rows_back_fails_and_what_costs_warns() {
        let verdict = |publication| judge(&Config::default(), &publication, false)[0].verdict;
        assert_eq!(verdict(Publication { has_table: false, ..GOOD }), Verdict::Fail);
        assert_eq!(verdict(Publication { insert: false, ..GOOD }), Verdict::Fail);
        assert_eq!(verdict(Publication { others: 2, ..GOOD }), Verdict::Warn);
        assert_eq!(verdict(Publication { row_filter: Some("(a > 1)".into()), ..GOOD }), Verdict::Warn);
        assert_eq!(judge(&Config::default(), &GOOD, true)[0].verdict, Verdict::Fail, "partitions");
    }
}
