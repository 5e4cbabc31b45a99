//! The board: stages put up what holds them, and the state is derived from what is on it.
//!
//! No stage sets the state. Each raises and clears its own conditions, so two of them can never disagree about which
//! word is shown, and a condition that ends makes room for the one behind it.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use crate::{
    control::Desired,
    error::{Error, Kind},
};

/// The words of `/api/status`, `postrider_state` and the logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// Connecting.
    Starting,
    /// Delivering history: rows that were there before the stream.
    Sweeping,
    /// Another relay holds the slot.
    Standby,
    /// Moving, or ready to.
    Running,
    /// Something outside must change; the reason says what.
    Blocked,
    /// Intake stopped as asked.
    Paused,
    /// Running to a target as asked.
    Draining,
    /// At the target; intake stopped.
    Drained,
    /// Needs a person; the process lives to say so.
    Failed,
}

impl State {
    /// All states.
    pub const ALL: [State; 9] = [
        State::Starting,
        State::Sweeping,
        State::Standby,
        State::Running,
        State::Blocked,
        State::Paused,
        State::Draining,
        State::Drained,
        State::Failed,
    ];

    /// The word.
    pub fn as_str(self) -> &'static str {
        match self {
            State::Starting => "starting",
            State::Sweeping => "sweeping",
            State::Standby => "standby",
            State::Running => "running",
            State::Blocked => "blocked",
            State::Paused => "paused",
            State::Draining => "draining",
            State::Drained => "drained",
            State::Failed => "failed",
        }
    }
}

/// Why the relay is blocked or failed. Ordered by what an operator should hear first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// The slot is gone or invalidated.
    SlotLost,
    /// The outbox table or one of ours is not as it must be, or the server is not prepared.
    SchemaChanged,
    /// The database cannot be reached or refuses us.
    DatabaseDown,
    /// The database accepts no writes.
    DatabaseReadonly,
    /// Another session holds the slot.
    SlotInUse,
    /// A lock on the outbox table is held for long.
    TableLocked,
    /// A streamed row is not visible yet: its transaction waits for a synchronous standby.
    MarkWaiting,
    /// The broker cannot be reached.
    BrokerDown,
    /// The broker refuses us.
    BrokerRefused,
    /// The broker is in a memory or disk alarm.
    BrokerAlarm,
    /// The configured exchange does not exist.
    ExchangeMissing,
    /// A thousand rejections in a row: the world is wrong, not the rows.
    AllRejected,
}

impl Reason {
    /// All reasons, most urgent first.
    pub const ALL: [Reason; 12] = [
        Reason::SlotLost,
        Reason::SchemaChanged,
        Reason::DatabaseDown,
        Reason::DatabaseReadonly,
        Reason::SlotInUse,
        Reason::TableLocked,
        Reason::MarkWaiting,
        Reason::BrokerDown,
        Reason::BrokerRefused,
        Reason::BrokerAlarm,
        Reason::ExchangeMissing,
        Reason::AllRejected,
    ];

    /// The word.
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::SlotLost => "slot_lost",
            Reason::SchemaChanged => "schema_changed",
            Reason::DatabaseDown => "database_down",
            Reason::DatabaseReadonly => "database_readonly",
            Reason::SlotInUse => "slot_in_use",
            Reason::TableLocked => "table_locked",
            Reason::MarkWaiting => "mark_waiting",
            Reason::BrokerDown => "broker_down",
            Reason::BrokerRefused => "broker_refused",
            Reason::BrokerAlarm => "broker_alarm",
            Reason::ExchangeMissing => "exchange_missing",
            Reason::AllRejected => "all_rejected",
        }
    }

    /// Whether only a database that answers can be the cause.
    fn is_answer(self) -> bool {
        use Reason::{DatabaseReadonly, SchemaChanged, SlotInUse, SlotLost, TableLocked};
        matches!(self, DatabaseReadonly | SchemaChanged | SlotInUse | SlotLost | TableLocked)
    }

    /// The reason an error of `kind` stands for, if it is one an operator sees.
    pub fn of(kind: Kind) -> Option<Reason> {
        match kind {
            Kind::DatabaseDown | Kind::DatabaseRefused => Some(Reason::DatabaseDown),
            Kind::DatabaseReadonly => Some(Reason::DatabaseReadonly),
            Kind::TableLocked => Some(Reason::TableLocked),
            Kind::SchemaChanged | Kind::DatabaseUnprepared | Kind::Config => Some(Reason::SchemaChanged),
            Kind::SlotLost | Kind::SlotForeign => Some(Reason::SlotLost),
            Kind::SlotInUse | Kind::SlotLingers => Some(Reason::SlotInUse),
            Kind::BrokerDown => Some(Reason::BrokerDown),
            Kind::BrokerRefused => Some(Reason::BrokerRefused),
            Kind::ExchangeMissing => Some(Reason::ExchangeMissing),
            Kind::Protocol | Kind::Stopped | Kind::Stuck | Kind::Internal => None,
        }
    }
}

