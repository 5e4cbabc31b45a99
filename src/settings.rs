//! From the configuration, which is what people write, to the settings of the pipeline, which is what it needs.

use std::time::Duration;

use postrider_actors::{
    credit::Cost,
    settings::{
        AckSettings, BrokerSettings, CleanupSettings, Columns, FirstStart, OutboxSettings, Part,
        PollSettings, PublishSettings, RowPolicy, Settings, SourceSettings, Template, WalSettings,
    },
};

use crate::config::{AckRows, Config, ConfigError, OnLostSlot, Origin, SourceMode, Wake, template};

/// The pipeline's settings.
///
/// # Errors
/// None for a loaded configuration; one is returned rather than assumed away.
pub fn settings(config: &Config) -> Result<Settings, ConfigError> {
    let (schema, table) = config.outbox_table();
    let columns = &config.outbox.columns;
    let mut template_columns = Vec::new();
    let exchange = parse("publish.exchange", &config.publish.exchange, &mut template_columns)?;
    let routing_key = parse("publish.routing_key", &config.publish.routing_key, &mut template_columns)?;
    let publish = &config.publish;
    Ok(Settings {
        database: config.database_settings(),
        broker: BrokerSettings {
            url: config.broker.url.expose().to_owned(),
            ca_file: config.broker.ca_file.clone(),
            cert_file: config.broker.cert_file.clone(),
            key_file: config.broker.key_file.clone(),
        },
        outbox: OutboxSettings {
            schema: schema.to_owned(),
            table: table.to_owned(),
            columns: Columns {
                id: columns.id.clone(),
                kind: columns.r#type.clone(),
                content: columns.content.clone(),
                occurred_on: columns.occurred_on.clone(),
                processed_on: columns.processed_on.clone(),
                error: columns.error.clone(),
                key: columns.key.clone(),
                headers: columns.headers.clone(),
                exchange: columns.exchange.clone(),
                routing_key: columns.routing_key.clone(),
            },
            template_columns,
        },
        source: source(config),
        publish: PublishSettings {
            exchange,
            routing_key,
            declare: publish.declare,
            window: publish.window_messages,
            exposure: config.exposure_messages(),
            lanes: publish.lanes as usize,
            confirms: publish.confirms,
            mandatory: publish.mandatory,
            persistent: publish.persistent,
            max_attempts: publish.max_attempts,
            retry_backoff: Duration::from_millis(publish.retry_backoff_ms),
            retry_backoff_max: Duration::from_millis(publish.retry_backoff_max_ms),
            confirm_timeout: Duration::from_millis(publish.confirm_timeout_ms),
        },
        ack: AckSettings {
            rows: match config.ack.rows {
                AckRows::Update => RowPolicy::Update,
                AckRows::Delete => RowPolicy::Delete,
                AckRows::Keep => RowPolicy::Keep,
            },
            batch_messages: config.ack.batch_messages as usize,
            interval: Duration::from_millis(config.ack.interval_ms),
        },
        credits: Cost {
            messages: config.credits.messages,
            bytes: u32::try_from(config.credits.bytes).unwrap_or(u32::MAX),
        },
        cleanup: (config.cleanup.retention_secs > 0).then(|| CleanupSettings {
            retention: Duration::from_secs(config.cleanup.retention_secs),
            interval: Duration::from_secs(config.cleanup.interval_secs),
            batch_rows: config.cleanup.batch_rows,
        }),
        shutdown_timeout: Duration::from_millis(config.shutdown.timeout_ms),
    })
}

fn source(config: &Config) -> SourceSettings {
    match config.source.mode {
        SourceMode::Wal => SourceSettings::Wal(WalSettings {
            slot: config.source.wal.slot.clone(),
            publication: config.source.wal.publication.clone(),
            first_start: match config.first_start() {
                crate::config::FirstStart::Sweep => FirstStart::Sweep,
                crate::config::FirstStart::Stream => FirstStart::Stream,
            },
            recover_lost_slot: config.source.wal.on_lost_slot == OnLostSlot::Recover,
        }),
        SourceMode::Poll => SourceSettings::Poll(PollSettings {
            workers: config.source.poll.workers as usize,
            batch_messages: config.source.poll.batch_messages,
            interval: Duration::from_millis(config.source.poll.interval_ms),
            notify: config.source.poll.wake == Wake::Notify,
        }),
    }
}

/// Parses a template; columns it names are added to `columns` once.
fn parse(key: &str, text: &str, columns: &mut Vec<String>) -> Result<Template, ConfigError> {
    let pieces = template::parse(text)
        .map_err(|problem| ConfigError::new(Origin::Default, format!("{key}: {problem}")))?;
    let parts = pieces.into_iter().map(|piece| match piece {
        template::Piece::Text(text) => Part::Text(text),
        template::Piece::Placeholder(name) => match name.as_str() {
            "id" => Part::Id,
            "type" => Part::Type,
            "key" => Part::Key,
            _ => Part::Column(columns.iter().position(|column| *column == name).unwrap_or_else(|| {
                columns.push(name);
                columns.len() - 1
            })),
        },
    });
    Ok(Template(parts.collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_of_both_templates_are_read_once() {
        let mut columns = Vec::new();
        let exchange = parse("publish.exchange", "x.{tenant}", &mut columns).unwrap();
        let routing_key = parse("publish.routing_key", "{region}.{tenant}.{type}", &mut columns).unwrap();
        assert_eq!(columns, ["tenant", "region"]);
        assert_eq!(exchange.0, [Part::Text("x.".into()), Part::Column(0)]);
        assert_eq!(routing_key.0[0], Part::Column(1));
        assert_eq!(routing_key.0[2], Part::Column(0));
        assert_eq!(routing_key.0[4], Part::Type);
    }
}
