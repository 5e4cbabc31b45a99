//! Rows as they were committed, and as they come out.

use crate::support::{Database, Half, TABLE, bodies, headers, positions};
use postrider_actors::{
    decode::Resume,
    envelope::{Reason, Verdict},
    error::Kind,
    pipeline::exit::ExitStatus,
    position::Lsn,
};

#[actix::test]
async fn committed_rows_arrive_in_commit_order_and_rolled_back_ones_never() {
    let database = Database::new(TABLE).await;
    let mut half = Half::start(&database, Resume::default()).await;
    assert!(half.created);
    database.sql("INSERT INTO outbox_messages (type) VALUES ('one')").await;
    database.sql("BEGIN; INSERT INTO outbox_messages (type) VALUES ('never'); ROLLBACK").await;
    database.sql("BEGIN; INSERT INTO outbox_messages (type) VALUES ('two'), ('three'); COMMIT").await;
    let (messages, refused) = half.take(3).await;
    assert!(refused.is_empty());
    let keys: Vec<_> = messages.iter().map(|message| message.routing_key.as_str()).collect();
    assert_eq!(keys, ["one", "two", "three"]);
    assert!(positions(&messages).is_sorted());
    half.stop().await;
    database.remove().await;
}

#[actix::test]
async fn operations_that_insert_no_row_are_skipped_and_acknowledged() {
    let database = Database::new(TABLE).await;
    database
        .sql(
            "CREATE TYPE mood AS ENUM ('sad', 'ok'); ALTER TABLE outbox_messages ADD mood mood DEFAULT 'ok'; \
             CREATE TABLE orders (id int PRIMARY KEY, note text); DROP PUBLICATION postrider; \
             CREATE PUBLICATION postrider FOR ALL TABLES",
        )
        .await;
    let mut half = Half::start(&database, Resume::default()).await;
    database.sql("INSERT INTO outbox_messages (type) VALUES ('first')").await;
    database
        .sql("INSERT INTO orders VALUES (1, 'x'); UPDATE orders SET note = 'y'; DELETE FROM orders")
        .await;
    database.sql("SELECT pg_logical_emit_message(true, 'audit', 'in a transaction')").await;
    database.sql("SELECT pg_logical_emit_message(false, 'audit', 'outside')").await;
    database.sql("TRUNCATE orders, outbox_messages").await;
    let origin = database.wal.slot.clone();
    database
        .sql(&format!(
            "SELECT pg_replication_origin_create('{origin}'); SELECT pg_replication_origin_session_setup('{origin}')"
        ))
        .await;
    database
        .sql(
            "BEGIN; SELECT pg_replication_origin_xact_setup('0/1', now()); \
             INSERT INTO outbox_messages (type) VALUES ('from elsewhere'); COMMIT",
        )
        .await;
    database
        .sql(&format!(
            "SELECT pg_replication_origin_session_reset(); SELECT pg_replication_origin_drop('{origin}')"
        ))
        .await;
    database.sql("ALTER TABLE outbox_messages DROP COLUMN mood").await;
    database.sql("INSERT INTO outbox_messages (type) VALUES ('last')").await;
    let (messages, _) = half.take(3).await;
    let keys: Vec<_> = messages.iter().map(|message| message.routing_key.as_str()).collect();
    assert_eq!(keys, ["first", "from elsewhere", "last"]);
    let tip: Lsn = database.text("SELECT pg_current_wal_lsn()").await.parse().unwrap();
    assert!(half.until_durable(tip).await.is_empty());
    half.stop().await;
    assert!(database.confirmed().await >= tip, "everything was acknowledged");
    database.remove().await;
}

#[actix::test]
async fn each_insert_is_one_message_whatever_else_its_transaction_does() {
    let database = Database::new(TABLE).await;
    let mut half = Half::start(&database, Resume::default()).await;
    database
        .sql(
            "BEGIN; INSERT INTO outbox_messages (type, content) VALUES ('deleted', '{\"a\": 1}'); \
             DELETE FROM outbox_messages; COMMIT",
        )
        .await;
    database
        .sql(
            "BEGIN; INSERT INTO outbox_messages (type, content) VALUES ('updated', '{\"b\": 2}'); \
             UPDATE outbox_messages SET content = '{\"b\": 3}'; COMMIT",
        )
        .await;
    database
        .sql(
            "INSERT INTO outbox_messages (type, content) \
             SELECT 'large', jsonb_build_object('t', string_agg(md5(n::text), '')) FROM generate_series(1, 2000) n",
        )
        .await;
    database.sql("UPDATE outbox_messages SET processed_on_utc = now() WHERE type = 'large'").await;
    database.sql("INSERT INTO outbox_messages (type) VALUES ('last')").await;
    let (messages, _) = half.take(4).await;
    let found: Vec<_> = messages
        .iter()
        .map(|message| (message.routing_key.as_str().to_owned(), message.envelope.row.content.len()))
        .collect();
    let expected = [("deleted", 8), ("updated", 8), ("large", 64_000 + 9), ("last", 2)];
    assert_eq!(found, expected.map(|(kind, length)| (kind.to_owned(), length)));
    assert_eq!(messages[1].envelope.row.content.as_ref(), b"{\"b\": 2}", "the body as it was inserted");
    half.stop().await;
    database.remove().await;
}

/// What JSON allows and careless relays change.
const CORNERS: [&str; 8] = [
    r#"{"big": 123456789012345678901234567890.000000000000000000000001000}"#,
    r#"{"exp": 1e400, "neg": -0.0}"#,
    r#"{"nul": "\u0000", "pair": "\ud83d\ude00"}"#,
    r#"{"k": 1, "k": 2,   "k":3 }"#,
    "null",
    r#""just text é 😀""#,
    "[]",
    "  {\t\"spaced\" :\n true }  ",
];

