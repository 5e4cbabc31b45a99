//! `postrider migrate`.

use std::time::Duration;

use crate::database::{Database, printed, rows, text};

/// Everything a database holds that migrate could have made.
const OBJECTS: &str = "select relkind::text || ' ' || relname from pg_class
    where relnamespace not in ('pg_catalog'::regnamespace, 'information_schema'::regnamespace, 'pg_toast'::regnamespace)
    union all select 'publication ' || pubname from pg_publication order by 1";

#[tokio::test]
async fn a_second_migrate_finds_nothing_to_do() {
    let database = Database::fresh().await;
    assert!(printed(&database.postrider(&["migrate"], &[])).ends_with("done\n"));
    let client = database.client().await;
    let objects = rows(&client, OBJECTS).await;
    for expected in [
        "r outbox_messages",
        "r postrider_control",
        "r postrider_dead_letters",
        "r postrider_progress",
        "r postrider_retries",
        "r postrider_schema_history",
        "i postrider_waiting_outbox_messages",
        "publication postrider",
    ] {
        assert!(objects.iter().any(|object| object == expected), "{expected}: {objects:?}");
    }
    assert_eq!(printed(&database.postrider(&["migrate"], &[])), "nothing to do\n");
    assert_eq!(rows(&client, OBJECTS).await, objects);
}

#[tokio::test]
async fn a_dry_run_changes_nothing_and_its_sql_does_what_migrate_does() {
    let database = Database::fresh().await;
    let client = database.client().await;
    let before = rows(&client, OBJECTS).await;
    let sql = printed(&database.postrider(&["migrate", "--dry-run"], &[]));
    assert_eq!(rows(&client, OBJECTS).await, before);
    // As psql would: one statement at a time, since CREATE INDEX CONCURRENTLY allows no transaction around it.
    for statement in sql.split(";\n\n") {
        client.batch_execute(statement).await.unwrap_or_else(|error| panic!("{statement}: {error:?}"));
    }
    assert_eq!(printed(&database.postrider(&["migrate", "--dry-run"], &[])), "-- nothing to do\n");
}

#[tokio::test]
async fn our_tables_live_in_the_configured_schema_and_the_outbox_where_it_is() {
    let database = Database::fresh().await;
    let client = database.client().await;
    client.batch_execute("create schema \"Sales\"").await.unwrap();
    let variables = [("POSTRIDER_DATABASE__SCHEMA", "relay"), ("POSTRIDER_OUTBOX__TABLE", "Sales.Outbox")];
    printed(&database.postrider(&["migrate"], &variables));
    let query =
        "select count(*) from relay.postrider_progress union all select count(*) from \"Sales\".\"Outbox\"";
    assert_eq!(rows(&client, query).await, ["0", "0"]);
    assert_eq!(printed(&database.postrider(&["migrate"], &variables)), "nothing to do\n");
}

/// C28. Random text does not compress, so nothing shortens it before it meets an index.
#[tokio::test]
async fn ten_kilobytes_of_random_text_in_every_text_column_can_be_inserted() {
    let database = Database::fresh().await;
    let client = database.client().await;
    // A text id is bounded by the primary key alone, at a little over 2,700 bytes: ours must not be stricter.
    client
        .batch_execute(
            "create table outbox_messages (id text primary key, type text not null, content text not null,
             occurred_on_utc timestamptz not null, processed_on_utc timestamptz, error text, key text, routing_key text)",
        )
        .await
        .unwrap();
    let variables = [
        ("POSTRIDER_OUTBOX__COLUMNS__KEY", "key"),
        ("POSTRIDER_OUTBOX__COLUMNS__ROUTING_KEY", "routing_key"),
    ];
    printed(&database.postrider(&["migrate"], &variables));
    client
        .batch_execute(
            "create function noise(bytes int) returns text language sql volatile as
                 $$ select string_agg(chr(33 + (random() * 90)::int), '') from generate_series(1, bytes) $$;
             insert into outbox_messages select noise(2690), noise(10240), noise(10240), now(), null, null, noise(10240),
                 noise(10240);
             insert into outbox_messages select noise(2690), noise(10240), noise(10240), now(), now(), noise(10240),
                 noise(10240), noise(10240);
             insert into postrider_retries (message_id, type, content, content_kind, key, headers, exchange, routing_key,
                 columns, attempts, reason, detail, next_attempt_at)
             select noise(10240), noise(10240), convert_to(noise(10240), 'UTF8'), 'text', noise(10240), noise(10240),
                 noise(10240), noise(10240), noise(10240), 1, noise(10240), noise(10240), now();
             insert into postrider_dead_letters (message_id, type, content, content_kind, key, headers, exchange,
                 routing_key, columns, attempts, reason, detail)
             select noise(10240), noise(10240), convert_to(noise(10240), 'UTF8'), 'text', noise(10240), noise(10240),
                 noise(10240), noise(10240), noise(10240), 1, noise(10240), noise(10240);
             insert into postrider_progress (outbox, mode, slot, system_identifier, sweep_cursor)
             select noise(127), noise(10240), noise(10240), noise(10240), noise(10240);
             insert into postrider_control (outbox, desired, drain_target) select noise(127), 'run', noise(10240);",
        )
        .await
        .unwrap();
    // Longer names cannot exist; a documented CHECK says so, not an index.
    let long = client
        .batch_execute("insert into postrider_control (outbox, desired) select noise(10240), 'run'")
        .await;
    assert_eq!(long.unwrap_err().code().map(|code| code.code().to_owned()).as_deref(), Some("23514"));
}

