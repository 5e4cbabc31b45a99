//! History: the rows that were there before the stream, delivered through the same pipeline.
//!
//! The stream is held back meanwhile, and the slot exists already, so every row that commits from now on is streamed:
//! what a sweep must find is what was visible when it began. It works on state, so it goes on after a kill: marked rows are
//! not found again, and where nothing is marked the cursor of `postrider_progress` tells how far it came.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use futures_util::{StreamExt, stream::FuturesUnordered};
use tokio::time::sleep;
use tokio_postgres::Client;

use super::{
    claim::{Done, Wanted, latest},
    claims::load,
    take::{Taken, Taker},
    trouble::Trouble,
};
use crate::{
    ack::rows::Recorded,
    database::{
        from_postgres,
        outbox::Outbox,
        pool,
        progress::{Sweep, load_progress, set_sweep},
        values::Time,
    },
    envelope::{Origin, Raw, RawBatch},
    error::{Error, Kind, Result},
    outlet::Outlet,
    pipeline::shared::Shared,
    position::Lsn,
    settings::{CLAIM_MESSAGES, RowPolicy},
};

/// Claims under way at a time: one being published, one being recorded, one being read.
const IN_FLIGHT: usize = 3;

/// Pause before rows that others hold, or that nothing became of, are looked at again.
const PAUSE: Duration = Duration::from_millis(100);

/// Delivers history, then records that it is done and where the server stood; returns that position.
///
/// Goes on where an earlier sweep stopped: [`set_sweep`] with [`Sweep::Pending`] begins anew. Outages of the database are
/// waited out, as [`super::claims::ClaimSource`] does.
///
/// # Errors
/// [`Kind::Stopped`] when the generation ends first, and what waiting cannot help.
pub async fn sweep(shared: &Shared, decoder: &Outlet<RawBatch>) -> Result<Lsn> {
    let outbox = load(shared).await?;
    let sweeper = Sweeper { shared, decoder, outbox };
    let mut trouble = Trouble::new();
    loop {
        let swept = async {
            match sweeper.outbox.policy {
                RowPolicy::Keep => sweeper.pages(&mut trouble).await?,
                RowPolicy::Update | RowPolicy::Delete => sweeper.claims(&mut trouble).await?,
            }
            sweeper.finish().await
        };
        match swept.await {
            Ok(end) => {
                trouble.over(shared);
                return Ok(end);
            }
            Err(error) => trouble.endure(error, shared).await?,
        }
    }
}

struct Sweeper<'a> {
    shared: &'a Shared,
    decoder: &'a Outlet<RawBatch>,
    outbox: Arc<Outbox>,
}

