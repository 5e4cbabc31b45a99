//! Recording the stream and the operator's tables against a real PostgreSQL.

mod support;

use postrider_actors::{
    ack::stream::{missing, record_stream, visible},
    control::Desired,
    database::{
        control::{Request, health, load_request, store_request},
        progress::{Progress, Sweep, load_progress, set_mode, set_sweep, store_progress},
    },
    envelope::{Reason, Row, Settlement, Verdict},
    position::{Lsn, Position},
    settings::RowPolicy,
};
use support::{Database, rejected, settle};
use tokio_postgres::Client;

fn progress(row: u64) -> Progress {
    Progress {
        slot: "postrider".into(),
        system_identifier: "7123456789012345678".into(),
        timeline: 1,
        position: Position { commit: Lsn(0x16_0000_0100), row },
        flush: Lsn(0x16_0000_0050),
    }
}

fn row(id: &str) -> Row {
    Row { id: id.to_owned().into(), kind: "t".into(), content: "{}".into(), ..Row::default() }
}

async fn ids(client: &Client) -> Vec<String> {
    let rows = client.query_typed("SELECT id::text FROM outbox_messages ORDER BY occurred_on_utc", &[]).await;
    rows.expect("ids").iter().map(|row| row.get(0)).collect()
}

fn all(ids: &[String], verdict: impl Fn(usize) -> Verdict) -> Vec<Settlement> {
    ids.iter().enumerate().map(|(n, id)| settle(n, row(id), verdict(n))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn marks_and_progress_are_one_transaction() {
    let database = Database::new().await;
    database.insert(3, "order", 1_000).await;
    let (outbox, publish) = (database.outbox().await, &database.settings.publish);
    let settled = all(&ids(&database.client).await, |_| Verdict::Delivered);
    let recorded = record_stream(&database.client, &outbox, &settled, Some(&progress(3)), publish)
        .await
        .expect("recorded");
    assert!(recorded.complete() && recorded.marked == 3);
    assert_eq!(database.count("outbox_messages WHERE processed_on_utc IS NOT NULL").await, 3);
    let stored = load_progress(&database.client, &outbox).await.expect("read").expect("a row");
    assert_eq!(stored.progress, Some(progress(3)));
    let after = Progress { position: Position::end_of(Lsn(0x16_0000_0200)), ..progress(0) };
    record_stream(&database.client, &outbox, &[], Some(&after), publish).await.expect("recorded");
    let stored = load_progress(&database.client, &outbox).await.expect("read").expect("a row");
    assert_eq!(stored.progress, Some(after), "the end of a transaction survives a bigint");
}

/// What a relay still had to commit when it was frozen, it commits when it thaws: another may have gone on long ago.
#[tokio::test(flavor = "multi_thread")]
async fn progress_that_is_older_or_another_streams_changes_nothing_and_its_marks_count() {
    let database = Database::new().await;
    database.insert(4, "order", 1_000).await;
    let (outbox, publish) = (database.outbox().await, &database.settings.publish);
    store_progress(&database.client, &outbox, &progress(7)).await.expect("stored");
    let settled = all(&ids(&database.client).await, |_| Verdict::Delivered);
    let stale = Progress { slot: "before".into(), ..progress(9) };
    for (settled, late) in settled.chunks(2).zip([progress(6), stale]) {
        let recorded = record_stream(&database.client, &outbox, settled, Some(&late), publish).await;
        assert_eq!(recorded.expect("recorded").marked, 2);
        let stored = load_progress(&database.client, &outbox).await.expect("read").expect("a row");
        assert_eq!(stored.progress, Some(progress(7)));
    }
    record_stream(&database.client, &outbox, &[], Some(&progress(8)), publish).await.expect("recorded");
    let stored = load_progress(&database.client, &outbox).await.expect("read").expect("a row");
    assert_eq!(stored.progress, Some(progress(8)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mark_that_hits_too_few_rows_leaves_progress_where_it_is() {
    let database = Database::new().await;
    database.insert(2, "order", 1_000).await;
    let (outbox, publish) = (database.outbox().await, &database.settings.publish);
    let mut ids = ids(&database.client).await;
    let gone = "00000000-0000-0000-0000-000000000000".to_owned();
    ids.push(gone.clone());
    for last in [Verdict::Delivered, rejected(Reason::Nacked)] {
        let settled = all(&ids, |n| if n == 2 { last.clone() } else { Verdict::Delivered });
        let recorded = record_stream(&database.client, &outbox, &settled, Some(&progress(3)), publish).await;
        let recorded = recorded.expect("an answer");
        assert_eq!((recorded.complete(), recorded.expected, recorded.marked), (false, 3, 2));
        assert_eq!(load_progress(&database.client, &outbox).await.expect("read"), None);
    }
    assert_eq!(database.count("postrider_retries").await, 1, "a rejection is kept though its row is gone");
    let ids: Vec<_> = ids.iter().map(String::as_str).collect();
    assert_eq!(missing(&database.client, &outbox, &ids).await.expect("an answer"), [gone]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rejection_recorded_twice_waits_once() {
    let database = Database::new().await;
    database.insert(4, "order", 1_000).await;
    let (outbox, publish) = (database.outbox().await, &database.settings.publish);
    let reasons = [Reason::Nacked, Reason::Invalid];
    let settled = all(&ids(&database.client).await, |n| match n {
        0 | 1 => rejected(reasons[n]),
        2 => Verdict::Abandoned,
        _ => Verdict::Delivered,
    });
    for _ in 0..2 {
        let recorded = record_stream(&database.client, &outbox, &settled, Some(&progress(3)), publish)
            .await
            .expect("ok");
        assert_eq!((recorded.retried, recorded.parked, recorded.marked), (1, 1, 3));
    }
    assert_eq!(database.count("postrider_retries").await, 1);
    assert_eq!(database.count("postrider_dead_letters").await, 1);
    assert_eq!(database.count("outbox_messages WHERE processed_on_utc IS NULL AND error IS NULL").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_id_that_comes_twice_is_hit_once_and_enough() {
    let database = Database::new().await;
    database.insert(2, "order", 1_000).await;
    let (outbox, publish) = (database.outbox().await, &database.settings.publish);
    let mut ids = ids(&database.client).await;
    ids.extend(ids.clone());
    for last in [Verdict::Delivered, rejected(Reason::Nacked)] {
        let settled = all(&ids, |n| if n == 3 { last.clone() } else { Verdict::Delivered });
        let recorded = record_stream(&database.client, &outbox, &settled, Some(&progress(4)), publish).await;
        let recorded = recorded.expect("recorded");
        assert!(recorded.complete() && recorded.marked == 2, "{recorded:?}");
    }
    assert_eq!(database.count("postrider_retries").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn kept_rows_are_not_touched() {
    let mut database = Database::new().await;
    database.settings.ack.rows = RowPolicy::Keep;
    database.insert(2, "order", 1_000).await;
    let (outbox, publish) = (database.outbox().await, &database.settings.publish);
    let settled = all(&ids(&database.client).await, |n| match n {
        0 => rejected(Reason::Nacked),
        _ => Verdict::Delivered,
    });
    let recorded = record_stream(&database.client, &outbox, &settled, Some(&progress(2)), publish)
        .await
        .expect("recorded");
    assert!(recorded.complete());
    assert_eq!(database.count("outbox_messages WHERE processed_on_utc IS NULL AND error IS NULL").await, 2);
    assert_eq!(database.count("postrider_retries").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_is_visible_once_it_has_ended_and_not_before() {
    let database = Database::new().await;
    let xid: String = database.value("SELECT (pg_current_xact_id()::text::int8 & 4294967295)::text").await;
    let ended: u32 = xid.parse().expect("an xid");
    assert!(visible(&database.client, ended).await.expect("an answer"));

    let other = Database::new().await;
    other.run("BEGIN").await;
    let xid: String = other.value("SELECT (pg_current_xact_id()::text::int8 & 4294967295)::text").await;
    let open: u32 = xid.parse().expect("an xid");
    assert!(!visible(&database.client, open).await.expect("an answer"), "it runs");
    database.run("CREATE TABLE later ()").await;
    assert!(!visible(&database.client, open).await.expect("an answer"), "later ones have ended");
    other.run("COMMIT").await;
    assert!(visible(&database.client, open).await.expect("an answer"), "it has ended");
    assert!(!visible(&database.client, open.wrapping_add(1000)).await.expect("an answer"), "not begun yet");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_asked_for_and_where_the_sweep_stands_are_kept() {
    let database = Database::new().await;
    let (client, outbox) = (&database.client, database.outbox().await);
    assert_eq!(load_request(client, &outbox).await.expect("read"), Request::default());
    let drain = Request { desired: Desired::Drain, drain_target: Some("16/100".into()) };
    store_request(client, &outbox, &drain).await.expect("stored");
    assert_eq!(load_request(client, &outbox).await.expect("read"), drain);
    set_sweep(client, &outbox, Sweep::Pending, None).await.expect("stored");
    set_sweep(client, &outbox, Sweep::Done, Some(Lsn(77))).await.expect("stored");
    set_mode(client, &outbox, "poll").await.expect("stored");
    let stored = load_progress(client, &outbox).await.expect("read").expect("a row");
    assert_eq!((stored.sweep, stored.sweep_end, stored.mode.as_str()), (Sweep::Done, Some(Lsn(77)), "poll"));
    assert_eq!(stored.progress, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_figures_are_read_in_one_statement() {
    let mut database = Database::new().await;
    database.insert(5, "order", 1_000).await;
    let slot = database.name.clone();
    let create = format!("SELECT FROM pg_create_logical_replication_slot('{slot}', 'pgoutput')");
    database.run(&create).await;
    let outbox = database.outbox().await;
    let seen = health(&database.client, &outbox, Some(&slot)).await.expect("figures");
    assert_eq!((seen.retries, seen.dead_letters, seen.unprocessed), (0, 0, Some(5)));
    assert!(seen.oldest_unprocessed.is_some_and(|age| age.as_secs() > 1_000_000));
    let stood = seen.slot.expect("the slot");
    assert!(
        !stood.active && stood.wal_status.as_deref() == Some("reserved") && stood.confirmed_flush.is_some()
    );
    assert!(seen.wal_lsn > Lsn::ZERO && seen.now > 1_600_000_000_000_000 && !seen.in_recovery);
    database.settings.ack.rows = RowPolicy::Keep;
    let outbox = database.outbox().await;
    let seen = health(&database.client, &outbox, Some("no_such_slot")).await.expect("figures");
    assert_eq!((seen.oldest_unprocessed, seen.unprocessed, seen.slot), (None, None, None));
    database.run(&format!("SELECT pg_drop_replication_slot('{slot}')")).await;
}
