//! From a row to what is published: where to, and with which properties. The content itself is never looked into.
//!
//! Everything that AMQP, or the broker's reading of it, would refuse with a closed channel or connection is refused
//! here instead, as that row's rejection: a closed channel takes innocent neighbours with it. The one limit left to the
//! broker is the body's size, which is its configuration (16 MiB on RabbitMQ 4, 128 MiB before).

use lapin::{BasicProperties, types::ShortString};

use super::{
    headers,
    template::{Address, too_long},
};
use crate::{
    envelope::{ContentKind, Reason, Rejection, Row},
    settings::Settings,
};

/// The frame size that RabbitMQ offers by default (`frame_max`) and lapin accepts. A content header must fit into one
/// frame; a larger one closes the *connection* (501). A broker configured with smaller frames is not known here.
const FRAME_MAX: usize = 131_072;

/// What a content header frame takes besides its properties' values: 7 of frame header, 1 of frame end, then class 2,
/// weight 2, body size 8 and property flags 2 (AMQP 0-9-1, 2.3.5.2 and 4.2.6.1).
const FRAME_OVERHEAD: usize = 7 + 1 + 2 + 2 + 8 + 2;

const APP_ID: &str = "postrider";

/// A message without its row.
#[derive(Debug)]
pub struct Composed {
    /// The exchange.
    pub exchange: ShortString,
    /// Whether the exchange is the row's own.
    pub own_exchange: bool,
    /// The routing key.
    pub routing_key: ShortString,
    /// All properties.
    pub properties: BasicProperties,
}

/// Makes messages of rows.
#[derive(Debug)]
pub struct Composer {
    exchange: Address,
    routing_key: Address,
    delivery_mode: u8,
}

impl Composer {
    /// A composer as configured.
    pub fn new(settings: &Settings) -> Self {
        Self {
            exchange: Address::new("exchange", &settings.publish.exchange, &settings.outbox),
            routing_key: Address::new("routing key", &settings.publish.routing_key, &settings.outbox),
            delivery_mode: if settings.publish.persistent { 2 } else { 1 },
        }
    }

    /// What is published for `row`, or why AMQP cannot carry it.
    ///
    /// # Errors
    /// [`Reason::Invalid`], with lengths and names but no contents.
    pub fn compose(&self, row: &Row) -> Result<Composed, Rejection> {
        self.try_compose(row).map_err(invalid)
    }

    fn try_compose(&self, row: &Row) -> Result<Composed, String> {
        let (exchange, own_exchange) = match &row.exchange {
            Some(own) => (short("exchange", own)?, true),
            None => (self.exchange.of(row)?, false),
        };
        let routing_key = match &row.routing_key {
            Some(own) => short("routing key", own)?,
            None => self.routing_key.of(row)?,
        };
        let content_type = content_type(row.content_kind);
        let id = short("id", &row.id)?;
        let kind = short("type", &row.kind)?;
        let mut size = FRAME_OVERHEAD
            + (1 + content_type.len())
            + 1
            + (1 + id.as_str().len())
            + (1 + kind.as_str().len())
            + (1 + APP_ID.len());
        let mut properties = BasicProperties::default()
            .with_content_type(fixed(content_type))
            .with_delivery_mode(self.delivery_mode)
            .with_message_id(id)
            .with_type(kind)
            .with_app_id(fixed(APP_ID));
        // AMQP counts whole seconds since 1970 and knows none before.
        if let Some(seconds) = row.occurred_on.and_then(|micros| u64::try_from(micros).ok()) {
            properties = properties.with_timestamp(seconds / 1_000_000);
            size += 8;
        }
        if let Some(json) = &row.headers {
            let headers = headers::parse(json, FRAME_MAX)?;
            size += headers.encoded;
            if size > FRAME_MAX {
                return Err(format!("properties of {size} bytes with headers; AMQP allows {FRAME_MAX}"));
            }
            properties = properties.with_headers(headers.table);
        }
        Ok(Composed { exchange, own_exchange, routing_key, properties })
    }
}

/// The rejection of a row that cannot be sent.
pub fn invalid(detail: impl Into<String>) -> Rejection {
    Rejection { reason: Reason::Invalid, detail: detail.into() }
}

fn content_type(kind: ContentKind) -> &'static str {
    match kind {
        ContentKind::Json => "application/json",
        ContentKind::Text => "text/plain; charset=utf-8",
        ContentKind::Bytes => "application/octet-stream",
    }
}

