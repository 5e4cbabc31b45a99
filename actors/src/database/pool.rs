//! Pooled SQL connections, through `database.url`.
//!
//! A claim's connection travels between arbiters, and the pool outlives every generation of the pipeline; an arbiter's
//! runtime does not. So a connection is made, and its task runs, on the runtime the pool was built on.

use std::time::{Duration, Instant};

use deadpool_postgres::{Connect, Manager, ManagerConfig, Object, Pool, PoolError, RecyclingMethod, Runtime};
use futures_util::future::BoxFuture;
use tokio::{runtime::Handle, task::JoinHandle, time::timeout};
use tokio_postgres::{Client, Config};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::{DatabaseSettings, Link, pool_config, sqlstate::while_connecting};
use crate::{
    deadlines::{ANSWER, CONNECT, PATIENCE},
    error::{Error, Kind, Result},
    status::{Board, Reason, board::default_remedy},
};

/// Connections that connect and live on one runtime, whoever asks for them.
struct Outliving {
    runtime: Handle,
    tls: MakeRustlsConnect,
    link: Link,
}

impl Connect for Outliving {
    fn connect(
        &self,
        config: &Config,
    ) -> BoxFuture<'_, Result<(Client, JoinHandle<()>), tokio_postgres::Error>> {
        let (config, tls, runtime) = (config.clone(), self.tls.clone(), self.runtime.clone());
        let link = self.link.clone();
        // The socket belongs to the runtime it is opened on, so the connect is spawned there too.
        let connecting = self.runtime.spawn(async move {
            let (client, connection) = link.attempt(config.connect(tls)).await?;
            let task = runtime.spawn(super::run(connection, link.severed()));
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
    let connect = Outliving { runtime: Handle::current(), tls, link: settings.link.clone() };
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

/// Waits for `answer`, and says on the board while it does not come: something is to be moved and is not.
pub(crate) async fn patiently<T>(board: &Board, answer: impl Future<Output = Result<T>>) -> Result<T> {
    let (began, mut answer) = (Instant::now(), std::pin::pin!(answer));
    let mut said = false;
    let answer = loop {
        match timeout(PATIENCE, &mut answer).await {
            Ok(answer) => break answer,
            Err(_silence) => {
                said = true;
                let detail = format!("no answer from the database for {} s", began.elapsed().as_secs());
                board.raise_since(began, Reason::DatabaseDown, detail, default_remedy(Reason::DatabaseDown));
            }
        }
    };
    // An error that is no outage is an answer too; an outage is put up by whoever handles it, and holds on.
    if said && !matches!(&answer, Err(error) if error.kind() == Kind::DatabaseDown) {
        board.clear(Reason::DatabaseDown);
    }
    answer
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
    let silent = |elapsed| Err(Error::new(Kind::DatabaseDown, op).with_source(elapsed));
    timeout(limit, answer).await.unwrap_or_else(silent)
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
