//! The connection to the broker: made when needed, shared by the lanes, watched for alarms, and said on the board when
//! it is not there.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::atomic::Ordering::Relaxed,
    time::{Duration, Instant},
};

use deadpool::{
    Runtime,
    managed::{Object, Pool, PoolError, Timeouts},
};
use futures_util::StreamExt;
use lapin::{Connection, ErrorKind, Event};
use tokio::{sync::Mutex, task::JoinHandle};

use super::{
    close::{Ending, words},
    dial::Dialer,
    hub::Hub,
};
use crate::{
    deadlines::{ATTEMPT_EVERY, CLOSE_BROKER, CONNECT, PATIENCE},
    error::{Error, Kind, Result},
    settings::BrokerSettings,
    status::Reason,
};

/// The longest pause between attempts: what an outage is noticed to be over late by.
const ATTEMPT_AT_LEAST_EVERY: Duration = Duration::from_secs(5);
/// One for the lanes; the others are there while lanes still hold one that ended.
const POOL_SIZE: usize = 4;

/// A connection in use. Dropping the last handle gives it back to the pool, which drops it if it is not open.
#[derive(Debug)]
pub(super) struct Link {
    dialed: Option<Object<Dialer>>,
    /// Never to be used again, though it may look open.
    discarded: Cell<bool>,
    watch: JoinHandle<()>,
    hub: Rc<Hub>,
}

impl Link {
    /// The connection.
    pub(super) fn connection(&self) -> &Connection {
        self.dialed.as_ref().expect("taken only when dropped")
    }

    /// Whether the broker has announced an alarm: publishes, channel openings and closes hang.
    pub(super) fn blocked(&self) -> bool {
        self.connection().status().blocked()
    }

    /// Whether a channel may be opened on it.
    pub(super) fn usable(&self) -> bool {
        !self.discarded.get() && self.connection().status().connected()
    }

    /// Gives it up: it did not answer.
    pub(super) fn discard(&self) {
        self.discarded.set(true);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.watch.abort();
        self.hub.shared.figures.broker_blocked.store(false, Relaxed);
        self.hub.shared.board.clear(Reason::BrokerAlarm);
        if self.discarded.get()
            && let Some(dialed) = self.dialed.take()
        {
            drop(Object::take(dialed));
        }
    }
}

/// Makes and shares the connection.
#[derive(Debug)]
pub(super) struct Broker {
    pool: Pool<Dialer>,
    host: String,
    hub: Rc<Hub>,
    current: Mutex<Option<Rc<Link>>>,
    failures: Cell<u32>,
    attempted: Cell<Option<Instant>>,
    /// What the last attempt met, to be logged once and not every second.
    said: RefCell<String>,
}

impl Broker {
    /// Nothing is connected yet.
    ///
    /// # Errors
    /// [`Kind::Config`] when the settings cannot work.
    pub(super) fn new(settings: &BrokerSettings, hub: Rc<Hub>) -> Result<Self> {
        let dialer = Dialer::new(settings)?;
        let host = dialer.host();
        let pool = Pool::builder(dialer)
            .max_size(POOL_SIZE)
            .runtime(Runtime::Tokio1)
            .timeouts(Timeouts { wait: Some(CONNECT), create: Some(CONNECT), recycle: Some(CONNECT) })
            .build()
            .map_err(|error| {
                Error::new(Kind::Internal, "pool connections to the broker").with_source(error)
            })?;
        Ok(Self {
            pool,
            host,
            hub,
            current: Mutex::default(),
            failures: Cell::new(0),
            attempted: Cell::new(None),
            said: RefCell::default(),
        })
    }

    /// The connection; waits for as long as there is none, saying why on the board.
    pub(super) async fn link(&self) -> Rc<Link> {
        let mut current = self.current.lock().await;
        if let Some(link) = current.as_ref().filter(|link| link.usable()) {
            return Rc::clone(link);
        }
        current.take();
        loop {
            self.pace().await;
            match self.patiently("a connection", &|| false, self.pool.get()).await {
                Ok(dialed) => {
                    self.failures.set(0);
                    self.said.borrow_mut().clear();
                    tracing::info!(broker = %self.host, "connected to the broker");
                    let link = Rc::new(self.watched(dialed));
                    *current = Some(Rc::clone(&link));
                    return link;
                }
                Err(error) => {
                    self.failures.set(self.failures.get().saturating_add(1));
                    self.refused(&error);
                }
            }
        }
    }

    /// A connection ended, or did not answer.
    pub(super) fn lost(&self, said: &str) {
        self.down(Instant::now(), format!("connection to {} lost: {said}", self.host));
    }

    /// Waits for an answer of the broker, and says on the board when it does not come, unless it is an alarm that holds it
    /// back. Whoever gets the answer says that the silence is over.
    pub(super) async fn patiently<T>(
        &self,
        what: &str,
        blocked: &dyn Fn() -> bool,
        answer: impl Future<Output = T>,
    ) -> T {
        let (asked, mut answer) = (Instant::now(), std::pin::pin!(answer));
        if let Ok(answer) = tokio::time::timeout(PATIENCE, &mut answer).await {
            return answer;
        }
        if !blocked() {
            self.silent(asked, &format!("no answer to {what} for {} s", PATIENCE.as_secs()));
        }
        answer.await
    }

