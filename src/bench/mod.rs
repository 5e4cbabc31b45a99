//! `postrider bench`: how fast this relay is on this database and this broker, beside what the broker takes at all.
//!
//! Everything happens in a place of its own (`arena`): a schema, an exchange, a queue and a slot, all named
//! `postrider_bench`, removed at the end whatever happened. The relay is measured as its users run it, as a process of
//! this same program (`relay`). Speeds are told as ratios to a bare publisher (`bare`) that takes turns with the
//! relay, because machines are noisy and brokers differ.

mod arena;
mod article;
mod bare;
mod consumer;
mod crash;
mod drain;
mod idle;
mod latency;
mod options;
mod plain;
mod plot;
mod relay;
mod report;
mod usage;
mod users;
mod wiretap;

use std::{path::Path, process::ExitCode};

pub use options::{Bench, Subject};

use crate::{cli::output, config::Config, failure::Failure, shutdown::Signals};
use arena::Arena;
use report::Report;

/// Runs what was asked for, cleans up, and prints the report.
///
/// # Errors
/// Whatever kept the benchmark from measuring; the arena is removed all the same.
pub async fn run(options: &Bench, file: Option<&Path>) -> Result<ExitCode, Failure> {
    let config = Config::load(file, std::env::vars().chain(options.overrides()?))?;
    // Heard from here on: whatever ends the measurement, its relay ends with it and the arena is removed.
    let mut signals = Signals::hear().map_err(|error| Failure::new(format!("hear signals: {error}")))?;
    let mut arena = Arena::open(&config, options).await?;
    let measured = tokio::select! {
        measured = measure(&mut arena, options) => measured,
        signal = signals.next() => Err(Failure::new(format!("interrupted by {signal}"))),
    };
    output::progress("");
    arena.remove().await;
    let report = measured?;
    if let Some(path) = &options.html {
        std::fs::write(path, report.html())
            .map_err(|error| Failure::new(format!("write {}: {error}", path.display())))?;
    }
    output::print(&if options.json { report.json() } else { report.table() })?;
    Ok(if report.lost() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn measure(arena: &mut Arena, options: &Bench) -> Result<Report, Failure> {
    let mut report = Report::of(arena, options).await?;
    match options.subject {
        Subject::Bare => bare::measure(arena, options, &mut report).await?,
        Subject::Drain => drain::measure(arena, options, &mut report).await?,
        Subject::Latency => latency::measure(arena, options, &mut report).await?,
        Subject::Users => users::measure(arena, options, &mut report).await?,
        Subject::Crash => crash::measure(arena, options, &mut report).await?,
        Subject::Idle => idle::measure(arena, options, &mut report).await?,
        Subject::Article => article::measure(arena, options, &mut report).await?,
    }
    Ok(report)
}
