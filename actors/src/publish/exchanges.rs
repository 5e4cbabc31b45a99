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

/// How long an exchange is taken to be missing, or forbidden, before it is tried again.
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
    /// It does, and the broker does not let us write to it; its words.
    Forbidden(String),
    /// Not looked for, or no answer.
    Unknown,
}

/// What is known. That an exchange exists holds as long as a channel lives: who deletes one makes the broker close it.
#[derive(Debug, Default)]
pub(super) struct Exchanges {
    /// The last one asked about that exists: mostly it is the only one.
    last: RefCell<ShortString>,
    there: HashSet<ShortString>,
    /// Those that cannot be published to, whatever channel is open.
    closed: HashMap<ShortString, (Instant, Presence)>,
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
        match self.closed.get(exchange) {
            Some((since, presence)) if now.duration_since(*since) < MISSING_FOR => presence.clone(),
            _ => Presence::Unknown,
        }
    }

    /// Another channel was opened: what existed is to be looked for again.
    pub(super) fn renew(&mut self) {
        self.there.clear();
        self.last.take();
    }

    /// Notes what was found.
    pub(super) fn note(&mut self, exchange: ShortString, presence: &Presence, now: Instant) {
        match presence {
            Presence::There => {
                self.closed.remove(&exchange);
                self.there.insert(exchange);
            }
            Presence::Missing(_) | Presence::Forbidden(_) => {
                if self.closed.len() >= REMEMBERED {
                    self.closed.retain(|_, (since, _)| now.duration_since(*since) < MISSING_FOR);
                }
                self.there.remove(&exchange);
                if *self.last.borrow() == exchange {
                    self.last.take();
                }
                self.closed.insert(exchange, (now, presence.clone()));
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

    #[test]
    fn a_new_channel_forgets_what_was_there_and_keeps_what_was_forbidden() {
        let (mut exchanges, now) = (Exchanges::default(), Instant::now());
        let (there, forbidden) = (ShortString::from("orders"), ShortString::from("private"));
        let words = Presence::Forbidden("403 ACCESS_REFUSED".to_owned());
        for name in [&there, &forbidden] {
            exchanges.note(name.clone(), &Presence::There, now);
            assert_eq!(exchanges.presence(name, now), Presence::There);
        }
        exchanges.note(forbidden.clone(), &words, now);
        exchanges.renew();
        assert_eq!(exchanges.presence(&there, now), Presence::Unknown);
        assert_eq!(exchanges.presence(&forbidden, now), words);
        assert_eq!(exchanges.presence(&forbidden, now + MISSING_FOR), Presence::Unknown);
    }
}
