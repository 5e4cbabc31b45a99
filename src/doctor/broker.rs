//! Whether RabbitMQ can be reached, and has the exchange.

use std::{error::Error as _, fs, path::Path, time::Duration};

use lapin::{
    Connection, ConnectionProperties, ExchangeKind,
    options::ExchangeDeclareOptions,
    tcp::{OwnedIdentity, OwnedTLSConfig},
    types::FieldTable,
};

use super::Finding;
use crate::config::{Config, template};

/// How long the broker may take to answer. As for the database.
const DEADLINE: Duration = Duration::from_secs(10);

const SUBJECT: &str = "broker";

pub(super) async fn examine(config: &Config) -> Vec<Finding> {
    let url = &config.broker.url;
    let tls = match tls(config) {
        Ok(tls) => tls,
        Err(finding) => return vec![finding],
    };
    let properties = ConnectionProperties::default().with_connection_name("postrider check".into());
    let runtime = match lapin::runtime::default_runtime() {
        Ok(runtime) => runtime,
        Err(error) => return vec![Finding::fail(SUBJECT, format!("no runtime: {error}"), "report this")],
    };
    let connecting = Connection::connect_with_config(url.expose(), properties, tls, runtime);
    let connection = match tokio::time::timeout(DEADLINE, connecting).await {
        Ok(Ok(connection)) => connection,
        Ok(Err(error)) => return vec![refused(config, &error)],
        Err(_) => {
            let remedy = "start RabbitMQ, or correct broker.url";
            return vec![Finding::fail(SUBJECT, format!("{url}: no answer within 10 s"), remedy)];
        }
    };
    let mut findings = vec![Finding::ok(SUBJECT, format!("connected to {url}"))];
    findings.extend(exchange(config, &connection).await);
    // A broker in an alarm never answers a close; the connection goes with the process.
    let _ = tokio::time::timeout(Duration::from_secs(1), connection.close(200, "done".into())).await;
    findings
}

fn refused(config: &Config, error: &lapin::Error) -> Finding {
    let url = &config.broker.url;
    let mut message = format!("{url}: {error}");
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !message.contains(&cause_text) {
            message = format!("{message}: {cause_text}");
        }
        source = cause.source();
    }
    let text = message.to_ascii_uppercase();
    let remedy = if text.contains("ACCESS_REFUSED") || text.contains("ACCESS-REFUSED") {
        "correct user and password in broker.url, or: rabbitmqctl set_permissions -p VHOST USER '.*' '.*' '.*'"
    } else if text.contains("NOT_ALLOWED") || text.contains("NOT-ALLOWED") {
        "rabbitmqctl add_vhost VHOST and rabbitmqctl set_permissions -p VHOST USER '.*' '.*' '.*'"
    } else {
        "start RabbitMQ, or correct broker.url"
    };
    Finding::fail(SUBJECT, message, remedy)
}

async fn exchange(config: &Config, connection: &Connection) -> Vec<Finding> {
    const SUBJECT: &str = "exchange";
    let pieces = template::parse(&config.publish.exchange).unwrap_or_default();
    let name = match template::fixed(&pieces) {
        None => return vec![Finding::ok(SUBJECT, format!("{} depends on the row", config.publish.exchange))],
        Some("") => return vec![Finding::ok(SUBJECT, "the default exchange")],
        Some(name) => name,
    };
    let asked = async {
        let channel = connection.create_channel().await?;
        let options = ExchangeDeclareOptions { passive: true, ..Default::default() };
        // Passive: the kind is not compared.
        channel.exchange_declare(name.into(), ExchangeKind::Topic, options, FieldTable::default()).await
    };
    let failure = match tokio::time::timeout(DEADLINE, asked).await {
        Ok(Ok(())) => return vec![Finding::ok(SUBJECT, format!("{name} exists"))],
        Ok(Err(error)) => error.to_string(),
        Err(_) => "no answer within 10 s".to_owned(),
    };
    if config.publish.declare {
        return vec![Finding::ok(SUBJECT, format!("{name} does not exist yet; `postrider run` declares it"))];
    }
    let remedy = format!(
        "rabbitmqadmin declare exchange name={name} type=topic durable=true, or publish.declare = true"
    );
    vec![Finding::fail(SUBJECT, format!("{name}: {failure}"), remedy)]
}

/// The files of `[broker]`, read.
pub(crate) fn tls(config: &Config) -> Result<OwnedTLSConfig, Finding> {
    let broker = &config.broker;
    let read = |key: &str, path: &Path| {
        fs::read(path).map_err(|error| {
            let message = format!("broker.{key}: cannot read {}: {error}", path.display());
            Finding::fail(SUBJECT, message, format!("correct broker.{key}"))
        })
    };
    let cert_chain = match &broker.ca_file {
        Some(path) => Some(String::from_utf8_lossy(&read("ca_file", path)?).into_owned()),
        None => None,
    };
    let identity = match (&broker.cert_file, &broker.key_file) {
        (Some(cert), Some(key)) => {
            Some(OwnedIdentity::PKCS8 { pem: read("cert_file", cert)?, key: read("key_file", key)? })
        }
        _ => None,
    };
    Ok(OwnedTLSConfig { identity, cert_chain })
}
