//! `GET /api/status`: what an operator asks at three in the morning, in one document.

use std::{sync::atomic::Ordering::Relaxed, time::SystemTime};

use metrics::gauge;
use postrider_actors::{
    metrics::Stage,
    pipeline::{generation::MAILBOX_BATCHES, plane::Reading},
    position::Lsn,
    settings::SourceSettings,
    status::{Reason, State},
};
use serde::{Deserialize, Serialize};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use super::Admin;

/// The document. Times are RFC 3339 in UTC, bytes are bytes.
#[derive(Debug, Serialize, Deserialize)]
pub struct Status {
    /// `wal` or `poll`.
    pub mode: String,
    /// The state.
    pub state: String,
    /// Why, where the state has a reason.
    pub reason: Option<String>,
    /// The reason in a clause.
    pub detail: Option<String>,
    /// Since when the state holds.
    pub since: String,
    /// What to do about it.
    pub remedy: Option<String>,
    /// What `/readyz` says.
    pub ready: bool,
    /// Everything that is wrong at the moment, most urgent first.
    pub conditions: Vec<Condition>,
    /// The outbox table.
    pub outbox: String,
    /// What was asked for: `run`, `pause` or `drain`.
    pub desired: String,
    /// A drain's target and what it still has to move.
    pub drain: Option<Drain>,
    /// The stages.
    pub stages: Stages,
    /// Sent and not confirmed.
    pub unconfirmed: u64,
    /// Sent and not durably recorded, and its bound.
    pub exposed: Level,
    /// What is held, and its bounds.
    pub credits: Credits,
    /// Totals since the start.
    pub totals: Totals,
    /// What waits in tables; absent until it was read.
    pub waiting: Option<Waiting>,
    /// The broker's connection.
    pub broker: Broker,
    /// The slot (wal).
    pub slot: Option<Slot>,
    /// The last error that ended a generation.
    pub last_error: Option<LastError>,
    /// How often the pipeline was built.
    pub generation: u64,
    /// When the process started.
    pub started: String,
    /// The program's version.
    pub version: String,
}

/// Something that is wrong.
#[derive(Debug, Serialize, Deserialize)]
pub struct Condition {
    /// The reason's word.
    pub reason: String,
    /// In a clause.
    pub detail: String,
    /// What to do.
    pub remedy: String,
    /// Since when.
    pub since: String,
}

/// A running or finished drain.
#[derive(Debug, Serialize, Deserialize)]
pub struct Drain {
    /// LSN (wal) or snapshot (poll).
    pub target: Option<String>,
    /// Rows still to be moved, where they are counted (poll).
    pub remaining_rows: Option<u64>,
}

/// A level and its bound.
#[derive(Debug, Serialize, Deserialize)]
pub struct Level {
    /// Now.
    pub now: u64,
    /// At most.
    pub limit: u64,
}

/// Credits by unit.
#[derive(Debug, Serialize, Deserialize)]
pub struct Credits {
    /// Messages held.
    pub messages: Level,
    /// Bytes held.
    pub bytes: Level,
}

/// The stages in order.
#[derive(Debug, Serialize, Deserialize)]
pub struct Stages {
    /// Takes rows.
    pub source: StageStatus,
    /// Makes messages of them.
    pub decode: StageStatus,
    /// Publishes them.
    pub publish: StageStatus,
    /// Records verdicts.
    pub ack: StageStatus,
}

/// One stage.
#[derive(Debug, Serialize, Deserialize)]
pub struct StageStatus {
    /// Batches waiting in front of it.
    pub mailbox: u64,
    /// How many can.
    pub capacity: u64,
}

/// Totals since the start.
#[derive(Debug, Serialize, Deserialize)]
pub struct Totals {
    /// Acknowledged by the broker and not returned.
    pub delivered: u64,
    /// Rejected, each attempt counted.
    pub rejected: u64,
    /// Verdicts durably recorded.
    pub recorded: u64,
    /// Rows of history delivered by the sweep.
    pub swept: u64,
}

/// What waits in tables.
#[derive(Debug, Serialize, Deserialize)]
pub struct Waiting {
    /// Unprocessed rows, counted up to a bound; absent with `ack.rows = "keep"`.
    pub unprocessed: Option<u64>,
    /// Age of the oldest.
    pub oldest_unprocessed_seconds: Option<f64>,
    /// Rows waiting for another attempt.
    pub retries: u64,
    /// Rows parked.
    pub dead_letters: u64,
    /// When this was read.
    pub read_at: String,
}

