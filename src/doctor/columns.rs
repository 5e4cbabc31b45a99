//! Whether the outbox table is one, and has the configured columns in types the relay reads.

use postrider_actors::database::quote_identifier;

use super::{Finding, Patient};
use crate::{
    catalog::Table,
    config::{AckRows, Config, template},
};

const SUBJECT: &str = "table";

/// What a role's column may be; the first is what a new column would be.
const TEXTS: [&str; 3] = ["text", "character varying", "character"];
const IDS: [&str; 5] = ["uuid", "integer", "bigint", "text", "character varying"];
const CONTENTS: [&str; 5] = ["jsonb", "json", "text", "bytea", "character varying"];
const TIMES: [&str; 2] = ["timestamp with time zone", "timestamp without time zone"];
const HEADERS: [&str; 1] = ["jsonb"];

pub(super) fn examine(patient: &Patient<'_>) -> Vec<Finding> {
    let name = patient.config.outbox_name();
    let Some(table) = &patient.table else {
        return vec![Finding::fail(
            SUBJECT,
            format!("{name} does not exist"),
            "postrider migrate (or set outbox.table)",
        )];
    };
    let mut findings = shape(patient.config, table);
    if patient.streams() && table.unlogged {
        let (schema, bare) = patient.config.outbox_table();
        let remedy =
            format!("ALTER TABLE {}.{} SET LOGGED;", quote_identifier(schema), quote_identifier(bare));
        findings.push(Finding::fail(
            SUBJECT,
            format!("{name} is unlogged: nothing of it is in the WAL"),
            remedy,
        ));
    }
    if patient.config.outbox.columns.key.is_some() {
        findings.push(Finding::warn(
            "order",
            "outbox.columns.key is set: it fills templates, and order by key is not promised",
            "nothing, unless consumers rely on an order by key",
        ));
    }
    if findings.is_empty() {
        findings.push(Finding::ok(SUBJECT, format!("{name} has the configured columns")));
    }
    findings
}

/// What is wrong with the columns of `table`.
fn shape(config: &Config, table: &Table) -> Vec<Finding> {
    let name = config.outbox_name();
    if !matches!(table.kind.as_str(), "r" | "p") {
        let remedy = "name the table that applications insert into in outbox.table";
        return vec![Finding::fail(SUBJECT, format!("{name} is not a table"), remedy)];
    }
    let (schema, bare) = config.outbox_table();
    let target = format!("{}.{}", quote_identifier(schema), quote_identifier(bare));
    let mut findings = Vec::new();
    for (key, column, allowed) in expected(config) {
        match table.column(&column) {
            None => findings.push(Finding::fail(
                SUBJECT,
                format!("{name} has no column {column} ({key})"),
                format!(
                    "ALTER TABLE {target} ADD COLUMN {} {}; or set {key}",
                    quote_identifier(&column),
                    allowed.first().unwrap_or(&"text")
                ),
            )),
            Some(found) if allowed.is_empty() || allowed.contains(&found.type_name.as_str()) => {}
            Some(found) => findings.push(Finding::fail(
                SUBJECT,
                format!("{name}.{column} is {}, allowed for {key}: {}", found.type_name, allowed.join(", ")),
                format!("set {key} to a column of one of these types"),
            )),
        }
    }
    let marks =
        [("processed_on", &config.outbox.columns.processed_on), ("error", &config.outbox.columns.error)];
    for (role, column) in marks {
        if config.ack.rows != AckRows::Keep && table.column(column).is_some_and(|column| column.not_null) {
            findings.push(Finding::fail(
                SUBJECT,
                format!("{name}.{column} is NOT NULL; null is how a row waits (outbox.columns.{role})"),
                format!("ALTER TABLE {target} ALTER COLUMN {} DROP NOT NULL;", quote_identifier(column)),
            ));
        }
    }
    findings
}

/// Every configured column: its key, its name and the types it may have; none named means any, since any has a text form.
fn expected(config: &Config) -> Vec<(String, String, &'static [&'static str])> {
    let columns = &config.outbox.columns;
    let roles: [(&str, Option<&String>, &'static [&'static str]); 10] = [
        ("id", Some(&columns.id), &IDS),
        ("type", Some(&columns.r#type), &TEXTS),
        ("content", Some(&columns.content), &CONTENTS),
        ("occurred_on", Some(&columns.occurred_on), &TIMES),
        ("processed_on", Some(&columns.processed_on), &TIMES),
        ("error", Some(&columns.error), &TEXTS),
        ("key", columns.key.as_ref(), &["text", "character varying", "uuid", "integer", "bigint"]),
        ("headers", columns.headers.as_ref(), &HEADERS),
        ("exchange", columns.exchange.as_ref(), &TEXTS),
        ("routing_key", columns.routing_key.as_ref(), &TEXTS),
    ];
    let mut expected: Vec<_> = roles
        .into_iter()
        .filter_map(|(role, name, types)| Some((format!("outbox.columns.{role}"), name?.clone(), types)))
        .collect();
    for (key, text) in
        [("publish.exchange", &config.publish.exchange), ("publish.routing_key", &config.publish.routing_key)]
    {
        let pieces = template::parse(text).unwrap_or_default();
        for column in template::columns(&pieces) {
            expected.push((key.to_owned(), column.to_owned(), &[]));
        }
    }
    expected
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::Column;

    fn table(columns: &[(&str, &str)]) -> Table {
        let column = |(name, type_name): &(&str, &str)| Column {
            name: (*name).to_owned(),
            type_name: (*type_name).to_owned(),
            not_null: false,
        };
        Table {
            oid: 1,
            kind: "r".into(),
            owner: "o".into(),
            unlogged: false,
            columns: columns.iter().map(column).collect(),
        }
    }

    const DEFAULT: [(&str, &str); 6] = [
        ("id", "uuid"),
        ("type", "character varying"),
        ("content", "jsonb"),
        ("occurred_on_utc", "timestamp with time zone"),
        ("processed_on_utc", "timestamp with time zone"),
        ("error", "text"),
    ];

    #[test]
    fn the_schema_of_the_net_world_is_fine() {
        assert_eq!(shape(&Config::default(), &table(&DEFAULT)), []);
    }

    #[test]
    fn a_missing_column_comes_with_the_statement_that_adds_it() {
        let findings = shape(&Config::default(), &table(&DEFAULT[..5]));
        assert_eq!(findings.len(), 1);
        assert!(
            findings[0].remedy.as_deref().unwrap().starts_with(
                "ALTER TABLE \"public\".\"outbox_messages\" ADD COLUMN \"error\" text; or set outbox.columns.error"
            ),
            "{:?}",
            findings[0]
        );
    }

    #[test]
    fn a_column_of_another_type_names_the_types_it_may_have() {
        let mut columns = DEFAULT;
        columns[0].1 = "numeric";
        let findings = shape(&Config::default(), &table(&columns));
        let expected =
            "public.outbox_messages.id is numeric, allowed for outbox.columns.id: uuid, integer, bigint";
        assert!(findings[0].message.starts_with(expected), "{:?}", findings[0]);
    }

    #[test]
    fn a_template_s_column_must_exist_and_may_have_any_type() {
        let mut config = Config::default();
        config.publish.routing_key = "{tenant}".into();
        assert_eq!(shape(&config, &table(&DEFAULT)).len(), 1);
        let mut columns = DEFAULT.to_vec();
        columns.push(("tenant", "inet"));
        assert_eq!(shape(&config, &table(&columns)), []);
    }
}
