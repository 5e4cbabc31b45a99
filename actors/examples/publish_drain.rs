//! How fast the publisher is, beside a bare lapin publisher with the same messages, exchange and window, in turns.
//!
//! `cargo run --release -p postrider-actors --example publish_drain -- AMQP_URL [MESSAGES] [ROUNDS] [LANES]`

#[path = "../tests/publishing/stage.rs"]
#[allow(dead_code, unreachable_pub, reason = "shared with the tests")]
mod stage;

use std::time::Instant;

use futures_util::{StreamExt, stream::FuturesUnordered};
use lapin::{
    Channel, Connection, ConnectionProperties, ExchangeKind,
    options::{
        BasicPublishOptions, ConfirmSelectOptions, ExchangeDeclareOptions, QueueBindOptions,
        QueueDeclareOptions, QueuePurgeOptions,
    },
    types::FieldTable,
};
use stage::{Stage3, message, settings};

const EXCHANGE: &str = "publish-drain";
const WINDOW: usize = 256;
const GROUP: usize = 64;

/// CPU this process has used, in microseconds.
fn cpu() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after = stat.rsplit_once(')').map_or("", |(_, after)| after);
    let ticks: f64 =
        after.split_whitespace().skip(11).take(2).filter_map(|field| field.parse::<f64>().ok()).sum();
    ticks * 10_000.0
}

async fn bare(channel: &Channel, count: u64) {
    let mut flights = FuturesUnordered::new();
    let (mut sent, mut confirmed) = (0, 0);
    while confirmed < count {
        while sent < count && flights.len() + GROUP <= WINDOW {
            for _ in 0..GROUP.min((count - sent) as usize) {
                let message = message(sent, EXCHANGE, "key", true);
                sent += 1;
                flights.push(async move {
                    let options = BasicPublishOptions { mandatory: true, ..Default::default() };
                    let body = &message.envelope.row.content;
                    let confirm = channel
                        .basic_publish(
                            message.exchange,
                            message.routing_key,
                            options,
                            body,
                            message.properties,
                        )
                        .await?;
                    confirm.await
                });
            }
            // Polls the group: each takes its tag and queues its frames.
            while let std::task::Poll::Ready(Some(confirm)) = futures_util::poll!(flights.next()) {
                confirm.expect("a confirm");
                confirmed += 1;
            }
        }
        if let Some(confirm) = flights.next().await {
            confirm.expect("a confirm");
            confirmed += 1;
        }
    }
}

#[actix::main]
async fn main() {
    let mut args = std::env::args().skip(1);
    let url = args.next().unwrap_or_else(|| "amqp://guest:guest@127.0.0.1:5672/%2f".to_owned());
    let count: u64 = args.next().and_then(|n| n.parse().ok()).unwrap_or(200_000);
    let rounds: u32 = args.next().and_then(|n| n.parse().ok()).unwrap_or(3);
    let lanes: usize = args.next().and_then(|n| n.parse().ok()).unwrap_or(1);
    let connection = Connection::connect(&url, ConnectionProperties::default()).await.expect("a broker");
    let channel = connection.create_channel().await.expect("a channel");
    let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
    channel
        .exchange_declare(EXCHANGE.into(), ExchangeKind::Direct, durable, FieldTable::default())
        .await
        .expect("declare");
    let options = QueueDeclareOptions { durable: true, ..Default::default() };
    channel.queue_declare(EXCHANGE.into(), options, FieldTable::default()).await.expect("declare");
    channel
        .queue_bind(
            EXCHANGE.into(),
            EXCHANGE.into(),
            "key".into(),
            QueueBindOptions::default(),
            FieldTable::default(),
        )
        .await
        .expect("bind");
    channel.confirm_select(ConfirmSelectOptions::default()).await.expect("confirms");

    let mut settings = settings(&url, EXCHANGE);
    settings.publish.lanes = lanes;
    let stage = Stage3::start(settings).await;
    stage.send(vec![message(u64::MAX / 2, EXCHANGE, "key", true)]).await;
    stage.verdicts(1).await;
    println!("round  publisher              bare                   ratio");
    for round in 1..=rounds {
        let (begun, used) = (Instant::now(), cpu());
        bare(&channel, count).await;
        let (bare_rate, bare_cpu) = rates(count, begun, used);
        channel.queue_purge(EXCHANGE.into(), QueuePurgeOptions::default()).await.expect("purge");

        stage.verdicts.lock().expect("not poisoned").clear();
        let (begun, used) = (Instant::now(), cpu());
        for first in (0..count).step_by(200) {
            let until = (first + 200).min(count);
            stage.send((first..until).map(|n| message(n, EXCHANGE, "key", true)).collect()).await;
        }
        stage.reach(std::time::Duration::from_secs(300), |seen| seen.len() as u64 >= count).await;
        let (rate, per) = rates(count, begun, used);
        channel.queue_purge(EXCHANGE.into(), QueuePurgeOptions::default()).await.expect("purge");
        println!(
            "{round:>5}  {rate:>7.0}/s {per:>5.2} us/msg  {bare_rate:>7.0}/s {bare_cpu:>5.2} us/msg  {:>5.2}",
            rate / bare_rate
        );
    }
    stage.stop().await;
}

fn rates(count: u64, begun: Instant, used: f64) -> (f64, f64) {
    (count as f64 / begun.elapsed().as_secs_f64(), (cpu() - used) / count as f64)
}
