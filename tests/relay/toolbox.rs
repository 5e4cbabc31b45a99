//! The tests' own tools, tested: a tool that sees nothing would let every other test pass.

use crate::support::{
    Database, Metrics, Pgbouncer, PrivateBroker, PrivatePostgres, RelayConfig, Vhost, connect, eventually,
    full,
};
use futures_util::StreamExt as _;
use lapin::options::BasicPublishOptions;
use lapin::{BasicProperties, Event, ExchangeKind};
use std::time::Duration;

fn message(id: &str) -> BasicProperties {
    BasicProperties::default().with_message_id(id.into()).with_delivery_mode(2)
}

#[tokio::test]
async fn the_oracle_sees_what_is_published_and_tells_duplicates() {
    let vhost = Vhost::fresh().await;
    let oracle = vhost.topic_with_oracle("outbox").await;
    for id in ["one", "two", "one"] {
        vhost.publish("outbox", "order.created", message(id), id.as_bytes()).await;
    }
    oracle.wait_for(3).await;
    oracle.wait_for_all(&["one", "two"]).await;
    oracle.assert_nothing_lost(&["one", "two"]);
    oracle.assert_nothing_else(&["one", "two"]);
    oracle.assert_order(&["one", "two"]);
    assert_eq!(oracle.duplicates().into_iter().collect::<Vec<_>>(), [("one".to_owned(), 2)]);
    let two = oracle.get("two").unwrap();
    assert_eq!(
        (two.exchange.as_str(), two.routing_key.as_str(), two.queue.as_str()),
        ("outbox", "order.created", "all")
    );
    assert_eq!(two.body, b"two");
    assert_eq!(two.properties.delivery_mode(), &Some(2));
}

#[tokio::test]
#[should_panic(expected = "1 of 2 messages are missing, among them [\"lost\"]")]
async fn the_oracle_says_what_is_missing() {
    let vhost = Vhost::fresh().await;
    let oracle = vhost.topic_with_oracle("outbox").await;
    vhost.publish("outbox", "k", message("here"), b"").await;
    oracle.barrier().await;
    oracle.assert_nothing_lost(&["here", "lost"]);
}

#[tokio::test]
async fn a_barrier_comes_behind_everything_before_it() {
    let vhost = Vhost::fresh().await;
    vhost.declare_exchange("outbox", ExchangeKind::Fanout).await;
    for queue in ["a", "b"] {
        vhost.declare_queue(queue).await;
        vhost.bind(queue, "outbox", "").await;
    }
    let ids: Vec<usize> = (0..full(200, 5000)).collect();
    let (_connection, channel) = vhost.channel().await;
    for id in &ids {
        let properties = message(&id.to_string());
        let sent = channel.basic_publish(
            "outbox".into(),
            "".into(),
            BasicPublishOptions::default(),
            b"",
            properties,
        );
        sent.await.unwrap();
    }
    // the same channel routes this after all of those
    let all = u32::try_from(ids.len()).unwrap();
    eventually("the last one is queued", async || (vhost.queue_depth("b").await == all).then_some(())).await;
    let oracle = vhost.oracle(&["a", "b"]).await;
    oracle.barrier().await;
    assert_eq!(oracle.count(), 2 * ids.len());
    oracle.assert_no_duplicates();
    oracle.assert_order(&ids);
}

#[tokio::test]
async fn a_database_is_gone_after_its_test_and_its_slots_with_it() {
    let server = Database::fresh().await;
    let admin = server.connect().await;
    let name = {
        let database = Database::fresh().await;
        let client = database.connect().await;
        let create = "SELECT pg_create_logical_replication_slot($1::text::name, 'pgoutput')";
        client.query(create, &[&database.name()]).await.unwrap();
        database.name().to_owned()
    };
    let left = "SELECT (SELECT count(*) FROM pg_database WHERE datname = $1)
                     + (SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1)";
    assert_eq!(admin.query_one(left, &[&name]).await.unwrap().get::<_, i64>(0), 0);
}

#[tokio::test]
async fn a_vhost_is_gone_after_its_test() {
    let other = Vhost::fresh().await;
    let name = Vhost::fresh().await.name().to_owned();
    let vhosts = other.api("GET", "/api/vhosts", None).await.json();
    let names: Vec<&str> = vhosts.as_array().unwrap().iter().filter_map(|v| v["name"].as_str()).collect();
    assert!(names.contains(&other.name()) && !names.contains(&name.as_str()), "{names:?}");
}