    /// The broker has been silent since then, while something is to be moved.
    pub(super) fn silent(&self, since: Instant, what: &str) {
        self.down(since, format!("{} is silent: {what}", self.host));
    }

    /// It is not, or not any more.
    pub(super) fn answered(&self) {
        self.hub.shared.board.clear(Reason::BrokerDown);
    }

    /// A channel is open: whatever was wrong is over, unless publishing is what is forbidden.
    pub(super) fn found(&self, forbidden: bool) {
        self.answered();
        if !forbidden {
            self.hub.shared.board.clear(Reason::BrokerRefused);
        }
    }

    /// Closes the connection in order, if that can be had at once.
    pub(super) async fn close(&self) {
        let Ok(mut current) = self.current.try_lock() else { return };
        let Some(link) = current.take().filter(|link| link.usable() && !link.blocked()) else { return };
        let closing = link.connection().close(200, "OK".into());
        if tokio::time::timeout(CLOSE_BROKER, closing).await.is_err() {
            link.discard();
        }
    }

    async fn pace(&self) {
        if let Some(attempted) = self.attempted.get() {
            let grown = ATTEMPT_EVERY.mul_f64(1.5_f64.powi(self.failures.get().min(8) as i32));
            let pause = grown.min(ATTEMPT_AT_LEAST_EVERY).mul_f64(1.0 + 0.2 * fastrand::f64());
            tokio::time::sleep_until((attempted + pause).into()).await;
        }
        self.attempted.set(Some(Instant::now()));
    }

    fn watched(&self, dialed: Object<Dialer>) -> Link {
        let mut events = dialed.events_listener();
        let hub = Rc::clone(&self.hub);
        let host = self.host.clone();
        let socket = dialed.socket();
        let watch = tokio::task::spawn_local(async move {
            while let Some(event) = events.next().await {
                let (board, figures) = (&hub.shared.board, &hub.shared.figures);
                match event {
                    Event::ConnectionBlocked(reason) => {
                        figures.broker_blocked.store(true, Relaxed);
                        socket.expect_reader(false);
                        board.raise(
                            Reason::BrokerAlarm,
                            format!("{host} blocks publishers: {reason}"),
                            "free memory or disk on the broker (`rabbitmq-diagnostics alarms`); publishing resumes by itself",
                        );
                    }
                    Event::ConnectionUnblocked => {
                        figures.broker_blocked.store(false, Relaxed);
                        socket.expect_reader(true);
                        board.clear(Reason::BrokerAlarm);
                    }
                    _ => {}
                }
                hub.wake();
            }
        });
        Link { dialed: Some(dialed), discarded: Cell::new(false), watch, hub: Rc::clone(&self.hub) }
    }

    fn down(&self, since: Instant, detail: String) {
        let remedy = format!(
            "check that the broker is up and reachable at {}, and that broker.url is right; the relay keeps trying",
            self.host
        );
        self.hub.shared.board.raise_since(since, Reason::BrokerDown, detail, remedy);
    }

    fn refused(&self, error: &PoolError<lapin::Error>) {
        let (refused, said) = match error {
            PoolError::Backend(error) => refusal(error),
            PoolError::Timeout(_) => (None, format!("no answer within {} s", CONNECT.as_secs())),
            other => (None, other.to_string()),
        };
        if *self.said.borrow() != said {
            tracing::warn!(broker = %self.host, error = %said, "cannot connect to the broker");
            self.said.borrow_mut().clone_from(&said);
        }
        let board = &self.hub.shared.board;
        match refused {
            Some(remedy) => {
                board.raise(
                    Reason::BrokerRefused,
                    format!("{} refuses the connection: {said}", self.host),
                    remedy,
                );
                board.clear(Reason::BrokerDown);
            }
            None => {
                self.down(Instant::now(), format!("cannot connect to {}: {said}", self.host));
                board.clear(Reason::BrokerRefused);
            }
        }
    }
}

/// What the broker says no to, as the remedy, and its words. An error without a remedy is an outage.
fn refusal(error: &lapin::Error) -> (Option<&'static str>, String) {
    match error.kind() {
        ErrorKind::ProtocolError(said) => {
            let remedy = match said.get_id() {
                403 => Some("correct the user or password in broker.url, or create that user on the broker"),
                530 => Some(
                    "create the virtual host named in broker.url, or give the user permissions on it; a limit of connections is another cause",
                ),
                _ => None,
            };
            (remedy, words(said))
        }
        ErrorKind::IOError(cause) if cause.get_ref().is_some_and(|inner| inner.is::<rustls::Error>()) => (
            Some(
                "check broker.ca_file, broker.cert_file and the host in broker.url against the broker's certificate",
            ),
            cause.to_string(),
        ),
        _ => (None, Ending::of(error).words().to_owned()),
    }
}