/// The broker's connection.
#[derive(Debug, Serialize, Deserialize)]
pub struct Broker {
    /// Whether a confirm channel is open.
    pub connected: bool,
    /// Whether the broker is in alarm.
    pub blocked: bool,
    /// Channels opened since the start.
    pub channel_openings: u64,
}

/// The slot.
#[derive(Debug, Serialize, Deserialize)]
pub struct Slot {
    /// Its name.
    pub name: String,
    /// Whether the stream is open.
    pub streaming: bool,
    /// The server's last position as the stream told it.
    pub received_lsn: String,
    /// What the slot was told: everything before it is recorded.
    pub durable_lsn: String,
    /// Where the slot stands, as the server says.
    pub confirmed_flush_lsn: Option<String>,
    /// `reserved`, `extended`, `unreserved` or `lost`.
    pub wal_status: Option<String>,
    /// WAL it makes the server keep.
    pub retained_bytes: Option<u64>,
    /// WAL written and not acknowledged yet.
    pub lag_bytes: Option<u64>,
}

/// The last error that ended a generation.
#[derive(Debug, Serialize, Deserialize)]
pub struct LastError {
    /// When.
    pub at: String,
    /// What.
    pub error: String,
}

impl Status {
    /// The status at this moment.
    pub fn of(admin: &Admin) -> Self {
        let Admin { settings, board, figures, plane, .. } = admin;
        let report = board.report();
        let request = plane.request();
        let reading = plane.reading();
        let in_use = figures.credits_in_use();
        let stage = |stage| StageStatus {
            mailbox: figures.mailbox_depth(stage) as u64,
            capacity: if stage == Stage::Source { 0 } else { MAILBOX_BATCHES as u64 },
        };
        let draining = request.desired == postrider_actors::control::Desired::Drain;
        Self {
            mode: mode(admin).to_owned(),
            state: report.state.as_str().to_owned(),
            reason: report.reason.map(|reason| reason.as_str().to_owned()),
            detail: report.condition.as_ref().map(|condition| condition.detail.clone()),
            since: rfc3339(report.since),
            remedy: report.condition.map(|condition| condition.remedy),
            ready: report.ready,
            conditions: board
                .conditions()
                .into_iter()
                .map(|(reason, condition)| Condition {
                    reason: reason.as_str().to_owned(),
                    detail: condition.detail,
                    remedy: condition.remedy,
                    since: rfc3339(condition.since),
                })
                .collect(),
            outbox: settings.outbox.name(),
            desired: request.desired.as_str().to_owned(),
            drain: draining.then(|| Drain { target: request.drain_target, remaining_rows: plane.remaining() }),
            stages: Stages {
                source: stage(Stage::Source),
                decode: stage(Stage::Decode),
                publish: stage(Stage::Publish),
                ack: stage(Stage::Ack),
            },
            unconfirmed: figures.unconfirmed.load(Relaxed),
            exposed: Level { now: figures.exposed().into(), limit: settings.publish.exposure.into() },
            credits: Credits {
                messages: Level { now: in_use.messages.into(), limit: settings.credits.messages.into() },
                bytes: Level { now: in_use.bytes.into(), limit: settings.credits.bytes.into() },
            },
            totals: Totals {
                delivered: figures.delivered.load(Relaxed),
                rejected: figures.rejected.load(Relaxed),
                recorded: figures.recorded.load(Relaxed),
                swept: figures.swept.load(Relaxed),
            },
            waiting: reading.as_ref().map(waiting),
            broker: Broker {
                connected: figures.broker_connected.load(Relaxed),
                blocked: figures.broker_blocked.load(Relaxed),
                channel_openings: figures.channel_openings.load(Relaxed),
            },
            slot: slot(admin, reading.as_ref()),
            last_error: report.last_error.map(|(at, error)| LastError { at: rfc3339(at), error }),
            generation: figures.generation.load(Relaxed),
            started: rfc3339(admin.started),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}

fn mode(admin: &Admin) -> &'static str {
    match admin.settings.source {
        SourceSettings::Wal(_) => "wal",
        SourceSettings::Poll(_) => "poll",
    }
}

fn waiting(reading: &Reading) -> Waiting {
    let health = &reading.health;
    Waiting {
        unprocessed: health.unprocessed,
        oldest_unprocessed_seconds: health.oldest_unprocessed.map(|age| age.as_secs_f64()),
        retries: health.retries,
        dead_letters: health.dead_letters,
        read_at: rfc3339(reading.at),
    }
}

fn slot(admin: &Admin, reading: Option<&Reading>) -> Option<Slot> {
    let SourceSettings::Wal(wal) = &admin.settings.source else { return None };
    let figures = &admin.figures;
    let health = reading.map(|reading| &reading.health);
    let known = health.and_then(|health| health.slot.as_ref());
    Some(Slot {
        name: wal.slot.clone(),
        streaming: figures.source_connected.load(Relaxed),
        received_lsn: Lsn(figures.received_lsn.load(Relaxed)).to_string(),
        durable_lsn: Lsn(figures.durable_lsn.load(Relaxed)).to_string(),
        confirmed_flush_lsn: known.and_then(|slot| slot.confirmed_flush.map(|lsn| lsn.to_string())),
        wal_status: known.and_then(|slot| slot.wal_status.clone()),
        retained_bytes: known.map(|slot| slot.retained_bytes),
        lag_bytes: lag_bytes(admin, reading),
    })
}

/// WAL written and not acknowledged: by the server's position at the last reading, or the stream's own, whichever is
/// further.
fn lag_bytes(admin: &Admin, reading: Option<&Reading>) -> Option<u64> {
    let written = reading?.health.wal_lsn.0.max(admin.figures.received_lsn.load(Relaxed));
    Some(written.saturating_sub(admin.figures.durable_lsn.load(Relaxed)))
}

/// Copies levels into gauges; called when somebody looks.
pub fn copy_levels(admin: &Admin) {
    let Admin { board, figures, plane, started, .. } = admin;
    let report = board.report();
    for state in State::ALL {
        gauge!("postrider_state", "state" => state.as_str()).set(f64::from(u8::from(state == report.state)));
    }
    for reason in Reason::ALL {
        gauge!("postrider_reason", "reason" => reason.as_str()).set(f64::from(u8::from(board.holds(reason))));
    }
    for stage in Stage::ALL {
        gauge!("postrider_mailbox_batches", "stage" => stage.as_str()).set(figures.mailbox_depth(stage) as f64);
    }
    let in_use = figures.credits_in_use();
    gauge!("postrider_credits_in_use", "unit" => "messages").set(f64::from(in_use.messages));
    gauge!("postrider_credits_in_use", "unit" => "bytes").set(f64::from(in_use.bytes));
    gauge!("postrider_unconfirmed_messages").set(figures.unconfirmed.load(Relaxed) as f64);
    gauge!("postrider_exposed_messages").set(f64::from(figures.exposed()));
    gauge!("postrider_broker_blocked").set(f64::from(u8::from(figures.broker_blocked.load(Relaxed))));
    gauge!("postrider_channel_openings").set(figures.channel_openings.load(Relaxed) as f64);
    gauge!("postrider_generation").set(figures.generation.load(Relaxed) as f64);
    gauge!("postrider_start_time_seconds").set(started.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64());
    let Some(reading) = plane.reading() else { return };
    gauge!("postrider_database_read_age_seconds").set(reading.instant.elapsed().as_secs_f64());
    gauge!("postrider_retries").set(reading.health.retries as f64);
    gauge!("postrider_dead_letters").set(reading.health.dead_letters as f64);
    if let Some(unprocessed) = reading.health.unprocessed {
        gauge!("postrider_unprocessed_rows").set(unprocessed as f64);
        let oldest = reading.health.oldest_unprocessed.map_or(0.0, |age| age.as_secs_f64());
        gauge!("postrider_oldest_unprocessed_seconds").set(oldest);
    }
    let slot = reading.health.slot.as_ref();
    gauge!("postrider_slot_retained_bytes").set(slot.map_or(0, |slot| slot.retained_bytes) as f64);
    if matches!(admin.settings.source, SourceSettings::Wal(_)) {
        gauge!("postrider_replication_lag_bytes").set(lag_bytes(admin, Some(&reading)).unwrap_or(0) as f64);
    }
}

fn rfc3339(time: SystemTime) -> String {
    let time = OffsetDateTime::from(time);
    // Milliseconds: what an operator can use.
    let time = time.replace_millisecond(time.millisecond()).unwrap_or(time);
    time.format(&Rfc3339).unwrap_or_default()
}
