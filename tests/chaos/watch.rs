//! Looks at a relay a few times a second: does it move, is it ready when it does not, and what does it cost.

use std::fs;
use std::time::{Duration, Instant};

use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use crate::faults::Fate;
use crate::subject::Subject;
use crate::support::http_call;

const LOOK_EVERY: Duration = Duration::from_millis(250);

/// How long rows may wait with nothing delivered while nothing is wrong.
pub(crate) const STALL_LIMIT: Duration = Duration::from_secs(30);

/// How long `/readyz` may say yes while rows wait and nothing moves; and no while nothing is wrong and messages arrive.
const READY_LIMIT: Duration = Duration::from_secs(10);

/// After a fault began, before that is held against the relay: it looks at an idle peer every few seconds.
const FIRST_SECONDS: Duration = Duration::from_secs(2);

/// Messages arrive where the last came no longer ago.
const MOVING: Duration = Duration::from_secs(1);

/// After a fault, before a relay's descriptors are compared with those it had.
const SETTLED_AFTER: Duration = Duration::from_secs(2);

/// What a process holds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Usage {
    pub(crate) rss_bytes: u64,
    pub(crate) descriptors: usize,
    pub(crate) threads: usize,
}

/// One process of the relay: what it held when nothing was wrong for the first time, and for the last.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Life {
    pid: u32,
    pub(crate) first: Usage,
    pub(crate) last: Usage,
}

/// What was seen.
#[derive(Debug, Default)]
pub(crate) struct Watched {
    /// The state's word and the reason's, as last told.
    pub(crate) state: String,
    /// The longest time with rows waiting and nothing delivered, faults left out.
    pub(crate) longest_stall: Duration,
    /// The longest time of a yes from `/readyz` with rows waiting and nothing delivered.
    pub(crate) longest_idle: Duration,
    /// The longest time of a no with nothing wrong and messages arriving.
    pub(crate) longest_alarm: Duration,
    pub(crate) peak: Usage,
    pub(crate) lives: Vec<Life>,
    pub(crate) complaints: Vec<String>,
}

/// For ever.
pub(crate) async fn watch(subject: &Subject, fate: &Fate<'_>) {
    tokio::join!(progress(subject, fate), process(subject, fate), readiness(subject, fate));
}

async fn progress(subject: &Subject, fate: &Fate<'_>) {
    let (mut before, mut looked, mut stall) = (0, Instant::now(), Duration::ZERO);
    loop {
        sleep(LOOK_EVERY).await;
        let passed = looked.elapsed();
        looked += passed;
        let here = subject.receipts.distinct();
        if here != before || subject.waiting() == 0 {
            stall = Duration::ZERO;
        } else if fate.weather().now.is_empty() {
            stall += passed;
        }
        before = here;
        let mut watched = subject.watched();
        watched.longest_stall = watched.longest_stall.max(stall);
    }
}

async fn readiness(subject: &Subject, fate: &Fate<'_>) {
    let mut ticks = interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (status, ready) = (subject.url("/api/status").await, subject.url("/readyz").await);
    let (mut idle_since, mut alarm_since) = (Instant::now(), Instant::now());
    loop {
        ticks.tick().await;
        let status = look(&status).await.and_then(|answer| serde_json::from_str(&answer.body).ok());
        let status: serde_json::Value = status.unwrap_or_default();
        let word = |key: &str| status[key].as_str().unwrap_or_default();
        subject.watched().state = format!("{} {}", word("state"), word("reason")).trim().to_owned();
        let ready = look(&ready).await.is_some_and(|answer| answer.status == 200);
        // a pause is what was asked for
        if !ready || subject.waiting() == 0 || word("desired") != "run" {
            idle_since = Instant::now();
        }
        let (weather, moved) = (fate.weather(), subject.receipts.seen().moved.unwrap_or(idle_since));
        if ready || !weather.now.is_empty() || moved.elapsed() > MOVING {
            alarm_since = Instant::now();
        }
        let (idle, alarm) =
            (idle_since.max(moved).max(weather.began + FIRST_SECONDS).elapsed(), alarm_since.elapsed());
        let mut watched = subject.watched();
        let before = (watched.longest_idle, watched.longest_alarm);
        (watched.longest_idle, watched.longest_alarm) = (idle.max(before.0), alarm.max(before.1));
        drop(watched);
        if before.0 <= READY_LIMIT && idle > READY_LIMIT {
            subject.complain(format!("ready, and nothing moved for {idle:?}: {status}"));
        }
        if before.1 <= READY_LIMIT && alarm > READY_LIMIT {
            subject.complain(format!("not ready for {alarm:?}, and messages arrived: {status}"));
        }
    }
}

async fn look(url: &str) -> Option<crate::support::Answer> {
    timeout(Duration::from_secs(1), http_call("GET", url.to_owned(), None)).await.ok()?.ok()
}

async fn process(subject: &Subject, fate: &Fate<'_>) {
    loop {
        sleep(LOOK_EVERY).await;
        let pid = {
            let mut relay = subject.relay.lock().await;
            if let Some(exit) = relay.exited() {
                subject.complain(format!("the relay ended by itself: {exit:?}"));
                *relay = subject.config.start();
            }
            relay.pid()
        };
        let Some(usage) = usage(pid) else { continue };
        let weather = fate.weather();
        let mut watched = subject.watched();
        let Usage { rss_bytes, descriptors, threads } = watched.peak;
        watched.peak = Usage {
            rss_bytes: rss_bytes.max(usage.rss_bytes),
            descriptors: descriptors.max(usage.descriptors),
            threads: threads.max(usage.threads),
        };
        if watched.state != "running" || !weather.now.is_empty() || weather.ended.elapsed() < SETTLED_AFTER {
            continue;
        }
        match watched.lives.last_mut().filter(|life| life.pid == pid) {
            Some(life) => life.last = usage,
            None => watched.lives.push(Life { pid, first: usage, last: usage }),
        }
    }
}

/// Nothing where it has just ended.
fn usage(pid: u32) -> Option<Usage> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let number = |key: &str| -> Option<u64> {
        let line = status.lines().find_map(|line| line.strip_prefix(key))?;
        line.split_whitespace().next()?.parse().ok()
    };
    Some(Usage {
        rss_bytes: number("VmRSS:")? * 1024,
        descriptors: fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count(),
        threads: number("Threads:")?.try_into().ok()?,
    })
}
