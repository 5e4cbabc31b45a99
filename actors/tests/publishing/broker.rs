//! A virtual host of its own for each test, on the broker that `POSTRIDER_TEST_AMQP_URL` names, made and removed through
//! the management API at `POSTRIDER_TEST_MANAGEMENT_URL`.

use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use lapin::{
    Channel, Connection, ConnectionProperties,
    options::{BasicGetOptions, ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions},
    types::{AMQPValue, FieldTable},
};

/// The broker and the management API, or `None` where no broker is given: the test then has nothing to say.
fn given() -> Option<(String, String)> {
    let amqp = std::env::var("POSTRIDER_TEST_AMQP_URL").ok()?;
    let management = std::env::var("POSTRIDER_TEST_MANAGEMENT_URL").ok()?;
    Some((amqp, management))
}

/// A virtual host of one test.
pub struct Vhost {
    pub name: String,
    pub url: String,
    management: String,
    connection: Connection,
    pub channel: Channel,
}

impl Vhost {
    /// A fresh one; `None` (with a word on stderr) where no broker is given.
    pub async fn fresh() -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let Some((amqp, management)) = given() else {
            eprintln!("skipped: POSTRIDER_TEST_AMQP_URL and POSTRIDER_TEST_MANAGEMENT_URL name no broker");
            return None;
        };
        let name = format!("t{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let base = amqp.trim_end_matches('/');
        let authority = base.splitn(4, '/').take(3).collect::<Vec<_>>().join("/");
        let url = format!("{authority}/{name}");
        let user =
            authority.trim_start_matches("amqp://").split([':', '@']).next().unwrap_or("guest").to_owned();
        request(&management, "PUT", &format!("/api/vhosts/{name}"), "");
        let all = r#"{"configure":".*","write":".*","read":".*"}"#;
        request(&management, "PUT", &format!("/api/permissions/{name}/{user}"), all);
        let connection =
            Connection::connect(&url, ConnectionProperties::default()).await.expect("a fresh vhost");
        let channel = connection.create_channel().await.expect("a channel");
        Some(Self { name, url, management, connection, channel })
    }

    /// Declares a topic exchange.
    pub async fn exchange(&self, name: &str) {
        self.channel
            .exchange_declare(
                name.into(),
                lapin::ExchangeKind::Topic,
                ExchangeDeclareOptions { durable: true, ..Default::default() },
                FieldTable::default(),
            )
            .await
            .expect("declare");
    }

    /// Declares a queue bound to `exchange` by `key`.
    pub async fn queue(&self, name: &str, exchange: &str, key: &str, arguments: &[(&str, AMQPValue)]) {
        let mut table = FieldTable::default();
        for (key, value) in arguments {
            table.insert((*key).into(), value.clone());
        }
        let options = QueueDeclareOptions { durable: true, ..Default::default() };
        self.channel.queue_declare(name.into(), options, table).await.expect("declare");
        self.channel
            .queue_bind(
                name.into(),
                exchange.into(),
                key.into(),
                QueueBindOptions::default(),
                FieldTable::default(),
            )
            .await
            .expect("bind");
    }

    /// Everything in a queue, as message ids in order.
    pub async fn drain(&self, queue: &str) -> Vec<String> {
        let mut ids = Vec::new();
        let options = BasicGetOptions { no_ack: true };
        while let Some(message) = self.channel.basic_get(queue.into(), options).await.expect("get") {
            let id = message.delivery.properties.message_id().as_ref().expect("an id");
            ids.push(id.as_str().to_owned());
        }
        ids
    }

    /// Closes every connection of the publisher, as an operator does. Waits until there was one.
    pub fn kill_publisher(&self) {
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            let all = request(&self.management, "GET", &format!("/api/vhosts/{}/connections", self.name), "");
            let names = publishers(&all);
            for name in &names {
                let path = format!("/api/connections/{}", name.replace(' ', "%20").replace('>', "%3E"));
                request(&self.management, "DELETE", &path, "");
            }
            if !names.is_empty() {
                return;
            }
            assert!(Instant::now() < until, "the publisher never connected");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Removes it.
    pub async fn remove(self) {
        let _ = self.connection.close(200, "OK".into()).await;
        request(&self.management, "DELETE", &format!("/api/vhosts/{}", self.name), "");
    }
}

/// Names of the connections that say they are postrider's, out of the API's JSON.
fn publishers(json: &str) -> Vec<String> {
    let value: serde_json::Value = serde_json::from_str(json).unwrap_or_default();
    let all = value.as_array().cloned().unwrap_or_default();
    all.iter()
        .filter(|one| one["client_properties"]["connection_name"] == "postrider")
        .filter_map(|one| one["name"].as_str().map(ToOwned::to_owned))
        .collect()
}

/// One HTTP request with basic authentication; the body of the answer.
fn request(base: &str, method: &str, path: &str, body: &str) -> String {
    let rest = base.trim_start_matches("http://").trim_end_matches('/');
    let (user, host) = rest.split_once('@').unwrap_or(("guest:guest", rest));
    let mut stream = TcpStream::connect(host).expect("the management API");
    let request = format!(
        "{method} {path} HTTP/1.0\r\nHost: {host}\r\nAuthorization: Basic {}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        base64(user.as_bytes()),
        body.len(),
    );
    stream.write_all(request.as_bytes()).expect("write");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("read");
    answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default()
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let group =
            chunk.iter().enumerate().fold(0u32, |sum, (i, byte)| sum | u32::from(*byte) << (16 - 8 * i));
        for i in 0..4 {
            let digit = DIGITS[(group >> (18 - 6 * i) & 63) as usize];
            text.push(if i <= chunk.len() { digit as char } else { '=' });
        }
    }
    text
}
