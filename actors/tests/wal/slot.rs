//! The slot, and what a start makes of what earlier ones left behind.

use crate::support::{Database, Half, TABLE, id, positions};
use postrider_actors::{
    control::Intake,
    credit::Cost,
    decode::Resume,
    error::Kind,
    pipeline::exit::ExitStatus,
    position::{Lsn, Position, StreamIdentity},
    settings::RowPolicy,
    source::wal::open,
};

#[actix::test]
async fn a_restart_skips_what_was_recorded_and_nothing_else() {
    let database = Database::new(TABLE).await;
    let mut half = Half::start(&database, Resume::default()).await;
    database.sql("INSERT INTO outbox_messages (type) SELECT 'n' || n FROM generate_series(1, 600) n").await;
    // Some batches of a large transaction are recorded, its end is not: the slot stays before it.
    let mut recorded = Vec::new();
    while recorded.len() < 256 {
        let batch = half.batch().await;
        half.record(&batch);
        recorded.extend(batch.messages);
    }
    let position = half.watermark().position;
    assert_eq!(position, *positions(&recorded).last().unwrap());
    half.stop().await;

    let resume = Resume { position: Some(position), overlap: None };
    let mut half = Half::start(&database, resume).await;
    assert!(!half.created);
    let (rest, _) = half.take(600 - recorded.len()).await;
    assert_eq!(positions(&rest)[0], Position { row: position.row + 1, ..position });
    assert!(rest.iter().all(|message| recorded.iter().all(|before| id(before) != id(message))));
    half.stop().await;
    database.remove().await;
}

#[actix::test]
async fn rows_that_a_sweep_recorded_are_not_published_again() {
    for policy in [RowPolicy::Update, RowPolicy::Delete, RowPolicy::Keep] {
        let mut database = Database::new(TABLE).await;
        database.settings.ack.rows = policy;
        let stream = open(&database.settings, &database.wal, None, &Default::default()).await.unwrap();
        database
            .sql("INSERT INTO outbox_messages (type) VALUES ('swept'), ('rejected'), ('waits'), ('deleted')")
            .await;
        database
            .sql(
                "UPDATE outbox_messages SET processed_on_utc = now() WHERE type = 'swept'; \
                 UPDATE outbox_messages SET error = 'no route' WHERE type = 'rejected'; \
                 DELETE FROM outbox_messages WHERE type = 'deleted'",
            )
            .await;
        let overlap: Lsn = database.text("SELECT pg_current_wal_lsn()").await.parse().unwrap();
        database.sql("INSERT INTO outbox_messages (type, processed_on_utc) VALUES ('later', now())").await;
        let resume = Resume { position: None, overlap: Some(overlap) };
        let mut half = Half::on(&database, stream, resume);
        let expected: &[&str] = match policy {
            RowPolicy::Update => &["waits", "deleted", "later"],
            RowPolicy::Delete => &["waits", "later"],
            RowPolicy::Keep => &["swept", "rejected", "waits", "deleted", "later"],
        };
        let (messages, _) = half.take(expected.len()).await;
        let keys: Vec<_> = messages.iter().map(|message| message.routing_key.as_str()).collect();
        assert_eq!(keys, expected, "{policy:?}");
        let tip: Lsn = database.text("SELECT pg_current_wal_lsn()").await.parse().unwrap();
        half.until_durable(tip).await;
        drop(messages);
        assert_eq!(half.shared.credits.in_use(), Cost::default(), "passed rows gave their credits back");
        half.stop().await;
        database.remove().await;
    }
}

#[actix::test]
async fn a_slot_that_is_not_ours_is_refused_by_name() {
    let database = Database::new(TABLE).await;
    let slot = &database.wal.slot;
    database.sql(&format!("SELECT pg_create_logical_replication_slot('{slot}', 'test_decoding')")).await;
    let error = open(&database.settings, &database.wal, None, &Default::default()).await.unwrap_err();
    assert_eq!(error.kind(), Kind::SlotForeign);
    assert!(error.chain().contains(slot) && error.chain().contains("test_decoding"), "{}", error.chain());
    assert!(error.remedy().is_some());
    database.remove().await;
}

#[actix::test]
async fn a_slot_in_use_is_waited_for_and_free_right_after_a_stop() {
    let database = Database::new(TABLE).await;
    let half = Half::start(&database, Resume::default()).await;
    let error = open(&database.settings, &database.wal, None, &Default::default()).await.unwrap_err();
    assert_eq!(error.kind(), Kind::SlotInUse, "{}", error.chain());
    half.stop().await;
    database.slot_is_free().await;
    Half::start(&database, Resume::default()).await.stop().await;
    database.remove().await;
}

#[actix::test]
async fn a_slot_that_was_known_and_is_missing_is_lost_and_never_made_anew_unasked() {
    let mut database = Database::new(TABLE).await;
    let half = Half::start(&database, Resume::default()).await;
    let known = half.identity.clone();
    half.stop().await;
    let slot = database.wal.slot.clone();
    database.drop_slot().await;
    let error = open(&database.settings, &database.wal, Some(&known), &Default::default()).await.unwrap_err();
    assert_eq!(error.kind(), Kind::SlotLost);
    assert!(error.remedy().unwrap().contains("on_lost_slot"));
    let gone = format!("SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{slot}'");
    assert_eq!(database.text(&gone).await, "0");

    let other = StreamIdentity { system_identifier: "1".to_owned(), ..known.clone() };
    let stream = open(&database.settings, &database.wal, Some(&other), &Default::default()).await.unwrap();
    assert!(stream.created(), "another cluster's progress says nothing about this slot");
    Half::on(&database, stream, Resume::default()).stop().await;
    database.drop_slot().await;
    database.wal.recover_lost_slot = true;
    let stream = open(&database.settings, &database.wal, Some(&known), &Default::default()).await.unwrap();
    assert!(stream.created());
    Half::on(&database, stream, Resume::default()).stop().await;
    database.remove().await;
}

#[actix::test]
async fn a_publication_that_is_missing_or_lacks_the_table_is_named_with_its_remedy() {
    let database = Database::new(TABLE).await;
    for (sql, fault) in [
        ("ALTER PUBLICATION postrider DROP TABLE outbox_messages", "does not publish table"),
        ("ALTER PUBLICATION postrider SET (publish = 'delete')", "does not publish inserts"),
        ("DROP PUBLICATION postrider", "does not exist"),
    ] {
        database.sql(sql).await;
        let error = open(&database.settings, &database.wal, None, &Default::default()).await.unwrap_err();
        assert_eq!(error.kind(), Kind::DatabaseUnprepared);
        assert!(error.chain().contains(fault), "{}", error.chain());
        assert!(error.remedy().unwrap().contains("postrider migrate"));
    }
    database.remove().await;
}

#[actix::test]
async fn an_ended_walsender_is_an_outage_also_while_nothing_is_read() {
    for intake in [Intake::Open, Intake::Closed] {
        let database = Database::new(TABLE).await;
        let mut half = Half::start(&database, Resume::default()).await;
        half.intake.send_replace(intake);
        let slot = &database.wal.slot;
        database
            .sql(&format!(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{slot}'"
            ))
            .await;
        let exit = half.ended().await;
        let ExitStatus::Returned(Err(error)) = exit.status else { panic!("{exit:?}") };
        assert_eq!(error.kind(), Kind::DatabaseDown, "{}", error.chain());
        half.shared.stop.cancel();
        database.remove().await;
    }
}
