//! The source of `wal` mode: the replication stream comes in, batches of undecoded events go to the decoder.
//!
//! The [`WalSource`] promises that every insert it hands on is paid for, that nothing is read while intake is closed or
//! beyond a drain's target, and that feedback goes on whatever it waits for. A batch is what is there: one event is
//! waited for, the rest is taken as long as it comes by itself, or while the decoder is busy anyway.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use actix::{Actor, ActorContext, ActorFutureExt, AsyncContext, Context, WrapFuture};
use futures_util::{FutureExt, future::LocalBoxFuture};
use pgwire_replication::ReplicationEvent;
use tokio::{sync::watch, time::Instant};

use super::{
    collect::{Batch, Offered, translate},
    feedback::{Feedback, look_after},
    wire::from_wire,
};
use crate::{
    control::Intake,
    deadlines::{CLOSE_STREAM, PATIENCE, SILENCE},
    envelope::{RawBatch, StreamEvent},
    error::{Error, Kind, Result},
    metrics::{Stage, StageMetrics},
    outlet::Outlet,
    pipeline::{exit::ExitGuard, shared::Shared},
    position::Lsn,
    status::Reason,
};

pub use super::open::{Stream, open};

/// How far the position of an idle server may lie beyond all it streams: a page's header, 40 bytes at most.
const IDLE_SLACK: u64 = 64;

/// Between looks for what should have come.
const LOOK_EVERY: Duration = Duration::from_secs(1);

const OP: &str = "read the replication stream";

type Watch = watch::Receiver<Intake>;

/// Reads the replication stream.
pub struct WalSource {
    /// Taken by `started`; stages are built anew, never restarted.
    run: Option<LocalBoxFuture<'static, Result<()>>>,
    exit: ExitGuard,
}

impl WalSource {
    /// A source that reads `stream` and hands over to `decoder`.
    pub fn new(shared: Shared, exit: ExitGuard, decoder: Arc<Outlet<RawBatch>>, stream: Stream) -> Self {
        let durable = shared.controls.durable.subscribe();
        let mut look = tokio::time::interval(LOOK_EVERY);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let reader = Reader {
            feedback: Feedback::new(durable, stream.confirmed, shared.settings.ack.interval),
            metrics: StageMetrics::of(Stage::Source),
            heard: Instant::now(),
            looked_after: Instant::now(),
            look,
            missed: false,
            shared,
            decoder,
            stream,
        };
        Self { run: Some(Box::pin(reader.run())), exit }
    }
}

impl Actor for WalSource {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Context<Self>) {
        let run = self.run.take().expect("an actor starts once");
        ctx.spawn(run.into_actor(self).map(|result, stage, ctx| {
            stage.exit.returned(result);
            ctx.stop();
        }));
    }
}

struct Reader {
    shared: Shared,
    decoder: Arc<Outlet<RawBatch>>,
    stream: Stream,
    feedback: Feedback,
    metrics: StageMetrics,
    /// When the session gave a sign of life last.
    heard: Instant,
    /// When a session that is silent is looked at.
    look: tokio::time::Interval,
    /// When it was asked last whether the session is still there.
    looked_after: Instant,
    /// Whether the board says that something should have come.
    missed: bool,
}

impl Reader {
    async fn run(mut self) -> Result<()> {
        self.shared.figures.source_connected.store(true, Relaxed);
        let result = self.read().await;
        self.shared.figures.source_connected.store(false, Relaxed);
        self.close().await;
        match result {
            Err(error) if error.kind() == Kind::Stopped && self.shared.stop.is_cancelled() => Ok(()),
            result => result,
        }
    }

