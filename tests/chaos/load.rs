//! The application under load: writers that commit and roll back, and a journal of what they know to be committed.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fastrand::Rng;
use tokio_postgres::{Client, Error};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::support::connect;

/// Writers of each mode; together they write about 400 rows a second while nothing is wrong.
pub(crate) const WRITERS: u64 = 3;
const ROWS_PER_SECOND: f64 = 150.0;

/// Where a row can go. Its `as_str` is its type, and so its routing key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    Bound,
    /// While nobody has taken the binding away.
    Unsteady,
    /// Nowhere, ever: such a row ends as a dead letter.
    Unbound,
}

impl Route {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Route::Bound => "order.created",
            Route::Unsteady => "order.unsteady",
            Route::Unbound => "order.unbound",
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    pub(crate) id: Uuid,
    pub(crate) digest: u64,
    pub(crate) route: Route,
}

/// A transaction whose outcome is known. It took effect between `sent` and `known`.
#[derive(Debug)]
pub(crate) struct Transaction {
    pub(crate) rows: Vec<Row>,
    pub(crate) committed: bool,
    pub(crate) sent: Instant,
    pub(crate) known: Instant,
}

/// What the writers know.
#[derive(Debug, Default)]
pub(crate) struct Journal {
    transactions: Mutex<Vec<Transaction>>,
    deliverable: AtomicUsize,
}

impl Journal {
    pub(crate) fn transactions(&self) -> MutexGuard<'_, Vec<Transaction>> {
        self.transactions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Committed rows that must arrive.
    pub(crate) fn deliverable(&self) -> usize {
        self.deliverable.load(Ordering::Relaxed)
    }

    fn enter(&self, transaction: Transaction) {
        let deliverable = transaction.rows.iter().filter(|row| row.route != Route::Unbound).count();
        if transaction.committed {
            self.deliverable.fetch_add(deliverable, Ordering::Relaxed);
        }
        self.transactions().push(transaction);
    }
}

/// What a body is known by.
pub(crate) fn digest(body: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    body.hash(&mut hasher);
    hasher.finish()
}

/// Commits to the outbox of `url` until stopped, over every end of the server.
pub(crate) async fn write(url: String, journal: &Journal, seed: u64, stop: CancellationToken) {
    let mut rng = Rng::with_seed(seed);
    let noise: String = (0..40_000).map(|_| rng.alphanumeric()).collect();
    let mut client = connected(&url).await;
    while !stop.is_cancelled() {
        let (rows, contents): (Vec<_>, Vec<_>) =
            (0..spread(&mut rng, 1, 500)).map(|_| row(&mut rng, &noise)).unzip();
        let rolls_back = rng.u8(0..10) == 0;
        let mut sent = None;
        let written = transact(&client, &mut rng, &rows, &contents, rolls_back, &mut sent).await;
        let committed = match (written, sent) {
            (Ok(()), _) => !rolls_back,
            (Err(_), None) => {
                client = connected(&url).await;
                false
            }
            // the answer to COMMIT was lost with the server: the next one knows
            (Err(_), Some(_)) => loop {
                client = connected(&url).await;
                let sql = "SELECT FROM outbox_messages WHERE id = $1";
                if let Ok(found) = client.query_opt(sql, &[&rows[0].id]).await {
                    break found.is_some();
                }
            },
        };
        let pause = Duration::from_secs_f64(rows.len() as f64 / ROWS_PER_SECOND);
        let known = Instant::now();
        journal.enter(Transaction { rows, committed, sent: sent.unwrap_or(known), known });
        stop.run_until_cancelled(tokio::time::sleep(pause)).await;
    }
}

async fn connected(url: &str) -> Client {
    loop {
        match connect(url).await {
            Ok(client) => return client,
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// One transaction of a few statements, so that many overlap; `sent` is set when COMMIT is.
async fn transact(
    client: &Client,
    rng: &mut Rng,
    rows: &[Row],
    contents: &[String],
    rolls_back: bool,
    sent: &mut Option<Instant>,
) -> Result<(), Error> {
    let sql = "INSERT INTO outbox_messages (id, type, content, occurred_on_utc)
               SELECT id, type, content::jsonb, clock_timestamp()
               FROM unnest($1::uuid[], $2::text[], $3::text[]) WITH ORDINALITY AS r(id, type, content, n) ORDER BY n";
    client.batch_execute("BEGIN").await?;
    let part = rows.len().div_ceil(rng.usize(1..=3));
    for (rows, contents) in rows.chunks(part).zip(contents.chunks(part)) {
        let ids: Vec<Uuid> = rows.iter().map(|row| row.id).collect();
        let types: Vec<&str> = rows.iter().map(|row| row.route.as_str()).collect();
        client.execute(sql, &[&ids, &types, &contents]).await?;
        tokio::time::sleep(Duration::from_millis(rng.u64(0..30))).await;
    }
    if rolls_back {
        return client.batch_execute("ROLLBACK").await;
    }
    *sent = Some(Instant::now());
    client.batch_execute("COMMIT").await
}

/// A row and its content: jsonb's own text, which is the body to expect.
fn row(rng: &mut Rng, noise: &str) -> (Row, String) {
    let size = spread(rng, 50, 20_000);
    let from = rng.usize(0..noise.len() - size);
    let content = format!(r#"{{"n": {}, "pad": "{}"}}"#, rng.u32(..), &noise[from..from + size]);
    let route = match rng.u8(0..100) {
        0 => Route::Unbound,
        1..5 => Route::Unsteady,
        _ => Route::Bound,
    };
    let id = uuid::Builder::from_random_bytes(rng.u128(..).to_ne_bytes()).into_uuid();
    (Row { id, digest: digest(content.as_bytes()), route }, content)
}

/// As many small ones as large ones, by the order of magnitude.
fn spread(rng: &mut Rng, least: usize, most: usize) -> usize {
    let ratio = most as f64 / least as f64;
    (least as f64 * ratio.powf(rng.f64())) as usize
}
