//! What can be asked of the benchmark.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::{
    config::{KEYS, SourceMode, variable},
    failure::Failure,
};

/// Measure this relay on the configured database and broker
#[derive(Debug, Clone, Args)]
pub struct Bench {
    /// What to measure
    #[arg(value_enum, default_value_t = Subject::Drain)]
    pub subject: Subject,
    /// The source mode: wal or poll [default: the configuration's]
    #[arg(long, value_name = "MODE", value_parser = mode)]
    pub mode: Option<SourceMode>,
    /// Rows of a backlog
    #[arg(long, default_value_t = 200_000, value_parser = clap::value_parser!(u64).range(100..=50_000_000))]
    pub rows: u64,
    /// Rows of one transaction of the backlog
    #[arg(long, value_name = "ROWS", default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub transaction: u64,
    /// Bytes of a message's body
    #[arg(long, value_name = "BYTES", default_value_t = 150, value_parser = clap::value_parser!(u32).range(40..=16_000_000))]
    pub body: u32,
    /// How often everything is measured, taking turns
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Length of a timed measurement
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(2..=3600))]
    pub seconds: u64,
    /// Orders a second (latency)
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=5000))]
    pub rate: u32,
    /// Users who order one after the other without a pause (users)
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=500))]
    pub users: u32,
    /// The kind of exchange, for relay and bare publisher alike: it weighs more than the relay
    #[arg(long, value_enum, default_value_t)]
    pub exchange: Exchange,
    /// A key of the configuration to measure with, such as publish.lanes=2; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Write a report with plots: one file that needs nothing else
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Subject {
    /// A publisher without a database: what the broker takes, the denominator of everything
    Bare,
    /// A backlog, from the first message to the last, beside the bare publisher
    Drain,
    /// From COMMIT to the consumer at a steady rate, beside a direct publish
    Latency,
    /// Users who order as fast as they are served, with and without the relay
    Users,
    /// kill -9 in the middle of a backlog, restart: what is lost, what repeats
    Crash,
    /// What a relay costs that has nothing to do
    Idle,
    /// Every system of a published comparison, with the figures published for it
    Article,
}

impl Subject {
    /// As on the command line.
    pub fn word(self) -> &'static str {
        match self {
            Subject::Bare => "bare",
            Subject::Drain => "drain",
            Subject::Latency => "latency",
            Subject::Users => "users",
            Subject::Crash => "crash",
            Subject::Idle => "idle",
            Subject::Article => "article",
        }
    }
}

/// The kind of the benchmark's exchange.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Exchange {
    /// As `publish.declare` makes it
    #[default]
    Topic,
    /// Cheaper for the broker
    Direct,
    /// To every queue
    Fanout,
}

fn mode(word: &str) -> Result<SourceMode, String> {
    match word {
        "wal" => Ok(SourceMode::Wal),
        "poll" => Ok(SourceMode::Poll),
        _ => Err("allowed: wal, poll".to_owned()),
    }
}

impl Bench {
    /// What `--set` and `--mode` say, as the variables that override the configuration.
    ///
    /// # Errors
    /// A value that is not `KEY=VALUE`, or names no key.
    pub fn overrides(&self) -> Result<Vec<(String, String)>, Failure> {
        let mut overrides = Vec::new();
        for text in &self.set {
            let (key, value) = text
                .split_once('=')
                .ok_or_else(|| Failure::usage(format!("--set {text}: allowed: KEY=VALUE")))?;
            if !KEYS.contains_key(key) {
                return Err(Failure::usage(format!("--set {text}: no such key"))
                    .with_hint("config.toml has every key, written as section.key"));
            }
            overrides.push((variable(key), value.to_owned()));
        }
        if let Some(mode) = self.mode {
            let word = if mode == SourceMode::Wal { "wal" } else { "poll" };
            overrides.push((variable("source.mode"), word.to_owned()));
        }
        Ok(overrides)
    }
}