#[tokio::test]
async fn an_invalid_index_left_by_an_interruption_is_rebuilt() {
    let database = Database::fresh().await;
    printed(&database.postrider(&["migrate"], &[]));
    let client = database.client().await;
    // What an interrupted CREATE INDEX CONCURRENTLY leaves behind.
    client
        .batch_execute(
            "update pg_index set indisvalid = false
             where indexrelid = 'postrider_waiting_outbox_messages'::regclass",
        )
        .await
        .unwrap();
    let told = printed(&database.postrider(&["migrate"], &[]));
    assert!(told.contains("drop the unusable index") && told.contains("build the index"), "{told}");
    let valid =
        "select indisvalid from pg_index where indexrelid = 'postrider_waiting_outbox_messages'::regclass";
    assert_eq!(rows(&client, valid).await, ["t"]);
}

#[tokio::test]
async fn an_index_that_already_serves_is_used_and_kept_rows_get_none() {
    let database = Database::fresh().await;
    let client = database.client().await;
    let keep = [("POSTRIDER_ACK__ROWS", "keep"), ("POSTRIDER_SOURCE__WAL__FIRST_START", "sweep")];
    printed(&database.postrider(&["migrate"], &keep));
    let ours = "select count(*) from pg_class where relname like 'postrider_waiting%'";
    assert_eq!(rows(&client, ours).await, ["0"]);
    client
        .batch_execute(
            "create index theirs on outbox_messages (occurred_on_utc) where processed_on_utc is null",
        )
        .await
        .unwrap();
    assert_eq!(printed(&database.postrider(&["migrate"], &[])), "nothing to do\n");
    assert_eq!(rows(&client, ours).await, ["0"]);
}

#[tokio::test]
async fn two_migrates_at_a_time_serialize_and_both_succeed() {
    let database = Database::fresh().await;
    let outputs = std::thread::scope(|scope| {
        let runs: Vec<_> = (0..3).map(|_| scope.spawn(|| database.postrider(&["migrate"], &[]))).collect();
        runs.into_iter().map(|run| run.join().expect("the run ends")).collect::<Vec<_>>()
    });
    let told: Vec<_> = outputs.iter().map(printed).collect();
    let did = told.iter().filter(|told| told.ends_with("done\n")).count();
    assert_eq!(did, 1, "one did it, the others found it done: {told:?}");
}

#[tokio::test]
async fn a_locked_outbox_stalls_nobody_for_long_and_migrate_says_what_to_do() {
    let database = Database::fresh().await;
    let client = database.client().await;
    printed(&database.postrider(&["migrate"], &[("POSTRIDER_SOURCE__MODE", "poll")]));
    let blocker = database.client().await;
    blocker.batch_execute("begin; lock table outbox_messages in access exclusive mode").await.unwrap();
    let begun = std::time::Instant::now();
    let output = database.postrider(&["migrate"], &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains("hint: another transaction holds the table"),
        "{}",
        text(&output.stderr)
    );
    assert!(begun.elapsed() < Duration::from_secs(30));
    blocker.batch_execute("rollback").await.unwrap();
    assert_eq!(rows(&client, "select count(*) from pg_publication").await, ["0"]);
    assert!(printed(&database.postrider(&["migrate"], &[])).contains("create the publication postrider"));
}

#[tokio::test]
async fn the_granted_role_may_do_what_running_needs_and_no_more() {
    let database = Database::fresh().await;
    let client = database.client().await;
    let role = format!("{}_role", database.name);
    let missing = database.postrider(&["migrate", "--role", &role], &[]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(text(&missing.stderr).contains("hint: CREATE ROLE"), "{}", text(&missing.stderr));
    client.batch_execute(&format!("create role {role} login password 'secret'")).await.unwrap();
    let told = printed(&database.postrider(&["migrate", "--role", &role], &[]));
    assert!(told.contains("REPLICATION"), "{told}");
    client
        .batch_execute(&format!(
            "insert into outbox_messages values (gen_random_uuid(), 't', '{{}}', now(), null, null);
             set role {role};
             select * from outbox_messages for update skip locked;
             update outbox_messages set processed_on_utc = now(), error = 'x';
             insert into postrider_control (outbox, desired) values ('public.outbox_messages', 'run');
             insert into postrider_retries (message_id, type, content, content_kind, attempts, reason, detail,
                 next_attempt_at) values ('1', 't', '', 'json', 1, 'r', 'd', now());
             delete from postrider_retries;"
        ))
        .await
        .unwrap();
    for forbidden in [
        "delete from outbox_messages",
        "insert into outbox_messages (id) values (gen_random_uuid())",
        "update outbox_messages set content = '{}'",
        "create table mine ()",
    ] {
        let refused = client.batch_execute(forbidden).await.expect_err(forbidden);
        assert_eq!(
            refused.code().map(|code| code.code().to_owned()).as_deref(),
            Some("42501"),
            "{forbidden}"
        );
    }
    client.batch_execute(&format!("reset role; drop owned by {role}; drop role {role}")).await.unwrap();
}

#[tokio::test]
async fn a_publication_of_somebody_else_s_is_reported_and_not_changed() {
    let database = Database::fresh().await;
    let client = database.client().await;
    client
        .batch_execute("create table other (id int); create publication postrider for table other")
        .await
        .unwrap();
    let output = database.postrider(&["migrate"], &[]);
    assert_eq!(output.status.code(), Some(1));
    let expected = "hint: ALTER PUBLICATION \"postrider\" ADD TABLE \"public\".\"outbox_messages\";";
    assert!(text(&output.stderr).contains(expected), "{}", text(&output.stderr));
    assert_eq!(rows(&client, "select tablename from pg_publication_tables").await, ["other"]);
}