/// Something that holds the relay, since when, and what to do about it.
#[derive(Debug, Clone)]
pub struct Condition {
    /// What is wrong, in a clause.
    pub detail: String,
    /// What a person can do.
    pub remedy: String,
    /// Since when, by this machine's clock.
    pub since: SystemTime,
    began: Instant,
}

/// How far the relay has come by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Connecting.
    Starting,
    /// Delivering history.
    Sweeping,
    /// Another relay holds the slot.
    Standby,
    /// Moving.
    Running,
    /// Waits for a person.
    Failed,
}

/// What is said about the relay at one moment.
#[derive(Debug, Clone)]
pub struct Report {
    /// The state.
    pub state: State,
    /// The most urgent reason, where the state has one.
    pub reason: Option<Reason>,
    /// The condition behind `reason`.
    pub condition: Option<Condition>,
    /// Since when this state holds.
    pub since: SystemTime,
    /// Whether `/readyz` says yes.
    pub ready: bool,
    /// The last error that ended a generation, and when.
    pub last_error: Option<(SystemTime, String)>,
}

#[derive(Debug)]
struct Inner {
    phase: Phase,
    desired: Desired,
    drained: bool,
    conditions: BTreeMap<Reason, Condition>,
    last_error: Option<(SystemTime, String)>,
    /// The state as last derived, and since when.
    shown: (State, SystemTime),
}

/// Shared by all stages of all generations. Cloning shares it.
#[derive(Debug, Clone)]
pub struct Board(Arc<Mutex<Inner>>);

/// `blocked` makes the relay not ready after this long: an outage of a moment is no reason to be replaced.
pub const READY_GRACE: Duration = Duration::from_secs(5);

/// Derives the state from what is on the board: what needs a person, then what blocks, then what was asked for, then
/// how far the relay has come.
pub fn derive(phase: Phase, conditions: bool, desired: Desired, drained: bool) -> State {
    match (phase, desired) {
        (Phase::Failed, _) => State::Failed,
        (Phase::Standby, _) => State::Standby,
        _ if conditions => State::Blocked,
        (_, Desired::Pause) => State::Paused,
        (_, Desired::Drain) if drained => State::Drained,
        (_, Desired::Drain) => State::Draining,
        (Phase::Starting, _) => State::Starting,
        (Phase::Sweeping, _) => State::Sweeping,
        (Phase::Running, _) => State::Running,
    }
}

impl Default for Board {
    fn default() -> Self {
        Self::new()
    }
}

