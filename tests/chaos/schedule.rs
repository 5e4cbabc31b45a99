//! What goes wrong when: a pure function of the seed and the length of the run.

use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Kind {
    /// `kill -9`, and started again at once.
    RelayKilled,
    /// SIGTERM, its end, and started again.
    RelayStopped,
    /// SIGSTOP for a while.
    RelayFrozen,
    /// Paused and resumed by its operator.
    RelayPaused,
    /// `kill -9`, down for a while, started again with what it had stored.
    BrokerKilled,
    BrokerFrozen,
    /// A memory alarm.
    BrokerBlocked,
    /// All connections closed by the broker's operator.
    ConnectionsClosed,
    /// The binding of some rows is gone for a while.
    Unbound,
    /// `kill -9` of the server and all its sessions, down for a while.
    PostgresKilled,
    /// A fast shutdown and a start.
    PostgresRestarted,
    PostgresFrozen,
    /// `pg_terminate_backend` on every session of the relay.
    SessionsEnded,
    /// An exclusive lock on the outbox table.
    TableLocked,
    Slow(Peer),
    /// Every connection reset, and new ones for a while.
    Cut(Peer),
    /// Every connection silent, and new ones for a while; the silent ones stay so.
    Silent(Peer),
    /// A few kilobytes a second.
    Dripping(Peer),
}

/// The other end of a network that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Peer {
    Broker,
    Postgres,
}

/// Whom it happens to. A run of one mode has one relay, whatever is said here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Wal,
    Poll,
    Both,
}

/// One thing that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) kind: Kind,
    pub(crate) target: Target,
    /// After the start of the run.
    pub(crate) at: Duration,
    pub(crate) lasts: Duration,
}

/// A fault, and where it is long enough, sometimes one of the relay in the midst of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Episode {
    pub(crate) fault: Fault,
    pub(crate) meanwhile: Option<Fault>,
}

impl Kind {
    pub(crate) const ALL: [Kind; 22] = [
        Kind::RelayKilled,
        Kind::RelayStopped,
        Kind::RelayFrozen,
        Kind::RelayPaused,
        Kind::BrokerKilled,
        Kind::BrokerFrozen,
        Kind::BrokerBlocked,
        Kind::ConnectionsClosed,
        Kind::Unbound,
        Kind::PostgresKilled,
        Kind::PostgresRestarted,
        Kind::PostgresFrozen,
        Kind::SessionsEnded,
        Kind::TableLocked,
        Kind::Slow(Peer::Broker),
        Kind::Slow(Peer::Postgres),
        Kind::Cut(Peer::Broker),
        Kind::Cut(Peer::Postgres),
        Kind::Silent(Peer::Broker),
        Kind::Silent(Peer::Postgres),
        Kind::Dripping(Peer::Broker),
        Kind::Dripping(Peer::Postgres),
    ];

    /// Those that may strike while something else is wrong.
    const OF_THE_RELAY: [Kind; 3] = [Kind::RelayKilled, Kind::RelayStopped, Kind::RelayFrozen];

    /// Kinds that are over once they have happened: nothing lasts but the recovery.
    fn is_a_moment(self) -> bool {
        use Kind::{ConnectionsClosed, PostgresRestarted, RelayKilled, RelayStopped, SessionsEnded};
        matches!(self, RelayKilled | RelayStopped | ConnectionsClosed | PostgresRestarted | SessionsEnded)
    }

    /// Servers are both relays' own; everything else happens to one relay, or to both.
    fn strikes_both(self) -> bool {
        use Kind::{
            BrokerBlocked, BrokerFrozen, BrokerKilled, PostgresFrozen, PostgresKilled, PostgresRestarted,
        };
        matches!(
            self,
            BrokerBlocked | BrokerFrozen | BrokerKilled | PostgresFrozen | PostgresKilled | PostgresRestarted
        )
    }

    /// What injecting and undoing it takes on a busy machine, beyond its duration.
    fn overhead(self) -> Duration {
        Duration::from_secs(match self {
            Kind::BrokerKilled => 6,
            Kind::BrokerBlocked | Kind::PostgresRestarted => 3,
            _ => 1,
        })
    }
}

