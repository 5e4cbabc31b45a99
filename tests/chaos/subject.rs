//! One relay under chaos: its database, its vhost, the network around it, and what is known about its messages.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use lapin::ExchangeKind;
use tokio::sync::Mutex;
use tokio::task::JoinHandle;

use crate::load::{Journal, Route};
use crate::receipts::Receipts;
use crate::support::{
    Database, PrivateBroker, PrivatePostgres, Proxy, Relay, RelayConfig, Vhost, consume_for_ever,
};
use crate::watch::Watched;

const QUEUE: &str = "orders";
const EXCHANGE: &str = "outbox";

/// Dropped in this order: the relay first.
pub(crate) struct Subject {
    pub(crate) mode: &'static str,
    pub(crate) relay: Mutex<Relay>,
    pub(crate) config: RelayConfig,
    pub(crate) journal: Arc<Journal>,
    pub(crate) receipts: Arc<Receipts>,
    watched: std::sync::Mutex<Watched>,
    consumer: JoinHandle<()>,
    /// Between the relay and the broker, and between it and the database. Everyone else goes straight.
    pub(crate) to_broker: Proxy,
    pub(crate) to_postgres: Proxy,
    pub(crate) vhost: Vhost,
    pub(crate) database: Database,
}

impl Subject {
    /// With the relay's defaults, and a retry schedule that outlives every missing binding yet parks within the run.
    pub(crate) async fn start(
        mode: &'static str,
        postgres: &PrivatePostgres,
        broker: &PrivateBroker,
    ) -> Self {
        let (database, vhost) = (postgres.database().await, broker.vhost().await);
        vhost.declare_exchange(EXCHANGE, ExchangeKind::Topic).await;
        vhost.declare_queue(QUEUE).await;
        for route in [Route::Bound, Route::Unsteady] {
            vhost.bind(QUEUE, EXCHANGE, route.as_str()).await;
        }
        let to_postgres = Proxy::before(&database.url()).await;
        let to_broker = Proxy::before(&vhost.url()).await;
        let config = RelayConfig::new(&database, &vhost)
            .mode(mode)
            .set("database.url", to_postgres.url_for(&database.url()))
            .set("broker.url", to_broker.url_for(&vhost.url()))
            .set("publish.retry_backoff_max_ms", 2_000);
        config.migrate().await;
        let receipts = Arc::new(Receipts::default());
        let consumer = tokio::spawn(consume_for_ever(vhost.url(), QUEUE.to_owned(), receipts.clone()));
        let relay = Mutex::new(config.start_running().await);
        let (journal, watched) = (Arc::default(), std::sync::Mutex::default());
        Self {
            mode,
            relay,
            config,
            journal,
            receipts,
            watched,
            consumer,
            to_broker,
            to_postgres,
            vhost,
            database,
        }
    }

    pub(crate) fn watched(&self) -> MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Of its admin server, which every process of it has at the same address.
    pub(crate) async fn url(&self, path: &str) -> String {
        self.relay.lock().await.admin(path)
    }

    /// Notes something that is not right.
    pub(crate) fn complain(&self, what: String) {
        eprintln!("{}: {what}", self.mode);
        self.watched().complaints.push(what);
    }

    /// Committed, and not yet here.
    pub(crate) fn waiting(&self) -> usize {
        self.journal.deliverable().saturating_sub(self.receipts.distinct())
    }

    /// Takes the binding of some rows away for a while.
    pub(crate) async fn unbind(&self, lasts: Duration) {
        let key = Route::Unsteady.as_str();
        self.vhost.unbind(QUEUE, EXCHANGE, key).await;
        tokio::time::sleep(lasts).await;
        self.vhost.bind(QUEUE, EXCHANGE, key).await;
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        self.consumer.abort();
    }
}
