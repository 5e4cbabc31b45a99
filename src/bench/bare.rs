//! The bare publisher: lapin without a database. Same exchange, properties, body and window as the relay's, on one
//! channel, publishes polled in groups: what this broker takes.

use std::{task::Poll, time::Instant};

use futures_util::{StreamExt, poll, stream::FuturesUnordered};
use lapin::{
    BasicProperties, Channel,
    options::{BasicPublishOptions, ConfirmSelectOptions},
    types::ShortString,
};
use uuid::Uuid;

use super::{
    arena::{Arena, KIND, NAME, refused},
    drain::{Drained, empty},
    options::Bench,
    report::{Line, Report},
    usage::Usage,
};
use crate::{cli::output, failure::Failure};

/// Publishes polled together: what saturates a broker at the least CPU.
const GROUP: usize = 64;

/// Only the bare publisher.
pub(super) async fn measure(arena: &Arena, options: &Bench, report: &mut Report) -> Result<(), Failure> {
    let mut runs = Vec::new();
    for round in 1..=options.rounds {
        output::progress(&format!("round {round} of {}: bare publisher", options.rounds));
        runs.push(publish(arena, options).await?);
    }
    report.add(Line::drained("bare publisher", &runs, &runs));
    Ok(())
}

/// Publishes as many messages as a backlog has rows.
pub(super) async fn publish(arena: &Arena, options: &Bench) -> Result<Drained, Failure> {
    arena.purge().await?;
    let connection = arena.dial().await?;
    let channel = connection.create_channel().await.map_err(refused)?;
    channel.confirm_select(ConfirmSelectOptions::default()).await.map_err(refused)?;
    let usage = Usage::begin(arena, std::process::id()).await;
    let began = Instant::now();
    stream(&channel, arena, options).await?;
    let seconds = began.elapsed().as_secs_f64();
    let used = usage.end().await;
    let held = arena.held().await?;
    Ok(Drained { messages: options.rows, seconds, used, held, ..empty() })
}

async fn stream(channel: &Channel, arena: &Arena, options: &Bench) -> Result<(), Failure> {
    let publish = &arena.config.publish;
    let window = publish.window_messages as usize;
    let body = body(options.body);
    let settings = BasicPublishOptions { mandatory: publish.mandatory, ..Default::default() };
    let mode = if publish.persistent { 2 } else { 1 };
    let (exchange, key) = (ShortString::from(NAME), ShortString::from(KIND));
    let mut flights = FuturesUnordered::new();
    let (mut sent, mut confirmed) = (0, 0);
    while confirmed < options.rows {
        while sent < options.rows && flights.len() + GROUP <= window.max(GROUP) {
            for _ in 0..GROUP.min(usize::try_from(options.rows - sent).unwrap_or(GROUP)) {
                sent += 1;
                let (exchange, key, body) = (exchange.clone(), key.clone(), &body);
                flights.push(async move {
                    let properties = properties(mode);
                    channel.basic_publish(exchange, key, settings, body, properties).await?.await
                });
            }
            // Polled in order: each takes its tag and queues its frames.
            while let Poll::Ready(Some(confirm)) = poll!(flights.next()) {
                confirm.map_err(refused)?;
                confirmed += 1;
            }
        }
        if let Some(confirm) = flights.next().await {
            confirm.map_err(refused)?;
            confirmed += 1;
        }
    }
    Ok(())
}

/// What the relay sets on a message.
pub(super) fn properties(mode: u8) -> BasicProperties {
    let seconds =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    BasicProperties::default()
        .with_message_id(Uuid::new_v4().to_string().as_str().into())
        .with_type(KIND.into())
        .with_timestamp(seconds)
        .with_content_type("application/json".into())
        .with_delivery_mode(mode)
        .with_app_id("postrider".into())
}

/// A JSON body of about `bytes` bytes.
pub(super) fn body(bytes: u32) -> Vec<u8> {
    let pad = "x".repeat((bytes as usize).saturating_sub(20));
    format!("{{\"n\": 1, \"pad\": \"{pad}\"}}").into_bytes()
}