#[tokio::test]
async fn a_private_broker_blocks_freezes_dies_and_returns() {
    let broker = PrivateBroker::start().await;
    let vhost = broker.vhost().await;
    let oracle = vhost.topic_with_oracle("outbox").await;

    let (connection, channel) = vhost.channel().await;
    let mut events = Box::pin(connection.events_listener());
    broker.block().await;
    let publish = async |id: &str| {
        let options = BasicPublishOptions::default();
        channel.basic_publish("outbox".into(), "k".into(), options, b"", message(id)).await.unwrap();
    };
    // the first to arrive makes the broker say so, and may yet pass
    publish("first").await;
    while !matches!(events.next().await.unwrap(), Event::ConnectionBlocked(_)) {}
    let mut held = Box::pin(publish("held"));
    tokio::time::timeout(Duration::from_millis(300), &mut held)
        .await
        .expect_err("nothing passes a blocked broker");
    broker.unblock().await;
    held.await;
    oracle.wait_for_all(&["first", "held"]).await;

    broker.freeze().await;
    let mut connecting = Box::pin(vhost.connect());
    tokio::time::timeout(Duration::from_millis(300), &mut connecting)
        .await
        .expect_err("a frozen broker does not answer");
    broker.thaw().await;
    drop(connecting.await);

    broker.kill9().await;
    broker.start_again().await;
    vhost.publish("outbox", "k", message("after"), b"").await;
    oracle.wait_for_all(&["first", "held", "after"]).await;
}

#[tokio::test]
async fn a_private_postgres_takes_settings_freezes_dies_and_returns() {
    let server = PrivatePostgres::start(&["wal_sender_timeout=2s"]).await;
    let database = server.database().await;
    let client = database.connect().await;
    let timeout = client.query_one("SHOW wal_sender_timeout", &[]).await.unwrap();
    assert_eq!(timeout.get::<_, &str>(0), "2s");
    client.batch_execute("CREATE TABLE kept (id int); INSERT INTO kept VALUES (1)").await.unwrap();

    server.freeze().await;
    let mut asking = Box::pin(client.query_one("SELECT 1", &[]));
    tokio::time::timeout(Duration::from_millis(300), &mut asking)
        .await
        .expect_err("a frozen server does not answer");
    server.thaw().await;
    asking.await.unwrap();

    server.kill9().await;
    eventually("the client notices", async || client.is_closed().then_some(())).await;
    server.start_again().await;
    let kept = database.connect().await.query_one("SELECT count(*) FROM kept", &[]).await.unwrap();
    assert_eq!(kept.get::<_, i64>(0), 1);
}

#[tokio::test]
async fn a_pgbouncer_pools_by_transaction() {
    let database = Database::fresh().await;
    let bouncer = Pgbouncer::before(&database).await;
    let mut clients = Vec::new();
    for _ in 0..10 {
        let client = connect(bouncer.url()).await.unwrap();
        client.simple_query("SELECT 1").await.unwrap();
        clients.push(client);
    }
    let direct = database.connect().await;
    let backends = "SELECT count(*) FROM pg_stat_activity WHERE datname = $1 AND pid <> pg_backend_pid()";
    let backends: i64 = direct.query_one(backends, &[&database.name()]).await.unwrap().get(0);
    assert_eq!(backends, 1, "{} clients, one after the other, share one server connection", clients.len());
}

#[tokio::test]
async fn a_configuration_is_toml_of_dotted_keys() {
    let (database, vhost) = (Database::fresh().await, Vhost::fresh().await);
    let config = RelayConfig::new(&database, &vhost)
        .mode("poll")
        .set("credits.messages", 64)
        .set("publish.declare", true);
    let toml = config.toml();
    for line in ["credits.messages = 64", "publish.declare = true", "source.mode = \"poll\""] {
        assert!(toml.lines().any(|l| l == line), "{line} in:\n{toml}");
    }
    assert!(toml.contains(&format!("database.url = \"{}\"", database.url())), "{toml}");
    assert!(!config.unset("publish.declare").toml().contains("declare"));
}

#[test]
fn a_scrape_is_read_by_name_and_labels() {
    let metrics = Metrics::parse(
        "# TYPE m_total counter\nm_total{verdict=\"delivered\"} 3\nm_total{verdict=\"rejected\"} 1\n\nup 1e0\n",
    );
    assert_eq!(metrics.get("m_total{verdict=\"delivered\"}"), Some(3.0));
    assert_eq!((metrics.sum("m_total"), metrics.sum("m"), metrics.get("up")), (4.0, 0.0, Some(1.0)));
}
