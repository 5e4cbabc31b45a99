//! Claims against a real PostgreSQL: what they lock, what they read, how they end.

mod support;

use futures_util::TryStreamExt;
use postrider_actors::{
    database::outbox::Outbox,
    envelope::{Reason, Row, Verdict},
    error::Kind,
    settings::RowPolicy,
    source::claim::{Claim, Wanted},
};
use std::{sync::Arc, time::Duration};
use support::{Database, rejected, settle, until};

const OUTBOX: Wanted = Wanted::Outbox { since: None };

/// Claims up to `limit` rows and takes only their ids.
async fn claim(pool: &deadpool_postgres::Pool, outbox: &Arc<Outbox>, limit: u32) -> (Box<Claim>, Vec<Row>) {
    let (claim, rows, _) = Claim::open(pool, outbox, OUTBOX, limit).await.expect("a claim");
    let rows: Vec<_> = rows.try_collect().await.expect("rows");
    let id = |row: &tokio_postgres::Row| Row {
        id: row.get::<_, String>(0).into(),
        kind: "t".into(),
        content: "{}".into(),
        ..Row::default()
    };
    (Box::new(claim), rows.iter().map(id).collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn two_claims_never_share_a_row_and_a_dropped_one_gives_its_rows_back() {
    let database = Database::new().await;
    database.insert(10, "order", 1_000).await;
    let (outbox, (shared, _intake)) = (database.outbox().await, database.shared());
    let (first, first_rows) = claim(&shared.pool, &outbox, 6).await;
    let (second, second_rows) = claim(&shared.pool, &outbox, 6).await;
    assert_eq!((first_rows.len(), second_rows.len()), (6, 4));
    assert!(first_rows.iter().all(|row| !second_rows.contains(row)));
    drop(first);
    let free = "SELECT count(*) = 6 FROM (SELECT FROM outbox_messages FOR UPDATE SKIP LOCKED) AS free";
    until(&database, free, Duration::from_secs(5)).await;
    second.release().await.expect("released");
    let (_third, third_rows) = claim(&shared.pool, &outbox, 20).await;
    assert_eq!(third_rows.len(), 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_commits_the_delivered_and_releases_the_abandoned() {
    let database = Database::new().await;
    database.insert(3, "order", 1_000).await;
    let (outbox, (shared, _intake)) = (database.outbox().await, database.shared());
    let (claimed, rows) = claim(&shared.pool, &outbox, 10).await;
    let verdicts = [Verdict::Delivered, Verdict::Abandoned, rejected(Reason::Unroutable)];
    let settled: Vec<_> = rows
        .into_iter()
        .zip(verdicts)
        .enumerate()
        .map(|(n, (row, verdict))| settle(n, row, verdict))
        .collect();
    let recorded = claimed.record(&settled, &database.settings.publish).await.expect("recorded");
    assert_eq!((recorded.delivered, recorded.retried, recorded.released), (1, 1, 1));
    assert_eq!(
        database.count("outbox_messages WHERE processed_on_utc IS NOT NULL AND error IS NULL").await,
        1
    );
    assert_eq!(database.count("outbox_messages WHERE error = 'unroutable: no route'").await, 1);
    assert_eq!(database.count("postrider_retries WHERE attempts = 1 AND reason = 'unroutable'").await, 1);
    let (_again, rows) = claim(&shared.pool, &outbox, 10).await;
    assert_eq!(rows.len(), 1, "the abandoned one alone");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_record_leaves_everything_as_it_was() {
    let database = Database::new().await;
    database.insert(2, "order", 1_000).await;
    let (outbox, (shared, _intake)) = (database.outbox().await, database.shared());
    let (claimed, rows) = claim(&shared.pool, &outbox, 10).await;
    database.run("ALTER TABLE postrider_retries RENAME TO elsewhere").await;
    let verdicts = [Verdict::Delivered, rejected(Reason::Nacked)];
    let settled: Vec<_> = rows
        .into_iter()
        .zip(verdicts)
        .enumerate()
        .map(|(n, (row, verdict))| settle(n, row, verdict))
        .collect();
    let error = claimed.record(&settled, &database.settings.publish).await.expect_err("a table is missing");
    assert_eq!(error.kind(), Kind::SchemaChanged, "{}", error.chain());
    assert_eq!(database.count("outbox_messages WHERE processed_on_utc IS NULL AND error IS NULL").await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn delivered_rows_are_deleted_where_asked_for() {
    let mut database = Database::new().await;
    database.settings.ack.rows = RowPolicy::Delete;
    database.insert(2, "order", 1_000).await;
    let (outbox, (shared, _intake)) = (database.outbox().await, database.shared());
    let (claimed, rows) = claim(&shared.pool, &outbox, 10).await;
    let verdicts = [Verdict::Delivered, rejected(Reason::Invalid)];
    let settled: Vec<_> = rows
        .into_iter()
        .zip(verdicts)
        .enumerate()
        .map(|(n, (row, verdict))| settle(n, row, verdict))
        .collect();
    claimed.record(&settled, &database.settings.publish).await.expect("recorded");
    assert_eq!(database.count("outbox_messages").await, 1);
    assert_eq!(
        database.count("outbox_messages WHERE processed_on_utc IS NOT NULL AND error IS NOT NULL").await,
        1
    );
    assert_eq!(database.count("postrider_dead_letters WHERE reason = 'invalid'").await, 1);
}

/// The claim query's plan, under the settings a claim makes.
async fn plan(database: &Database, sql: &str, arguments: &str) -> String {
    let begin = "BEGIN; SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL enable_sort = off";
    database.run(begin).await;
    let mut sql = format!("EXPLAIN {sql}");
    for (n, argument) in arguments.split(';').enumerate() {
        sql = sql.replace(&format!("${}", n + 1), argument);
    }
    let rows = database.client.query_typed(&sql, &[]).await.expect("a plan");
    database.run("ROLLBACK").await;
    rows.iter().map(|row| row.get::<_, String>(0) + "\n").collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_claim_walks_the_partial_index_in_order_with_or_without_statistics() {
    let database = Database::new().await;
    database.insert(20_000, "order", 1_000).await;
    let outbox = database.outbox().await;
    for analyzed in [false, true] {
        if analyzed {
            database.run("ANALYZE outbox_messages").await;
        }
        for (sql, arguments) in [
            (&outbox.sql.claim, "400"),
            (&outbox.sql.claim_since, "400;'1970-01-01 00:16:40.01+00'::timestamptz"),
            (&outbox.sql.claim_until, "400;now()"),
        ] {
            let plan = plan(&database, sql, arguments).await;
            assert!(plan.contains("Index Scan using outbox_waiting"), "{plan}");
            assert!(!plan.contains("Sort"), "{plan}");
            if arguments.contains("1970") {
                assert!(plan.contains("Index Cond: (occurred_on_utc >="), "{plan}");
            }
        }
        let page =
            plan(&database, &outbox.sql.page_first, "400;'ffffffff-ffff-ffff-ffff-ffffffffffff'").await;
        assert!(page.contains("Index Scan using outbox_messages_pkey"), "{page}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_on_the_whole_table_is_called_that() {
    let database = Database::new().await;
    database.insert(1, "order", 1_000).await;
    let (outbox, (shared, _intake)) = (database.outbox().await, database.shared());
    database.run("BEGIN; LOCK TABLE outbox_messages IN ACCESS EXCLUSIVE MODE").await;
    let error = match Claim::open(&shared.pool, &outbox, OUTBOX, 1).await {
        Ok((_claim, rows, _)) => {
            let error = rows.try_collect::<Vec<_>>().await.expect_err("the table is locked");
            support::from_postgres(error, "claim")
        }
        Err(error) => error,
    };
    database.run("ROLLBACK").await;
    assert_eq!(error.kind(), Kind::TableLocked, "{}", error.chain());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_cannot_be_used_is_named_with_its_column() {
    let mut database = Database::of("int", "text").await;
    assert_eq!(database.outbox().await.content_kind.as_str(), "text");
    database.settings.outbox.columns.processed_on = "nowhere".into();
    let error = Outbox::load(&database.client, &database.settings).await.expect_err("no such column");
    assert_eq!(error.kind(), Kind::SchemaChanged);
    assert!(error.chain().contains("\"nowhere\" does not exist"), "{}", error.chain());
    database.settings.outbox.table = "nothing".into();
    let error = Outbox::load(&database.client, &database.settings).await.expect_err("no such table");
    assert!(error.chain().contains("\"public\".\"nothing\" does not exist"), "{}", error.chain());
}
