//! Whether exchanges exist. One publish to an exchange that does not closes the channel under its innocent neighbours,
//! so each is looked for before its first use, on a channel of its own that may be closed over it.

use std::{
    cell::RefCell,
    collections::{HashMap, HashSet},
    rc::Rc,
    time::{Duration, Instant},
};

use lapin::{
    ErrorKind, ExchangeKind,
    options::ExchangeDeclareOptions,
    types::{FieldTable, ShortString},
};

use super::{broker::Link, close::words};
use crate::deadlines::STEP;

/// How long an exchange is taken to be missing before it is looked for again.
const MISSING_FOR: Duration = Duration::from_secs(3);
/// So many missing exchanges are remembered; rows may name any number.
const REMEMBERED: usize = 1024;
/// Whether an exchange exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Presence {
    /// It does.
    There,
    /// It does not; the broker's words.
    Missing(String),
    /// Not looked for, or no answer.
    Unknown,
}

/// What is known, for as long as a channel lives: who deletes an exchange makes the broker close it.
#[derive(Debug, Default)]
pub(super) struct Exchanges {
    /// The last one asked about that exists: mostly it is the only one.
    last: RefCell<ShortString>,
    there: HashSet<ShortString>,
    missing: HashMap<ShortString, (Instant, String)>,
}

impl Exchanges {
    /// What is known about `exchange`.
    pub(super) fn presence(&self, exchange: &ShortString, now: Instant) -> Presence {
        // The default exchange, the empty name, always exists and cannot be declared.
        if exchange.as_str().is_empty() || *exchange == *self.last.borrow() {
            return Presence::There;
        }
        if self.there.contains(exchange) {
            self.last.borrow_mut().clone_from(exchange);
            return Presence::There;
        }
        match self.missing.get(exchange) {
            Some((since, words)) if now.duration_since(*since) < MISSING_FOR => {
                Presence::Missing(words.clone())
            }
            _ => Presence::Unknown,
        }
    }

    /// Notes what was found.
    pub(super) fn note(&mut self, exchange: ShortString, presence: &Presence, now: Instant) {
        match presence {
            Presence::There => {
                self.missing.remove(&exchange);
                self.there.insert(exchange);
            }
            Presence::Missing(words) => {
                if self.missing.len() >= REMEMBERED {
                    self.missing.retain(|_, (since, _)| now.duration_since(*since) < MISSING_FOR);
                }
                self.missing.insert(exchange, (now, words.clone()));
            }
            Presence::Unknown => {}
        }
    }
}

/// Looks for `exchange`; with `declare` it is declared, topic and durable, if it is not there.
pub(super) async fn look(link: Rc<Link>, exchange: ShortString, declare: bool) -> (ShortString, Presence) {
    let look = async {
        match ask(&link, &exchange, true).await {
            Ok(()) => Presence::There,
            Err(Some(words)) if !declare => Presence::Missing(words),
            Err(Some(_)) => match ask(&link, &exchange, false).await {
                Ok(()) => {
                    tracing::info!(exchange = %exchange, "declared the exchange");
                    Presence::There
                }
                Err(Some(words)) => Presence::Missing(words),
                Err(None) => Presence::Unknown,
            },
            Err(None) => Presence::Unknown,
        }
    };
    let presence = tokio::time::timeout(STEP, look).await.unwrap_or_else(|_| {
        if !link.blocked() {
            link.discard();
        }
        Presence::Unknown
    });
    (exchange, presence)
}

/// `Err(Some(words))`: the broker says no. `Err(None)`: no answer.
async fn ask(link: &Link, exchange: &ShortString, passive: bool) -> Result<(), Option<String>> {
    let scout = link.connection().create_channel().await.map_err(|_| None)?;
    let options = ExchangeDeclareOptions { passive, durable: true, ..ExchangeDeclareOptions::default() };
    let asked =
        scout.exchange_declare(exchange.clone(), ExchangeKind::Topic, options, FieldTable::default()).await;
    match asked {
        Ok(()) => Ok(()),
        Err(error) => match error.kind() {
            ErrorKind::ProtocolError(said) if error.is_amqp_soft_error() => Err(Some(words(said))),
            _ => Err(None),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_exchange_is_looked_for_again_and_one_that_exists_is_not() {
        let (mut exchanges, now) = (Exchanges::default(), Instant::now());
        let name = ShortString::from("orders");
        assert_eq!(exchanges.presence(&ShortString::default(), now), Presence::There);
        assert_eq!(exchanges.presence(&name, now), Presence::Unknown);
        let missing = Presence::Missing("404 NOT_FOUND".to_owned());
        exchanges.note(name.clone(), &missing, now);
        assert_eq!(exchanges.presence(&name, now), missing);
        let later = now + MISSING_FOR;
        assert_eq!(exchanges.presence(&name, later), Presence::Unknown);
        exchanges.note(name.clone(), &Presence::There, later);
        assert_eq!(exchanges.presence(&name, later + MISSING_FOR), Presence::There);
    }
}
