//! Whether claims find waiting rows by an index, and whether some index makes the application's INSERT fail.

use postrider_actors::database::quote_identifier;

use super::{Finding, Patient};
use crate::{
    catalog::{self, Index, Table},
    config::{AckRows, Config},
    migrate,
};

const SUBJECT: &str = "index";

pub(super) async fn examine(patient: &Patient<'_>) -> Result<Vec<Finding>, tokio_postgres::Error> {
    let Some(table) = &patient.table else { return Ok(Vec::new()) };
    let indexes = catalog::indexes(patient.client, table.oid).await?;
    Ok(judge(patient.config, table, &indexes))
}

fn judge(config: &Config, table: &Table, indexes: &[Index]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let (schema, name) = config.outbox_table();
    let drop = |index: &Index| {
        format!("DROP INDEX CONCURRENTLY {}.{};", quote_identifier(schema), quote_identifier(&index.name))
    };
    if config.ack.rows != AckRows::Keep {
        let ours = catalog::waiting_index_name(name);
        let create = migrate::create_index(config, Some(table));
        findings.push(match catalog::claim_index(indexes, &config.outbox.columns) {
            Some(index) => Finding::ok(SUBJECT, format!("{} finds waiting rows", index.name)),
            None => match indexes.iter().find(|index| index.name == ours) {
                Some(index) if !index.valid => {
                    let message = format!("{} is invalid: its building was interrupted", index.name);
                    Finding::warn(
                        SUBJECT,
                        message,
                        format!("postrider migrate, or {} {create};", drop(index)),
                    )
                }
                _ => {
                    let message = "no index finds waiting rows: every claim reads the whole table";
                    Finding::warn(SUBJECT, message, format!("postrider migrate, or {create};"))
                }
            },
        });
    }
    for index in indexes {
        let unbounded = |name: &String| {
            let name = name.trim_matches('"');
            let column = table.column(name)?;
            // A varchar may be bounded; what is carried along with the content hardly ever is.
            matches!(column.type_name.as_str(), "text" | "jsonb" | "json" | "bytea").then(|| name.to_owned())
        };
        let content = config.outbox.columns.content.as_str();
        let keyed =
            index.keys.iter().filter(|key| key.trim_matches('"') == content && index.method == "btree");
        if let Some(column) = index.included.iter().chain(keyed).find_map(unbounded) {
            let message = format!(
                "{} holds {column}: an INSERT fails once a row takes more than 2,704 bytes there",
                index.name
            );
            findings.push(Finding::warn(SUBJECT, message, drop(index)));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::{super::Verdict, *};
    use crate::catalog::Column;

    fn table() -> Table {
        let column = |name: &str, type_name: &str| Column {
            name: name.into(),
            type_name: type_name.into(),
            not_null: true,
        };
        let columns = vec![column("id", "uuid"), column("content", "jsonb")];
        Table { oid: 1, kind: "r".into(), owner: "o".into(), unlogged: false, columns }
    }

    fn index(included: &[&str]) -> Index {
        Index {
            name: "ix_outbox".into(),
            method: "btree".into(),
            valid: true,
            keys: vec!["occurred_on_utc".into()],
            included: included.iter().map(|name| (*name).to_owned()).collect(),
            predicate: Some("(processed_on_utc IS NULL)".into()),
        }
    }

    #[test]
    fn a_usable_index_is_fine_whoever_made_it() {
        let findings = judge(&Config::default(), &table(), &[index(&["id"])]);
        assert_eq!(findings, [Finding::ok("index", "ix_outbox finds waiting rows")]);
    }

    #[test]
    fn an_index_that_carries_the_content_is_warned_about_with_its_drop() {
        let findings = judge(&Config::default(), &table(), &[index(&["id", "content"])]);
        assert_eq!(findings[1].verdict, Verdict::Warn);
        assert_eq!(findings[1].remedy.as_deref(), Some("DROP INDEX CONCURRENTLY \"public\".\"ix_outbox\";"));
    }

    #[test]
    fn no_index_comes_with_the_statement_that_makes_it() {
        let findings = judge(&Config::default(), &table(), &[]);
        assert!(findings[0].remedy.as_deref().unwrap().contains("CREATE INDEX CONCURRENTLY"), "{findings:?}");
    }
}
