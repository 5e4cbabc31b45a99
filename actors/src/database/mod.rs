//! Connections to PostgreSQL: ordinary ones, one that listens, and the settings of a replication connection.
//!
//! What comes in is a [`DatabaseSettings`]; what goes out is a connected [`Client`] whose connection task runs on
//! the runtime of the caller. Start-up `options` are used on the replication connection alone, because a
//! transaction pooler may refuse them: other SQL must be right whatever `DateStyle` or `TimeZone` it meets.

pub mod columns;
pub mod control;
pub mod drain;
pub mod letters;
mod link;
pub mod outbox;
pub mod pool;
pub mod progress;
mod replication;
mod sqlstate;
mod tls;
pub(crate) mod trial;
pub(crate) mod values;

use std::{error::Error as _, fmt, future::poll_fn, path::PathBuf, str::FromStr};

use tokio::sync::watch;
use tokio_postgres::{
    AsyncMessage, Client, Config, Socket,
    config::{Host, SslMode as PgSslMode},
};
use tokio_postgres_rustls::MakeRustlsConnect;
use tokio_util::sync::CancellationToken;

use crate::{
    deadlines::{ASK, CONNECT, KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_RETRIES, TCP_USER_TIMEOUT},
    error::{Error, Kind, Result},
};

pub use link::Link;
pub use replication::replication_config;
pub use sqlstate::from_postgres;
pub(crate) use sqlstate::of_state as of_sql_state;

/// How a connection to PostgreSQL uses TLS, with the meaning libpq gives these words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SslMode {
    /// Never.
    Disable,
    /// Where the server offers it, without verifying anything.
    #[default]
    Prefer,
    /// Always; the certificate is verified only where `ca_file` is set, as libpq does.
    Require,
    /// Always, with a certificate of a trusted authority.
    VerifyCa,
    /// Always, with a certificate of a trusted authority that names this host.
    VerifyFull,
}

/// Where the database is and how to reach it.
#[derive(Clone)]
pub struct DatabaseSettings {
    /// For SQL; may lead through a transaction pooler.
    pub url: String,
    /// For replication, `LISTEN` and migrations; never through a pooler.
    pub direct_url: String,
    /// Whether and how strictly TLS is used.
    pub sslmode: SslMode,
    /// The trusted authorities (PEM); Mozilla's when unset.
    pub ca_file: Option<PathBuf>,
    /// Our certificate chain (PEM), together with `key_file`.
    pub cert_file: Option<PathBuf>,
    /// The private key of `cert_file` (PEM).
    pub key_file: Option<PathBuf>,
    /// The schema of postrider's own tables.
    pub schema: String,
    /// What connections have in common; clones of these settings share it.
    pub link: Link,
}

impl fmt::Debug for DatabaseSettings {
    /// Leaves the URLs out: they hold passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DatabaseSettings")
            .field("sslmode", &self.sslmode)
            .field("ca_file", &self.ca_file)
            .field("cert_file", &self.cert_file)
            .field("key_file", &self.key_file)
            .field("schema", &self.schema)
            .finish_non_exhaustive()
    }
}

/// Connects for SQL through `url`.
///
/// The connection's task is spawned on the current runtime and ends when the client is dropped.
pub async fn connect(settings: &DatabaseSettings, application_name: &str) -> Result<Client> {
    dial(settings, &settings.url, application_name, "connect to the database").await
}

/// Connects for SQL through `direct_url`, where session state (advisory locks, `SET`) is safe.
pub async fn connect_direct(settings: &DatabaseSettings, application_name: &str) -> Result<Client> {
    dial(settings, &settings.direct_url, application_name, "connect directly to the database").await
}

/// What a pool needs to make connections like [`connect`]'s.
pub fn pool_config(
    settings: &DatabaseSettings,
    application_name: &str,
) -> Result<(Config, MakeRustlsConnect)> {
    Ok((client_config(settings, &settings.url, application_name)?, tls::connector(settings)?))
}

/// A connection that hears `NOTIFY`.
pub struct Listener {
    /// Counts notifications; a burst is one change. Its sender is gone once the connection has ended.
    pub arrivals: watch::Receiver<u64>,
    /// Keeps the connection open.
    pub client: Client,
}

impl Listener {
    /// Whether the server is still there: a connection that listens hears nothing from one that is not.
    ///
    /// # Errors
    /// [`Kind::DatabaseDown`] if it is not.
    pub async fn look_after(&self) -> Result<()> {
        self.ask("SELECT 1", "look after the connection that listens").await
    }

    async fn ask(&self, sql: &str, op: &'static str) -> Result<()> {
        match tokio::time::timeout(ASK, self.client.batch_execute(sql)).await {
            Ok(done) => done.map_err(|error| from_postgres(error, op)),
            Err(elapsed) => Err(Error::new(Kind::DatabaseDown, op).with_source(elapsed)),
        }
    }
}

/// Connects through `direct_url` and listens on `channel`.
pub async fn listen(settings: &DatabaseSettings, application_name: &str, channel: &str) -> Result<Listener> {
    const OP: &str = "listen for notifications";
    let config = client_config(settings, &settings.direct_url, application_name)?;
    let connecting = settings.link.attempt(config.connect(tls::connector(settings)?));
    let (client, mut connection) = deadline(connecting, OP).await?;
    let (sender, arrivals) = watch::channel(0);
    let severed = settings.link.severed();
    tokio::spawn(severed.run_until_cancelled_owned(async move {
        while let Some(message) = poll_fn(|cx| connection.poll_message(cx)).await {
            match message {
                Ok(AsyncMessage::Notification(_)) => sender.send_modify(|count| *count += 1),
                Ok(_) => {}
                Err(error) => {
                    tracing::debug!(error = %error, "listening connection ended");
                    break;
                }
            }
        }
    }));
    let listener = Listener { arrivals, client };
    listener.ask(&format!("LISTEN {}", quote_identifier(channel)), OP).await?;
    Ok(listener)
}

