//! A vhost of its own for each test, through the broker's HTTP API (`rabbitmqctl` costs seconds a call).

use super::{Oracle, dev, http};
use lapin::options::{
    BasicPublishOptions, ConfirmSelectOptions, ExchangeDeclareOptions, ExchangeDeleteOptions,
    QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{FieldTable, ShortString};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties, ExchangeKind};
use serde_json::{Value, json};

/// A fresh, empty vhost; deleted, with all in it, when this value is dropped.
#[derive(Debug)]
pub(crate) struct Vhost {
    amqp: String,
    management: String,
    name: String,
}

impl Vhost {
    /// On the shared broker.
    pub(crate) async fn fresh() -> Self {
        let services = dev::services();
        Self::on(&services.amqp_url, &services.management_url).await
    }

    /// On the broker of these two URLs.
    pub(crate) async fn on(amqp_url: &str, management_url: &str) -> Self {
        let name = super::unique();
        let (amqp, _) = amqp_url.rsplit_once('/').expect("an AMQP URL names a vhost");
        let user =
            amqp.split_once("://").and_then(|(_, rest)| rest.split_once(':')).map_or("guest", |(u, _)| u);
        let vhost = Self { amqp: amqp.to_owned(), management: management_url.to_owned(), name };
        vhost.api("PUT", &format!("/api/vhosts/{}", vhost.name), None).await;
        let all = json!({"configure": ".*", "write": ".*", "read": ".*"});
        vhost.api("PUT", &format!("/api/permissions/{}/{user}", vhost.name), Some(all)).await;
        vhost
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn url(&self) -> String {
        format!("{}/{}", self.amqp, self.name)
    }

    /// The broker's HTTP API; panics unless it answers 2xx.
    pub(crate) async fn api(&self, method: &'static str, path: &str, body: Option<Value>) -> http::Answer {
        let answer = self.try_api(method, path, body).await;
        assert!((200..300).contains(&answer.status), "{method} {path}: {answer:?}");
        answer
    }

    /// The same with any status: the statistics of a broker that has just started may answer 500.
    pub(crate) async fn try_api(
        &self,
        method: &'static str,
        path: &str,
        body: Option<Value>,
    ) -> http::Answer {
        let answer = http::call(method, format!("{}{path}", self.management), body).await;
        answer.unwrap_or_else(|e| panic!("{e}"))
    }

    pub(crate) async fn connect(&self) -> Connection {
        try_connect(&self.url()).await.unwrap_or_else(|e| panic!("{}: {e}", self.url()))
    }

    /// A channel on a connection of its own, and that connection: dropping it closes both.
    pub(crate) async fn channel(&self) -> (Connection, Channel) {
        let connection = self.connect().await;
        let channel = connection.create_channel().await.expect("a channel opens");
        (connection, channel)
    }

    pub(crate) async fn declare_exchange(&self, name: &str, kind: ExchangeKind) {
        let options = ExchangeDeclareOptions { durable: true, ..Default::default() };
        let (_connection, channel) = self.channel().await;
        channel
            .exchange_declare(name.into(), kind, options, FieldTable::default())
            .await
            .expect("the exchange is declared");
    }

    pub(crate) async fn declare_queue(&self, name: &str) {
        self.declare_queue_with(name, FieldTable::default()).await;
    }

    /// With arguments, `x-max-length` and `x-overflow = reject-publish` for one that nacks.
    pub(crate) async fn declare_queue_with(&self, name: &str, arguments: FieldTable) {
        let (_connection, channel) = self.channel().await;
        channel
            .queue_declare(name.into(), QueueDeclareOptions::durable(), arguments)
            .await
            .expect("the queue is declared");
    }

    pub(crate) async fn bind(&self, queue: &str, exchange: &str, routing_key: &str) {
        let (_connection, channel) = self.channel().await;
        channel
            .queue_bind(
                queue.into(),
                exchange.into(),
                routing_key.into(),
                QueueBindOptions::default(),
                FieldTable::default(),
            )
            .await
            .expect("the queue is bound");
    }

    pub(crate) async fn unbind(&self, queue: &str, exchange: &str, routing_key: &str) {
        let (_connection, channel) = self.channel().await;
        channel
            .queue_unbind(queue.into(), exchange.into(), routing_key.into(), FieldTable::default())
            .await
            .expect("the queue is unbound");
    }

    pub(crate) async fn delete_exchange(&self, name: &str) {
        let (_connection, channel) = self.channel().await;
        channel
            .exchange_delete(name.into(), ExchangeDeleteOptions::default())
            .await
            .expect("the exchange is deleted");
    }

    pub(crate) async fn delete_queue(&self, name: &str) {
        let (_connection, channel) = self.channel().await;
        channel.queue_delete(name.into(), QueueDeleteOptions::default()).await.expect("the queue is deleted");
    }

    /// How many messages wait in a queue: asked over AMQP, so exact, where the HTTP API is seconds old.
    pub(crate) async fn queue_depth(&self, name: &str) -> u32 {
        let (_connection, channel) = self.channel().await;
        let options = QueueDeclareOptions { passive: true, ..Default::default() };
        channel
            .queue_declare(name.into(), options, FieldTable::default())
            .await
            .expect("the queue exists")
            .message_count()
    }

    /// Publishes one message by hand and waits for the broker to confirm that it was routed and stored.
    pub(crate) async fn publish(
        &self,
        exchange: &str,
        routing_key: &str,
        properties: BasicProperties,
        body: &[u8],
    ) {
        let (_connection, channel) = self.channel().await;
        publish_confirmed(&channel, exchange, routing_key, properties, body)
            .await
            .expect("the message is stored");
    }

    /// The exchange and one queue bound to it for every key, and the oracle on that queue: what most tests want.
    pub(crate) async fn topic_with_oracle(&self, exchange: &str) -> Oracle {
        self.declare_exchange(exchange, ExchangeKind::Topic).await;
        self.declare_queue("all").await;
        self.bind("all", exchange, "#").await;
        self.oracle(&["all"]).await
    }

    /// Closes every connection the broker lists, as its operator would.
    pub(crate) async fn close_connections(&self) {
        let path = format!("/api/vhosts/{}/connections", self.name);
        // the list is seconds late, and after a start of the broker cannot be had at first
        let listed = super::eventually("connections are listed", async || {
            let answer = http::call("GET", format!("{}{path}", self.management), None).await.ok()?;
            let listed = (answer.status == 200).then(|| answer.json())?;
            listed.as_array().filter(|l| !l.is_empty()).cloned()
        })
        .await;
        for name in listed.iter().filter_map(|connection| connection["name"].as_str()) {
            let name = name.replace(' ', "%20").replace('>', "%3E");
            let url = format!("{}/api/connections/{name}", self.management);
            // some are gone already
            let closed = http::call("DELETE", url, None).await.map(|answer| answer.status);
            assert!(matches!(closed, Ok(204 | 404)), "{name} was not closed: {closed:?}");
        }
    }

    /// An oracle that consumes these queues.
    pub(crate) async fn oracle(&self, queues: &[&str]) -> Oracle {
        Oracle::on(&self.url(), queues).await
    }
}

pub(super) async fn try_connect(url: &str) -> lapin::Result<Connection> {
    Connection::connect(url, ConnectionProperties::default()).await
}

pub(super) async fn publish_confirmed(
    channel: &Channel,
    exchange: &str,
    routing_key: &str,
    properties: BasicProperties,
    body: &[u8],
) -> Result<(), String> {
    let text = |s: &str| ShortString::try_new(s).map_err(|e| e.to_string());
    channel.confirm_select(ConfirmSelectOptions::default()).await.map_err(|e| e.to_string())?;
    let options = BasicPublishOptions { mandatory: true, ..Default::default() };
    let confirm = channel
        .basic_publish(text(exchange)?, text(routing_key)?, options, body, properties)
        .await
        .map_err(|e| e.to_string())?;
    match confirm.await.map_err(|e| e.to_string())? {
        Confirmation::Ack(None) => Ok(()),
        other => Err(format!("not stored: {other:?}")),
    }
}

impl Drop for Vhost {
    fn drop(&mut self) {
        let url = format!("{}/api/vhosts/{}", self.management, self.name);
        // a broker that is gone took its vhosts along
        let _ = std::thread::spawn(move || http::blocking("DELETE", &url, None)).join();
    }
}