impl Board {
    /// A board of a relay that is starting.
    pub fn new() -> Self {
        Self(Arc::new(Mutex::new(Inner {
            phase: Phase::Starting,
            desired: Desired::Run,
            drained: false,
            conditions: BTreeMap::new(),
            last_error: None,
            shown: (State::Starting, SystemTime::now()),
        })))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the board and logs one line if that changes the state.
    fn change(&self, apply: impl FnOnce(&mut Inner)) {
        let mut inner = self.inner();
        apply(&mut inner);
        let state = derive(inner.phase, !inner.conditions.is_empty(), inner.desired, inner.drained);
        if state == inner.shown.0 {
            return;
        }
        inner.shown = (state, SystemTime::now());
        match inner.conditions.iter().next() {
            Some((reason, condition)) if matches!(state, State::Blocked | State::Failed | State::Standby) => {
                tracing::warn!(
                    state = state.as_str(),
                    reason = reason.as_str(),
                    detail = %condition.detail,
                    remedy = %condition.remedy,
                    "state changed"
                );
            }
            _ => tracing::info!(state = state.as_str(), "state changed"),
        }
    }

    /// Puts up a condition. Raising it again keeps its `since`.
    pub fn raise(&self, reason: Reason, detail: impl Into<String>, remedy: impl Into<String>) {
        self.raise_since(Instant::now(), reason, detail, remedy);
    }

    /// Puts up a condition that was noticed later than it began, as a silence is.
    pub fn raise_since(
        &self,
        began: Instant,
        reason: Reason,
        detail: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        let (detail, remedy) = (detail.into(), remedy.into());
        self.change(|inner| {
            let condition = inner.conditions.entry(reason).or_insert_with(|| Condition {
                detail: String::new(),
                remedy: String::new(),
                since: SystemTime::now().checked_sub(began.elapsed()).unwrap_or(SystemTime::UNIX_EPOCH),
                began,
            });
            condition.detail = detail;
            condition.remedy = remedy;
        });
    }

    /// Puts up the condition that `error` stands for, if it is one, and keeps it as the last error.
    pub fn raise_error(&self, error: &Error) {
        let line = error.chain();
        if let Some(reason) = Reason::of(error.kind()) {
            self.raise(reason, line.clone(), error.remedy().unwrap_or(default_remedy(reason)));
            if reason.is_answer() {
                self.clear(Reason::DatabaseDown);
            }
        }
        self.inner().last_error = Some((SystemTime::now(), line));
    }

    /// Takes a condition down.
    pub fn clear(&self, reason: Reason) {
        self.change(|inner| {
            inner.conditions.remove(&reason);
        });
    }

    /// Whether a condition is up.
    pub fn holds(&self, reason: Reason) -> bool {
        self.inner().conditions.contains_key(&reason)
    }

    /// All conditions, most urgent first.
    pub fn conditions(&self) -> Vec<(Reason, Condition)> {
        self.inner().conditions.iter().map(|(reason, condition)| (*reason, condition.clone())).collect()
    }

    /// Says how far the relay has come.
    pub fn set_phase(&self, phase: Phase) {
        self.change(|inner| inner.phase = phase);
    }

    /// Says what was asked for, and whether a drain has reached its target.
    pub fn set_desired(&self, desired: Desired, drained: bool) {
        self.change(|inner| {
            inner.desired = desired;
            inner.drained = drained;
        });
    }

    /// What is to be said now.
    pub fn report(&self) -> Report {
        let inner = self.inner();
        let (state, since) = inner.shown;
        let said = matches!(state, State::Blocked | State::Failed | State::Standby);
        let first = inner.conditions.iter().next().filter(|_| said);
        let blocked_for = inner.conditions.values().map(|c| c.began.elapsed()).max().unwrap_or_default();
        let ready = match state {
            State::Starting | State::Failed => false,
            State::Blocked => blocked_for < READY_GRACE && inner.phase != Phase::Starting,
            _ => true,
        };
        Report {
            state,
            reason: first.map(|(reason, _)| *reason),
            condition: first.map(|(_, condition)| condition.clone()),
            since,
            ready,
            last_error: inner.last_error.clone(),
        }
    }
}

/// What to do about a reason where the error itself does not know better.
pub fn default_remedy(reason: Reason) -> &'static str {
    match reason {
        Reason::SlotLost => "run `postrider check`, which names the slot's state and the way out",
        Reason::SchemaChanged => {
            "run `postrider check`, which names the object and the statement that mends it"
        }
        Reason::DatabaseDown => {
            "check that database.url is right and the server accepts connections; the relay keeps trying"
        }
        Reason::DatabaseReadonly => "point database.url at the primary; the relay keeps trying",
        Reason::SlotInUse => "nothing, if another relay is meant to run; this one takes over when it ends",
        Reason::TableLocked => "find the session that holds the lock in pg_locks and end its transaction",
        Reason::MarkWaiting => "bring the synchronous standby back, or change synchronous_standby_names",
        Reason::BrokerDown => "check that broker.url is right and the broker is up; the relay keeps trying",
        Reason::BrokerRefused => "check the user, its password and its permissions on the virtual host",
        Reason::BrokerAlarm => "free memory or disk on the broker; publishing resumes by itself",
        Reason::ExchangeMissing => "declare the exchange, or set publish.declare = true",
        Reason::AllRejected => {
            "bind a queue to the exchange for these routing keys; one message a while probes for it"
        }
    }
}

#[cfg(test)]
#[path = "board_tests.rs"]
mod tests;
