//! The settings of the replication connection.

use std::{str::FromStr, time::Duration};

use pgwire_replication::{
    ReplicationConfig,
    config::{SslMode as WireSslMode, TlsConfig},
};
use tokio_postgres::{Config, config::Host};

use super::{DatabaseSettings, SslMode};
use crate::error::{Error, Kind, Result};

/// Events the crate may read ahead of its consumer. Its default, 8192, is memory outside our credits (8192 rows of
/// 1 MiB are 8 GiB); 16 still covers the hop between two tasks.
const BUFFER_EVENTS: usize = 16;

/// A walsender inherits `DateStyle`, `TimeZone` and `bytea_output` from the role and the database; the decoder
/// reads one form of each. Given last, these win over `options` of the URL.
const OPTIONS: &str = "-c datestyle=ISO -c timezone=UTC -c bytea_output=hex";

/// The settings of a replication connection through `direct_url`.
///
/// `status_interval` is how often the position is reported without being asked; it must stay below the server's
/// `wal_sender_timeout`.
pub fn replication_config(
    settings: &DatabaseSettings,
    slot: &str,
    publication: &str,
    status_interval: Duration,
) -> Result<ReplicationConfig> {
    const OP: &str = "read database.direct_url";
    let url = Config::from_str(&settings.direct_url)
        .map_err(|error| Error::new(Kind::Config, OP).with_source(error))?;
    let only_one = || {
        Error::new(Kind::Config, OP)
            .with_source("replication needs a URL with exactly one host")
            .with_remedy("name the primary in database.direct_url")
    };
    if url.get_hosts().len() > 1 || url.get_hostaddrs().len() > 1 {
        return Err(only_one());
    }
    let host = match (url.get_hosts().first(), url.get_hostaddrs().first()) {
        (Some(Host::Tcp(name)), _) => name.clone(),
        (Some(Host::Unix(directory)), _) => directory.to_string_lossy().into_owned(),
        (None, Some(address)) => address.to_string(),
        (None, None) => return Err(only_one()),
    };
    let user = url.get_user().unwrap_or("postgres");
    let password = String::from_utf8_lossy(url.get_password().unwrap_or_default()).into_owned();
    let database = url.get_dbname().unwrap_or(user);
    let options = match url.get_options() {
        Some(theirs) => format!("{theirs} {OPTIONS}"),
        None => OPTIONS.to_owned(),
    };
    let tls = if host.starts_with('/') { TlsConfig::disabled() } else { tls(settings) };
    Ok(ReplicationConfig::new(host, user, password, database, slot, publication)
        .with_port(url.get_ports().first().copied().unwrap_or(5432))
        .with_tls(tls)
        .with_buffer_size(BUFFER_EVENTS)
        .with_status_interval(status_interval)
        .with_wakeup_interval(status_interval)
        .with_options(options)
        .with_application_name(slot))
}

/// The same choices [`super::tls`] makes. One differs in effect: the crate (0.5.0) means to accept any name with
/// `verify-ca` and refuses a wrong one, since it expects rustls to report the mismatch without its details. That is
/// stricter than asked, never laxer.
fn tls(settings: &DatabaseSettings) -> TlsConfig {
    let mut tls = TlsConfig::disabled();
    tls.mode = match (settings.sslmode, &settings.ca_file) {
        (SslMode::Disable, _) => WireSslMode::Disable,
        (SslMode::Prefer, _) => WireSslMode::Prefer,
        (SslMode::Require, None) => WireSslMode::Require,
        (SslMode::Require, Some(_)) | (SslMode::VerifyCa, _) => WireSslMode::VerifyCa,
        (SslMode::VerifyFull, _) => WireSslMode::VerifyFull,
    };
    tls.ca_pem_path.clone_from(&settings.ca_file);
    tls.client_cert_pem_path.clone_from(&settings.cert_file);
    tls.client_key_pem_path.clone_from(&settings.key_file);
    tls
}

#[cfg(test)]
mod tests {
    use super::{super::tests::settings, *};

    const TICK: Duration = Duration::from_secs(1);

    #[test]
    fn the_replication_connection_reads_one_form_of_dates_and_little_ahead() {
        let direct =
            settings("postgres://u:p@db:5433/orders?options=-c%20statement_timeout%3D0", SslMode::Prefer);
        let config = replication_config(&direct, "slot", "publication", TICK).unwrap();
        assert_eq!((config.host.as_str(), config.port, config.database.as_str()), ("db", 5433, "orders"));
        assert_eq!(config.buffer_events, 16);
        assert_eq!(config.options.unwrap(), format!("-c statement_timeout=0 {OPTIONS}"));
    }

    #[test]
    fn several_hosts_are_refused_because_a_slot_lives_on_one() {
        let many = settings("postgres://u:p@a,b/orders", SslMode::Prefer);
        assert_eq!(replication_config(&many, "s", "p", TICK).unwrap_err().kind(), Kind::Config);
    }

    #[test]
    fn require_with_an_authority_verifies_the_chain_as_libpq_does() {
        let mut strict = settings("postgres://u:p@a/orders", SslMode::Require);
        assert_eq!(tls(&strict).mode, WireSslMode::Require);
        strict.ca_file = Some("ca.pem".into());
        assert_eq!(tls(&strict).mode, WireSslMode::VerifyCa);
    }
}
