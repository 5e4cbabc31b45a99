//! `ClaimSource`: takes rows by claims, hands them to the decoder with their claim, and waits for each to end.
//!
//! It promises that a worker holds one claim at a time, that nothing is claimed before credits are in hand, and that a
//! pause is obeyed before the next claim. In wal mode it runs without workers and brings back what is due for retry.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use actix::{Actor, ActorContext, AsyncContext, Context, WrapFuture, fut::ActorFutureExt};
use futures_util::future::{LocalBoxFuture, try_join_all};
use tokio::{sync::Notify, time::sleep};

use super::{
    claim::Wanted,
    floor::Floor,
    take::{Taken, Taker},
    trouble::Trouble,
    wake,
};
use crate::{
    database::{from_postgres, outbox::Outbox, pool},
    envelope::{Origin, Raw, RawBatch},
    error::{Error, Kind, Result},
    metrics::{Stage, StageMetrics},
    outlet::Outlet,
    pipeline::{exit::ExitGuard, shared::Shared},
    settings::{CLAIM_MESSAGES, SourceSettings},
};

/// Longest pause of the retry loop: how late a row may be retried that was put there by another process.
const RETRY_POLL: Duration = Duration::from_secs(1);

/// Shortest: rows that are due but locked by another relay are looked at again after this.
const RETRY_PACE: Duration = Duration::from_millis(20);

/// Pause after a claim nothing became of, so that rows that are released again and again are not claimed in a spin.
const FRUITLESS: Duration = Duration::from_millis(200);

/// The actor.
#[derive(Debug)]
pub struct ClaimSource {
    exit: ExitGuard,
    /// Taken by the loops when the actor starts.
    loops: Option<Loops>,
}

#[derive(Debug)]
struct Loops {
    shared: Shared,
    decoder: Arc<Outlet<RawBatch>>,
    workers: usize,
}

impl ClaimSource {
    /// A source with so many workers on the outbox (none in wal mode) and one on the retries.
    pub fn new(shared: Shared, exit: ExitGuard, decoder: Arc<Outlet<RawBatch>>, workers: usize) -> Self {
        Self { exit, loops: Some(Loops { shared, decoder, workers }) }
    }
}

impl Actor for ClaimSource {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        let Some(loops) = self.loops.take() else { return };
        ctx.spawn(loops.run().into_actor(self).map(|result, source, ctx| {
            source.exit.returned(result);
            ctx.stop();
        }));
    }
}

/// What every loop of the source uses.
struct Common {
    shared: Shared,
    decoder: Arc<Outlet<RawBatch>>,
    outbox: Arc<Outbox>,
    metrics: StageMetrics,
    floor: Floor,
    wake: Notify,
}

impl Loops {
    async fn run(self) -> Result<()> {
        let shared = self.shared.clone();
        match self.run_until_stopped().await {
            Err(error) if error.kind() == Kind::Stopped && shared.stop.is_cancelled() => Ok(()),
            result => result,
        }
    }

    async fn run_until_stopped(self) -> Result<()> {
        let outbox = load(&self.shared).await?;
        let common = Common {
            shared: self.shared,
            decoder: self.decoder,
            outbox,
            metrics: StageMetrics::of(Stage::Source),
            floor: Floor::default(),
            wake: Notify::new(),
        };
        let (messages, interval, notify) = match &common.shared.settings.source {
            SourceSettings::Poll(poll) => (poll.batch_messages, poll.interval, poll.notify),
            SourceSettings::Wal(_) => (CLAIM_MESSAGES, RETRY_POLL, false),
        };
        let mut loops: Vec<LocalBoxFuture<'_, Result<()>>> = vec![Box::pin(common.retries())];
        loops.extend(
            (0..self.workers)
                .map(|_| -> LocalBoxFuture<'_, Result<()>> { Box::pin(common.worker(messages, interval)) }),
        );
        if notify && self.workers > 0 {
            loops.push(Box::pin(wake::listen_and_wake(&common.shared, &common.wake)));
        }
        try_join_all(loops).await.map(drop)
    }
}

/// Looks up the outbox, waiting out an outage.
pub(super) async fn load(shared: &Shared) -> Result<Arc<Outbox>> {
    let mut trouble = Trouble::new();
    loop {
        let looked_up = pool::ask(&shared.pool, "read the outbox table's columns", async |client| {
            Outbox::load(client, &shared.settings).await
        });
        match shared.stop.run_until_cancelled(looked_up).await {
            None => return Err(Error::new(Kind::Stopped, "look up the outbox")),
            Some(Ok(outbox)) => return Ok(Arc::new(outbox)),
            Some(Err(error)) => trouble.endure(error, shared).await?,
        }
    }
}

impl Common {
    /// Claims from the outbox until the generation stops.
    async fn worker(&self, messages: u32, interval: Duration) -> Result<()> {
        let (mut taker, mut trouble) = (Taker::new(&self.shared, &self.outbox), Trouble::new());
        loop {
            self.intake().await?;
            let began = std::cell::Cell::new(None);
            let wanted = || {
                let now = Instant::now();
                let since = self.floor.next(now);
                began.set(Some((since, now)));
                self.open().then_some(Wanted::Outbox { since })
            };
            match self.rest(taker.take(wanted, messages)).await? {
                Ok(taken) => {
                    if taken.is_none() {
                        trouble.idle();
                    }
                    trouble.over(&self.shared);
                    self.shared.figures.source_connected.store(true, Relaxed);
                    if let Some((since, began)) = began.get() {
                        let first = taken.as_ref().and_then(|taken| taken.rows.first()?.occurred_on);
                        let took = taken.as_ref().map_or_else(|| began.elapsed(), |taken| taken.first_after);
                        self.floor.learn(since, took, first, Instant::now());
                    }
                    match taken {
                        Some(taken) => {
                            if taken.full {
                                self.wake.notify_one();
                            }
                            self.deliver(taken, &mut trouble).await?;
                        }
                        None => {
                            let rest = interval.mul_f64(0.8 + 0.4 * fastrand::f64());
                            self.rest(async {
                                let _ = tokio::time::timeout(rest, self.wake.notified()).await;
                            })
                            .await?;
                        }
                    }
                }
                Err(error) => self.failed(error, &mut trouble).await?,
            }
        }
    }

