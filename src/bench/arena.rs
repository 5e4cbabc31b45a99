//! The benchmark's own place on the user's servers: a schema with an outbox, an exchange, a queue and a slot.
//!
//! All have one name, so a run that was killed leaves nothing that the next one does not find and remove. An advisory
//! lock keeps two runs apart; the schema carries a comment, so that nobody else's is ever dropped.

use std::{net::TcpListener, time::Duration};

use lapin::{
    Channel, Connection, ConnectionProperties, ExchangeKind,
    options::{
        ExchangeDeclareOptions, ExchangeDeleteOptions, QueueBindOptions, QueueDeclareOptions,
        QueueDeleteOptions, QueuePurgeOptions,
    },
    types::FieldTable,
};
use postrider_actors::database;
use tokio_postgres::{Client, types::Type};

use super::options::{Bench, Exchange};
use crate::{cli::output, config::Config, doctor::broker_tls, failure::Failure, migrate};

/// The name of everything the benchmark makes.
pub(super) const NAME: &str = "postrider_bench";

/// What says that a schema of this name is ours to drop.
const COMMENT: &str = "made by postrider bench";

/// "bench", read as a number.
const ADVISORY_LOCK: i64 = 0x0062_656e_6368;

/// How long a broker may take for one answer.
const ANSWER: Duration = Duration::from_secs(10);

/// The type of every message.
pub(super) const KIND: &str = "order.created";

/// The place.
pub(super) struct Arena {
    /// The configuration that relays are started with.
    pub config: Config,
    /// For statements beside the measurement.
    pub sql: Client,
    /// For looking at the queue.
    pub channel: Channel,
    _connection: Connection,
}

impl Arena {
    /// Makes the place, on the servers of `config`.
    pub(super) async fn open(config: &Config, options: &Bench) -> Result<Self, Failure> {
        output::progress("preparing");
        let sql = database::connect_direct(&config.database_settings(), "postrider bench").await?;
        let config = at_home(config, &slot(&sql).await?)?;
        let locked = sql
            .query_typed_one("SELECT pg_try_advisory_lock($1)", &[(&ADVISORY_LOCK, Type::INT8)])
            .await
            .map_err(failed("lock"))?;
        if !locked.get::<_, bool>(0) {
            return Err(Failure::new("another postrider bench is at work in this database"));
        }
        drop_leftovers(&sql).await?;
        let setup = format!("CREATE SCHEMA {NAME}; COMMENT ON SCHEMA {NAME} IS '{COMMENT}'");
        sql.batch_execute(&setup).await.map_err(failed("create its schema"))?;
        migrate::migrate(&config, &migrate::Options::default(), &mut |_| {}).await?;
        let orders = format!("CREATE TABLE {NAME}.orders (id uuid PRIMARY KEY, body jsonb NOT NULL)");
        sql.batch_execute(&orders).await.map_err(failed("create its table"))?;
        let connection = dial(&config).await?;
        let channel = connection.create_channel().await.map_err(refused)?;
        let arena = Self { config, sql, channel, _connection: connection };
        arena.declare(options.exchange).await?;
        Ok(arena)
    }

    async fn declare(&self, exchange: Exchange) -> Result<(), Failure> {
        let kind = match exchange {
            Exchange::Topic => ExchangeKind::Topic,
            Exchange::Direct => ExchangeKind::Direct,
            Exchange::Fanout => ExchangeKind::Fanout,
        };
        let table = FieldTable::default;
        // A run that was killed may have left them, as another kind.
        let _ = self.channel.exchange_delete(NAME.into(), ExchangeDeleteOptions::default()).await;
        let _ = self.channel.queue_delete(NAME.into(), QueueDeleteOptions::default()).await;
        let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
        self.channel.exchange_declare(NAME.into(), kind, durable, table()).await.map_err(refused)?;
        let durable = QueueDeclareOptions { durable: true, ..Default::default() };
        self.channel.queue_declare(NAME.into(), durable, table()).await.map_err(refused)?;
        let key = if exchange == Exchange::Topic { "#" } else { KIND };
        let bind = QueueBindOptions::default();
        self.channel.queue_bind(NAME.into(), NAME.into(), key.into(), bind, table()).await.map_err(refused)
    }