    async fn read(&mut self) -> Result<()> {
        let mut watch = self.shared.controls.intake.clone();
        let (decoder, stop) = (Arc::clone(&self.decoder), self.shared.stop.clone());
        // An event that was read and could not be taken yet.
        let mut kept: Option<StreamEvent> = None;
        // The drain whose target was reached, so that this is said once.
        let mut reached: Option<Lsn> = None;
        loop {
            let intake = *watch.borrow_and_update();
            self.feedback.tell(&self.stream.client, &self.shared.figures);
            let beyond = match (intake, &kept) {
                (Intake::UpTo(target), Some(StreamEvent::Begin { commit, .. })) if *commit > target => {
                    Some(target)
                }
                _ => None,
            };
            if intake == Intake::Closed || beyond.is_some() {
                if let Some(target) = beyond.filter(|_| reached != beyond) {
                    reached = beyond;
                    // Commits arrive in order: nothing before the target is missing. Without this the position would
                    // stay where the last transaction ended, short of the target.
                    let mut batch = Batch::new(&self.shared.credits);
                    batch.reached(target);
                    let slot = self.aside(decoder.reserve(&stop)).await??;
                    slot.hand_over(batch.close())?;
                }
                self.aside(async { watch.changed().await.map_err(|_| stopped()) }).await??;
                continue;
            }
            let first = match kept.take() {
                Some(event) => event,
                None => match self.next(&mut watch).await? {
                    Some(event) => event,
                    None => continue,
                },
            };
            let arrived = Instant::now();
            let mut batch = Batch::new(&self.shared.credits);
            kept = self.fill(&mut batch, first, intake).await?;
            if !batch.is_empty() {
                kept = self.hand_over(batch, kept, arrived, &mut watch).await?;
            }
        }
    }

    /// Fills `batch`, from `first` on, with what is there. Returns the event that has to wait.
    async fn fill(
        &mut self,
        batch: &mut Batch,
        first: StreamEvent,
        intake: Intake,
    ) -> Result<Option<StreamEvent>> {
        let mut event = Some(first);
        let mut yielded = false;
        while !batch.is_full() {
            let Some(next) = event.take() else {
                match self.ready()? {
                    Some(next) => {
                        yielded = false;
                        event = translate(next);
                    }
                    // The session's task may have more in its hands than its buffer holds.
                    None if !yielded => {
                        tokio::task::yield_now().await;
                        yielded = true;
                    }
                    None => break,
                }
                continue;
            };
            match batch.offer(next, intake, &self.shared.credits) {
                Offered::Taken => {}
                Offered::Beyond(begin) => return Ok(Some(begin)),
                // What was collected goes on first: its credits come back only from the end of the pipeline.
                Offered::Unpaid(row, _) if !batch.is_empty() => return Ok(Some(row)),
                Offered::Unpaid(row, cost) => {
                    let (credits, stop) = (self.shared.credits.clone(), self.shared.stop.clone());
                    let credit = self.aside(async move { credits.acquire(cost, &stop).await }).await??;
                    batch.take_paid(row, credit);
                }
            }
        }
        Ok(event)
    }

