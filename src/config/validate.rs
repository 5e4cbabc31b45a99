//! What a value may be where its type alone does not say, and which values go together.

use std::str::FromStr;

use super::{
    Config,
    error::{ConfigError, Origin},
    layers::Layers,
    names,
    template::{self, Piece},
    words::{AckRows, OnLostSlot, SourceMode},
};

/// The least and the most each number may be, where every value between works.
const RANGES: [(&str, i64, i64); 18] = [
    ("source.poll.workers", 1, 64),
    ("source.poll.batch_messages", 1, 10_000),
    ("source.poll.interval_ms", 1, 3_600_000),
    ("publish.window_messages", 1, 65_535),
    ("publish.exposure_messages", 1, 1_000_000),
    ("publish.lanes", 1, 64),
    ("publish.max_attempts", 1, 1_000_000),
    ("publish.retry_backoff_ms", 1, 3_600_000),
    ("publish.retry_backoff_max_ms", 1, 86_400_000),
    ("publish.confirm_timeout_ms", 100, 3_600_000),
    ("ack.batch_messages", 1, 100_000),
    // Feedback must come at least once a second whatever is configured.
    ("ack.interval_ms", 1, 1_000),
    ("credits.messages", 1, 10_000_000),
    // A semaphore of bytes counts in 32 bits.
    ("credits.bytes", 1 << 20, (1 << 32) - 1),
    ("cleanup.retention_secs", 0, 3_155_760_000),
    ("cleanup.interval_secs", 1, 86_400),
    ("cleanup.batch_rows", 1, 1_000_000),
    ("shutdown.timeout_ms", 0, 600_000),
];

/// Numbers that are out of range, before they are narrowed to their field's type.
pub(super) fn ranges(layers: &Layers) -> Result<(), ConfigError> {
    for (key, least, most) in RANGES {
        if let Some(found) = layers.get(key).and_then(toml::Value::as_integer)
            && !(least..=most).contains(&found)
        {
            let problem = format!("{key}: found {found}, allowed: {least} to {most}");
            return Err(ConfigError::new(layers.origin(key), problem));
        }
    }
    Ok(())
}

/// Everything that needs the whole configuration.
pub(super) fn all(config: &Config, layers: &Layers) -> Result<(), ConfigError> {
    let check = Check { config, layers };
    check.urls()?;
    check.names()?;
    check.templates()?;
    check.recording()?;
    check.bounds()?;
    check.admin()
}

struct Check<'a> {
    config: &'a Config,
    layers: &'a Layers,
}

