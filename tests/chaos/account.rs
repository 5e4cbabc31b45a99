//! At the end: is everything that was committed delivered, or kept where an operator sees it, and nothing else?

use std::collections::HashSet;
use std::time::{Duration, Instant};

use tokio_postgres::Client;
use uuid::Uuid;

use crate::load::{Route, Row, Transaction};
use crate::receipts::Seen;
use crate::subject::Subject;
use crate::watch::STALL_LIMIT;

/// Rows by what became of them.
#[derive(Debug, Default)]
pub(crate) struct Account {
    pub(crate) committed: usize,
    pub(crate) rolled_back: usize,
    pub(crate) delivered: usize,
    /// Unroutable ones that wait for another attempt or are parked.
    pub(crate) unroutable: usize,
    pub(crate) repeated: usize,
    /// Committed, not delivered and not kept as unroutable; with where they are.
    pub(crate) lost: Vec<(Uuid, String)>,
    /// Delivered but never committed.
    pub(crate) phantoms: Vec<String>,
    /// Delivered with another body than was written.
    pub(crate) altered: Vec<Uuid>,
    /// Parked though there was, or soon was again, a queue for them.
    pub(crate) wrongly_parked: usize,
    /// Delivered, and never recorded as such.
    pub(crate) unrecorded: i64,
    /// First deliveries out of commit order, of rows that nobody rejected.
    pub(crate) out_of_order: usize,
    /// From the end of its commit to its first delivery.
    pub(crate) slowest: Duration,
}

/// Rows that wait to be recorded: those that wait for another attempt do not count.
const UNRECORDED: &str = "SELECT count(*) FROM outbox_messages o WHERE processed_on_utc IS NULL
    AND NOT EXISTS (SELECT FROM postrider_retries r WHERE r.message_id = o.id::text)";

/// Until everything that was committed is delivered and recorded, or nothing has changed for as long as a stall may last.
pub(crate) async fn settle(subject: &Subject) {
    let client = subject.database.connect().await;
    let (mut last, mut changed) = ((0, 0), Instant::now());
    while changed.elapsed() < STALL_LIMIT {
        let state = (subject.waiting(), count(&client, UNRECORDED).await);
        if state == (0, 0) {
            return;
        }
        if state != last {
            (last, changed) = (state, Instant::now());
        }
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
}

/// The account of one relay, after the writers have stopped and what they wrote has settled.
pub(crate) async fn account(subject: &Subject) -> Account {
    let client = subject.database.connect().await;
    let waiting = ids(&client, "SELECT message_id::uuid FROM postrider_retries").await;
    let parked = ids(&client, "SELECT message_id::uuid FROM postrider_dead_letters").await;
    let mut account = balance(subject, &waiting, &parked);
    account.unrecorded = count(&client, UNRECORDED).await;
    for (id, place) in &mut account.lost {
        let processed = "SELECT processed_on_utc IS NOT NULL FROM outbox_messages WHERE id = $1";
        let row = client.query_opt(processed, &[id]).await.expect("the outbox is read");
        place.push_str(match row.map(|row| row.get(0)) {
            Some(true) => ": outbox, recorded as processed",
            Some(false) => ": outbox, not processed",
            None => ": not in the outbox",
        });
        for (table, ids) in [("retries", &waiting), ("dead letters", &parked)] {
            if ids.contains(id) {
                place.push_str(&format!(", in {table}"));
            }
        }
    }
    account
}

fn balance(subject: &Subject, waiting: &HashSet<Uuid>, parked: &HashSet<Uuid>) -> Account {
    let (seen, transactions) = (subject.receipts.seen(), subject.journal.transactions());
    let mut account =
        Account { repeated: seen.repeated, altered: seen.altered.clone(), ..Account::default() };
    let mut expected = HashSet::new();
    for Transaction { rows, committed, known, .. } in transactions.iter() {
        if !committed {
            account.rolled_back += rows.len();
            continue;
        }
        account.committed += rows.len();
        for Row { id, digest, route } in rows {
            expected.insert(*id);
            account.wrongly_parked += usize::from(*route != Route::Unbound && parked.contains(id));
            if let Some(receipt) = seen.first.get(id) {
                account.delivered += 1;
                account.slowest = account.slowest.max(receipt.at.saturating_duration_since(*known));
                account.altered.extend((receipt.digest != *digest).then_some(*id));
            } else if *route == Route::Unbound && (waiting.contains(id) || parked.contains(id)) {
                account.unroutable += 1;
            } else {
                account.lost.push((*id, route.as_str().to_owned()));
            }
        }
    }
    let never_committed = seen.first.keys().filter(|id| !expected.contains(*id)).map(ToString::to_string);
    account.phantoms = seen.foreign.iter().cloned().chain(never_committed).collect();
    if subject.mode == "wal" {
        account.out_of_order = out_of_order(&transactions, &seen);
    }
    account
}

/// Steadily bound rows that first came after a row that certainly follows them: a later one of the same transaction, or
/// one whose COMMIT was sent when theirs was known.
fn out_of_order(transactions: &[Transaction], seen: &Seen) -> usize {
    let mut arrived = Vec::new();
    for (of, transaction) in transactions.iter().enumerate() {
        for (n, row) in transaction.rows.iter().enumerate().filter(|(_, row)| row.route == Route::Bound) {
            arrived.extend(seen.first.get(&row.id).map(|receipt| (receipt.place, of, n)));
        }
    }
    arrived.sort_unstable();
    let (mut sent, mut furthest) = (None, vec![0; transactions.len()]);
    let late = arrived.iter().filter(|(_, of, n)| {
        let transaction = &transactions[*of];
        let late = *n < furthest[*of] || sent.is_some_and(|sent| transaction.known < sent);
        sent = sent.max(Some(transaction.sent));
        furthest[*of] = furthest[*of].max(*n);
        late
    });
    late.count()
}

async fn count(client: &Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.unwrap_or_else(|e| panic!("{sql}: {e}")).get(0)
}

async fn ids(client: &Client, sql: &str) -> HashSet<Uuid> {
    let rows = client.query(sql, &[]).await.unwrap_or_else(|e| panic!("{sql}: {e}"));
    rows.iter().map(|row| row.get(0)).collect()
}
