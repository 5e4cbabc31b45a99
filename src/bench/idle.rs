//! What a relay costs that has nothing to do.

use std::{str::FromStr, sync::atomic::Ordering::Relaxed, time::Duration};

use super::{
    arena::Arena,
    drain::describe,
    options::Bench,
    relay::Relay,
    report::{Line, Report},
    usage::Usage,
    wiretap,
};
use crate::{
    cli::output,
    config::{Config, SslMode},
    failure::Failure,
};

/// After the start: what is only done once is done.
const SETTLE: Duration = Duration::from_secs(12);

/// The configured relay.
pub(super) async fn measure(arena: &Arena, options: &Bench, report: &mut Report) -> Result<(), Failure> {
    report.add(idle(arena, &arena.config, options).await?);
    Ok(())
}

/// A relay of this configuration on an empty outbox.
pub(super) async fn idle(arena: &Arena, config: &Config, options: &Bench) -> Result<Line, Failure> {
    arena.clear().await?;
    let (config, tap) = tapped(config).await?;
    let relay = Relay::start_running(&config).await?;
    output::progress("settling");
    tokio::time::sleep(SETTLE).await;
    let counted = || {
        (tap.counts.statements.load(Relaxed), tap.counts.outbox.load(Relaxed), tap.counts.bytes.load(Relaxed))
    };
    let before = counted();
    let usage = Usage::begin(arena, relay.pid()).await;
    for second in 0..options.seconds {
        output::progress(&format!("idle: {second} of {} s", options.seconds));
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let (used, after) = (usage.end().await, counted());
    relay.stop().await?;
    let seconds = options.seconds as f64;
    let a_minute = |before: u64, after: u64| (after - before) as f64 * 60.0 / seconds;
    Ok(Line::new(format!("postrider, {}", describe(&config)))
        .number("statements_per_minute", "statements/min", a_minute(before.0, after.0), 1)
        .number("outbox_statements_per_minute", "on the outbox/min", a_minute(before.1, after.1), 1)
        .number("bytes_per_minute", "bytes/min", a_minute(before.2, after.2), 0)
        .number("relay_cpu_percent", "CPU %", used.relay / seconds * 100.0, 2)
        .maybe("postgres_cpu_percent", "PostgreSQL %", used.postgres.map(|cpu| cpu / seconds * 100.0), 2)
        .maybe("broker_cpu_percent", "broker %", used.broker.map(|cpu| cpu / seconds * 100.0), 2))
}

/// The configuration with a tap before the database.
async fn tapped(config: &Config) -> Result<(Config, wiretap::Wiretap), Failure> {
    let parsed = tokio_postgres::Config::from_str(config.direct_url().expose())
        .map_err(|error| Failure::new(format!("database.direct_url: {error}")))?;
    let host = match parsed.get_hosts().first() {
        Some(tokio_postgres::config::Host::Tcp(host)) => host.clone(),
        _ => {
            return Err(Failure::new(
                "idle counts statements between relay and database, which needs a TCP address",
            )
            .with_hint("give database.url a host"));
        }
    };
    let port = parsed.get_ports().first().copied().unwrap_or(5432);
    let tap = wiretap::open(format!("{host}:{port}"), "outbox_messages").await?;
    let text = |bytes: Option<&[u8]>| {
        bytes.map(|bytes| String::from_utf8_lossy(bytes).into_owned()).unwrap_or_default()
    };
    // As PostgreSQL's own key words, since user and password may hold anything.
    let quoted = |text: &str| format!("'{}'", text.replace('\\', "\\\\").replace('\'', "\\'"));
    let url = format!(
        "host=127.0.0.1 port={} user={} password={} dbname={}",
        tap.address.port(),
        quoted(parsed.get_user().unwrap_or_default()),
        quoted(&text(parsed.get_password())),
        quoted(parsed.get_dbname().unwrap_or_default()),
    );
    let mut config = config.clone();
    config.database.url = url.as_str().into();
    config.database.direct_url = None;
    // Encrypted statements could not be told apart.
    config.database.sslmode = SslMode::Disable;
    Ok((config, tap))
}
