//! A stage whose relay reaches both services through proxies; the application and the oracle reach them directly.

use super::{Database, Proxy, RelayConfig, Stage, Vhost};

/// The stage, and what is between the relay and each service.
pub(crate) struct Between {
    pub(crate) stage: Stage,
    pub(crate) database: Proxy,
    pub(crate) broker: Proxy,
}

impl Between {
    /// On the shared services.
    pub(crate) async fn set(mode: &str, change: impl FnOnce(RelayConfig) -> RelayConfig) -> Self {
        Self::on(mode, Database::fresh().await, Vhost::fresh().await, change).await
    }

    /// On servers of the test's own.
    pub(crate) async fn on(
        mode: &str,
        database: Database,
        vhost: Vhost,
        change: impl FnOnce(RelayConfig) -> RelayConfig,
    ) -> Self {
        let (sql, amqp) = (Proxy::before(&database.url()).await, Proxy::before(&vhost.url()).await);
        let (sql_url, amqp_url) = (sql.url_for(&database.url()), amqp.url_for(&vhost.url()));
        let through =
            |config: RelayConfig| change(config.set("database.url", sql_url).set("broker.url", amqp_url));
        let stage = Stage::on(mode, database, vhost, through).await;
        Self { stage, database: sql, broker: amqp }
    }
}