impl Check<'_> {
    fn fail(&self, key: &str, problem: impl std::fmt::Display) -> Result<(), ConfigError> {
        Err(ConfigError::new(self.layers.origin(key), format!("{key}: {problem}")))
    }

    /// Fails where the first of `keys` that somebody set stands; the defaults themselves go together.
    fn conflict(&self, keys: [&str; 2], problem: impl std::fmt::Display) -> Result<(), ConfigError> {
        let set = keys.iter().find(|key| self.layers.origin(key) != Origin::Default).unwrap_or(&keys[0]);
        Err(ConfigError::new(self.layers.origin(set), problem.to_string()))
    }

    fn urls(&self) -> Result<(), ConfigError> {
        let database = &self.config.database;
        self.postgres("database.url", database.url.expose())?;
        if let Some(url) = &database.direct_url {
            self.postgres("database.direct_url", url.expose())?;
        }
        let broker = self.config.broker.url.expose();
        if !broker.starts_with("amqp://") && !broker.starts_with("amqps://") {
            return self.fail(
                "broker.url",
                "not an AMQP URL, allowed: amqp://USER:PASSWORD@HOST:PORT/VHOST or amqps://…",
            );
        }
        if lapin::uri::AMQPUri::from_str(broker).is_err() {
            return self.fail(
                "broker.url",
                "not a well-formed AMQP URL, allowed: amqp://USER:PASSWORD@HOST:PORT/VHOST (a `/` in a name is %2f)",
            );
        }
        for (section, cert, key) in [
            ("database", &database.cert_file, &database.key_file),
            ("broker", &self.config.broker.cert_file, &self.config.broker.key_file),
        ] {
            if cert.is_some() != key.is_some() {
                let (set, unset) = if cert.is_some() { ("cert", "key") } else { ("key", "cert") };
                let set = format!("{section}.{set}_file");
                return self.fail(&set, format!("set without {section}.{unset}_file, allowed: both or none"));
            }
        }
        Ok(())
    }

    fn postgres(&self, key: &str, url: &str) -> Result<(), ConfigError> {
        if url.split(['?', '&', ' ']).any(|part| part.starts_with("sslmode=")) {
            return self.fail(key, "holds sslmode, which is a key of its own: database.sslmode");
        }
        match tokio_postgres::Config::from_str(url) {
            Ok(parsed) if parsed.get_hosts().is_empty() && parsed.get_hostaddrs().is_empty() => {
                self.fail(key, "names no host, allowed: postgres://USER:PASSWORD@HOST:PORT/DATABASE")
            }
            Ok(parsed) if parsed.get_user().is_none() => {
                self.fail(key, "names no user, allowed: postgres://USER:PASSWORD@HOST:PORT/DATABASE")
            }
            Ok(_) => Ok(()),
            // The cause names the option or part that is wrong and never repeats the URL.
            Err(error) => {
                let cause =
                    std::error::Error::source(&error).map(|cause| format!(" ({cause})")).unwrap_or_default();
                self.fail(
                    key,
                    format!(
                        "not a PostgreSQL URL{cause}, allowed: postgres://USER:PASSWORD@HOST:PORT/DATABASE"
                    ),
                )
            }
        }
    }

    fn names(&self) -> Result<(), ConfigError> {
        let outbox = &self.config.outbox;
        let wal = &self.config.source.wal;
        let columns = &outbox.columns;
        let always = [
            ("database.schema", &self.config.database.schema),
            ("outbox.columns.id", &columns.id),
            ("outbox.columns.type", &columns.r#type),
            ("outbox.columns.content", &columns.content),
            ("outbox.columns.occurred_on", &columns.occurred_on),
            ("outbox.columns.processed_on", &columns.processed_on),
            ("outbox.columns.error", &columns.error),
        ];
        let sometimes = [
            ("outbox.columns.key", &columns.key),
            ("outbox.columns.headers", &columns.headers),
            ("outbox.columns.exchange", &columns.exchange),
            ("outbox.columns.routing_key", &columns.routing_key),
        ];
        let sometimes = sometimes.iter().filter_map(|(key, name)| name.as_ref().map(|name| (*key, name)));
        for (key, name) in always.into_iter().chain(sometimes) {
            names::identifier(name).or_else(|problem| self.fail(key, problem))?;
        }
        names::table(&outbox.table).map(drop).or_else(|problem| self.fail("outbox.table", problem))?;
        names::slot(&wal.slot).or_else(|problem| self.fail("source.wal.slot", problem))?;
        names::publication(&wal.publication).or_else(|problem| self.fail("source.wal.publication", problem))
    }

    fn templates(&self) -> Result<(), ConfigError> {
        let publish = &self.config.publish;
        for (key, text) in
            [("publish.exchange", &publish.exchange), ("publish.routing_key", &publish.routing_key)]
        {
            let pieces = match template::parse(text) {
                Ok(pieces) => pieces,
                Err(problem) => return self.fail(key, format!("found {text:?}: {problem}")),
            };
            if pieces.contains(&Piece::Placeholder("key".to_owned()))
                && self.config.outbox.columns.key.is_none()
            {
                return self.fail(key, format!("found {text:?}: {{key}} needs outbox.columns.key"));
            }
            // AMQP's short strings; a placeholder may still make one too long, which is that row's fault.
            if template::fixed(&pieces).is_some_and(|text| text.len() > 255) {
                return self.fail(key, "longer than 255 bytes, which AMQP cannot carry");
            }
            if key == "publish.exchange" && publish.declare {
                match template::fixed(&pieces) {
                    None => {
                        return self
                            .fail(key, "has placeholders, which publish.declare = true cannot declare");
                    }
                    Some("") => return self.fail(key, "is the default exchange, which nobody can declare"),
                    Some(_) => {}
                }
            }
        }
        Ok(())
    }

    fn recording(&self) -> Result<(), ConfigError> {
        if self.config.ack.rows != AckRows::Keep {
            return Ok(());
        }
        if self.config.source.mode == SourceMode::Poll {
            let problem =
                "ack.rows: found \"keep\", allowed with source.mode = \"poll\": \"update\", \"delete\"";
            return self.conflict(["ack.rows", "source.mode"], problem);
        }
        if self.config.source.wal.on_lost_slot == OnLostSlot::Recover {
            let problem =
                "source.wal.on_lost_slot: found \"recover\", allowed with ack.rows = \"keep\": \"halt\"";
            let hint = "kept rows do not say whether they were published, so a recovery would repeat all of them";
            return self
                .conflict(["ack.rows", "source.wal.on_lost_slot"], problem)
                .map_err(|error| error.with_hint(hint));
        }
        if self.config.source.wal.first_start.is_none() {
            let problem =
                "source.wal.first_start: unset, allowed with ack.rows = \"keep\": \"sweep\", \"stream\"";
            let hint = "kept rows do not say whether they were published: \"stream\" starts with new rows, \
                        \"sweep\" publishes every row in the table once";
            return self
                .conflict(["ack.rows", "source.mode"], problem)
                .map_err(|error| error.with_hint(hint));
        }
        Ok(())
    }

    fn bounds(&self) -> Result<(), ConfigError> {
        let (publish, poll) = (&self.config.publish, &self.config.source.poll);
        let exposure = self.config.exposure_messages();
        let in_poll = self.config.source.mode == SourceMode::Poll;
        let pairs = [
            ("publish.window_messages", publish.window_messages, "publish.exposure_messages", exposure, true),
            (
                "source.poll.batch_messages",
                poll.batch_messages,
                "publish.exposure_messages",
                exposure,
                in_poll,
            ),
            (
                "source.poll.batch_messages",
                poll.batch_messages,
                "credits.messages",
                self.config.credits.messages,
                in_poll,
            ),
            (
                "ack.batch_messages",
                self.config.ack.batch_messages,
                "credits.messages",
                self.config.credits.messages,
                true,
            ),
        ];
        for (small, less, large, more, applies) in pairs {
            if applies && less > more {
                let problem = format!("{small}: found {less}, allowed: at most {large}, which is {more}");
                return self.conflict([small, large], problem);
            }
        }
        if publish.retry_backoff_ms > publish.retry_backoff_max_ms {
            let problem = format!(
                "publish.retry_backoff_ms: found {}, allowed: at most publish.retry_backoff_max_ms, which is {}",
                publish.retry_backoff_ms, publish.retry_backoff_max_ms
            );
            return self.conflict(["publish.retry_backoff_ms", "publish.retry_backoff_max_ms"], problem);
        }
        Ok(())
    }

    fn admin(&self) -> Result<(), ConfigError> {
        let admin = &self.config.admin;
        if !admin.listen.ip().is_loopback() && admin.token_file.is_none() {
            let problem =
                format!("found {} without admin.token_file, allowed: a loopback address", admin.listen);
            return self.fail("admin.listen", problem).map_err(|error| {
                error.with_hint(
                    "write a token into a file and name it in admin.token_file, or listen on 127.0.0.1",
                )
            });
        }
        Ok(())
    }
}
