//! A soak: both modes under load while everything around them goes wrong at random, and the account at the end.
//!
//! The schedule is a function of the seed and the length alone. `./dev chaos` runs it for as long as one likes; among
//! the tests it runs for a minute.
#![allow(clippy::unwrap_used, reason = "a soak that cannot go on should say where")]
#![allow(clippy::disallowed_methods, reason = "writers speak to the server itself, with no pooler between")]

#[path = "../support/mod.rs"]
mod support;

mod account;
mod faults;
mod load;
mod receipts;
mod report;
mod schedule;
mod subject;
mod watch;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use futures_util::future::join_all;
use tokio_util::sync::CancellationToken;

use account::{account, settle};
use faults::Fate;
use schedule::{Episode, schedule};
use subject::Subject;
use support::{PrivateBroker, PrivatePostgres, full};

/// What this is called among the tests.
const NAME: &str = "random_faults_lose_nothing_and_stop_nothing";

#[derive(Parser)]
struct Args {
    /// Length of the run.
    #[arg(long, value_parser = minutes)]
    minutes: Option<Duration>,
    /// The same seed and length make the same faults.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// wal, poll or both.
    #[arg(long, default_value = "both", value_parser = ["wal", "poll", "both"])]
    mode: String,
    /// Print the schedule and stop.
    #[arg(long)]
    dry_run: bool,
    // what cargo test hands to every test binary
    #[arg(long, hide = true)]
    list: bool,
    #[arg(long, hide = true)]
    exact: bool,
    #[arg(long, hide = true)]
    nocapture: bool,
    #[arg(long, hide = true)]
    test_threads: Option<String>,
    #[arg(long, hide = true)]
    skip: Vec<String>,
    #[arg(hide = true)]
    filter: Vec<String>,
}

fn minutes(text: &str) -> Result<Duration, String> {
    let minutes: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    let length = Duration::try_from_secs_f64(minutes * 60.0).map_err(|e| e.to_string())?;
    if length < Duration::from_secs(20) { Err("less than a third".to_owned()) } else { Ok(length) }
}

impl Args {
    fn is_wanted(&self) -> bool {
        let matches = |word: &String| if self.exact { NAME == word } else { NAME.contains(word.as_str()) };
        (self.filter.is_empty() || self.filter.iter().any(matches)) && !self.skip.iter().any(matches)
    }
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> ExitCode {
    let args = Args::parse();
    if args.list {
        println!("{NAME}: test");
        return ExitCode::SUCCESS;
    }
    if !args.is_wanted() {
        return ExitCode::SUCCESS;
    }
    let length = args.minutes.unwrap_or(full(Duration::from_secs(60), Duration::from_secs(300)));
    let schedule = schedule(args.seed, length);
    println!("chaos: seed {}, {} s, {}", args.seed, length.as_secs(), args.mode);
    schedule.iter().for_each(|episode| println!("{episode}"));
    if args.dry_run {
        return ExitCode::SUCCESS;
    }
    tokio::select! {
        passed = soak(&args, length, &schedule) => ExitCode::from(u8::from(!passed)),
        _ = tokio::signal::ctrl_c() => ExitCode::from(130),
    }
}

/// Whether everything was as it must be.
async fn soak(args: &Args, length: Duration, schedule: &[Episode]) -> bool {
    // a session whose client went silent holds the slot until the server notices
    let (broker, postgres) =
        tokio::join!(PrivateBroker::start(), PrivatePostgres::start(&["wal_sender_timeout=10s"]));
    let modes: &[&'static str] = match args.mode.as_str() {
        "wal" => &["wal"],
        "poll" => &["poll"],
        _ => &["wal", "poll"],
    };
    let subjects = join_all(modes.iter().map(|mode| Subject::start(mode, &postgres, &broker))).await;
    let fate = Fate::new(&broker, &postgres, &subjects);
    let stop = CancellationToken::new();
    let writers = subjects.iter().flat_map(|subject| (0..load::WRITERS).map(move |n| (subject, n)));
    let load = join_all(writers.map(|(subject, n)| {
        load::write(
            subject.database.url(),
            &subject.journal,
            args.seed.wrapping_mul(1_000).wrapping_add(n),
            stop.clone(),
        )
    }));
    let story = async {
        tokio::join!(tokio::time::sleep(length), fate.run(schedule));
        stop.cancel();
    };
    let observers = join_all(subjects.iter().map(|subject| watch::watch(subject, &fate)));
    let run = async {
        tokio::join!(load, story);
        join_all(subjects.iter().map(settle)).await;
    };
    tokio::select! {
        () = run => {}
        _ = observers => unreachable!("they watch for ever"),
        () = report::live(&subjects, &fate) => unreachable!("it is shown for ever"),
    }
    let mut results = Vec::new();
    for subject in &subjects {
        results.push((subject, account(subject).await));
    }
    println!("\n{}\n{}", report::faults(schedule), report::table(&results));
    let mut passed = true;
    for (subject, account) in &results {
        for failure in report::failures(account, &subject.watched()) {
            passed = false;
            println!("FAILED  {}: {failure}", subject.mode);
        }
    }
    for (subject, account) in results.iter().filter(|_| !passed) {
        println!(
            "{}: logs, schedule and what is missing are in {}",
            subject.mode,
            report::keep_evidence(subject, account, schedule)
        );
    }
    println!("chaos: seed {}: {}", args.seed, if passed { "ok" } else { "FAILED" });
    passed
}
