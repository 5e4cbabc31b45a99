//! From COMMIT to the consumer at a steady rate, beside a direct publish to the same consumer in the same run.
//!
//! The load is open: each order has its time, however long the one before takes, so a slow moment is seen by every
//! order that falls into it (no coordinated omission).

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use lapin::{
    Channel,
    options::{BasicPublishOptions, ConfirmSelectOptions},
};
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{MissedTickBehavior, interval},
};
use uuid::Uuid;

use super::{
    arena::{Arena, KIND, NAME, refused},
    bare,
    consumer::{Clock, DIRECT, arrived, consume},
    drain::describe,
    options::Bench,
    relay::Relay,
    report::{Line, Report},
    users::{Notify, place, statement},
};
use crate::{
    cli::output,
    config::{SourceMode, Wake},
    failure::Failure,
};

/// Connections that place orders: enough for the highest rate at some milliseconds an order.
const WRITERS: usize = 16;
/// Orders that wait for a connection, a writer.
const QUEUE: usize = 64;
/// Before anything counts: caches fill, connections open.
const WARM_UP: Duration = Duration::from_secs(1);
/// How long the last message may take.
const LAST: Duration = Duration::from_secs(30);

/// The configured relay.
pub(super) async fn measure(arena: &Arena, options: &Bench, report: &mut Report) -> Result<(), Failure> {
    arena.clear().await?;
    let relay = Relay::start_running(&arena.config).await?;
    run(arena, options, Duration::ZERO, WARM_UP, "warming up").await?;
    let (relayed, direct) =
        run(arena, options, Duration::ZERO, Duration::from_secs(options.seconds), "measuring").await?;
    relay.stop().await?;
    let (ours, theirs) = (relayed.latencies(), direct.latencies());
    let ratio = |quantile| {
        ours.value_at_quantile(quantile) as f64 / (theirs.value_at_quantile(quantile) as f64).max(1.0)
    };
    let reached = relayed.count() as f64 / options.seconds as f64;
    let name = format!("postrider, {}", describe(&arena.config));
    report.add(
        Line::new("direct publish")
            .number("per_second", "a second", direct.count() as f64 / options.seconds as f64, 0)
            .latency(&theirs),
    );
    report.add(
        Line::new(&name)
            .number("per_second", "a second", reached, 0)
            .latency(&ours)
            .number("p50_of_direct", "p50 of direct", ratio(0.5), 2)
            .number("p99_of_direct", "p99 of direct", ratio(0.99), 2)
            .lost(relayed.under_way()),
    );
    report.distribution("latency", &[("direct publish", &theirs), (&name, &ours)]);
    Ok(())
}

async fn run(
    arena: &Arena,
    options: &Bench,
    offset: Duration,
    length: Duration,
    label: &str,
) -> Result<(Clock, Clock), Failure> {
    let (relayed, direct) = (Clock::new(), Clock::new());
    let _consumer = consume(arena, relayed.clone(), direct.clone()).await?;
    let notify = match (arena.config.source.mode, arena.config.source.poll.wake) {
        (SourceMode::Poll, Wake::Notify) => Notify::AfterCommit,
        _ => Notify::Never,
    };
    let statement: Arc<str> = statement(&arena.config, options.body).into();
    let mut tasks = JoinSet::new();
    let mut writers = Vec::new();
    for _ in 0..WRITERS {
        let client = arena.connect().await?;
        let (orders, mut due) = mpsc::channel::<()>(QUEUE);
        let (statement, clock) = (Arc::clone(&statement), relayed.clone());
        tasks.spawn(async move {
            while due.recv().await.is_some() {
                let id = place(&client, &statement, notify).await?;
                clock.began(id, Instant::now());
            }
            Ok::<(), Failure>(())
        });
        writers.push(orders);
    }
    let connection = arena.dial().await?;
    let channel = connection.create_channel().await.map_err(refused)?;
    channel.confirm_select(ConfirmSelectOptions::default()).await.map_err(refused)?;
    tokio::time::sleep(offset).await;
    let mut ticks = interval(Duration::from_secs(1) / options.rate);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let began = Instant::now();
    for n in 0.. {
        ticks.tick().await;
        if began.elapsed() >= length {
            break;
        }
        if let Some(writer) = writers.get(n % WRITERS) {
            writer.send(()).await.map_err(|_| Failure::new("a writer ended"))?;
        }
        // Between two orders, so that neither stands in the other's way.
        if n % 2 == 0 {
            tokio::time::sleep(Duration::from_secs(1) / options.rate / 2).await;
            publish(&channel, arena, options.body, &direct).await?;
        }
        if n % (options.rate as usize) == 0 {
            output::progress(&format!("{label}: {} of {} s", began.elapsed().as_secs(), length.as_secs()));
        }
    }
    drop(writers);
    while let Some(writer) = tasks.join_next().await {
        writer.map_err(|error| Failure::new(format!("a writer: {error}")))??;
    }
    arrived(&direct, LAST).await;
    arrived(&relayed, LAST).await;
    Ok((relayed, direct))
}

async fn publish(channel: &Channel, arena: &Arena, body: u32, clock: &Clock) -> Result<(), Failure> {
    let publish = &arena.config.publish;
    let id = format!("{DIRECT}{}", Uuid::new_v4());
    let mode = if publish.persistent { 2 } else { 1 };
    let properties = bare::properties(mode).with_message_id(id.as_str().into());
    let options = BasicPublishOptions { mandatory: publish.mandatory, ..Default::default() };
    clock.began(id, Instant::now());
    let confirm = channel
        .basic_publish(NAME.into(), KIND.into(), options, &bare::body(body), properties)
        .await
        .map_err(refused)?;
    // Not awaited here: the next order is due at its time.
    tokio::spawn(confirm);
    Ok(())
}