impl Sweeper<'_> {
    /// Claims whatever is unprocessed and not younger than the youngest row at the beginning, until nothing is left.
    async fn claims(&self, trouble: &mut Trouble) -> Result<()> {
        let until = self.last_time().await?;
        let mut taker = Taker::new(self.shared, &self.outbox);
        let mut in_flight: FuturesUnordered<Done> = FuturesUnordered::new();
        loop {
            self.intake().await?;
            if in_flight.len() >= IN_FLIGHT {
                self.one_ends(&mut in_flight, trouble).await?;
            }
            let wanted = || self.open().then_some(Wanted::History { until });
            match self.rest(taker.take(wanted, CLAIM_MESSAGES)).await?? {
                Some(taken) => {
                    trouble.over(self.shared);
                    in_flight.push(self.hand_over(taken).await?);
                }
                None if !in_flight.is_empty() => self.one_ends(&mut in_flight, trouble).await?,
                // Rows may be left that another relay's claims hold, or that were released: they count as not delivered.
                None if self.any_until(until).await? => self.rest(sleep(PAUSE)).await?,
                None => return Ok(()),
            }
        }
    }

    /// Pages by id, one after the other, up to the highest id at the beginning. Complete, because what was committed before
    /// is visible to every page.
    async fn pages(&self, trouble: &mut Trouble) -> Result<()> {
        let Some(until) = self.last_id().await? else { return Ok(()) };
        let mut taker = Taker::new(self.shared, &self.outbox);
        let mut after = self.cursor().await?;
        loop {
            self.intake().await?;
            let wanted = || self.open().then(|| Wanted::Page { after: after.clone(), until: until.clone() });
            let Some(taken) = self.rest(taker.take(wanted, CLAIM_MESSAGES)).await?? else {
                if self.open() {
                    return Ok(());
                }
                continue;
            };
            trouble.over(self.shared);
            let done = self.hand_over(taken).await?;
            self.ended(self.rest(done).await?.ok(), trouble).await?;
            after = self.cursor().await?;
        }
    }

    async fn hand_over(&self, taken: Taken) -> Result<Done> {
        let Taken { claim, done, rows, credit, .. } = taken;
        let batch = RawBatch { origin: Origin::Claim(claim), raw: Raw::Rows(rows), credit };
        self.decoder.hand_over(batch, &self.shared.stop).await?;
        Ok(done)
    }

    async fn one_ends(&self, in_flight: &mut FuturesUnordered<Done>, trouble: &mut Trouble) -> Result<()> {
        match self.rest(in_flight.next()).await? {
            Some(recorded) => self.ended(recorded.ok(), trouble).await,
            None => Ok(()),
        }
    }

    /// A claim has ended: recorded, or dropped without a word.
    async fn ended(&self, recorded: Option<Recorded>, trouble: &mut Trouble) -> Result<()> {
        trouble.claimed(recorded);
        let moved = recorded.map_or(0, |recorded| recorded.moved());
        self.shared.figures.swept.fetch_add(moved, Relaxed);
        if moved == 0 {
            self.rest(sleep(PAUSE)).await?;
        }
        Ok(())
    }

    /// Records that history is delivered. Only rows that commit after this position are new to the stream for sure.
    async fn finish(&self) -> Result<Lsn> {
        const OP: &str = "end the sweep";
        self.ask(OP, async |client| {
            let row = client.query_typed_one("SELECT pg_current_wal_insert_lsn()::text", &[]).await;
            let text: String =
                row.and_then(|row| row.try_get(0)).map_err(|error| from_postgres(error, OP))?;
            let end = text.parse().map_err(|error| Error::new(Kind::Protocol, OP).with_source(error))?;
            set_sweep(client, &self.outbox, Sweep::Done, Some(end)).await?;
            Ok(end)
        })
        .await
    }

    async fn last_time(&self) -> Result<Option<i64>> {
        const OP: &str = "find the youngest row of history";
        let time: Option<Time> = self
            .ask(OP, async |client| {
                let row = client.query_typed_one(&self.outbox.sql.last_time, &[]).await;
                row.and_then(|row| row.try_get(0)).map_err(|error| from_postgres(error, OP))
            })
            .await?;
        Ok(match time {
            Some(Time::At(micros)) => Some(micros),
            Some(Time::Latest) => Some(i64::MAX),
            Some(Time::Earliest) | None => None,
        })
    }

    async fn last_id(&self) -> Result<Option<String>> {
        const OP: &str = "find the last row of history";
        self.ask(OP, async |client| {
            let row = client.query_typed_opt(&self.outbox.sql.last_id, &[]).await;
            let id = row.and_then(|row| row.map(|row| row.try_get(0)).transpose());
            id.map_err(|error| from_postgres(error, OP))
        })
        .await
    }

    async fn any_until(&self, until: Option<i64>) -> Result<bool> {
        const OP: &str = "look for history that is left";
        let until = latest(until);
        self.ask(OP, async |client| {
            let type_ = self.outbox.occurred_on.parameter();
            let row = client.query_typed_one(&self.outbox.sql.any_until, &[(&until, type_)]).await;
            row.and_then(|row| row.try_get(0)).map_err(|error| from_postgres(error, OP))
        })
        .await
    }

    async fn cursor(&self) -> Result<Option<String>> {
        let row = self
            .ask("read the sweep's cursor", async |client| load_progress(client, &self.outbox).await)
            .await?;
        Ok(row.and_then(|row| row.sweep_cursor))
    }

    async fn ask<T>(&self, op: &'static str, question: impl AsyncFnOnce(&Client) -> Result<T>) -> Result<T> {
        self.rest(pool::ask(&self.shared.pool, op, question)).await?
    }

    fn open(&self) -> bool {
        self.shared.controls.intake.borrow().claims()
    }

    async fn intake(&self) -> Result<()> {
        let mut intake = self.shared.controls.intake.clone();
        let opened = self.rest(intake.wait_for(|intake| intake.claims())).await?;
        opened.map(drop).map_err(|_| Error::new(Kind::Stopped, "wait for intake"))
    }

    async fn rest<T>(&self, until: impl Future<Output = T>) -> Result<T> {
        let waited = self.shared.stop.run_until_cancelled(until).await;
        waited.ok_or_else(|| Error::new(Kind::Stopped, "sweep history"))
    }
}
