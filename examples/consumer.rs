//! A consumer that applies each message once, though messages may come twice.
//!
//! postrider delivers at least once, as every relay does: after a crash it may publish a message again, with the same
//! `message_id` and the same body. An inbox table makes that harmless. The id is inserted in the transaction that
//! applies the message's effect; if it is there already the effect is too, and the message is only acknowledged.
//!
//! ```text
//! export DATABASE_URL=postgres://postgres@127.0.0.1:5432/shop AMQP_URL=amqp://guest:guest@127.0.0.1:5672/%2f
//! cargo run --example consumer
//! ```
//!
//! `./dev demo` runs this very file.

use std::env;

use anyhow::Context;
use futures_util::StreamExt;
use lapin::{
    Channel, Connection, ConnectionProperties, Consumer, ExchangeKind,
    message::Delivery,
    options::{
        BasicAckOptions, BasicConsumeOptions, BasicQosOptions, BasicRejectOptions, ExchangeDeclareOptions,
        QueueBindOptions, QueueDeclareOptions,
    },
    types::{FieldTable, ShortString},
};
use serde::Deserialize;
use tokio_postgres::{Client, NoTls, types::Type};
use uuid::Uuid;

/// What this consumer needs of an `order.placed` message. It ignores the rest, so the sender may add to it.
#[derive(Debug, Deserialize)]
pub(crate) struct OrderPlaced {
    customer: String,
    total_cents: i64,
}

/// A message whose form is right.
#[derive(Debug)]
pub(crate) struct Message {
    /// The id postrider gave it: that of its outbox row.
    pub(crate) id: Uuid,
    order: OrderPlaced,
}

/// What became of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Its effect was applied just now.
    Applied,
    /// Its effect was there already.
    Repeated,
}

/// The inbox, and what the messages are applied to: adding twice would be wrong, which is the point.
pub(crate) const TABLES: &str = "
    CREATE TABLE IF NOT EXISTS inbox (
        message_id uuid PRIMARY KEY,
        received_at timestamptz NOT NULL DEFAULT now()
    );
    CREATE TABLE IF NOT EXISTS customer_totals (
        customer text PRIMARY KEY,
        orders bigint NOT NULL,
        cents bigint NOT NULL
    );";

/// Reads a delivery. An error here is the message's own: it would fail again however often it came back.
pub(crate) fn read(delivery: &Delivery) -> anyhow::Result<Message> {
    let id = delivery.properties.message_id().as_ref().context("no message_id")?;
    Ok(Message {
        id: Uuid::parse_str(id.as_str()).context("message_id is no uuid")?,
        order: serde_json::from_slice(&delivery.data).context("the body is no order.placed")?,
    })
}

/// Applies a message, once. Returns when that is committed; acknowledge the message then, not before.
pub(crate) async fn apply(client: &mut Client, message: &Message) -> Result<Outcome, tokio_postgres::Error> {
    let transaction = client.transaction().await?;
    // Of two consumers with the same message one waits here for the other's commit, and then inserts nothing.
    let inserted = transaction
        .execute_typed(
            "INSERT INTO inbox (message_id) VALUES ($1) ON CONFLICT DO NOTHING",
            &[(&message.id, Type::UUID)],
        )
        .await?;
    if inserted == 0 {
        transaction.rollback().await?;
        return Ok(Outcome::Repeated);
    }
    transaction
        .execute_typed(
            "INSERT INTO customer_totals AS t (customer, orders, cents) VALUES ($1, 1, $2)
             ON CONFLICT (customer) DO UPDATE SET orders = t.orders + 1, cents = t.cents + excluded.cents",
            &[(&message.order.customer, Type::TEXT), (&message.order.total_cents, Type::INT8)],
        )
        .await?;
    transaction.commit().await?;
    Ok(Outcome::Applied)
}

/// Declares the exchange and a durable queue bound to it, and starts consuming with at most `prefetch` messages
/// unacknowledged.
pub(crate) async fn subscribe(
    channel: &Channel,
    exchange: &str,
    routing_key: &str,
    queue: &str,
    prefetch: u16,
) -> anyhow::Result<Consumer> {
    let short = |name: &str| ShortString::try_new(name.to_owned());
    let none = FieldTable::default;
    let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
    channel.exchange_declare(short(exchange)?, ExchangeKind::Topic, durable, none()).await?;
    channel.queue_declare(short(queue)?, QueueDeclareOptions::durable(), none()).await?;
    let bind = QueueBindOptions::default();
    channel.queue_bind(short(queue)?, short(exchange)?, short(routing_key)?, bind, none()).await?;
    channel.basic_qos(prefetch, BasicQosOptions::default()).await?;
    Ok(channel.basic_consume(short(queue)?, short("")?, BasicConsumeOptions::default(), none()).await?)
}

/// Connects to the broker under a name its operator will recognise.
pub(crate) async fn connect(amqp_url: &str, name: &str) -> anyhow::Result<Connection> {
    let properties = ConnectionProperties::default().with_connection_name(name.into());
    Connection::connect(amqp_url, properties).await.context("cannot connect to the broker")
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let database_url = env::var("DATABASE_URL").context("DATABASE_URL is not set")?;
    let amqp_url = env::var("AMQP_URL").context("AMQP_URL is not set")?;

    // `NoTls` is for a database on this machine.
    let (mut client, connection) =
        tokio_postgres::connect(&database_url, NoTls).await.context("cannot connect to the database")?;
    tokio::spawn(connection);
    client.batch_execute(TABLES).await.context("cannot create the inbox")?;

    let broker = connect(&amqp_url, "consumer").await?;
    let channel = broker.create_channel().await?;
    let mut messages = subscribe(&channel, "outbox", "order.placed", "orders", 32).await?;
    println!("consumer: waiting for order.placed in queue orders");

    // One at a time keeps the order the messages came in. Any error but a bad message ends the program: what is not
    // acknowledged comes back to whoever consumes next, so a restart is all the recovery there is to write.
    while let Some(delivery) = messages.next().await {
        let delivery = delivery?;
        let message = match read(&delivery) {
            Ok(message) => message,
            Err(error) => {
                // Requeued it would come back for ever; rejected it goes to the queue's dead-letter exchange, if any.
                eprintln!("consumer: rejected: {error:#}");
                delivery.reject(BasicRejectOptions { requeue: false }).await?;
                continue;
            }
        };
        let outcome = apply(&mut client, &message).await.context("cannot apply a message")?;
        delivery.ack(BasicAckOptions::default()).await?;
        println!("consumer: {} {outcome:?}", message.id);
    }
    anyhow::bail!("the broker cancelled the consumer")
}
