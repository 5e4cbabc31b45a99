//! The configuration: defaults, then a TOML file, then environment variables.
//!
//! ```text
//! POSTRIDER_SOURCE__WAL__SLOT=orders   overrides   [source.wal] slot = "…"
//! ```
//!
//! A [`Config`] that exists is valid: [`Config::load`] refuses unknown keys, wrong types, names PostgreSQL would
//! not take and combinations that cannot work, each with the file or variable, the key, what was found and what is
//! allowed. No error and no `Debug` output holds a password.

pub mod defaults;
mod error;
mod keys;
mod layers;
pub mod names;
mod secret;
mod sections;
pub mod template;
mod validate;
mod words;

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

pub use error::{ConfigError, Origin};
pub use keys::{KEYS, variable};
pub use secret::Url;
pub use sections::{
    Ack, Admin, Broker, Cleanup, Columns, Credits, Database, Outbox, Poll, Publish, Shutdown, Source, Wal,
};
pub use words::{AckRows, FirstStart, OnLostSlot, SourceMode, SslMode, Wake};

use layers::Layers;

/// The file that is read when none is named.
pub const DEFAULT_PATH: &str = "config.toml";

/// What the variables begin with that override keys; two underscores separate sections.
pub const ENV_PREFIX: &str = "POSTRIDER_";

/// The whole configuration, valid.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Where PostgreSQL is.
    pub database: Database,
    /// Where RabbitMQ is.
    pub broker: Broker,
    /// Where messages are.
    pub outbox: Outbox,
    /// How rows arrive.
    pub source: Source,
    /// How messages are sent.
    pub publish: Publish,
    /// How verdicts are recorded.
    pub ack: Ack,
    /// The bound of everything held.
    pub credits: Credits,
    /// What becomes of recorded rows.
    pub cleanup: Cleanup,
    /// The admin server.
    pub admin: Admin,
    /// How the program stops.
    pub shutdown: Shutdown,
}

impl Config {
    /// Reads `path`, or `config.toml` where that exists, and the variables in `env`.
    pub fn load(
        path: Option<&Path>,
        env: impl Iterator<Item = (String, String)>,
    ) -> Result<Self, ConfigError> {
        let mut layers = Layers::default();
        match path {
            Some(path) => layers.read_file(path)?,
            // Run from the environment alone, as in a container, there need not be a file.
            None if Path::new(DEFAULT_PATH).exists() => layers.read_file(Path::new(DEFAULT_PATH))?,
            None => {}
        }
        layers.read_variables(env)?;
        read_secrets(&mut layers)?;
        validate::ranges(&layers)?;
        let values = toml::Value::Table(layers.values.clone());
        let config: Self = serde_path_to_error::deserialize(values).map_err(|error| {
            let key = error.path().to_string();
            let problem = error.inner().message().to_owned();
            ConfigError::new(layers.origin(&key), format!("{key}: {problem}"))
        })?;
        validate::all(&config, &layers)?;
        Ok(config)
    }

    /// How to reach the database.
    pub fn database_settings(&self) -> postrider_actors::database::DatabaseSettings {
        let database = &self.database;
        postrider_actors::database::DatabaseSettings {
            url: database.url.expose().to_owned(),
            direct_url: self.direct_url().expose().to_owned(),
            sslmode: database.sslmode.into(),
            ca_file: database.ca_file.clone(),
            cert_file: database.cert_file.clone(),
            key_file: database.key_file.clone(),
            schema: database.schema.clone(),
            link: postrider_actors::database::Link::default(),
        }
    }

    /// `database.direct_url`, or `database.url`.
    pub fn direct_url(&self) -> &Url {
        self.database.direct_url.as_ref().unwrap_or(&self.database.url)
    }

    /// `publish.exposure_messages`, or the mode's default.
    pub fn exposure_messages(&self) -> u32 {
        self.publish.exposure_messages.unwrap_or(match self.source.mode {
            SourceMode::Wal => defaults::EXPOSURE_WAL,
            SourceMode::Poll => defaults::EXPOSURE_POLL,
        })
    }

    /// `source.wal.first_start`, or `sweep`.
    pub fn first_start(&self) -> FirstStart {
        self.source.wal.first_start.unwrap_or(FirstStart::Sweep)
    }

    /// Schema and name of the outbox table.
    pub fn outbox_table(&self) -> (&str, &str) {
        names::table(&self.outbox.table).expect("a loaded configuration names a table")
    }

    /// `schema.table`, under which our tables' rows are kept.
    pub fn outbox_name(&self) -> String {
        let (schema, table) = self.outbox_table();
        format!("{schema}.{table}")
    }
}

/// Puts what the `*_file` keys name in place of their keys.
fn read_secrets(layers: &mut Layers) -> Result<(), ConfigError> {
    for key in layers::SECRETS {
        let file_key = format!("{key}_file");
        let Some(path) = layers.get(&file_key).and_then(toml::Value::as_str).map(PathBuf::from) else {
            continue;
        };
        let origin = layers.origin(&file_key);
        if layers.get(key).is_some() {
            return Err(ConfigError::new(
                origin,
                format!("{file_key}: set together with {key}, allowed: one of them"),
            ));
        }
        let secret = fs::read_to_string(&path).map_err(|error| {
            ConfigError::new(origin.clone(), format!("{file_key}: cannot read {}: {error}", path.display()))
        })?;
        // Editors and `echo` end a file with a newline that is no part of the secret.
        let secret = secret.trim_end_matches(['\r', '\n']).to_owned();
        layers.set_secret(key, secret, origin);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