/// An identifier as SQL text, quoted whatever it holds.
pub fn quote_identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// A string as SQL literal, whatever it holds and whatever `standard_conforming_strings` says.
pub fn quote_literal(text: &str) -> String {
    if text.contains('\\') {
        format!("E'{}'", text.replace('\\', "\\\\").replace('\'', "''"))
    } else {
        format!("'{}'", text.replace('\'', "''"))
    }
}

async fn dial(
    settings: &DatabaseSettings,
    url: &str,
    application_name: &str,
    op: &'static str,
) -> Result<Client> {
    let config = client_config(settings, url, application_name)?;
    let connecting = settings.link.attempt(config.connect(tls::connector(settings)?));
    let (client, connection) = deadline(connecting, op).await?;
    tokio::spawn(run(connection, settings.link.severed()));
    Ok(client)
}

/// Runs a connection until it ends or is severed.
async fn run<T>(connection: tokio_postgres::Connection<Socket, T>, severed: CancellationToken)
where
    T: tokio_postgres::tls::TlsStream + Unpin,
{
    if let Some(Err(error)) = severed.run_until_cancelled(connection).await {
        tracing::debug!(error = %error, "database connection ended");
    }
}

/// One deadline over name lookup, connecting, TLS and authentication; `connect_timeout` covers the connect alone.
async fn deadline<F, T>(
    attempt: F,
    op: &'static str,
) -> Result<(Client, tokio_postgres::Connection<Socket, T>)>
where
    F: Future<Output = Result<(Client, tokio_postgres::Connection<Socket, T>), tokio_postgres::Error>>,
{
    match tokio::time::timeout(CONNECT, attempt).await {
        Ok(Ok(pair)) => Ok(pair),
        Ok(Err(error)) => Err(sqlstate::while_connecting(error, op)),
        Err(elapsed) => Err(Error::new(Kind::DatabaseDown, op).with_source(elapsed)),
    }
}

/// The connection settings behind `url`, with our deadlines and `sslmode`.
fn client_config(settings: &DatabaseSettings, url: &str, application_name: &str) -> Result<Config> {
    let mut config = Config::from_str(url).map_err(|error| {
        // The cause names the option or the part that is wrong; it never repeats the URL.
        let cause = error.source().map_or_else(|| error.to_string(), ToString::to_string);
        Error::new(Kind::Config, "read database.url").with_source(cause)
    })?;
    config
        .application_name(application_name)
        .connect_timeout(CONNECT)
        .keepalives(true)
        .keepalives_idle(KEEPALIVE_IDLE)
        .keepalives_interval(KEEPALIVE_INTERVAL)
        .keepalives_retries(KEEPALIVE_RETRIES)
        .tcp_user_timeout(TCP_USER_TIMEOUT)
        .ssl_mode(match settings.sslmode {
            SslMode::Disable => PgSslMode::Disable,
            SslMode::Prefer => PgSslMode::Prefer,
            SslMode::Require | SslMode::VerifyCa | SslMode::VerifyFull => PgSslMode::Require,
        });
    // libpq ignores sslmode on a Unix socket, and the server offers no TLS there.
    if config.get_hosts().iter().all(|host| matches!(host, Host::Unix(_)))
        && config.get_hostaddrs().is_empty()
    {
        config.ssl_mode(PgSslMode::Disable);
    }
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn settings(url: &str, sslmode: SslMode) -> DatabaseSettings {
        DatabaseSettings {
            url: url.to_owned(),
            direct_url: url.to_owned(),
            sslmode,
            ca_file: None,
            cert_file: None,
            key_file: None,
            schema: "public".to_owned(),
            link: Link::default(),
        }
    }

    #[test]
    fn debug_output_shows_no_password() {
        let text = format!("{:?}", settings("postgres://a:geheim@db/x", SslMode::Prefer));
        assert!(!text.contains("geheim"), "{text}");
    }

    #[test]
    fn a_malformed_url_is_a_configuration_error_that_does_not_repeat_it() {
        let bad = settings("postgres://a:geheim@db/x?conect_timeout=1", SslMode::Prefer);
        let error = client_config(&bad, &bad.url, "test").unwrap_err();
        assert_eq!(error.kind(), Kind::Config);
        assert!(
            error.chain().contains("conect_timeout") && !error.chain().contains("geheim"),
            "{}",
            error.chain()
        );
    }

    #[test]
    fn sslmode_is_ignored_on_a_unix_socket() {
        let unix = settings("postgres://a@%2Fvar%2Frun%2Fpostgresql/x", SslMode::VerifyFull);
        assert_eq!(client_config(&unix, &unix.url, "test").unwrap().get_ssl_mode(), PgSslMode::Disable);
    }

    #[test]
    fn quoting_survives_quotes_and_backslashes() {
        assert_eq!(quote_identifier("a\"b"), "\"a\"\"b\"");
        assert_eq!(quote_literal("it's"), "'it''s'");
        assert_eq!(quote_literal("a\\'b"), "E'a\\\\''b'");
    }

    #[tokio::test]
    async fn a_closed_port_is_an_outage() {
        let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let nowhere = settings(&format!("postgres://a@{closed}/x"), SslMode::Prefer);
        assert_eq!(connect(&nowhere, "test").await.unwrap_err().kind(), Kind::DatabaseDown);
    }
}
