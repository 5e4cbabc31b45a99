//! kill -9 in the middle of a backlog, and a restart: what is lost, and what comes twice.

use std::{collections::HashSet, time::Duration};

use futures_util::StreamExt;
use lapin::{
    options::{BasicConsumeOptions, BasicQosOptions},
    types::FieldTable,
};

use super::{
    arena::{Arena, NAME, refused},
    drain::{backlog, describe, follow},
    options::Bench,
    relay::Relay,
    report::{Line, Report},
};
use crate::{
    cli::output,
    config::{AckRows, Config},
    failure::Failure,
};

/// How long the relay may take to finish what is left, without a message moving.
const PATIENCE: Duration = Duration::from_secs(30);

/// What a crash cost.
#[derive(Debug, Clone, Copy)]
pub(super) struct Crash {
    /// Rows that never came.
    pub lost: u64,
    /// Messages that came again.
    pub duplicates: u64,
}

/// The configured relay, once a round.
pub(super) async fn measure(arena: &Arena, options: &Bench, report: &mut Report) -> Result<(), Failure> {
    let mut crashes = Vec::new();
    for round in 1..=options.rounds {
        let label = format!("round {round} of {}", options.rounds);
        crashes.push(crash(arena, &arena.config, options, &label).await?);
    }
    report.add(crashed(&format!("postrider, {}", describe(&arena.config)), &arena.config, &crashes));
    Ok(())
}

/// A line about crashes.
pub(super) fn crashed(name: &str, config: &Config, crashes: &[Crash]) -> Line {
    let worst = crashes.iter().map(|crash| crash.duplicates).max().unwrap_or_default();
    let sum: u64 = crashes.iter().map(|crash| crash.duplicates).sum();
    Line::new(name)
        .number("kills", "kills", crashes.len() as f64, 0)
        .lost(crashes.iter().map(|crash| crash.lost).sum())
        .number("duplicates_worst", "dup, worst", worst as f64, 0)
        .number("duplicates_mean", "dup, mean", sum as f64 / crashes.len().max(1) as f64, 0)
        .number("exposure", "bound", f64::from(config.exposure_messages()), 0)
}

/// One backlog, one kill.
pub(super) async fn crash(
    arena: &Arena,
    config: &Config,
    options: &Bench,
    label: &str,
) -> Result<Crash, Failure> {
    let mut relay = backlog(arena, config, options).await?;
    let half = options.rows / 2;
    follow(&mut relay, options.rows, &format!("{label}, until the kill"), |delivered| delivered >= half)
        .await?;
    relay.kill().await;
    let relay = Relay::start_running(config).await?;
    output::progress(&format!("{label}: after the restart"));
    wait(arena, config, options.rows).await?;
    relay.stop().await?;
    let total = arena.held().await?;
    let distinct = distinct(arena, total).await?;
    Ok(Crash { lost: options.rows.saturating_sub(distinct), duplicates: total.saturating_sub(distinct) })
}

/// Until every row is recorded, or, where rows are kept, until the queue has grown no more for a while.
async fn wait(arena: &Arena, config: &Config, rows: u64) -> Result<(), Failure> {
    let (mut last, mut quiet) = (0, Duration::ZERO);
    let pause = Duration::from_millis(250);
    loop {
        tokio::time::sleep(pause).await;
        let held = arena.held().await?;
        let done = match config.ack.rows {
            AckRows::Keep => held >= rows && quiet >= Duration::from_secs(2),
            _ => arena.unrecorded().await? == 0,
        };
        if done {
            return Ok(());
        }
        quiet = if held == last { quiet + pause } else { Duration::ZERO };
        last = held;
        if quiet > PATIENCE {
            return Ok(());
        }
    }
}

/// Consumes everything and counts the ids.
async fn distinct(arena: &Arena, total: u64) -> Result<u64, Failure> {
    let connection = arena.dial().await?;
    let channel = connection.create_channel().await.map_err(refused)?;
    channel.basic_qos(5000, BasicQosOptions::default()).await.map_err(refused)?;
    let options = BasicConsumeOptions { no_ack: true, ..Default::default() };
    let tag = "postrider-bench-count".into();
    let mut deliveries =
        channel.basic_consume(NAME.into(), tag, options, FieldTable::default()).await.map_err(refused)?;
    let mut ids = HashSet::new();
    for _ in 0..total {
        let delivery = tokio::time::timeout(PATIENCE, deliveries.next())
            .await
            .map_err(|_| Failure::new("the queue gave less than it holds"))?;
        let Some(Ok(delivery)) = delivery else { break };
        ids.insert(delivery.properties.message_id().as_ref().map(ToString::to_string));
    }
    Ok(ids.len() as u64)
}