#[actix::test]
async fn bodies_are_byte_for_byte_the_columns_text() {
    let deep = format!("{}1{}", "[".repeat(500), "]".repeat(500));
    for (kind, content_type) in [
        ("json", "application/json"),
        ("jsonb", "application/json"),
        ("text", "text/plain; charset=utf-8"),
        ("varchar", "text/plain; charset=utf-8"),
    ] {
        let table = TABLE.replace("content jsonb NOT NULL DEFAULT '{}'", &format!("content {kind} NOT NULL"));
        let database = Database::new(&table).await;
        let mut half = Half::start(&database, Resume::default()).await;
        let mut count = 0;
        for corner in CORNERS.iter().copied().chain([deep.as_str()]) {
            // jsonb has no NUL and normalises numbers that text keeps.
            if kind == "jsonb" && corner.contains("u0000") {
                continue;
            }
            let sql = format!("INSERT INTO outbox_messages (content) VALUES ($c${corner}$c$)");
            database.sql(&sql).await;
            count += 1;
        }
        let (messages, _) = half.take(count).await;
        let found = bodies(&messages);
        let stored = "SELECT id::text, content::text FROM outbox_messages";
        for row in database.client.query_typed(stored, &[]).await.unwrap() {
            let (id, content): (String, String) = (row.get(0), row.get(1));
            assert_eq!(found[&id], content.as_bytes(), "{kind}: {content}");
        }
        assert_eq!(messages[0].properties.content_type().as_ref().unwrap().as_str(), content_type);
        half.stop().await;
        database.remove().await;
    }
}

#[actix::test]
async fn bytea_is_published_as_its_bytes_whatever_the_database_prefers() {
    let database =
        Database::new(&TABLE.replace("content jsonb NOT NULL DEFAULT '{}'", "content bytea NOT NULL")).await;
    let name = database.text("SELECT current_database()").await;
    database
        .sql(&format!(
            "ALTER DATABASE {name} SET bytea_output = 'escape'; ALTER DATABASE {name} SET datestyle = 'German'; \
             ALTER DATABASE {name} SET timezone = 'Asia/Kathmandu'"
        ))
        .await;
    let mut half = Half::start(&database, Resume::default()).await;
    database
        .sql(
            "INSERT INTO outbox_messages (type, content, occurred_on_utc) \
             VALUES ('all', (SELECT string_agg(set_byte('\\x00', 0, n), '' ORDER BY n) FROM generate_series(0, 255) n), \
             '2026-01-02 03:04:05.123456+00'), ('none', '', 'infinity')",
        )
        .await;
    let (messages, _) = half.take(2).await;
    assert_eq!(messages[0].envelope.row.content.as_ref(), (0..=255).collect::<Vec<u8>>());
    assert_eq!(messages[0].properties.content_type().as_ref().unwrap().as_str(), "application/octet-stream");
    assert_eq!(*messages[0].properties.timestamp(), Some(1_767_323_045));
    assert_eq!(messages[0].envelope.row.occurred_on, Some(1_767_323_045_123_456));
    assert!(messages[1].envelope.row.content.is_empty() && messages[1].properties.timestamp().is_none());
    half.stop().await;
    database.remove().await;
}

#[actix::test]
async fn a_row_that_amqp_cannot_carry_is_refused_and_its_neighbours_are_not() {
    let table =
        TABLE.replace("type varchar(255)", "type text").replace("error text", "error text, headers jsonb");
    let mut database = Database::new(&table).await;
    database.settings.outbox.columns.headers = Some("headers".to_owned());
    let mut half = Half::start(&database, Resume::default()).await;
    database
        .sql(
            "INSERT INTO outbox_messages (type, headers) VALUES ('good', '{\"tenant\": \"acme\", \"n\": 1}'), \
             (repeat('é', 128), NULL), ('140 KB', jsonb_build_object('h', repeat('x', 140000))), \
             ('5 MB', jsonb_build_object('h', repeat('x', 5000000))), ('CC', '{\"CC\": \"x\"}'), \
             (repeat('a', 255), NULL)",
        )
        .await;
    let (messages, refused) = half.take(6).await;
    assert_eq!(messages.len(), 2);
    assert_eq!(headers(&messages[0]).inner().len(), 2);
    assert_eq!(messages[1].routing_key.as_str().len(), 255);
    for settlement in &refused {
        let Verdict::Rejected(rejection) = &settlement.verdict else { panic!() };
        assert_eq!(rejection.reason, Reason::Invalid);
        assert!(!rejection.detail.contains("xxx") && !rejection.detail.contains('é'), "{}", rejection.detail);
    }
    half.stop().await;
    database.remove().await;
}

#[actix::test]
async fn a_column_that_goes_missing_stops_the_decoder_by_name() {
    let database = Database::new(TABLE).await;
    let mut half = Half::start(&database, Resume::default()).await;
    database.sql("ALTER TABLE outbox_messages RENAME content TO body").await;
    database.sql("INSERT INTO outbox_messages (type) VALUES ('x')").await;
    let exit = half.ended().await;
    let ExitStatus::Returned(Err(error)) = exit.status else { panic!("{exit:?}") };
    assert_eq!(error.kind(), Kind::SchemaChanged);
    assert!(error.chain().contains("column content"), "{}", error.chain());
    half.shared.stop.cancel();
    database.remove().await;
}
