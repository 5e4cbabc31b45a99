//! A backlog, from its first message to its last, in turns with the bare publisher.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::{
    arena::Arena,
    bare,
    options::Bench,
    plot::Series,
    relay::Relay,
    report::{Line, Report},
    usage::{Cpu, Usage, peak_rss},
};
use crate::{
    cli::output,
    config::{AckRows, Config, FirstStart, SourceMode},
    failure::Failure,
};

/// Between two looks at the relay: its status costs it about a tenth of a millisecond.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How long nothing may move.
const PATIENCE: Duration = Duration::from_secs(60);

/// One run.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Drained {
    /// Messages of the backlog.
    pub messages: u64,
    /// From the first message to the last.
    pub seconds: f64,
    /// Messages that left before the clock ran.
    pub before: u64,
    /// Processor time from start to end.
    pub used: Cpu,
    /// Messages in the queue at the end: what was delivered is counted there, not believed.
    pub held: u64,
    /// Rows not recorded at the end.
    pub left: u64,
    /// The relay's largest memory, in bytes.
    pub peak_rss: u64,
    /// How it went.
    #[serde(skip)]
    pub samples: Vec<Sample>,
}

/// One look.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sample {
    /// Seconds since the start.
    pub at: f64,
    /// Delivered so far.
    pub delivered: u64,
    /// Credits in use.
    pub held: u64,
}

impl Drained {
    /// Messages a second.
    pub(super) fn rate(&self) -> f64 {
        (self.messages - self.before) as f64 / self.seconds.max(1e-6)
    }

    /// Messages that are missing.
    pub(super) fn lost(&self) -> u64 {
        self.messages.saturating_sub(self.held)
    }
}

/// A run of nothing.
pub(super) fn empty() -> Drained {
    Drained {
        messages: 0,
        seconds: 0.0,
        before: 0,
        used: Cpu::default(),
        held: 0,
        left: 0,
        peak_rss: 0,
        samples: Vec::new(),
    }
}

/// The relay as it is configured.
pub(super) async fn measure(arena: &Arena, options: &Bench, report: &mut Report) -> Result<(), Failure> {
    let config = arena.config.clone();
    let name = format!("postrider, {}", describe(&config));
    let (mut bare, mut relay) = (Vec::new(), Vec::new());
    for round in 1..=options.rounds {
        output::progress(&format!("round {round} of {}: bare publisher", options.rounds));
        bare.push(bare::publish(arena, options).await?);
        let label = format!("round {round} of {}: {name}", options.rounds);
        relay.push(drain(arena, &config, options, &label).await?);
    }
    report.add(Line::drained("bare publisher", &bare, &bare));
    report.add(Line::drained(&name, &relay, &bare));
    if let Some(last) = relay.last() {
        report.plot("messages a second", "msg/s", vec![throughput(&name, last)]);
        report.plot("held by the relay", "messages", vec![in_flight(&name, last)]);
    }
    Ok(())
}

/// What distinguishes a configuration.
pub(super) fn describe(config: &Config) -> String {
    let lanes = match config.publish.lanes {
        1 => String::new(),
        lanes => format!(", {lanes} lanes"),
    };
    match config.source.mode {
        SourceMode::Wal => format!("wal, rows {}{lanes}", config.ack.rows),
        SourceMode::Poll => match config.source.poll.workers {
            1 => format!("poll, 1 worker{lanes}"),
            workers => format!("poll, {workers} workers{lanes}"),
        },
    }
}

/// Drains one backlog.
pub(super) async fn drain(
    arena: &Arena,
    config: &Config,
    options: &Bench,
    label: &str,
) -> Result<Drained, Failure> {
    let mut relay = backlog(arena, config, options).await?;
    let usage = Usage::begin(arena, relay.pid()).await;
    let run = follow(&mut relay, options.rows, label, |_| false).await?;
    let used = usage.end().await;
    let peak_rss = peak_rss(relay.pid());
    relay.stop().await?;
    let left = if config.ack.rows == AckRows::Keep { 0 } else { arena.unrecorded().await? };
    Ok(Drained { used, peak_rss, left, held: arena.held().await?, ..run })
}

/// A fresh backlog, and a relay that has just been started on it. In wal mode the slot was there before, so that the
/// backlog is streamed.
pub(super) async fn backlog(arena: &Arena, config: &Config, options: &Bench) -> Result<Relay, Failure> {
    arena.clear().await?;
    let mut config = config.clone();
    if config.source.mode == SourceMode::Wal {
        if config.ack.rows == AckRows::Keep {
            config.source.wal.first_start = Some(FirstStart::Stream);
        }
        Relay::start_running(&config).await?.stop().await?;
    }
    arena.seed(options.rows, options.transaction, options.body).await?;
    Relay::start(&config)
}

/// Looks at the relay until all is delivered, or `enough`.
pub(super) async fn follow(
    relay: &mut Relay,
    rows: u64,
    label: &str,
    enough: impl Fn(u64) -> bool,
) -> Result<Drained, Failure> {
    let began = Instant::now();
    let (mut first, mut moved) = (None, Instant::now());
    let mut samples: Vec<Sample> = Vec::new();
    let mut ticker = tokio::time::interval(LOOK_EVERY);
    loop {
        ticker.tick().await;
        let Some(status) = relay.status().await else {
            relay.alive(began, "answer")?;
            continue;
        };
        let (now, delivered) = (Instant::now(), status.totals.delivered);
        if samples.last().is_none_or(|last| last.delivered != delivered) {
            moved = now;
        }
        relay.alive(moved, &format!("deliver more than {delivered} of {rows}"))?;
        samples.push(Sample {
            at: began.elapsed().as_secs_f64(),
            delivered,
            held: status.credits.messages.now,
        });
        if delivered > 0 {
            first.get_or_insert((now, delivered));
        }
        output::progress(&format!("{label}: {delivered} of {rows}"));
        if delivered >= rows || enough(delivered) {
            let (since, before) = first.unwrap_or((began, 0));
            // All of it between two looks: then the clock ran from the start.
            let (since, before) = if before == delivered { (began, 0) } else { (since, before) };
            let seconds = now.duration_since(since).as_secs_f64();
            return Ok(Drained { messages: delivered, seconds, before, samples, ..empty() });
        }
        if moved.elapsed() > PATIENCE {
            return Err(Failure::new(format!("nothing moved for {} s", PATIENCE.as_secs())));
        }
    }
}

/// Messages a second over a run.
fn throughput(name: &str, run: &Drained) -> Series {
    let points = run.samples.windows(5).map(|window| {
        let (from, to) = (window[0], window[window.len() - 1]);
        (to.at, (to.delivered - from.delivered) as f64 / (to.at - from.at).max(1e-6))
    });
    Series { name: name.to_owned(), points: points.collect() }
}

fn in_flight(name: &str, run: &Drained) -> Series {
    let points = run.samples.iter().map(|sample| (sample.at, sample.held as f64)).collect();
    Series { name: name.to_owned(), points }
}