fn short(what: &str, bytes: &[u8]) -> Result<ShortString, String> {
    let text = std::str::from_utf8(bytes).map_err(|_| format!("the {what} is not UTF-8"))?;
    ShortString::try_new(text).map_err(|_| too_long(what, bytes.len()))
}

fn fixed(text: &'static str) -> ShortString {
    ShortString::try_new(text).expect("a constant shorter than 255 bytes")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::testing::settings;
    use bytes::Bytes;

    fn row() -> Row {
        Row {
            id: Bytes::from_static(b"5b1e"),
            kind: Bytes::from_static(b"order.placed"),
            content: Bytes::from_static(b"{}"),
            occurred_on: Some(1_767_323_045_999_999),
            ..Row::default()
        }
    }

    fn compose(row: &Row) -> Result<Composed, Rejection> {
        Composer::new(&settings()).compose(row)
    }

    #[test]
    fn a_row_becomes_a_message_with_every_property() {
        let composed = compose(&row()).unwrap();
        assert_eq!((composed.exchange.as_str(), composed.own_exchange), ("outbox", false));
        assert_eq!(composed.routing_key.as_str(), "order.placed");
        let expected = BasicProperties::default()
            .with_message_id("5b1e".into())
            .with_type("order.placed".into())
            .with_timestamp(1_767_323_045)
            .with_content_type("application/json".into())
            .with_delivery_mode(2)
            .with_app_id("postrider".into());
        assert_eq!(composed.properties, expected);
    }

    #[test]
    fn the_content_type_follows_the_column_and_the_delivery_mode_the_configuration() {
        let mut settings = settings();
        settings.publish.persistent = false;
        let composer = Composer::new(&settings);
        for (kind, content_type) in [
            (ContentKind::Text, "text/plain; charset=utf-8"),
            (ContentKind::Bytes, "application/octet-stream"),
        ] {
            let composed = composer.compose(&Row { content_kind: kind, ..row() }).unwrap();
            assert_eq!(composed.properties.content_type().as_ref().unwrap().as_str(), content_type);
            assert_eq!(*composed.properties.delivery_mode(), Some(1));
        }
    }

    #[test]
    fn the_rows_own_exchange_and_routing_key_come_first() {
        let own = |text: &'static [u8]| Some(Bytes::from_static(text));
        let composed = compose(&Row { exchange: own(b"ex"), routing_key: own(b"rk"), ..row() }).unwrap();
        assert_eq!((composed.exchange.as_str(), composed.own_exchange), ("ex", true));
        assert_eq!(composed.routing_key.as_str(), "rk");
    }

    #[test]
    fn a_time_before_1970_or_none_gives_no_timestamp() {
        for occurred_on in [None, Some(-1), Some(i64::MIN)] {
            let composed = compose(&Row { occurred_on, ..row() }).unwrap();
            assert_eq!(*composed.properties.timestamp(), None);
        }
    }

    #[test]
    fn short_strings_may_take_255_bytes_and_more_is_the_rows_rejection() {
        for (text, works) in [
            ("a".repeat(254), true),
            ("a".repeat(255), true),
            ("a".repeat(256), false),
            (format!("a{}", "é".repeat(127)), true),
            ("é".repeat(128), false),
        ] {
            let text = Bytes::from(text);
            let rows = [
                Row { id: text.clone(), ..row() },
                Row { kind: text.clone(), ..row() },
                Row { exchange: Some(text.clone()), ..row() },
                Row { routing_key: Some(text.clone()), ..row() },
            ];
            for row in rows {
                match compose(&row) {
                    Ok(_) => assert!(works),
                    Err(rejection) => {
                        assert!(!works && rejection.reason == Reason::Invalid);
                        assert!(rejection.detail.contains("256 bytes"), "{}", rejection.detail);
                    }
                }
            }
        }
    }

    #[test]
    fn text_that_is_not_utf_8_is_refused() {
        assert!(compose(&Row { kind: Bytes::from_static(b"\xff"), ..row() }).is_err());
    }

    #[test]
    fn headers_that_do_not_fit_the_frame_are_refused_to_the_byte() {
        let with = |length: usize| Row {
            headers: Some(Bytes::from(format!("{{\"h\": \"{}\"}}", "x".repeat(length)))),
            ..row()
        };
        let bare = FRAME_OVERHEAD + 17 + 1 + 5 + 13 + 10 + 8;
        let room = FRAME_MAX - bare - (4 + 2 + 1 + 4);
        assert!(compose(&with(room)).is_ok());
        let detail = compose(&with(room + 1)).unwrap_err().detail;
        assert!(detail.contains("131073 bytes"), "{detail}");
        assert!(compose(&with(5_000_000)).is_err());
    }
}
