//! The relay: builds generations of the pipeline for as long as the process lives, and decides what an end means.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use deadpool_postgres::Pool;
use tokio::sync::{oneshot, watch};
use tokio_postgres::Client;
use tokio_util::sync::CancellationToken;

use crate::{
    ack::recorder::StreamRecorder,
    control::Controls,
    credit::Credits,
    database::{control, outbox::Outbox, pool, trial},
    decode::Resume,
    error::{Disposition, Error, Kind, Result},
    metrics::{self, Stage},
    pipeline::{
        budget::{Pauses, RestartBudget},
        cleanup,
        generation::{Arbiters, Ended, Generation},
        history,
        plane::Plane,
        shared::Shared,
    },
    position::{Lsn, StreamIdentity},
    settings::{PollSettings, Settings, SourceSettings, WalSettings},
    source::{
        sweep,
        wal::{self, WalSource},
    },
    status::{Board, Phase, Reason, figures::Figures},
};

/// How often a relay that waits for a person looks whether the person has acted.
const HALTED_INTERVAL: Duration = Duration::from_secs(5);

/// How often a standby tries to take the slot. A take-over happens within 10 s of the other's end.
const STANDBY_INTERVAL: Duration = Duration::from_secs(1);

/// What a relay is made of. Everything here outlives generations.
pub struct Relay {
    /// What it was told to do.
    pub settings: Arc<Settings>,
    /// SQL connections.
    pub pool: Pool,
    /// Where conditions are put up.
    pub board: Board,
    /// Levels and totals.
    pub figures: Arc<Figures>,
    /// What the operator asked for.
    pub plane: Arc<Plane>,
}

impl Relay {
    /// Runs until `shutdown` is cancelled; then what is in flight settles, for at most `settings.shutdown_timeout`.
    ///
    /// # Errors
    /// When the restart budget is spent, or a stage does not stop: the process should end and be started again.
    pub async fn run(self, shutdown: CancellationToken) -> Result<()> {
        let arbiters = Arc::new(Arbiters::start());
        let plane = tokio::spawn(Arc::clone(&self.plane).run(shutdown.clone()));
        let cleanup =
            tokio::spawn(cleanup::run(Arc::clone(&self.settings), self.pool.clone(), shutdown.clone()));
        let result = self.generations(&arbiters, &shutdown).await;
        shutdown.cancel();
        let _ = tokio::join!(plane, cleanup);
        arbiters.stop();
        result
    }

