//! The control plane: what the operator asked for, what sources may take, and the figures that need SQL.
//!
//! One task owns all three, so they can never disagree. Requests are stored in `postrider_control` before they take
//! effect here; every process on the outbox reads that table every [`READ_INTERVAL`], so a pause holds for all of them
//! and survives restarts.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant, SystemTime},
};

use deadpool_postgres::Pool;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    control::{Desired, Intake},
    database::{
        control::{self, Health, Request},
        drain,
        outbox::Outbox,
        pool,
    },
    deadlines::{ASK, PATIENCE},
    error::{Kind, Result},
    position::Lsn,
    settings::{Settings, SourceSettings},
    status::{Board, Reason, board::default_remedy, figures::Figures},
};

/// How often SQL is asked for what only SQL knows: 12 statements a minute.
pub const READ_INTERVAL: Duration = Duration::from_secs(5);

/// How often a drain looks whether it has arrived. Only while one runs.
const DRAIN_INTERVAL: Duration = Duration::from_millis(500);

/// The figures that need SQL, and when they were read.
#[derive(Debug, Clone)]
pub struct Reading {
    /// What was read.
    pub health: Health,
    /// When, by this machine's clock.
    pub at: SystemTime,
    /// When, for ages.
    pub instant: Instant,
}

/// Shared by the admin server and the relay.
pub struct Plane {
    settings: Arc<Settings>,
    pool: Pool,
    board: Board,
    figures: Arc<Figures>,
    request: watch::Sender<Request>,
    intake: watch::Sender<Intake>,
    reading: watch::Sender<Option<Reading>>,
    /// How many rows a running drain still has to move, where that is counted (poll).
    remaining: watch::Sender<Option<u64>>,
    /// Set once by a shutdown: nothing more is taken, whatever is asked for.
    closing: CancellationToken,
    /// The table as the database describes it; read again by each generation.
    outbox: Mutex<Option<Arc<Outbox>>>,
    /// Serialises requests: each is a write and then a change here.
    asking: tokio::sync::Mutex<()>,
    drained: Mutex<bool>,
    /// Whether this has put it on the board that the database does not answer.
    unanswered: AtomicBool,
    /// Whether the database has answered anything of the reading that is under way, or was last.
    answered: AtomicBool,
}

impl Plane {
    /// A plane that has read nothing yet; intake is closed until it has.
    pub fn new(settings: Arc<Settings>, pool: Pool, board: Board, figures: Arc<Figures>) -> Arc<Self> {
        Arc::new(Self {
            settings,
            pool,
            board,
            figures,
            request: watch::Sender::new(Request::default()),
            intake: watch::Sender::new(Intake::Closed),
            reading: watch::Sender::new(None),
            remaining: watch::Sender::new(None),
            closing: CancellationToken::new(),
            outbox: Mutex::new(None),
            asking: tokio::sync::Mutex::new(()),
            drained: Mutex::new(false),
            unanswered: AtomicBool::new(false),
            answered: AtomicBool::new(false),
        })
    }

    /// Whether sources may take more.
    pub fn intake(&self) -> watch::Receiver<Intake> {
        self.intake.subscribe()
    }

    /// What was asked for.
    pub fn request(&self) -> Request {
        self.request.borrow().clone()
    }

    /// The last figures read by SQL.
    pub fn reading(&self) -> Option<Reading> {
        self.reading.borrow().clone()
    }

    /// How many rows a running drain still has to move, where that is counted.
    pub fn remaining(&self) -> Option<u64> {
        *self.remaining.borrow()
    }

    /// Closes the intake for good: the process is going to stop.
    pub fn close_intake(&self) {
        self.closing.cancel();
        self.intake.send_replace(Intake::Closed);
    }

    /// Stops intake; what is in flight settles.
    ///
    /// # Errors
    /// When it cannot be stored; nothing changes then.
    pub async fn pause(&self) -> Result<()> {
        self.ask(Desired::Pause).await
    }

    /// Ends a pause or a drain.
    ///
    /// # Errors
    /// When it cannot be stored; nothing changes then.
    pub async fn resume(&self) -> Result<()> {
        self.ask(Desired::Run).await
    }

    /// Moves everything that is there now, then stops intake. A drain that runs keeps its target.
    ///
    /// # Errors
    /// When it cannot be stored; nothing changes then.
    pub async fn drain(&self) -> Result<()> {
        self.ask(Desired::Drain).await
    }

    async fn ask(&self, desired: Desired) -> Result<()> {
        let _one_at_a_time = self.asking.lock().await;
        if self.request.borrow().desired == desired {
            return Ok(());
        }
        let request = pool::ask_within(&self.pool, ASK, "store what is asked for", async |client| {
            let outbox = self.outbox(client).await?;
            let drain_target = match (desired, &self.settings.source) {
                (Desired::Drain, SourceSettings::Wal(_)) => Some(drain::mark(client).await?.to_string()),
                (Desired::Drain, SourceSettings::Poll(_)) => Some(drain::current_snapshot(client).await?),
                _ => None,
            };
            let request = Request { desired, drain_target };
            control::store_request(client, &outbox, &request).await?;
            Ok(request)
        })
        .await?;
        let target = request.drain_target.as_deref().unwrap_or("");
        tracing::info!(desired = desired.as_str(), target, "asked for");
        self.adopt(request);
        Ok(())
    }

    /// Makes `request` effective here.
    fn adopt(&self, request: Request) {
        let changed = self.request.send_if_modified(|current| {
            let changed = *current != request;
            *current = request;
            changed
        });
        if changed {
            self.set_drained(false);
            self.remaining.send_replace(None);
        }
        self.apply();
    }

