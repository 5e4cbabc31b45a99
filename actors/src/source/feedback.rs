//! Feedback: what the server is told to be durable, and whether the session is still there to be told.
//!
//! The transport reports on its own clock and repeats what it was told last, so feedback never depends on flow. Told is
//! only what the acker has made durable, and never less than before: the server would take a slot back to it (before
//! PostgreSQL 18), and a keepalive at the start of a stream may stand behind what the slot has confirmed, because the
//! walsender reads from `restart_lsn`.

use std::{sync::atomic::Ordering::Relaxed, task::Poll, time::Duration};

use deadpool_postgres::Pool;
use pgwire_replication::ReplicationClient;
use tokio::{sync::watch, time::Instant};
use tokio_postgres::types::Type;

use crate::{
    database::{from_postgres, pool},
    deadlines::ASK,
    error::{Error, Kind, Result},
    failpoints::{self, Point},
    position::Lsn,
    status::figures::Figures,
};

/// How often a session that is not being read is looked at.
const LOOK: Duration = Duration::from_secs(1);

/// Tells a session what is durable.
#[derive(Debug)]
pub(super) struct Feedback {
    durable: watch::Receiver<Lsn>,
    told: Lsn,
    /// Further news within this time are told together.
    interval: Duration,
    last: Instant,
}

impl Feedback {
    /// Feedback of what `durable` says, to a slot that has confirmed `confirmed`.
    pub(super) fn new(durable: watch::Receiver<Lsn>, confirmed: Lsn, interval: Duration) -> Self {
        let last = Instant::now().checked_sub(interval).unwrap_or_else(Instant::now);
        Self { durable, told: confirmed, interval, last }
    }

    /// Waits until there is news to tell. Cancel safe.
    pub(super) async fn news(&mut self) {
        loop {
            if *self.durable.borrow_and_update() > self.told {
                tokio::time::sleep_until(self.last + self.interval).await;
                return;
            }
            if self.durable.changed().await.is_err() {
                // The generation is ending: nobody makes anything durable any more.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Tells `client` what is durable, if that is news.
    pub(super) fn tell(&mut self, client: &ReplicationClient, figures: &Figures) {
        let durable = *self.durable.borrow_and_update();
        if durable > self.told {
            failpoints::strike(Point::Feedback);
            client.update_applied_lsn(pgwire_replication::Lsn(durable.0));
            figures.durable_lsn.fetch_max(durable.0, Relaxed);
            self.told = durable;
            self.last = Instant::now();
        }
    }

    /// Runs `work`, which does not read the session, while what becomes durable is told. `None` when the session ended
    /// first.
    pub(super) async fn while_telling<T>(
        &mut self,
        client: &ReplicationClient,
        figures: &Figures,
        work: impl Future<Output = T>,
    ) -> Option<T> {
        tokio::pin!(work);
        if let Poll::Ready(done) = futures_util::poll!(&mut work) {
            return Some(done);
        }
        let mut look = tokio::time::interval(LOOK);
        loop {
            tokio::select! {
                biased;
                done = &mut work => return Some(done),
                // An ended session says so only to a reader.
                _ = look.tick() => if !client.is_running() { return None },
                () = self.news() => self.tell(client, figures),
            }
        }
    }

    /// Waits until the server was told the last news, at most `limit`.
    pub(super) async fn flush(&mut self, client: &ReplicationClient, figures: &Figures, limit: Duration) {
        const STEP: Duration = Duration::from_millis(5);
        self.tell(client, figures);
        let metrics = client.metrics();
        // A session that was told nothing yet has only what the slot confirmed before, and need not repeat it.
        let told = |lsn: Lsn| metrics.last_applied_lsn().0 >= lsn.0;
        let deadline = Instant::now() + limit;
        let news = self.last.elapsed() < limit;
        while news && client.is_running() && !told(self.told) && Instant::now() < deadline {
            tokio::time::sleep(STEP).await;
        }
    }
}

/// Asks the database whether the walsender with this process id still holds `slot`.
///
/// A server that writes nothing sends nothing, so silence alone proves nothing; a session whose walsender is gone will
/// stay silent for ever. A walsender that hears nothing from us ends itself after `wal_sender_timeout`.
///
/// # Errors
/// [`Kind::DatabaseDown`] where the walsender is gone or nobody answers.
pub(super) async fn look_after(pool: &Pool, slot: &str, pid: i32) -> Result<()> {
    const OP: &str = "look after a silent replication session";
    const SQL: &str = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = $1";
    let holder = pool::ask_within(pool, ASK, OP, async |client| {
        let row = client.query_typed_opt(SQL, &[(&slot, Type::TEXT)]).await;
        let row = row.map_err(|error| from_postgres(error, OP))?;
        Ok(row.and_then(|row| row.try_get::<_, Option<i32>>(0).ok().flatten()))
    });
    match holder.await? {
        Some(active) if active == pid => Ok(()),
        _ => Err(Error::new(Kind::DatabaseDown, OP)
            .with_source(format!("walsender {pid} no longer holds slot {slot}"))),
    }
}
