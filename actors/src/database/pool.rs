//! Pooled SQL connections, through `database.url`.
//!
//! A claim's connection travels between arbiters, and the pool outlives every generation of the pipeline; an arbiter's
//! runtime does not. So a connection is made, and its task runs, on the runtime the pool was built on.

use std::time::Duration;

use deadpool_postgres::{Connect, Manager, ManagerConfig, Object, Pool, PoolError, RecyclingMethod, Runtime};
use futures_util::future::BoxFuture;
use tokio::{runtime::Handle, task::JoinHandle, time::timeout};
use tokio_postgres::{Client, Config};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::{Attempts, DatabaseSettings, pool_config, sqlstate::while_connecting};
use crate::{
    deadlines::{ANSWER, CONNECT},
    error::{Error, Kind, Result},
};

/// Connections that connect and live on one runtime, whoever asks for them.
struct Outliving {
    runtime: Handle,
    tls: MakeRustlsConnect,
    attempts: Attempts,
}

impl Connect for Outliving {
    fn connect(
        &self,
        config: &Config,
    ) -> BoxFuture<'_, Result<(Client, JoinHandle<()>), tokio_postgres::Error>> {
        let (config, tls, runtime) = (config.clone(), self.tls.clone(), self.runtime.clone());
        let attempts = self.attempts.clone();
        // The socket belongs to the runtime it is opened on, so the connect is spawned there too.
        let connecting = self.runtime.spawn(async move {
            let (client, connection) = attempts.make(config.connect(tls)).await?;
            let task = runtime.spawn(async move {
                if let Err(error) = connection.await {
                    tracing::debug!(error = %error, "database connection ended");
                }
            });
            Ok((client, task))
        });
        let connecting = AbortOnDrop(connecting);
        Box::pin(async move {
            let mut connecting = connecting;
            match (&mut connecting.0).await {
                Ok(connected) => connected,
                // The runtime is shutting down: the pool's deadline says so to whoever still waits.
                Err(_) => std::future::pending().await,
            }
        })
    }
}

/// An attempt that the pool's deadline gave up is not left running.
struct AbortOnDrop<T>(JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A pool of at most `size` connections.
///
/// Must be called on a runtime that lives as long as the process. Whoever takes a connection leaves no session state
/// on it and no open transaction, so nothing is done to clean it.
pub fn pool(settings: &DatabaseSettings, application_name: &str, size: usize) -> Result<Pool> {
    let (config, tls) = pool_config(settings, application_name)?;
    let connect = Outliving { runtime: Handle::current(), tls, attempts: settings.attempts.clone() };
    let recycling = ManagerConfig { recycling_method: RecyclingMethod::Fast };
    Pool::builder(Manager::from_connect(config, connect, recycling))
        .max_size(size.max(1))
        .runtime(Runtime::Tokio1)
        .wait_timeout(Some(CONNECT))
        .create_timeout(Some(CONNECT))
        .build()
        .map_err(|error| Error::new(Kind::Internal, "build the connection pool").with_source(error))
}

/// Takes a connection out of the pool, waiting for one if all are in use.
pub async fn get(pool: &Pool) -> Result<Object> {
    const OP: &str = "connect to the database";
    pool.get().await.map_err(|error| match error {
        PoolError::Backend(error) => while_connecting(error, OP),
        other => Error::new(Kind::DatabaseDown, OP).with_source(other),
    })
}

/// Throws a connection away instead of giving it back: what is open on it is rolled back by the server.
pub fn discard(connection: Object) {
    drop(Object::take(connection));
}

/// Waits for the server's answer, but not for ever: one that is frozen sends neither an error nor a reset.
pub(crate) async fn answered<T>(answer: impl Future<Output = T>, op: &'static str) -> Result<T> {
    timeout(ANSWER, answer).await.map_err(|elapsed| Error::new(Kind::DatabaseDown, op).with_source(elapsed))
}

/// Asks on a connection of the pool. One that failed or kept silent is not given back, nor is one whose answer nobody
/// waits for any more.
pub async fn ask<T>(
    pool: &Pool,
    op: &'static str,
    question: impl AsyncFnOnce(&Client) -> Result<T>,
) -> Result<T> {
    ask_within(pool, ANSWER, op, question).await
}

/// [`ask`], with a deadline of its own for connection and answer.
pub async fn ask_within<T>(
    pool: &Pool,
    limit: Duration,
    op: &'static str,
    question: impl AsyncFnOnce(&Client) -> Result<T>,
) -> Result<T> {
    let answer = async {
        let lent = Lent(Some(get(pool).await?));
        let answer = question(lent.connection(op)?).await?;
        lent.give_back();
        Ok(answer)
    };
    timeout(limit, answer).await.unwrap_or_else(|elapsed| {
        suspect(pool);
        Err(Error::new(Kind::DatabaseDown, op).with_source(elapsed))
    })
}

/// A connection of this pool kept silent. What silenced it has silenced those that lie idle too, and each would cost its
/// next user a deadline: they go.
pub fn suspect(pool: &Pool) {
    pool.retain(|_, _| false);
}

/// A connection with a question under way: not to be given back as it is.
struct Lent(Option<Object>);

impl Lent {
    fn connection(&self, op: &'static str) -> Result<&Object> {
        self.0.as_ref().ok_or_else(|| Error::new(Kind::Internal, op))
    }

    fn give_back(mut self) {
        drop(self.0.take());
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(connection) = self.0.take() {
            discard(connection);
        }
    }
}