    /// The next event that matters, waiting for it; `None` when intake changed or there was none that matters.
    async fn next(
        &mut self,
        intake: &mut tokio::sync::watch::Receiver<Intake>,
    ) -> Result<Option<StreamEvent>> {
        let stop = self.shared.stop.clone();
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return Err(stopped()),
                event = self.stream.client.recv() => return self.received(event.transpose()).map(translate),
                changed = intake.changed() => {
                    changed.map_err(|_| stopped())?;
                    return Ok(None);
                }
                () = self.feedback.news() => self.feedback.tell(&self.stream.client, &self.shared.figures),
                _ = self.look.tick() => {
                    self.look_for_missed();
                    if self.heard.max(self.looked_after).elapsed() >= SILENCE {
                        let (pool, slot) = (self.shared.pool.clone(), self.stream.identity.slot.clone());
                        let pid = self.stream.pid;
                        let there = self.aside(async move { look_after(&pool, &slot, pid).await }).await?;
                        if there.is_err() {
                            // It ended and nothing told us: what lost that message has lost others too.
                            self.shared.settings.database.link.sever();
                        }
                        there?;
                        self.looked_after = Instant::now();
                    }
                }
            }
        }
    }

    /// An event that is there already.
    fn ready(&mut self) -> Result<Option<ReplicationEvent>> {
        match self.stream.client.recv().now_or_never() {
            None => Ok(None),
            Some(event) => self.received(event.transpose()).map(Some),
        }
    }

    fn received(
        &mut self,
        event: Option<pgwire_replication::Result<ReplicationEvent>>,
    ) -> Result<ReplicationEvent> {
        let event = event
            .ok_or_else(|| Error::new(Kind::DatabaseDown, OP).with_source("the server ended the stream"))?
            .map_err(|error| from_wire(error, OP))?;
        self.heard = Instant::now();
        if std::mem::take(&mut self.missed) {
            self.shared.board.clear(Reason::DatabaseDown);
        }
        Ok(event)
    }

    /// Says so when the server has written what should have come by now: at least where it stands, once it has nothing
    /// else to tell. The session may be dead, or the server busy decoding; either way nothing moves.
    fn look_for_missed(&mut self) {
        let Some((server, asked)) = self.shared.figures.server() else { return };
        let behind = server.0.saturating_sub(self.stream.client.metrics().last_wal_end().0);
        if behind > IDLE_SLACK && Instant::from_std(asked) > self.heard && asked.elapsed() > PATIENCE {
            self.missed = true;
            let detail = format!(
                "the replication session has been silent for {} s while the server wrote up to {server}",
                self.heard.elapsed().as_secs()
            );
            let remedy = "wait, if the server decodes a large transaction; else look at the network between: the relay \
                          connects again once the server has given the session up";
            self.shared.board.raise_since(asked, Reason::DatabaseDown, detail, remedy);
        }
    }

    /// Hands `batch` over. While the decoder is busy it grows, unless an event is `kept` that has to wait; returns that.
    async fn hand_over(
        &mut self,
        mut batch: Batch,
        mut kept: Option<StreamEvent>,
        arrived: Instant,
        watch: &mut Watch,
    ) -> Result<Option<StreamEvent>> {
        let received = self.stream.client.metrics().last_wal_end().0;
        self.shared.figures.received_lsn.fetch_max(received, Relaxed);
        let (decoder, stop, credits) =
            (Arc::clone(&self.decoder), self.shared.stop.clone(), self.shared.credits.clone());
        let intake = *watch.borrow();
        let reserving = decoder.reserve(&stop);
        tokio::pin!(reserving);
        let slot = loop {
            if kept.is_some() || batch.is_full() {
                break self.aside(reserving).await??;
            }
            tokio::select! {
                biased;
                slot = &mut reserving => break slot?,
                event = self.next(watch) => match event? {
                    // Intake may have changed: no more for this batch.
                    None => break self.aside(reserving).await??,
                    Some(event) => match batch.offer(event, intake, &credits) {
                        Offered::Taken => {}
                        Offered::Beyond(event) | Offered::Unpaid(event, _) => kept = Some(event),
                    },
                },
            }
        };
        slot.hand_over(batch.close())?;
        self.metrics.leave(arrived.into_std());
        Ok(kept)
    }

    /// Does `work` while the session is not read: feedback goes on, a stop ends it, and so does the session's end.
    async fn aside<T>(&mut self, work: impl Future<Output = T>) -> Result<T> {
        let stop = self.shared.stop.clone();
        let told = self.feedback.while_telling(&self.stream.client, &self.shared.figures, work);
        match stop.run_until_cancelled(told).await {
            None => Err(stopped()),
            Some(Some(done)) => Ok(done),
            Some(None) => Err(self.ended().await),
        }
    }

    /// Why a session has ended that nobody was reading.
    async fn ended(&mut self) -> Error {
        loop {
            match self.stream.client.recv().await.transpose() {
                Some(Ok(_)) => {}
                end => match self.received(end) {
                    Ok(_) => {}
                    Err(error) => return error,
                },
            }
        }
    }

    /// Ends the session, so that the slot is free for the next generation or another relay.
    async fn close(&mut self) {
        let close = async {
            let limit = self.stream.status_interval + Duration::from_millis(100);
            self.feedback.flush(&self.stream.client, &self.shared.figures, limit).await;
            self.stream.client.shutdown().await
        };
        match tokio::time::timeout(CLOSE_STREAM, close).await {
            Ok(Ok(())) => tracing::debug!("replication session ended"),
            Ok(Err(error)) => tracing::debug!(error = %error, "replication session had ended"),
            Err(_) => {
                self.stream.client.abort();
                tracing::debug!("replication session cut");
            }
        }
    }
}

fn stopped() -> Error {
    Error::new(Kind::Stopped, OP)
}
