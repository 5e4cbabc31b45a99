//! How a connection to the broker is made: what the pool calls.
//!
//! deadpool-lapin's own manager decides what may be reused. It cannot be given TLS settings, and a connection attempt
//! that it abandons stays behind in lapin as a thread and a descriptor for as long as the peer keeps the port open. So
//! connecting is done here, keeping a second handle of the socket that shuts it down when nobody wants it any more.

use std::{
    net::Shutdown,
    os::fd::AsFd,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use deadpool::managed::{self, Metrics, RecycleResult};
use lapin::{
    AsyncTcpStream, Connection, ConnectionProperties,
    tcp::RustlsConnector,
    uri::{AMQPScheme, AMQPUri},
};
use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use socket2::{SockRef, TcpKeepalive};

use crate::{
    deadlines::{
        CONNECT, HEARTBEAT, KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_RETRIES, TCP_USER_TIMEOUT,
    },
    error::{Error, Kind, Result},
    settings::BrokerSettings,
};

const OP: &str = "prepare connections to the broker";

/// A second handle of a connection's socket. Dropping it shuts the socket down, which ends lapin's thread whatever
/// the peer does.
#[derive(Debug, Clone, Default)]
pub(super) struct Socket(Arc<Mutex<Option<std::net::TcpStream>>>);

impl Socket {
    fn keep(&self, stream: &impl AsFd) -> std::io::Result<()> {
        let copy = std::net::TcpStream::from(stream.as_fd().try_clone_to_owned()?);
        let keepalive = TcpKeepalive::new()
            .with_time(KEEPALIVE_IDLE)
            .with_interval(KEEPALIVE_INTERVAL)
            .with_retries(KEEPALIVE_RETRIES);
        SockRef::from(&copy).set_tcp_keepalive(&keepalive)?;
        *self.kept() = Some(copy);
        self.expect_reader(true);
        Ok(())
    }

    /// Whether the peer should be reading. A broker in an alarm does not, for as long as that lasts; its kernel then keeps
    /// the window shut, and ours would take that for a dead peer. Heartbeats go on, so a dead one is still noticed.
    pub(super) fn expect_reader(&self, reading: bool) {
        if let Some(socket) = &*self.kept() {
            // It may have ended already; then there is nothing to limit.
            let _ = SockRef::from(socket).set_tcp_user_timeout(reading.then_some(TCP_USER_TIMEOUT));
        }
    }

    fn kept(&self) -> MutexGuard<'_, Option<std::net::TcpStream>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
struct Hangup(Socket);

impl Drop for Hangup {
    fn drop(&mut self) {
        if let Some(socket) = self.0.kept().take() {
            // It may be closed already; then there is nothing to shut down.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// A connection. Dropping it ends it at once; closing it in order is up to its owner.
#[derive(Debug)]
pub(super) struct Dialed {
    connection: Connection,
    hangup: Hangup,
}

impl Dialed {
    /// Its socket.
    pub(super) fn socket(&self) -> Socket {
        self.hangup.0.clone()
    }
}

impl std::ops::Deref for Dialed {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.connection
    }
}

/// Makes connections for the pool.
pub(super) struct Dialer {
    uri: AMQPUri,
    tls: Option<RustlsConnector>,
    /// Decides what may be reused.
    pool_law: deadpool_lapin::Manager,
}

impl std::fmt::Debug for Dialer {
    /// Leaves the URI out: it holds the password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dialer").field("tls", &self.tls.is_some()).finish_non_exhaustive()
    }
}

impl Dialer {
    /// A dialer for `settings`, on the current runtime.
    ///
    /// # Errors
    /// [`Kind::Config`] when the URL cannot be read or a certificate file cannot be used.
    pub(super) fn new(settings: &BrokerSettings) -> Result<Self> {
        // lapin's message names what is wrong and may repeat a part of the URL; the URL holds a password.
        let mut uri: AMQPUri = settings.url.parse().map_err(|_| {
            invalid("broker.url is no AMQP URL: amqp[s]://USER:PASSWORD@HOST:PORT/VIRTUAL_HOST is expected")
        })?;
        uri.query.heartbeat.get_or_insert(HEARTBEAT.as_secs() as u16);
        let tls = match uri.scheme {
            AMQPScheme::AMQP => None,
            AMQPScheme::AMQPS => Some(connector(settings)?),
        };
        let runtime = lapin::runtime::default_runtime()
            .map_err(|error| Error::new(Kind::Internal, OP).with_source(error))?;
        let pool_law =
            deadpool_lapin::Manager::new(settings.url.as_str(), ConnectionProperties::default, runtime);
        Ok(Self { uri, tls, pool_law })
    }

    /// `host:port`, for people to read.
    pub(super) fn host(&self) -> String {
        format!("{}:{}", self.uri.authority.host, self.uri.authority.port)
    }

    async fn dial(&self) -> lapin::Result<Dialed> {
        let socket = Socket::default();
        let hangup = Hangup(socket.clone());
        let tls = self.tls.clone();
        let options = ConnectionProperties::default()
            .with_connection_name("postrider".into())
            .with_client_property("product".into(), "postrider".into())
            .with_client_property("version".into(), env!("CARGO_PKG_VERSION").into());
        let connection = Connection::connector(
            self.uri.clone(),
            lapin::runtime::default_runtime()?,
            async move |uri, runtime| {
                let host = uri.authority.host.clone();
                let reach = async {
                    let address = runtime.to_socket_addrs((host.clone(), uri.authority.port));
                    let stream = AsyncTcpStream::connect(&runtime, address).await?;
                    if let AsyncTcpStream::Plain(plain) = &stream {
                        socket.keep(plain.get_ref())?;
                    }
                    match &tls {
                        Some(connector) => stream.into_rustls(connector, &host).await,
                        None => Ok(stream),
                    }
                };
                // lapin awaits this on a thread of its own, where nobody else could give up.
                match tokio::time::timeout(CONNECT, reach).await {
                    Ok(reached) => Ok(reached?),
                    Err(elapsed) => Err(std::io::Error::new(std::io::ErrorKind::TimedOut, elapsed).into()),
                }
            },
            options,
        )
        .await?;
        Ok(Dialed { connection, hangup })
    }
}

impl managed::Manager for Dialer {
    type Type = Dialed;
    type Error = lapin::Error;

    async fn create(&self) -> Result<Dialed, lapin::Error> {
        self.dial().await
    }

    async fn recycle(&self, dialed: &mut Dialed, metrics: &Metrics) -> RecycleResult<lapin::Error> {
        self.pool_law.recycle(&mut dialed.connection, metrics).await
    }
}

fn connector(settings: &BrokerSettings) -> Result<RustlsConnector> {
    let mut roots = RootCertStore::empty();
    match &settings.ca_file {
        Some(path) => {
            let (usable, _) = roots.add_parsable_certificates(certificates(path, "broker.ca_file")?);
            if usable == 0 {
                return Err(invalid(format!("broker.ca_file: no usable certificate in {}", path.display())));
            }
        }
        None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::new(Kind::Internal, OP).with_source(error))?
        .with_root_certificates(roots);
    let config = match (&settings.cert_file, &settings.key_file) {
        (Some(cert), Some(key)) => {
            let key = PrivateKeyDer::from_pem_file(key).map_err(|error| {
                invalid(format!("broker.key_file: cannot read {}: {error}", key.display()))
            })?;
            builder
                .with_client_auth_cert(certificates(cert, "broker.cert_file")?, key)
                .map_err(|error| Error::new(Kind::Config, OP).with_source(error))?
        }
        (None, None) => builder.with_no_client_auth(),
        _ => return Err(invalid("broker.cert_file and broker.key_file belong together: set both or none")),
    };
    Ok(config.into())
}

fn certificates(path: &Path, key: &str) -> Result<Vec<CertificateDer<'static>>> {
    CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| invalid(format!("{key}: cannot read {}: {error}", path.display())))
}

fn invalid(text: impl Into<String>) -> Error {
    Error::new(Kind::Config, OP).with_source(text.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(url: &str) -> BrokerSettings {
        BrokerSettings { url: url.to_owned(), ca_file: None, cert_file: None, key_file: None }
    }

    #[tokio::test]
    async fn a_malformed_url_is_a_configuration_error_that_does_not_repeat_it() {
        let error = Dialer::new(&settings("amqp://a:geheim@host:not-a-port/x")).unwrap_err();
        assert_eq!(error.kind(), Kind::Config);
        assert!(!error.chain().contains("geheim"), "{}", error.chain());
    }

    #[tokio::test]
    async fn what_is_printed_about_a_dialer_holds_no_password() {
        let dialer = Dialer::new(&settings("amqp://a:geheim@broker:5673/x")).unwrap();
        assert_eq!(dialer.host(), "broker:5673");
        assert!(!format!("{dialer:?}").contains("geheim"));
    }
}
