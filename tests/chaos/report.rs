//! What is printed: a line while it runs, a table and a verdict at the end, and where the evidence is.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{IsTerminal as _, Write as _, stderr};
use std::time::{Duration, Instant};

use crate::account::Account;
use crate::faults::Fate;
use crate::schedule::Episode;
use crate::subject::Subject;
use crate::watch::{STALL_LIMIT, Watched};

/// Descriptors or threads a process may have more at its end than at its beginning: pools fill as they are used.
const GROWTH_LIMIT: usize = 16;

/// Shows what is going on, for ever: in place on a terminal, now and then elsewhere.
pub(crate) async fn live(subjects: &[Subject], fate: &Fate<'_>) {
    let terminal = stderr().is_terminal();
    let (began, every) = (Instant::now(), Duration::from_secs(if terminal { 1 } else { 10 }));
    loop {
        tokio::time::sleep(every).await;
        let faults: Vec<String> = fate.weather().now.iter().map(ToString::to_string).collect();
        let mut line = format!("{:4} s  {:<22}", began.elapsed().as_secs(), faults.join(", "));
        for subject in subjects {
            let (here, repeated) = (subject.receipts.distinct(), subject.receipts.seen().repeated);
            let (waiting, state) = (subject.waiting(), subject.watched().state.clone());
            let _ = write!(
                line,
                " │ {}: {here} here, {waiting} waiting, {repeated} again, {state}",
                subject.mode
            );
        }
        let (clear, end) = if terminal { ("\r\x1b[K", "") } else { ("", "\n") };
        let _ = write!(stderr(), "{clear}{line}{end}");
    }
}

/// What happened, by kind, as far as the schedule got.
pub(crate) fn faults(schedule: &[Episode]) -> String {
    let mut counts = BTreeMap::new();
    for fault in schedule.iter().flat_map(|episode| [Some(episode.fault), episode.meanwhile]).flatten() {
        *counts.entry(fault.kind).or_insert(0) += 1;
    }
    counts.iter().map(|(kind, n)| format!("{:<24}{n:>6}\n", kind.to_string())).collect()
}

/// One column a relay.
pub(crate) fn table(results: &[(&Subject, Account)]) -> String {
    let mut table = String::new();
    let mut line = |name: &str, of: &dyn Fn(&Account, &Watched) -> String| {
        let _ = write!(table, "{name:<24}");
        for (subject, account) in results {
            let _ = write!(table, "{:>16}", of(account, &subject.watched()));
        }
        table.push('\n');
    };
    let seconds = |d: Duration| format!("{:.1} s", d.as_secs_f64());
    line("rows committed", &|a, _| a.committed.to_string());
    line("rolled back", &|a, _| a.rolled_back.to_string());
    line("delivered", &|a, _| a.delivered.to_string());
    line("unroutable, kept", &|a, _| a.unroutable.to_string());
    line("lost", &|a, _| a.lost.len().to_string());
    line("duplicates", &|a, _| a.repeated.to_string());
    line("out of order", &|a, _| a.out_of_order.to_string());
    line("slowest delivery", &|a, _| seconds(a.slowest));
    line("longest stall", &|_, w| seconds(w.longest_stall));
    line("ready while idle", &|_, w| seconds(w.longest_idle));
    line("not ready while moving", &|_, w| seconds(w.longest_alarm));
    line("peak memory", &|_, w| format!("{:.1} MB", w.peak.rss_bytes as f64 / 1e6));
    line("descriptors, peak", &|_, w| w.peak.descriptors.to_string());
    line("  most gained", &|_, w| gained(w).0.to_string());
    line("threads, peak", &|_, w| w.peak.threads.to_string());
    line("  most gained", &|_, w| gained(w).1.to_string());
    table
}

/// The most descriptors and threads that a process had more at its end than at its beginning.
fn gained(watched: &Watched) -> (usize, usize) {
    let most = |of: fn(&crate::watch::Usage) -> usize| {
        watched.lives.iter().map(|life| of(&life.last).saturating_sub(of(&life.first))).max().unwrap_or(0)
    };
    (most(|usage| usage.descriptors), most(|usage| usage.threads))
}

/// What is not as it must be; empty where all is.
pub(crate) fn failures(account: &Account, watched: &Watched) -> Vec<String> {
    let (descriptors, threads) = gained(watched);
    let checks = [
        (account.committed == 0, "nothing was committed".to_owned()),
        (!account.lost.is_empty(), format!("{} messages lost", account.lost.len())),
        (!account.phantoms.is_empty(), format!("{} messages that nobody committed", account.phantoms.len())),
        (!account.altered.is_empty(), format!("{} messages with another body", account.altered.len())),
        (account.out_of_order > 0, format!("{} first deliveries out of order", account.out_of_order)),
        (account.wrongly_parked > 0, format!("{} routable messages parked", account.wrongly_parked)),
        (account.unrecorded > 0, format!("{} rows never recorded", account.unrecorded)),
        (
            watched.longest_stall > STALL_LIMIT,
            format!("nothing was delivered for {:?}", watched.longest_stall),
        ),
        (descriptors > GROWTH_LIMIT, format!("a process gained {descriptors} descriptors")),
        (threads > GROWTH_LIMIT, format!("a process gained {threads} threads")),
    ];
    let found = checks.into_iter().filter(|(wrong, _)| *wrong).map(|(_, what)| what);
    found.chain(watched.complaints.iter().cloned()).collect()
}

/// Keeps the relay's logs, with the schedule and what is missing beside them; returns where.
pub(crate) fn keep_evidence(subject: &Subject, account: &Account, schedule: &[Episode]) -> String {
    let folder = subject.config.keep();
    let lost: String = account.lost.iter().map(|(id, place)| format!("{id} {place}\n")).collect();
    let schedule: String = schedule.iter().map(|episode| format!("{episode}\n")).collect();
    let others: String = account.phantoms.iter().map(|id| format!("{id}\n")).collect();
    for (name, text) in [("lost", lost), ("never-committed", others), ("schedule", schedule)] {
        if let Err(error) = std::fs::write(folder.join(name), text) {
            eprintln!("{name} was not written: {error}");
        }
    }
    folder.display().to_string()
}