impl Fault {
    pub(crate) fn ends(&self) -> Duration {
        self.at + self.lasts
    }
}

/// The calm at the end in which everything must be delivered.
pub(crate) fn last_calm(length: Duration) -> Duration {
    (length / 4).min(Duration::from_secs(20))
}

/// Every kind once in a random order, then every kind once more, for as long as there is room: no two at a time, but
/// for what strikes the relay in the midst of something else.
pub(crate) fn schedule(seed: u64, length: Duration) -> Vec<Episode> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let (mut episodes, mut deck) = (Vec::new(), Vec::new());
    let mut at = (length / 20).min(Duration::from_secs(5));
    loop {
        if deck.is_empty() {
            deck = Kind::ALL.to_vec();
            rng.shuffle(&mut deck);
        }
        let Some(kind) = deck.pop() else { return episodes };
        let lasts = if kind.is_a_moment() { Duration::ZERO } else { millis(&mut rng, 500..=8_000) };
        let fault = Fault { kind, target: target(&mut rng, kind), at, lasts };
        let meanwhile = (lasts > Duration::from_secs(2) && kind != Kind::RelayFrozen && rng.u8(0..3) == 0)
            .then(|| {
                let kind = Kind::OF_THE_RELAY[rng.usize(0..Kind::OF_THE_RELAY.len())];
                let at = at + lasts / 2;
                let lasts = if kind.is_a_moment() { Duration::ZERO } else { lasts / 3 };
                Fault { kind, target: target(&mut rng, kind), at, lasts }
            });
        at = fault.ends() + kind.overhead();
        if at + last_calm(length) > length {
            return episodes;
        }
        episodes.push(Episode { fault, meanwhile });
        at += millis(&mut rng, 1_500..=5_000);
    }
}

fn millis(rng: &mut fastrand::Rng, range: RangeInclusive<u64>) -> Duration {
    Duration::from_millis(rng.u64(range))
}

fn target(rng: &mut fastrand::Rng, kind: Kind) -> Target {
    let targets = [Target::Wal, Target::Poll, Target::Both];
    if kind.strikes_both() { Target::Both } else { targets[rng.usize(0..targets.len())] }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::RelayKilled => "relay killed",
            Kind::RelayStopped => "relay stopped",
            Kind::RelayFrozen => "relay frozen",
            Kind::RelayPaused => "relay paused",
            Kind::BrokerKilled => "broker killed",
            Kind::BrokerFrozen => "broker frozen",
            Kind::BrokerBlocked => "broker blocked",
            Kind::ConnectionsClosed => "connections closed",
            Kind::Unbound => "queue unbound",
            Kind::PostgresKilled => "PostgreSQL killed",
            Kind::PostgresRestarted => "PostgreSQL restarted",
            Kind::PostgresFrozen => "PostgreSQL frozen",
            Kind::SessionsEnded => "sessions ended",
            Kind::TableLocked => "table locked",
            Kind::Slow(Peer::Broker) => "broker far away",
            Kind::Slow(Peer::Postgres) => "PostgreSQL far away",
            Kind::Cut(Peer::Broker) => "broker cut off",
            Kind::Cut(Peer::Postgres) => "PostgreSQL cut off",
            Kind::Silent(Peer::Broker) => "broker swallowed",
            Kind::Silent(Peer::Postgres) => "PostgreSQL swallowed",
            Kind::Dripping(Peer::Broker) => "broker drips",
            Kind::Dripping(Peer::Postgres) => "PostgreSQL drips",
        })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, target, at, lasts } = self;
        let (at, lasts) = (at.as_secs_f64(), lasts.as_secs_f64());
        write!(f, "{at:7.1} s  {lasts:4.1} s  {:<5} {kind}", format!("{target:?}").to_lowercase())
    }
}

impl fmt::Display for Episode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fault.fmt(f)?;
        self.meanwhile.iter().try_for_each(|m| write!(f, "\n{m} (meanwhile)"))
    }
}