    /// The same servers once more, for work that must not wait for this connection's.
    pub(super) async fn connect(&self) -> Result<Client, Failure> {
        Ok(database::connect_direct(&self.config.database_settings(), "postrider bench").await?)
    }

    /// A connection to the broker.
    pub(super) async fn dial(&self) -> Result<Connection, Failure> {
        dial(&self.config).await
    }

    /// An empty outbox, an empty queue, no slot: as before a first start.
    pub(super) async fn clear(&self) -> Result<(), Failure> {
        drop_slot(&self.sql).await?;
        let clear = format!(
            "TRUNCATE {NAME}.outbox_messages, {NAME}.orders, {NAME}.postrider_retries,
                      {NAME}.postrider_dead_letters, {NAME}.postrider_progress, {NAME}.postrider_control"
        );
        self.sql.batch_execute(&clear).await.map_err(failed("clear its tables"))?;
        self.purge().await
    }

    /// Empties the queue.
    pub(super) async fn purge(&self) -> Result<(), Failure> {
        self.channel.queue_purge(NAME.into(), QueuePurgeOptions::default()).await.map_err(refused).map(|_| ())
    }

    /// Commits `rows` rows in transactions of `transaction` each. The index's statistics are made fresh and dirty pages
    /// are written, so that neither falls into what is measured next.
    pub(super) async fn seed(&self, rows: u64, transaction: u64, body: u32) -> Result<(), Failure> {
        // What the body holds beside the padding.
        const AROUND: u32 = 20;
        let columns = &self.config.outbox.columns;
        let quoted = |name: &str| database::quote_identifier(name);
        let insert = format!(
            "INSERT INTO {NAME}.outbox_messages ({}, {}, {}, {})
             SELECT gen_random_uuid(), '{KIND}', jsonb_build_object('n', g, 'pad', repeat('x', {})), clock_timestamp()
             FROM generate_series(done + 1, least(done + {transaction}, {rows})) g",
            quoted(&columns.id),
            quoted(&columns.r#type),
            quoted(&columns.content),
            quoted(&columns.occurred_on),
            body.saturating_sub(AROUND),
        );
        let seed = format!(
            "DO $seed$ DECLARE done bigint := 0; BEGIN
                 PERFORM set_config('synchronous_commit', 'off', false);
                 WHILE done < {rows} LOOP {insert}; COMMIT; done := done + {transaction}; END LOOP;
             END $seed$"
        );
        output::progress(&format!("writing {rows} rows"));
        let sql = self.connect().await?;
        sql.batch_execute(&seed).await.map_err(failed("write the backlog"))?;
        let settle = format!("ANALYZE {NAME}.outbox_messages");
        sql.batch_execute(&settle).await.map_err(failed("analyze"))?;
        // Only some roles may; then the next one due happens when it happens.
        let _ = sql.batch_execute("CHECKPOINT").await;
        Ok(())
    }

    /// Messages in the queue.
    pub(super) async fn held(&self) -> Result<u64, Failure> {
        let passive = QueueDeclareOptions { passive: true, ..Default::default() };
        let queue = self.channel.queue_declare(NAME.into(), passive, FieldTable::default());
        let queue = tokio::time::timeout(ANSWER, queue)
            .await
            .map_err(|_| Failure::new("the broker does not answer"))?
            .map_err(refused)?;
        Ok(queue.message_count().into())
    }

    /// Rows of the outbox that are not recorded.
    pub(super) async fn unrecorded(&self) -> Result<u64, Failure> {
        let processed = database::quote_identifier(&self.config.outbox.columns.processed_on);
        let count = format!("SELECT count(*) FROM {NAME}.outbox_messages WHERE {processed} IS NULL");
        let row = self.sql.query_typed_one(&count, &[]).await.map_err(failed("count"))?;
        Ok(u64::try_from(row.get::<_, i64>(0)).unwrap_or_default())
    }

    /// Removes the place. What cannot be removed is said.
    pub(super) async fn remove(self) {
        let (exchange, queue) = (ExchangeDeleteOptions::default(), QueueDeleteOptions::default());
        let gone = async {
            self.channel.exchange_delete(NAME.into(), exchange).await?;
            self.channel.queue_delete(NAME.into(), queue).await
        };
        if !matches!(tokio::time::timeout(ANSWER, gone).await, Ok(Ok(_))) {
            tracing::warn!(
                "exchange and queue {NAME} could not be deleted; the next bench on this broker does it"
            );
        }
        if let Err(failure) = drop_leftovers(&self.sql).await {
            tracing::warn!(%failure, "schema, publication and slot {NAME} could not be dropped; the next bench does it");
        }
    }
}

/// The configuration with everything of this place's own.
fn at_home(config: &Config, slot: &str) -> Result<Config, Failure> {
    let port = TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .map_err(|error| Failure::new(format!("find a free port: {error}")))?
        .port();
    let mut config = config.clone();
    config.database.schema = NAME.to_owned();
    // What the files hold was read.
    let database = &mut config.database;
    (database.url_file, database.direct_url_file, config.broker.url_file) = (None, None, None);
    config.outbox.table = format!("{NAME}.outbox_messages");
    let columns = &mut config.outbox.columns;
    (columns.key, columns.headers, columns.exchange, columns.routing_key) = (None, None, None, None);
    config.source.wal.slot = slot.to_owned();
    config.source.wal.publication = NAME.to_owned();
    config.publish.exchange = NAME.to_owned();
    config.publish.routing_key = "{type}".to_owned();
    config.publish.declare = false;
    config.cleanup.retention_secs = 0;
    config.admin.listen = ([127, 0, 0, 1], port).into();
    (config.admin.token_file, config.admin.read_token_file) = (None, None);
    Ok(config)
}

async fn dial(config: &Config) -> Result<Connection, Failure> {
    let tls = broker_tls(config).map_err(|finding| Failure::new(finding.message))?;
    let runtime = lapin::runtime::default_runtime().map_err(refused)?;
    let properties = ConnectionProperties::default().with_connection_name("postrider bench".into());
    let connecting = Connection::connect_with_config(config.broker.url.expose(), properties, tls, runtime);
    tokio::time::timeout(ANSWER, connecting)
        .await
        .map_err(|_| Failure::new(format!("{}: no answer within {} s", config.broker.url, ANSWER.as_secs())))?
        .map_err(refused)
}

async fn drop_leftovers(sql: &Client) -> Result<(), Failure> {
    let whose = "SELECT obj_description(oid, 'pg_namespace') FROM pg_namespace WHERE nspname = $1";
    let found = sql.query_typed_opt(whose, &[(&NAME, Type::TEXT)]).await.map_err(failed("look around"))?;
    if let Some(row) = found
        && row.get::<_, Option<&str>>(0) != Some(COMMENT)
    {
        let hint = format!("rename that schema: the benchmark drops a schema {NAME} when it is done");
        return Err(Failure::new(format!("schema {NAME} exists and is not the benchmark's")).with_hint(hint));
    }
    drop_slot(sql).await?;
    let leftovers =
        format!("DROP PUBLICATION IF EXISTS {NAME}; DROP SCHEMA IF EXISTS {NAME} CASCADE; RESET ALL");
    sql.batch_execute(&leftovers).await.map_err(failed("drop its schema"))
}

/// The slot's name. Slots are the server's, not the database's, and another database may be measured too.
async fn slot(sql: &Client) -> Result<String, Failure> {
    let name = "SELECT $1 || '_' || oid FROM pg_database WHERE datname = current_database()";
    let row = sql.query_typed_one(name, &[(&NAME, Type::TEXT)]).await.map_err(failed("name its slot"))?;
    Ok(row.get(0))
}

/// A relay that has just ended may hold the slot a moment longer.
async fn drop_slot(sql: &Client) -> Result<(), Failure> {
    let name = slot(sql).await?;
    let drop = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = $1";
    let patience = std::time::Instant::now() + ANSWER;
    loop {
        match sql.query_typed(drop, &[(&name, Type::TEXT)]).await {
            Ok(_) => return Ok(()),
            Err(_) if std::time::Instant::now() < patience => {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(error) => return Err(failed("drop its slot")(error)),
        }
    }
}

/// A statement's failure, with PostgreSQL's own words.
pub(super) fn failed(what: &'static str) -> impl FnOnce(tokio_postgres::Error) -> Failure {
    move |error| {
        let words = error.as_db_error().map_or_else(|| error.to_string(), |db| db.message().to_owned());
        Failure::new(format!("bench: {what}: {words}"))
    }
}

/// What the broker would not do.
pub(super) fn refused(error: lapin::Error) -> Failure {
    Failure::new(format!("bench: the broker: {error}"))
}
