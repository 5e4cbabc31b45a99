//! Recording the stream: rows are marked and progress is written in one transaction, and then the slot may advance.
//!
//! What comes in is verdicts in any order; the books (the ledger among them) say how far they are contiguous. With `ack.rows = keep`
//! there is nothing to mark: a verdict is known at once, its credit goes back at once, and progress is written every
//! `ack.interval_ms` while it moves.

use std::{
    collections::HashSet,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use deadpool_postgres::Object;
use tokio_postgres::Client;

use crate::{
    ack::{
        books::Books,
        stream::{self, StreamRecorded},
    },
    credit::{Cost, Credit},
    database::{outbox::Outbox, pool, progress::Progress},
    envelope::{Settled, Settlement, Verdict},
    error::{Error, Kind, Result},
    ledger::Watermark,
    metrics::MessageMetrics,
    pipeline::shared::Shared,
    position::StreamIdentity,
    settings::RowPolicy,
    status::{Reason, board::default_remedy},
};

/// Pause before a recording that met a lock or a deadlock is tried again, and between looks at a row that is not
/// visible yet.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// So many marks in a row without effect are no coincidence.
const FRUITLESS: u32 = 5;

/// Records what became of streamed rows.
pub struct StreamRecorder {
    shared: Shared,
    outbox: Arc<Outbox>,
    identity: StreamIdentity,
    books: Books,
    /// Exposure of rows beyond the contiguous prefix, and of kept rows whose progress is not written yet.
    exposure: Credit,
    last_write: Instant,
    connection: Option<Object>,
    /// Marks in a row that hit too few rows although all were there.
    fruitless: u32,
    metrics: MessageMetrics,
}

impl StreamRecorder {
    /// A recorder of the stream `identity`, of which everything up to `resume` is recorded already.
    pub fn new(shared: Shared, outbox: Arc<Outbox>, identity: StreamIdentity, resume: Watermark) -> Self {
        let exposure = shared.exposure.nothing();
        Self {
            shared,
            outbox,
            identity,
            books: Books::behind(resume),
            exposure,
            last_write: Instant::now(),
            connection: None,
            fruitless: 0,
            metrics: MessageMetrics::new(),
        }
    }

    /// Whether something is known that is not written yet and should be, though nothing new arrives.
    pub fn owes_progress(&self) -> bool {
        self.books.owe() || self.exposure.cost().messages > self.books.exposed_ahead()
    }

    /// Records `news` and returns when all of it is durable (kept rows: when it is written, or not due yet).
    ///
    /// # Errors
    /// When the database is gone or refuses. The generation ends then; nothing was acknowledged that is not recorded.
    pub async fn record(&mut self, news: Vec<Settled>) -> Result<()> {
        let mut settlements = Vec::new();
        let mut credit: Option<Credit> = None;
        for settled in news {
            self.books.enter(&settled.passed, &settled.settlements)?;
            settlements.extend(settled.settlements);
            match credit.as_mut() {
                Some(credit) => credit.merge(settled.credit),
                None => credit = Some(settled.credit),
            }
            self.exposure.merge(settled.exposure);
        }
        settlements.retain(|settlement| settlement.verdict != Verdict::Abandoned);
        let recorded = settlements.len() as u64;
        if self.shared.settings.ack.rows == RowPolicy::Keep && settlements.iter().all(delivered) {
            drop((settlements, credit));
            self.write_kept_progress().await?;
        } else {
            let written = self.write(settlements).await?;
            drop(credit);
            self.acknowledge(written);
        }
        self.shared.figures.recorded.fetch_add(recorded, Relaxed);
        Ok(())
    }

    /// Marks rows and moves progress in one transaction, as often as it takes for every mark to hit; returns how far
    /// everything is recorded then.
    async fn write(&mut self, mut settlements: Vec<Settlement>) -> Result<Watermark> {
        let watermark = self.books.watermark();
        if settlements.is_empty() && !self.books.moved() {
            return Ok(watermark);
        }
        let progress = Progress {
            slot: self.identity.slot.clone(),
            system_identifier: self.identity.system_identifier.clone(),
            timeline: self.identity.timeline,
            position: watermark.position,
            flush: watermark.flush,
        };
        loop {
            match self.attempt(&settlements, &progress).await {
                Ok(recorded) if recorded.complete() => break,
                Ok(_) => self.find_unmarked(&mut settlements).await?,
                Err(error) if error.kind() == Kind::TableLocked => {
                    self.shared.board.raise_error(&error);
                    self.pause().await?;
                }
                Err(error) => return Err(error),
            }
        }
        self.shared.board.clear(Reason::TableLocked);
        self.shared.board.clear(Reason::MarkWaiting);
        self.fruitless = 0;
        self.last_write = Instant::now();
        Ok(watermark)
    }

    async fn attempt(&mut self, settlements: &[Settlement], progress: &Progress) -> Result<StreamRecorded> {
        let connection = self.connection().await?;
        let settings = &self.shared.settings.publish;
        let attempt = stream::record_stream(&connection, &self.outbox, settlements, Some(progress), settings);
        match pool::patiently(&self.shared.board, attempt).await {
            Ok(recorded) => {
                self.connection = Some(connection);
                Ok(recorded)
            }
            Err(error) => {
                // It may hold an open transaction: closed, never pooled.
                pool::discard(connection);
                Err(error)
            }
        }
    }

    /// Why a mark hit fewer rows than expected. A row that is not there although its transaction is visible was deleted
    /// by somebody: it counts as vanished and leaves `settlements`. One whose transaction is not visible hangs in its
    /// COMMIT: it stays, and is waited for.
    async fn find_unmarked(&mut self, settlements: &mut Vec<Settlement>) -> Result<()> {
        const OP: &str = "look for rows that were not hit";
        let asked: &[Settlement] = settlements;
        let (missing, visible) = pool::ask(&self.shared.pool, OP, async |client| {
            let missing = self.missing(client, asked).await?;
            let xids: HashSet<u32> =
                asked.iter().filter(|s| missing.contains(&*s.envelope.row.id)).filter_map(xid).collect();
            let mut visible = HashSet::new();
            for xid in xids {
                if stream::visible(client, xid).await? {
                    visible.insert(xid);
                }
            }
            // Asked again, because a transaction may have become visible between the two questions: only a row that is
            // missing *after* its transaction was seen is gone.
            Ok((self.missing(client, asked).await?, visible))
        })
        .await?;
        let is_missing = |settlement: &Settlement| missing.contains(&*settlement.envelope.row.id);
        let before = settlements.len();
        settlements.retain(|settlement| {
            !(is_missing(settlement) && xid(settlement).is_some_and(|xid| visible.contains(&xid)))
        });
        let vanished = (before - settlements.len()) as u64;
        if vanished > 0 {
            self.metrics.vanished.increment(vanished);
            tracing::debug!(rows = vanished, "published rows were deleted before they could be marked");
        }
        let waiting: Vec<&Settlement> = settlements.iter().filter(|s| is_missing(s)).collect();
        if let Some(first) = waiting.first().and_then(|settlement| xid(settlement)) {
            let count = waiting.len();
            self.shared.board.raise(
                Reason::MarkWaiting,
                format!(
                    "{count} published rows are not visible yet; transaction {first} hangs in its COMMIT"
                ),
                default_remedy(Reason::MarkWaiting),
            );
            return self.pause().await;
        }
        // All rows are there now. Once that is a transaction that became visible between the two statements; again and
        // again it is something in the table that undoes our UPDATE.
        if vanished == 0 {
            self.fruitless += 1;
            if self.fruitless >= FRUITLESS {
                self.shared.board.raise(
                    Reason::MarkWaiting,
                    format!("marking rows of {} has no effect although they are there", self.outbox.name),
                    "find the trigger, rule or row security policy that suppresses the relay's UPDATE, and end that",
                );
            }
            return self.pause().await;
        }
        Ok(())
    }

    /// The ids among `settlements` that no visible row has.
    async fn missing(&self, client: &Client, settlements: &[Settlement]) -> Result<HashSet<Vec<u8>>> {
        let ids: Vec<&str> =
            settlements.iter().filter_map(|s| std::str::from_utf8(&s.envelope.row.id).ok()).collect();
        let missing = stream::missing(client, &self.outbox, &ids).await?;
        Ok(missing.into_iter().map(String::into_bytes).collect())
    }

    /// Writes the progress of kept rows if it is due, waiting for its time if nothing else is to do.
    async fn write_kept_progress(&mut self) -> Result<()> {
        let due = self.last_write + self.shared.settings.ack.interval;
        let left = due.saturating_duration_since(Instant::now());
        let pressed = self.exposure.cost().messages * 2 >= self.shared.exposure.size().messages;
        if !left.is_zero() && !pressed {
            // A short sleep instead of a timer of its own: what arrives meanwhile waits in the mailbox, bounded.
            tokio::time::sleep(left.min(Duration::from_millis(1))).await;
            return Ok(());
        }
        let written = self.write(Vec::new()).await?;
        self.acknowledge(written);
        Ok(())
    }

    /// Everything in the books is durable now: say so, and give back the exposure of what is contiguous.
    fn acknowledge(&mut self, written: Watermark) {
        let flush = self.books.durable(written);
        self.shared.controls.durable.send_if_modified(|durable| {
            let moves = flush > *durable;
            *durable = (*durable).max(flush);
            moves
        });
        self.shared.figures.durable_lsn.fetch_max(flush.0, Relaxed);
        let held = self.exposure.cost().messages;
        let settled = held.saturating_sub(self.books.exposed_ahead());
        self.exposure.split(Cost { messages: settled, bytes: 0 }).give_back();
    }

    async fn connection(&mut self) -> Result<Object> {
        match self.connection.take() {
            Some(connection) if !connection.is_closed() => Ok(connection),
            _ => pool::get(&self.shared.pool).await,
        }
    }

    async fn pause(&self) -> Result<()> {
        self.shared
            .stop
            .run_until_cancelled(tokio::time::sleep(RETRY_PAUSE))
            .await
            .ok_or_else(|| Error::new(Kind::Stopped, "wait to record again"))
    }
}

fn xid(settlement: &Settlement) -> Option<u32> {
    settlement.envelope.place.map(|place| place.xid)
}

fn delivered(settlement: &Settlement) -> bool {
    settlement.verdict == Verdict::Delivered
}
