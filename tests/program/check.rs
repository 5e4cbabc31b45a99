//! `postrider check`.

use serde_json::Value;

use crate::database::{Database, printed, text};

/// The findings about `subject` in the JSON report: verdict, message, remedy.
fn findings(database: &Database, variables: &[(&str, &str)], subject: &str) -> Vec<(String, String, String)> {
    let output = database.postrider(&["check", "--json"], variables);
    let report: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    let checks = report["checks"].as_array().expect("a list");
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    checks
        .iter()
        .filter(|check| check["subject"] == subject)
        .map(|check| (text(&check["verdict"]), text(&check["message"]), text(&check["remedy"])))
        .collect()
}

fn only(database: &Database, variables: &[(&str, &str)], subject: &str) -> (String, String, String) {
    let mut found = findings(database, variables, subject);
    assert_eq!(found.len(), 1, "{subject}: {found:?}");
    found.remove(0)
}

#[tokio::test]
async fn after_migrate_everything_about_the_database_is_ok() {
    let database = Database::fresh().await;
    printed(&database.postrider(&["migrate"], &[]));
    let output = text(&database.postrider(&["check"], &[]).stdout);
    let troubled = output.lines().filter(|line| line.starts_with("fail") || line.starts_with("warn"));
    let troubled: Vec<_> =
        troubled.filter(|line| !line.contains("broker") && !line.contains("exchange")).collect();
    assert!(troubled.is_empty(), "{output}");
    assert!(!output.contains('\x1b'), "no colour where no terminal is");
}

#[tokio::test]
async fn before_migrate_what_is_missing_is_named_and_the_exit_code_is_1() {
    let database = Database::fresh().await;
    assert_eq!(database.postrider(&["check"], &[]).status.code(), Some(1));
    assert_eq!(only(&database, &[], "table").0, "fail");
    assert_eq!(only(&database, &[], "migrations").2, "postrider migrate");
    assert!(only(&database, &[], "publication").2.contains("CREATE PUBLICATION"), "the exact statement");
}

#[tokio::test]
async fn the_statement_named_for_a_missing_index_makes_the_finding_ok() {
    let database = Database::fresh().await;
    printed(&database.postrider(&["migrate"], &[]));
    let client = database.client().await;
    client.batch_execute("drop index postrider_waiting_outbox_messages").await.unwrap();
    let (verdict, _, remedy) = only(&database, &[], "index");
    assert_eq!(verdict, "warn");
    client.batch_execute(remedy.strip_prefix("postrider migrate, or ").unwrap()).await.unwrap();
    assert_eq!(only(&database, &[], "index").0, "ok");
}

#[tokio::test]
async fn a_column_of_the_wrong_type_and_an_index_over_the_content_are_found() {
    let database = Database::fresh().await;
    let client = database.client().await;
    client
        .batch_execute(
            "create table outbox_messages (id numeric primary key, type text, content jsonb, occurred_on_utc timestamptz,
                 processed_on_utc timestamptz, error text);
             create index fat on outbox_messages (occurred_on_utc) include (content) where processed_on_utc is null",
        )
        .await
        .unwrap();
    printed(&database.postrider(&["migrate"], &[]));
    let (verdict, message, _) = only(&database, &[], "table");
    assert_eq!(verdict, "fail");
    assert!(message.contains("id is numeric, allowed for outbox.columns.id: uuid"), "{message}");
    let fat = findings(&database, &[], "index").into_iter().find(|finding| finding.0 == "warn").unwrap();
    assert_eq!(fat.2, "DROP INDEX CONCURRENTLY \"public\".\"fat\";");
}

#[tokio::test]
async fn a_trigger_that_notifies_is_warned_about_and_a_foreign_slot_fails() {
    let database = Database::fresh().await;
    printed(&database.postrider(&["migrate"], &[]));
    let client = database.client().await;
    let slot = database.name.as_str();
    client
        .batch_execute(
            "create function ring() returns trigger language plpgsql as
                 $$ begin perform pg_notify('postrider', ''); return null; end $$;
             create trigger bell after insert on outbox_messages execute function ring()",
        )
        .await
        .unwrap();
    let create = format!("select pg_create_logical_replication_slot('{slot}', 'test_decoding')");
    client.batch_execute(&create).await.unwrap();
    let (verdict, _, remedy) = only(&database, &[], "trigger");
    assert_eq!((verdict.as_str(), remedy.contains("DISABLE TRIGGER \"bell\"")), ("warn", true));
    let variables = [("POSTRIDER_SOURCE__WAL__SLOT", slot)];
    let (verdict, message, remedy) = only(&database, &variables, "slot");
    assert_eq!(verdict, "fail", "{message}");
    client.batch_execute(remedy.split_inclusive(';').next().unwrap()).await.unwrap();
    assert_eq!(only(&database, &variables, "slot").0, "ok");
}

#[tokio::test]
async fn a_role_without_privileges_gets_the_grants_it_needs() {
    let database = Database::fresh().await;
    printed(&database.postrider(&["migrate"], &[]));
    let client = database.client().await;
    let role = format!("{}_role", database.name);
    client.batch_execute(&format!("create role {role} login password 'secret'")).await.unwrap();
    let url = database.url_of(&role, "secret");
    let variables = [("POSTRIDER_DATABASE__URL", url.as_str())];
    for (verdict, message, remedy) in findings(&database, &variables, "privileges") {
        assert_eq!(verdict, "fail", "{message}");
        client.batch_execute(&remedy).await.unwrap_or_else(|error| panic!("{remedy}: {error:?}"));
    }
    assert_eq!(only(&database, &variables, "privileges").0, "ok");
    client.batch_execute(&format!("drop owned by {role}; drop role {role}")).await.unwrap();
}
