//! Every metric's name, unit and meaning, registered at the start so that each is present at zero.
//!
//! Names are `postrider_<noun>_<unit>[_total]`, base units, labels from closed sets. Stages record through the handles
//! here; what is a level (depths, credits) is kept in [`Figures`](crate::status::figures::Figures) and copied into
//! gauges when somebody looks.

use std::time::{Duration, Instant};

use metrics::Unit::{Bytes, Count, Seconds};
use metrics::{
    Counter, Gauge, Histogram, counter, describe_counter, describe_gauge, describe_histogram, gauge,
    histogram,
};

use crate::{
    envelope::Reason,
    status::{Reason as StateReason, State},
};

/// The stages of the pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Takes rows: from the log or by claims.
    Source,
    /// Turns rows into messages.
    Decode,
    /// Publishes and tracks confirms.
    Publish,
    /// Records verdicts.
    Ack,
}

impl Stage {
    /// All stages, source first.
    pub const ALL: [Stage; 4] = [Stage::Source, Stage::Decode, Stage::Publish, Stage::Ack];

    /// The label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Stage::Source => "source",
            Stage::Decode => "decode",
            Stage::Publish => "publish",
            Stage::Ack => "ack",
        }
    }
}

/// Upper bounds of the buckets of every histogram in seconds: 100 µs (below any round trip) to 60 s.
pub const SECONDS_BUCKETS: [f64; 18] = [
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    30.0, 60.0,
];

/// One stage's handles.
#[derive(Debug, Clone)]
pub struct StageMetrics {
    /// `postrider_stage_seconds`: from arriving at the stage to leaving it; a batch an observation, of `publish` a
    /// message, send to verdict.
    pub seconds: Histogram,
    backpressure: Gauge,
}

impl StageMetrics {
    /// The handles of `stage`.
    pub fn of(stage: Stage) -> Self {
        Self {
            seconds: histogram!("postrider_stage_seconds", "stage" => stage.as_str()),
            backpressure: gauge!("postrider_stage_backpressure_seconds_total", "stage" => stage.as_str()),
        }
    }

    /// Counts the time until the guard is dropped as this stage's backpressure.
    pub fn backpressure(&self) -> BackpressureGuard {
        BackpressureGuard { gauge: self.backpressure.clone(), since: Instant::now() }
    }

    /// Records that something that arrived at `arrived` leaves the stage now.
    pub fn leave(&self, arrived: Instant) {
        self.seconds.record(arrived.elapsed());
    }
}

/// Counts time lost to backpressure while it lives. A gauge that only grows: the `metrics` facade's counters are whole
/// numbers, and this is in seconds.
#[derive(Debug)]
pub struct BackpressureGuard {
    gauge: Gauge,
    since: Instant,
}

impl Drop for BackpressureGuard {
    fn drop(&mut self) {
        self.gauge.increment(self.since.elapsed().as_secs_f64());
    }
}

/// Counters of verdicts and what else is counted once a message or a batch.
#[derive(Debug, Clone)]
pub struct MessageMetrics {
    /// `postrider_messages_total{verdict="delivered"}`.
    pub delivered: Counter,
    /// `postrider_messages_total{verdict="rejected"}`.
    pub rejected: Counter,
    /// `postrider_messages_total{verdict="abandoned"}`.
    pub abandoned: Counter,
    /// `postrider_delivery_seconds`: commit (or `occurred_on` when polling) to confirm, never negative.
    pub delivery_seconds: Histogram,
    /// `postrider_vanished_total`: rows that were published and gone when they should have been marked.
    pub vanished: Counter,
}

impl MessageMetrics {
    /// The handles.
    pub fn new() -> Self {
        let verdict = |verdict: &'static str| counter!("postrider_messages_total", "verdict" => verdict);
        Self {
            delivered: verdict("delivered"),
            rejected: verdict("rejected"),
            abandoned: verdict("abandoned"),
            delivery_seconds: histogram!("postrider_delivery_seconds"),
            vanished: counter!("postrider_vanished_total"),
        }
    }

    /// Records a delivery `micros` microseconds after its commit; clocks may disagree, time does not run backwards.
    pub fn observe_delivery(&self, micros: i64) {
        self.delivery_seconds.record(Duration::from_micros(u64::try_from(micros).unwrap_or(0)));
    }
}

