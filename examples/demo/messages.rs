//! The broker's side: the consumer of the relayed orders, and the direct publishes they are compared with.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context;
use futures_util::{StreamExt, stream};
use lapin::{
    BasicProperties, Channel, Connection, Consumer,
    message::Delivery,
    options::{
        BasicAckOptions, BasicPublishOptions, BasicRejectOptions, ConfirmSelectOptions, QueueDeleteOptions,
    },
};
use tokio::{
    sync::mpsc,
    task::JoinHandle,
    time::{interval, sleep, timeout},
};
use uuid::Uuid;

use crate::{
    consumer::{self, connect, subscribe},
    database,
    load::any_order,
    order_api::{ORDER_PLACED, OrderPlaced, pool},
    tally::Tally,
};

/// The relay's exchange, which the direct publishes use too: its type weighs more than anything else here.
pub(crate) const EXCHANGE: &str = "outbox";
/// Where relayed orders arrive.
pub(crate) const ORDERS: &str = "demo.orders";
/// Where directly published ones arrive; also their routing key.
pub(crate) const DIRECT: &str = "demo.direct";

/// The same for both consumers.
const PREFETCH: u16 = 256;
/// Messages applied at the same time, each in its own transaction: a commit takes longer than a delivery.
const APPLYING: usize = 8;
/// Slow enough not to be in the way, often enough for a p99 within a minute.
const DIRECT_EVERY: Duration = Duration::from_millis(50);

/// The demo's own connections to the broker.
pub(crate) struct Broker {
    publishing: Connection,
    /// Dropping it would close it.
    _consuming: Connection,
    direct: Channel,
    publisher: Option<JoinHandle<()>>,
}

impl Broker {
    /// Declares what the demo needs, without what an earlier run left in it, and starts both consumers.
    pub(crate) async fn open(amqp: &str, database: &str, tally: &Arc<Tally>) -> anyhow::Result<Self> {
        let consuming = connect(amqp, "demo consumer").await?;
        let channel = consuming.create_channel().await?;
        for queue in [ORDERS, DIRECT] {
            channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await?;
        }
        let orders = subscribe(&channel, EXCHANGE, ORDER_PLACED, ORDERS, PREFETCH).await?;
        let channel = consuming.create_channel().await?;
        let direct_consumer = subscribe(&channel, EXCHANGE, DIRECT, DIRECT, PREFETCH).await?;

        database::connect(database).await?.batch_execute(consumer::TABLES).await?;
        let (stamped, waiting) = mpsc::channel(usize::from(PREFETCH));
        tokio::spawn(stamp(orders, stamped));
        tokio::spawn(apply_all(waiting, database.to_owned(), tally.clone()));
        tokio::spawn(receive_direct(direct_consumer, tally.clone()));

        let publishing = connect(amqp, "demo direct publisher").await?;
        let direct = publishing.create_channel().await?;
        direct.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok(Self { publishing, _consuming: consuming, direct, publisher: None })
    }

    /// Begins to publish directly, now and then.
    pub(crate) fn start_direct(&mut self, tally: &Arc<Tally>) {
        let (channel, tally) = (self.direct.clone(), tally.clone());
        self.publisher = Some(tokio::spawn(async move {
            let mut tick = interval(DIRECT_EVERY);
            loop {
                tick.tick().await;
                if let Err(error) = publish_direct(&channel, &tally).await {
                    eprintln!("demo: the direct publisher ended: {error:#}");
                    return;
                }
            }
        }));
    }

    /// Publishes no more.
    pub(crate) fn stop_direct(&mut self) {
        if let Some(publisher) = self.publisher.take() {
            publisher.abort();
        }
    }

    /// Waits a moment for the direct publishes on their way; they count for nothing but the comparison.
    pub(crate) async fn settle(&self, tally: &Tally) {
        for _ in 0..20 {
            if tally.direct_under_way() == 0 || !self.publishing.status().connected() {
                return;
            }
            sleep(Duration::from_millis(50)).await;
        }
    }
}

/// Publishes one order as the relay does: the same exchange, properties, mandatory, persistent, confirmed.
async fn publish_direct(channel: &Channel, tally: &Tally) -> anyhow::Result<()> {
    let order = any_order();
    let id = Uuid::now_v7();
    let body = serde_json::to_vec(&OrderPlaced {
        order_id: Uuid::now_v7(),
        customer: &order.customer,
        item: &order.item,
        quantity: order.quantity,
        total_cents: order.unit_price_cents * i64::from(order.quantity),
    })?;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs();
    let properties = BasicProperties::default()
        .with_message_id(id.to_string().into())
        .with_type(ORDER_PLACED.into())
        .with_timestamp(now)
        .with_content_type("application/json".into())
        .with_app_id("demo".into())
        .with_delivery_mode(2);
    let options = BasicPublishOptions { mandatory: true, ..Default::default() };
    tally.sent(id);
    let confirm = channel.basic_publish(EXCHANGE.into(), DIRECT.into(), options, &body, properties).await?;
    timeout(Duration::from_secs(10), confirm).await.context("no confirm within 10 s")??;
    Ok(())
}

async fn receive_direct(mut consumer: Consumer, tally: Arc<Tally>) -> anyhow::Result<()> {
    while let Some(delivery) = consumer.next().await {
        let (delivery, at) = (delivery?, Instant::now());
        if let Some(id) = delivery.properties.message_id().as_ref() {
            tally.received(Uuid::parse_str(id.as_str())?, at);
        }
        delivery.ack(BasicAckOptions::default()).await?;
    }
    Ok(())
}

/// Notes when each message came, however busy those who apply it are.
async fn stamp(mut consumer: Consumer, stamped: mpsc::Sender<(Delivery, Instant)>) {
    while let Some(delivery) = consumer.next().await {
        match delivery {
            Ok(delivery) => {
                let at = Instant::now();
                if stamped.send((delivery, at)).await.is_err() {
                    return;
                }
            }
            Err(error) => return eprintln!("demo: the consumer ended: {error}"),
        }
    }
}

async fn apply_all(
    mut waiting: mpsc::Receiver<(Delivery, Instant)>,
    database: String,
    tally: Arc<Tally>,
) -> anyhow::Result<()> {
    let pool = pool(&database, APPLYING)?;
    stream::poll_fn(|context| waiting.poll_recv(context))
        .for_each_concurrent(APPLYING, |(delivery, at)| {
            let (pool, tally) = (&pool, &tally);
            async move {
                if let Err(error) = apply(pool, &delivery, at, tally).await {
                    eprintln!("demo: the consumer could not apply a message: {error:#}");
                }
            }
        })
        .await;
    Ok(())
}

async fn apply(
    pool: &deadpool_postgres::Pool,
    delivery: &Delivery,
    at: Instant,
    tally: &Tally,
) -> anyhow::Result<()> {
    let message = match consumer::read(delivery) {
        Ok(message) => message,
        Err(error) => {
            delivery.reject(BasicRejectOptions { requeue: false }).await?;
            return Err(error);
        }
    };
    let mut client = pool.get().await?;
    let outcome = consumer::apply(&mut client, &message).await?;
    delivery.ack(BasicAckOptions::default()).await?;
    tally.handled(message.id, at, outcome);
    Ok(())
}