    /// Brings back what is due until the generation stops.
    async fn retries(&self) -> Result<()> {
        let (mut taker, mut trouble) = (Taker::new(&self.shared, &self.outbox), Trouble::new());
        loop {
            self.intake().await?;
            match self.rest(self.next_retry()).await? {
                Ok(Duration::ZERO) => {}
                Ok(pause) => {
                    trouble.answered(&self.shared);
                    self.rest(sleep(pause)).await?;
                    continue;
                }
                Err(error) => {
                    self.failed(error, &mut trouble).await?;
                    continue;
                }
            }
            let due = taker.take(|| self.open().then_some(Wanted::Retries), CLAIM_MESSAGES);
            match self.rest(due).await? {
                Ok(Some(taken)) => self.deliver(taken, &mut trouble).await?,
                Ok(None) => {
                    trouble.idle();
                    self.rest(sleep(RETRY_PACE)).await?;
                }
                Err(error) => self.failed(error, &mut trouble).await?,
            }
        }
    }

    /// How long until a retry is due: zero if one is, at most [`RETRY_POLL`].
    async fn next_retry(&self) -> Result<Duration> {
        const OP: &str = "look for due retries";
        let millis: Option<f64> = pool::ask(&self.shared.pool, OP, async |client| {
            let row = client.query_typed_one(&self.outbox.sql.next_retry, &[]).await;
            row.and_then(|row| row.try_get(0)).map_err(|error| from_postgres(error, OP))
        })
        .await?;
        Ok(millis.map_or(RETRY_POLL, |millis| {
            let due = Duration::try_from_secs_f64(millis.max(0.0) / 1000.0);
            due.unwrap_or(RETRY_POLL).min(RETRY_POLL)
        }))
    }

    /// Hands a batch over and waits until its claim has ended.
    async fn deliver(&self, taken: Taken, trouble: &mut Trouble) -> Result<()> {
        let Taken { claim, done, rows, credit, since, .. } = taken;
        let batch = RawBatch { origin: Origin::Claim(claim), raw: Raw::Rows(rows), credit };
        self.decoder.hand_over(batch, &self.shared.stop).await?;
        self.metrics.leave(since);
        // A claim that was dropped left no word, and its rows where they were.
        let recorded = self.rest(done).await?.ok();
        trouble.claimed(recorded);
        if recorded.is_none_or(|recorded| recorded.released > 0) {
            self.floor.reset();
        }
        if recorded.is_none_or(|recorded| recorded.moved() == 0) {
            self.rest(sleep(FRUITLESS)).await?;
        }
        Ok(())
    }

    fn open(&self) -> bool {
        self.shared.controls.intake.borrow().claims()
    }

    /// Waits until claims may be made.
    async fn intake(&self) -> Result<()> {
        let mut intake = self.shared.controls.intake.clone();
        let opened = self.rest(intake.wait_for(|intake| intake.claims())).await?;
        opened.map(drop).map_err(|_| Error::new(Kind::Stopped, "wait for intake"))
    }

    /// Waits for something, but no longer than the generation lasts.
    async fn rest<T>(&self, until: impl Future<Output = T>) -> Result<T> {
        let waited = self.shared.stop.run_until_cancelled(until).await;
        waited.ok_or_else(|| Error::new(Kind::Stopped, "wait for rows"))
    }

    async fn failed(&self, error: Error, trouble: &mut Trouble) -> Result<()> {
        if error.kind() != Kind::Stopped {
            self.shared.figures.source_connected.store(false, Relaxed);
        }
        trouble.endure(error, &self.shared).await
    }
}
