//! The default outbox, for the tests of this module.

use crate::settings::{Columns, OutboxSettings};

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
