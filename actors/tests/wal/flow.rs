//! What is taken when, and what is acknowledged.

use crate::support::{Database, Half, TABLE, positions};
use postrider_actors::{control::Intake, credit::Cost, decode::Resume, position::Lsn};
use std::time::Duration;

#[actix::test]
async fn an_idle_slot_follows_keepalives() {
    let database = Database::new(TABLE).await;
    let mut half = Half::start(&database, Resume::default()).await;
    let before = database.confirmed().await;
    database
        .sql("CREATE TABLE elsewhere AS SELECT n, md5(n::text) FROM generate_series(1, 50000) n; CHECKPOINT")
        .await;
    let tip: Lsn = database.text("SELECT pg_current_wal_lsn()").await.parse().unwrap();
    assert!(tip.0 - before.0 > 1 << 20);
    assert!(half.until_durable(tip).await.is_empty());
    database
        .until(
            "the slot follows",
            &format!(
                "SELECT confirmed_flush_lsn >= '{tip}' FROM pg_replication_slots WHERE slot_name = '{}'",
                database.wal.slot
            ),
        )
        .await;
    half.stop().await;
    database.remove().await;
}

#[actix::test]
async fn closed_intake_takes_nothing_and_a_drain_ends_at_its_target() {
    let database = Database::new(TABLE).await;
    let mut half = Half::start(&database, Resume::default()).await;
    half.intake.send_replace(Intake::Closed);
    // The source may be in the middle of taking one event: let it find out.
    tokio::time::sleep(Duration::from_millis(100)).await;
    database.sql("INSERT INTO outbox_messages (type) VALUES ('before')").await;
    let target: Lsn = database.text("SELECT pg_current_wal_insert_lsn()").await.parse().unwrap();
    database.sql("INSERT INTO outbox_messages (type) VALUES ('after')").await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(half.shared.credits.in_use(), Cost::default(), "nothing was taken");

    half.intake.send_replace(Intake::UpTo(target));
    let drained = half.until_durable(target).await;
    let keys: Vec<_> = drained.iter().map(|message| message.routing_key.as_str()).collect();
    assert_eq!(keys, ["before"]);

    half.intake.send_replace(Intake::Open);
    let (messages, _) = half.take(1).await;
    assert_eq!(messages[0].routing_key.as_str(), "after");
    half.stop().await;
    database.remove().await;
}

#[actix::test]
async fn a_blocked_consumer_holds_no_more_than_the_credits_and_the_walsender_stays() {
    let mut database = Database::new(TABLE).await;
    database.settings.credits = Cost { messages: 300, bytes: 1 << 20 };
    let name = database.text("SELECT current_database()").await;
    database.sql(&format!("ALTER DATABASE {name} SET wal_sender_timeout = '1500ms'")).await;
    let mut half = Half::start(&database, Resume::default()).await;
    database.sql("INSERT INTO outbox_messages (type) SELECT 'n' || n FROM generate_series(1, 20000) n").await;
    let first = half.batch().await;
    // Three of the server's timeouts without taking anything.
    tokio::time::sleep(Duration::from_millis(4500)).await;
    assert!(half.shared.credits.in_use().messages <= 300);
    half.record(&first);
    let taken = first.messages.len();
    drop(first);
    let (messages, _) = half.take(20_000 - taken).await;
    assert!(positions(&messages).is_sorted());
    drop(messages);
    half.stop().await;
    database.remove().await;
}

#[actix::test]
async fn a_row_larger_than_the_budget_travels_alone() {
    let mut database = Database::new(TABLE).await;
    database.settings.credits = Cost { messages: 10, bytes: 100_000 };
    let mut half = Half::start(&database, Resume::default()).await;
    database
        .sql(
            "INSERT INTO outbox_messages (type, content) SELECT 'n', jsonb_build_object('x', repeat('y', size)) \
             FROM unnest(ARRAY[10, 1000000, 20, 3000000, 30]) size",
        )
        .await;
    let mut sizes = Vec::new();
    while sizes.len() < 5 {
        let batch = half.batch().await;
        half.record(&batch);
        assert!(half.shared.credits.in_use().bytes <= 100_000);
        let spent: u32 = batch.messages.iter().map(|message| message.envelope.bytes).sum();
        assert_eq!(batch.credit.cost().bytes, spent, "a batch pays for exactly what is in it");
        sizes.extend(batch.messages.iter().map(|message| message.envelope.row.content.len() - 9));
    }
    assert_eq!(sizes, [10, 1_000_000, 20, 3_000_000, 30]);
    half.stop().await;
    assert_eq!(database.text("SELECT 1").await, "1");
    database.remove().await;
}