    async fn generations(&self, arbiters: &Arc<Arbiters>, shutdown: &CancellationToken) -> Result<()> {
        let mut budget = RestartBudget::default();
        let mut pauses = Pauses::default();
        let mut refused = false;
        loop {
            let started = Instant::now();
            self.board.set_phase(Phase::Starting);
            let Err(ended) = self.generation(arbiters, shutdown, refused).await else { return Ok(()) };
            self.figures.source_connected.store(false, Relaxed);
            if shutdown.is_cancelled() {
                return Ok(());
            }
            let Ended { stage, cause } = ended;
            // An end before there were stages leaves it as doubtful as it was.
            refused = stage.map_or(refused, |stage| stage == Stage::Ack);
            let disposition = cause.kind().disposition();
            if let (Some(stage), true) = (stage, disposition != Disposition::StandBy) {
                metrics::restarts(stage).increment(1);
            }
            let pause = match disposition {
                Disposition::Retry | Disposition::Rebuild => {
                    self.board.raise_error(&cause);
                    let pause = pauses.next(started.elapsed());
                    if cause.kind() == Kind::SlotLingers { pause.min(STANDBY_INTERVAL) } else { pause }
                }
                Disposition::Halt => {
                    self.board.raise_error(&cause);
                    self.board.set_phase(Phase::Failed);
                    HALTED_INTERVAL
                }
                Disposition::StandBy => {
                    self.board.raise_error(&cause);
                    self.board.set_phase(Phase::Standby);
                    STANDBY_INTERVAL
                }
                Disposition::Exit => return Err(cause),
                Disposition::Restart | Disposition::Stop => {
                    self.board.raise_error(&cause);
                    if !budget.spend(Instant::now()) {
                        return Err(cause);
                    }
                    pauses.next(started.elapsed())
                }
            };
            let stage = stage.map_or("none", Stage::as_str);
            tracing::warn!(stage, error = %cause.chain(), pause_ms = pause.as_millis() as u64, "generation ended");
            if shutdown.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
                return Ok(());
            }
        }
    }

    /// One generation, from connecting to its end. `Ok` when the relay was told to stop and has.
    /// `refused`: the one before ended over a recording.
    async fn generation(
        &self,
        arbiters: &Arc<Arbiters>,
        shutdown: &CancellationToken,
        refused: bool,
    ) -> Result<(), Ended> {
        self.figures.generation.fetch_add(1, Relaxed);
        let life = async {
            match &self.settings.source {
                SourceSettings::Wal(wal) => self.stream(wal, arbiters, shutdown, refused).await,
                SourceSettings::Poll(poll) => self.poll(poll, arbiters, shutdown, refused).await,
            }
        };
        life.await
    }

    /// The table as the database describes it now, once recording into it is possible.
    async fn outbox(&self, refused: bool) -> Result<Arc<Outbox>> {
        const OP: &str = "read the outbox table's columns";
        let load = async |client: &Client| {
            // Before anything is taken: what cannot be recorded would be sent again by every generation.
            control::writable(client).await?;
            let outbox = Outbox::load(client, &self.settings).await?;
            if refused {
                trial::mark(client, &outbox, self.settings.publish.exposure).await?;
            }
            Ok(outbox)
        };
        let outbox = Arc::new(pool::ask(&self.pool, OP, load).await?);
        self.plane.set_outbox(Arc::clone(&outbox));
        // What was asked for is known before anything is taken: a pause survives a restart.
        self.plane.read().await?;
        Ok(outbox)
    }

    /// What the stages of a new generation share.
    fn shared(&self) -> Shared {
        let credits = Credits::new(self.settings.credits);
        let exposure = Credits::exposure(self.settings.publish.exposure);
        self.figures.set_budgets(credits.clone(), exposure.clone());
        Shared {
            settings: Arc::clone(&self.settings),
            pool: self.pool.clone(),
            board: self.board.clone(),
            figures: Arc::clone(&self.figures),
            credits,
            exposure,
            controls: Controls { intake: self.plane.intake(), durable: watch::Sender::new(Lsn::ZERO) },
            stop: CancellationToken::new(),
        }
    }

    async fn poll(
        &self,
        poll: &PollSettings,
        arbiters: &Arc<Arbiters>,
        shutdown: &CancellationToken,
        refused: bool,
    ) -> Result<(), Ended> {
        let beginning = async {
            let outbox = self.outbox(refused).await?;
            history::begin_polling(&self.pool, &outbox).await
        };
        // Nothing was taken yet: a stop need not wait for a database that does not answer.
        let Some(begun) = shutdown.run_until_cancelled(beginning).await else { return Ok(()) };
        begun.map_err(before)?;
        let shared = self.shared();
        let generation =
            Generation::start(shared, Arc::clone(arbiters), None, Resume::default(), poll.workers);
        self.is_up(Phase::Running);
        self.until_stopped(generation, shutdown).await
    }

    async fn stream(
        &self,
        wal: &WalSettings,
        arbiters: &Arc<Arbiters>,
        shutdown: &CancellationToken,
        refused: bool,
    ) -> Result<(), Ended> {
        let beginning = async {
            let outbox = self.outbox(refused).await?;
            let progress = history::stored(&self.pool, &outbox).await?;
            let known = progress.as_ref().and_then(history::identity);
            let stream = self.open(wal, known, arbiters).await?;
            let plan = history::plan(progress, stream.identity(), stream.created(), wal);
            history::begin_streaming(&self.pool, &outbox, stream.identity(), &plan).await?;
            Ok((outbox, stream, plan))
        };
        // Nothing was taken yet: a stop need not wait for a database that does not answer.
        let Some(begun) = shutdown.run_until_cancelled(beginning).await else { return Ok(()) };
        let (outbox, stream, mut plan) = begun.map_err(before)?;
        let identity = stream.identity().clone();

        if plan.sweep {
            let shared = self.shared();
            let mut generation =
                Generation::start(shared.clone(), Arc::clone(arbiters), None, Resume::default(), 0);
            self.is_up(Phase::Sweeping);
            tracing::info!("delivering history: rows that were there before the stream");
            let decoder = generation.decoder();
            let sweeping = sweep::sweep(&shared, &decoder);
            let swept = tokio::select! {
                biased;
                () = shutdown.cancelled() => return self.settle_and_stop(generation).await,
                ended = generation.ended() => Err(ended),
                swept = sweeping => swept.map_err(before),
            };
            plan.overlap = match swept {
                Ok(end) => Some(end),
                Err(ended) => return self.tear_down(generation, ended).await,
            };
            if let Err(ended) = generation.settle().await {
                return self.tear_down(generation, ended).await;
            }
            generation.stop().await.map_err(before)?;
            tracing::info!(rows = self.figures.swept.load(Relaxed), "history delivered");
        }

        let shared = self.shared();
        shared.controls.durable.send_replace(plan.resume.flush);
        let recorder = StreamRecorder::new(shared.clone(), Arc::clone(&outbox), identity, plan.resume);
        let resume = Resume { position: plan.position(), overlap: plan.overlap };
        let mut generation = Generation::start(shared, Arc::clone(arbiters), Some(recorder), resume, 0);
        generation.start_source(move |shared, exit, decoder| WalSource::new(shared, exit, decoder, stream));
        self.is_up(Phase::Running);
        self.until_stopped(generation, shutdown).await
    }

    /// Opens the stream on the source's thread, where it is read: its task and the source then share one runtime, and an
    /// event costs no wake-up of another thread.
    async fn open(
        &self,
        wal: &WalSettings,
        known: Option<StreamIdentity>,
        arbiters: &Arbiters,
    ) -> Result<wal::Stream> {
        let (settings, wal) = (Arc::clone(&self.settings), wal.clone());
        let figures = Arc::clone(&self.figures);
        let (send, opened) = oneshot::channel();
        let opening = async move {
            let _ = send.send(wal::open(&settings, &wal, known.as_ref(), &figures.walsender).await);
        };
        let spawned = arbiters.of(Stage::Source).spawn(opening);
        let gone = || Error::new(Kind::Stuck, "open the stream on the source's thread");
        if !spawned {
            return Err(gone());
        }
        opened.await.map_err(|_| gone())?
    }

    /// The database answered and the stages are built: what was wrong with either is over.
    fn is_up(&self, phase: Phase) {
        for reason in [
            Reason::DatabaseDown,
            Reason::DatabaseReadonly,
            Reason::SchemaChanged,
            Reason::SlotLost,
            Reason::SlotInUse,
            Reason::TableLocked,
            Reason::MarkWaiting,
        ] {
            self.board.clear(reason);
        }
        self.board.set_phase(phase);
    }

    async fn until_stopped(
        &self,
        mut generation: Generation,
        shutdown: &CancellationToken,
    ) -> Result<(), Ended> {
        let ended = tokio::select! {
            biased;
            () = shutdown.cancelled() => return self.settle_and_stop(generation).await,
            ended = generation.ended() => ended,
        };
        self.tear_down(generation, ended).await
    }

    /// A stop as asked: nothing more is taken, what was taken is recorded, then the stages stop.
    async fn settle_and_stop(&self, mut generation: Generation) -> Result<(), Ended> {
        self.plane.close_intake();
        let limit = self.settings.shutdown_timeout;
        match tokio::time::timeout(limit, generation.settle()).await {
            Ok(Ok(())) => tracing::info!("everything taken is recorded"),
            Ok(Err(ended)) => {
                tracing::warn!(error = %ended.cause.chain(), "stopping with messages in flight; they will be repeated");
            }
            Err(_) => tracing::warn!(
                limit_ms = limit.as_millis() as u64,
                in_flight = self.figures.credits_in_use().messages,
                "stopping with messages in flight; they will be repeated"
            ),
        }
        generation.stop().await.map_err(before)
    }

    async fn tear_down(&self, generation: Generation, ended: Ended) -> Result<(), Ended> {
        match generation.stop().await {
            Ok(()) => Err(ended),
            Err(stuck) => Err(before(stuck)),
        }
    }
}

/// An error met before there was a stage to blame.
fn before(cause: Error) -> Ended {
    Ended { stage: None, cause }
}