impl Default for MessageMetrics {
    fn default() -> Self {
        Self::new()
    }
}

/// The counter `postrider_rejections_total{reason}`.
pub fn rejections(reason: Reason) -> Counter {
    counter!("postrider_rejections_total", "reason" => reason.as_str())
}

/// The counter `postrider_restarts_total{stage}`.
pub fn restarts(stage: Stage) -> Counter {
    counter!("postrider_restarts_total", "stage" => stage.as_str())
}

/// The gauges that are levels, in the order they are described: name, unit, meaning.
pub const LEVELS: [(&str, metrics::Unit, &str); 13] = [
    ("postrider_unconfirmed_messages", Count, "sent to the broker and not confirmed yet"),
    (
        "postrider_exposed_messages",
        Count,
        "sent to the broker and not durably recorded yet: what a crash repeats at most",
    ),
    ("postrider_slot_retained_bytes", Bytes, "WAL the slot makes the server keep"),
    ("postrider_replication_lag_bytes", Bytes, "WAL written and not acknowledged by this relay yet"),
    ("postrider_oldest_unprocessed_seconds", Seconds, "age of the oldest unprocessed row"),
    ("postrider_unprocessed_rows", Count, "rows waiting to be published, counted up to a bound"),
    ("postrider_broker_blocked", Count, "1 while the broker refuses publishes because of an alarm"),
    ("postrider_retries", Count, "rows waiting for another attempt"),
    ("postrider_dead_letters", Count, "rows parked after their last attempt"),
    ("postrider_channel_openings", Count, "confirm channels opened since the start"),
    ("postrider_database_read_age_seconds", Seconds, "age of the figures that need SQL"),
    ("postrider_generation", Count, "how often the pipeline was built"),
    ("postrider_start_time_seconds", Seconds, "when the process started, seconds since 1970"),
];

/// Describes every metric and registers it at zero, so that a dashboard never finds one missing.
pub fn register() {
    describe_histogram!("postrider_stage_seconds", Seconds, "time in a stage, from arriving to leaving");
    describe_histogram!(
        "postrider_delivery_seconds",
        Seconds,
        "commit (occurred_on when polling) to confirm"
    );
    describe_gauge!(
        "postrider_stage_backpressure_seconds_total",
        Seconds,
        "time lost waiting for the next stage"
    );
    describe_gauge!("postrider_mailbox_batches", Count, "batches waiting in a stage's mailbox");
    describe_gauge!("postrider_credits_in_use", Count, "credits held, by unit");
    describe_counter!("postrider_messages_total", Count, "messages by verdict");
    describe_counter!("postrider_rejections_total", Count, "rejections by reason");
    describe_counter!("postrider_restarts_total", Count, "pipeline rebuilds by the stage that ended first");
    describe_counter!(
        "postrider_vanished_total",
        Count,
        "published rows that were gone when they should be marked"
    );
    describe_gauge!("postrider_state", Count, "1 for the state the relay is in");
    describe_gauge!("postrider_reason", Count, "1 for each reason that holds now");
    for stage in Stage::ALL {
        StageMetrics::of(stage).backpressure.set(0.0);
        gauge!("postrider_mailbox_batches", "stage" => stage.as_str()).set(0.0);
        restarts(stage).increment(0);
    }
    let messages = MessageMetrics::new();
    for counter in [&messages.delivered, &messages.rejected, &messages.abandoned, &messages.vanished] {
        counter.increment(0);
    }
    for reason in Reason::ALL {
        rejections(reason).increment(0);
    }
    for unit in ["messages", "bytes"] {
        gauge!("postrider_credits_in_use", "unit" => unit).set(0.0);
    }
    for (name, unit, help) in LEVELS {
        describe_gauge!(name, unit, help);
        if name != "postrider_oldest_unprocessed_seconds" {
            gauge!(name).set(0.0);
        }
    }
    for state in State::ALL {
        gauge!("postrider_state", "state" => state.as_str()).set(0.0);
    }
    for reason in StateReason::ALL {
        gauge!("postrider_reason", "reason" => reason.as_str()).set(0.0);
    }
}