    fn set_drained(&self, drained: bool) {
        *self.drained.lock().unwrap_or_else(PoisonError::into_inner) = drained;
    }

    fn drained(&self) -> bool {
        *self.drained.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Derives intake and what the board shows from the request.
    fn apply(&self) {
        let request = self.request.borrow().clone();
        let drained = self.drained();
        let target = request.drain_target.as_deref().and_then(|target| target.parse::<Lsn>().ok());
        let intake = match (request.desired, target) {
            _ if self.closing.is_cancelled() => Intake::Closed,
            (Desired::Run, _) => Intake::Open,
            (Desired::Drain, Some(lsn)) if !drained => Intake::UpTo(lsn),
            (Desired::Drain, None) if !drained && self.remaining() != Some(0) => Intake::Open,
            _ => Intake::Closed,
        };
        self.intake.send_if_modified(|current| {
            let changed = *current != intake;
            *current = intake;
            changed
        });
        self.board.set_desired(request.desired, drained);
    }

    /// Reads SQL's figures and the stored request until `stop`.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        let mut read = tokio::time::interval(READ_INTERVAL);
        read.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut drain = tokio::time::interval(DRAIN_INTERVAL);
        drain.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                _ = read.tick() => {
                    stop.run_until_cancelled(self.look()).await;
                }
                _ = drain.tick(), if self.request.borrow().desired == Desired::Drain && !self.drained() => {
                    if let Some(Err(error)) = stop.run_until_cancelled(self.advance_drain()).await {
                        tracing::debug!(error = %error.chain(), "drain not looked at");
                    }
                }
            }
        }
    }

    /// Says how the database describes the table; each generation does, so that a change of it is noticed.
    pub fn set_outbox(&self, outbox: Arc<Outbox>) {
        *self.outbox.lock().unwrap_or_else(PoisonError::into_inner) = Some(outbox);
    }

    async fn outbox(&self, client: &tokio_postgres::Client) -> Result<Arc<Outbox>> {
        let known = self.outbox.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match known {
            Some(outbox) => Ok(outbox),
            None => Outbox::load(client, &self.settings).await.map(Arc::new),
        }
    }

    /// Reads, and says on the board when the database does not answer: an idle relay has no other question under way,
    /// and a busy one waits longer for its own.
    async fn look(&self) {
        let began = Instant::now();
        let mut reading = std::pin::pin!(self.read());
        let result = match tokio::time::timeout(PATIENCE, &mut reading).await {
            Ok(result) => result,
            Err(_silence) => {
                let detail = format!("no answer from the database for {} s", PATIENCE.as_secs());
                self.unanswered(began, detail);
                reading.await
            }
        };
        let Err(error) = result else { return };
        tracing::debug!(error = %error.chain(), "figures not read");
        if error.kind() == Kind::DatabaseDown {
            self.unanswered(began, error.chain());
        }
        // Not even the first, small question was answered.
        if began.elapsed() >= ASK && !self.answered.load(Relaxed) {
            self.settings.database.link.sever();
        }
    }

    fn unanswered(&self, asked: Instant, detail: String) {
        self.unanswered.store(true, Relaxed);
        self.board.raise_since(asked, Reason::DatabaseDown, detail, default_remedy(Reason::DatabaseDown));
    }

    /// Reads what was asked for, and the figures that need SQL.
    ///
    /// # Errors
    /// When the database cannot be asked; nothing changes then.
    pub async fn read(&self) -> Result<()> {
        let _one_at_a_time = self.asking.lock().await;
        let slot = match &self.settings.source {
            SourceSettings::Wal(wal) => Some(wal.slot.as_str()),
            SourceSettings::Poll(_) => None,
        };
        self.answered.store(false, Relaxed);
        let (request, health, asked, instant) =
            pool::ask_within(&self.pool, ASK, "read the database's figures", async |client| {
                let outbox = self.outbox(client).await?;
                let request = control::load_request(client, &outbox).await?;
                self.answered.store(true, Relaxed);
                let (asked, instant) = (SystemTime::now(), Instant::now());
                Ok((request, control::health(client, &outbox, slot).await?, asked, instant))
            })
            .await?;
        self.adopt(request);
        if self.unanswered.swap(false, Relaxed) {
            self.board.clear(Reason::DatabaseDown);
        }
        // Half of the round trip is the best guess at when the server looked at its clock.
        let half = asked.elapsed().unwrap_or_default() / 2;
        let ours = (asked + half)
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |since| i64::try_from(since.as_micros()).unwrap_or(i64::MAX));
        self.figures.clock_offset.store(health.now.saturating_sub(ours), Relaxed);
        self.figures.set_server(health.wal_lsn, instant);
        self.reading.send_replace(Some(Reading { health, at: SystemTime::now(), instant: Instant::now() }));
        Ok(())
    }

    /// Looks whether a drain has arrived: at its target, and everything taken is recorded.
    async fn advance_drain(&self) -> Result<()> {
        let request = self.request.borrow().clone();
        let Some(target) = request.drain_target else { return Ok(()) };
        let arrived = match target.parse::<Lsn>() {
            Ok(lsn) => Lsn(self.figures.durable_lsn.load(Relaxed)) >= lsn,
            Err(_) => {
                let outbox = &self.settings.outbox;
                let remaining =
                    pool::ask_within(&self.pool, ASK, "look how far a drain is", async |client| {
                        drain::remaining(client, outbox, &target).await
                    })
                    .await?;
                self.remaining.send_replace(Some(remaining));
                self.apply();
                remaining == 0
            }
        };
        if arrived && self.figures.credits_in_use().messages == 0 && self.figures.exposed() == 0 {
            self.set_drained(true);
            self.apply();
        }
        Ok(())
    }
}
