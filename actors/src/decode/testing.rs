//! The default configuration, for the tests of this module.

use std::time::Duration;

use crate::{
    credit::Cost,
    database::{DatabaseSettings, SslMode},
    settings::{
        AckSettings, BrokerSettings, Columns, FirstStart, OutboxSettings, Part, PublishSettings, RowPolicy,
        Settings, SourceSettings, Template, WalSettings,
    },
};

/// The table and the columns of the default configuration.
pub(crate) fn outbox() -> OutboxSettings {
    OutboxSettings {
        schema: "public".to_owned(),
        table: "outbox_messages".to_owned(),
        columns: Columns {
            id: "id".to_owned(),
            kind: "type".to_owned(),
            content: "content".to_owned(),
            occurred_on: "occurred_on_utc".to_owned(),
            processed_on: "processed_on_utc".to_owned(),
            error: "error".to_owned(),
            key: None,
            headers: None,
            exchange: None,
            routing_key: None,
        },
        template_columns: Vec::new(),
    }
}

/// The whole default configuration in `wal` mode; its services are nowhere.
pub(crate) fn settings() -> Settings {
    let nowhere = "postgres://nobody@127.0.0.1:1/nothing";
    Settings {
        database: DatabaseSettings {
            url: nowhere.to_owned(),
            direct_url: nowhere.to_owned(),
            sslmode: SslMode::Disable,
            ca_file: None,
            cert_file: None,
            key_file: None,
            schema: "public".to_owned(),
            link: Default::default(),
        },
        broker: BrokerSettings {
            url: "amqp://127.0.0.1:1".to_owned(),
            ca_file: None,
            cert_file: None,
            key_file: None,
        },
        outbox: outbox(),
        source: SourceSettings::Wal(WalSettings {
            slot: "postrider".to_owned(),
            publication: "postrider".to_owned(),
            first_start: FirstStart::Sweep,
            recover_lost_slot: false,
        }),
        publish: PublishSettings {
            exchange: Template(vec![Part::Text("outbox".to_owned())]),
            routing_key: Template(vec![Part::Type]),
            declare: false,
            window: 256,
            exposure: 1000,
            lanes: 1,
            confirms: true,
            mandatory: true,
            persistent: true,
            max_attempts: 10,
            retry_backoff: Duration::from_millis(500),
            retry_backoff_max: Duration::from_secs(60),
            confirm_timeout: Duration::from_secs(30),
        },
        ack: AckSettings {
            rows: RowPolicy::Update,
            batch_messages: 1000,
            interval: Duration::from_millis(10),
        },
        credits: Cost { messages: 8192, bytes: 64 << 20 },
        cleanup: None,
        shutdown_timeout: Duration::from_secs(10),
    }
}
