//! Connections to PostgreSQL.

use std::path::PathBuf;

/// Where PostgreSQL is and how it is reached.
#[derive(Debug, Clone)]
pub struct DatabaseSettings {
    /// URL for SQL; may lead through a transaction pooler.
    pub url: String,
    /// URL for replication and LISTEN; never through a pooler.
    pub direct_url: String,
    /// How much TLS is asked for.
    pub sslmode: SslMode,
    /// PEM file of the authority that signed the server's certificate.
    pub ca_file: Option<PathBuf>,
    /// PEM file of our certificate.
    pub cert_file: Option<PathBuf>,
    /// PEM file of our key.
    pub key_file: Option<PathBuf>,
    /// The schema of our own tables.
    pub schema: String,
}

/// How much TLS is asked for, with libpq's meanings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SslMode {
    /// Never.
    Disable,
    /// If the server offers it, unverified.
    #[default]
    Prefer,
    /// Always, unverified.
    Require,
    /// Always, by a known authority.
    VerifyCa,
    /// Always, by a known authority, for this host name.
    VerifyFull,
}
