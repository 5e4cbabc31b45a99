//! Users who order one after the other without a pause, each order and its outbox row in one transaction: how many
//! orders the database takes with the relay at work and without, and how far the relay is behind.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use postrider_actors::database::quote_identifier;
use tokio::task::JoinSet;
use tokio_postgres::Client;
use uuid::Uuid;

use super::{
    arena::{Arena, KIND, NAME, failed},
    bare,
    consumer::{Clock, arrived, consume, histogram},
    drain::describe,
    options::Bench,
    relay::Relay,
    report::{Line, Report},
};
use crate::{cli::output, config::Config, failure::Failure};

/// How long the relay may take to catch up when the users have left.
const CATCH_UP: Duration = Duration::from_secs(60);

/// What a user's application does beside writing the rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Notify {
    /// Nothing.
    #[default]
    Never,
    /// `NOTIFY` after the COMMIT.
    AfterCommit,
}

/// One run of all users.
pub(super) struct Ordered {
    /// Orders a second.
    pub rate: f64,
    /// From COMMIT's return to the consumer, where a relay was at work.
    pub lag: Histogram<u64>,
    /// Orders that never came.
    pub lost: u64,
}

/// With the configured relay and without one, in turns.
pub(super) async fn measure(arena: &Arena, options: &Bench, report: &mut Report) -> Result<(), Failure> {
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for round in 1..=options.rounds {
        output::progress(&format!("round {round} of {}: {} users, no relay", options.rounds, options.users));
        without.push(order(arena, options, None, Notify::Never).await?);
        output::progress(&format!("round {round} of {}: {} users", options.rounds, options.users));
        with.push(order(arena, options, Some(&arena.config), Notify::Never).await?);
    }
    report.add(Line::new("no relay").number("orders_per_second", "orders/s", mean(&without), 0));
    let (line, lag) =
        ordered(&format!("postrider, {}", describe(&arena.config)), &with, Some(mean(&without)));
    report.add(line);
    report.distribution("from COMMIT to the consumer", &[("relay", &lag)]);
    Ok(())
}

/// A line about users beside a relay, and all their lags together.
pub(super) fn ordered(name: &str, runs: &[Ordered], without: Option<f64>) -> (Line, Histogram<u64>) {
    let mut lag = histogram();
    for run in runs {
        let _ = lag.add(&run.lag);
    }
    let line = Line::new(name)
        .number("orders_per_second", "orders/s", mean(runs), 0)
        .maybe("ratio_to_no_relay", "of no relay", without.map(|without| mean(runs) / without), 2)
        .latency(&lag)
        .lost(runs.iter().map(|run| run.lost).sum());
    (line, lag)
}

/// Orders a second, over the runs.
pub(super) fn mean(runs: &[Ordered]) -> f64 {
    runs.iter().map(|run| run.rate).sum::<f64>() / runs.len().max(1) as f64
}

/// All users at once for as long as is asked.
pub(super) async fn order(
    arena: &Arena,
    options: &Bench,
    relay: Option<&Config>,
    notify: Notify,
) -> Result<Ordered, Failure> {
    arena.clear().await?;
    let relay = match relay {
        Some(config) => Some(Relay::start_running(config).await?),
        None => None,
    };
    let clock = Clock::new();
    let consumer = consume(arena, clock.clone(), Clock::new()).await?;
    let statement = statement(&arena.config, options.body);
    let mut users = JoinSet::new();
    let mut clients = Vec::new();
    for _ in 0..options.users {
        clients.push(arena.connect().await?);
    }
    let began = Instant::now();
    let until = began + Duration::from_secs(options.seconds);
    for client in clients {
        let (statement, clock) = (statement.clone(), relay.is_some().then(|| clock.clone()));
        users.spawn(async move {
            let mut orders = 0_u64;
            while Instant::now() < until {
                let id = place(&client, &statement, notify).await?;
                let at = Instant::now();
                if let Some(clock) = &clock {
                    clock.began(id, at);
                }
                orders += 1;
            }
            Ok::<u64, Failure>(orders)
        });
    }
    let mut orders = 0;
    while let Some(user) = users.join_next().await {
        orders += user.map_err(|error| Failure::new(format!("a user: {error}")))??;
    }
    let rate = orders as f64 / began.elapsed().as_secs_f64();
    let lost = if relay.is_some() { arrived(&clock, CATCH_UP).await } else { 0 };
    if let Some(relay) = relay {
        relay.stop().await?;
    }
    drop(consumer);
    Ok(Ordered { rate, lag: clock.latencies(), lost })
}

/// The statements of one order, with `$id` where its id goes: a transaction of two inserts, in one message as a
/// driver that pipelines sends them.
pub(super) fn statement(config: &Config, body: u32) -> String {
    let columns = &config.outbox.columns;
    let body = String::from_utf8_lossy(&bare::body(body)).into_owned();
    format!(
        "BEGIN; INSERT INTO {NAME}.orders (id, body) VALUES ('$id', '{body}');
         INSERT INTO {NAME}.outbox_messages ({}, {}, {}, {}) VALUES ('$id', '{KIND}', '{body}', clock_timestamp());
         COMMIT",
        quote_identifier(&columns.id),
        quote_identifier(&columns.r#type),
        quote_identifier(&columns.content),
        quote_identifier(&columns.occurred_on),
    )
}

/// Places one order; returns its id when the COMMIT has returned.
pub(super) async fn place(client: &Client, statement: &str, notify: Notify) -> Result<String, Failure> {
    let id = Uuid::new_v4().to_string();
    client.batch_execute(&statement.replace("$id", &id)).await.map_err(failed("place an order"))?;
    if notify == Notify::AfterCommit {
        client.batch_execute("NOTIFY postrider").await.map_err(failed("notify"))?;
    }
    Ok(id)
}
