//! A database of its own for each test, and the first half of the pipeline on it: source and decoder, with a publisher
//! and an acker that the test plays itself.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use actix::{Actor, Context, Handler};
use lapin::types::FieldTable;
use postrider_actors::{
    control::{Controls, Intake},
    credit::{Cost, Credits},
    database::{DatabaseSettings, SslMode},
    decode::{Decoder, Resume},
    envelope::{Message, MessageBatch, Settlement},
    ledger::{Ledger, Mark, Watermark},
    metrics::Stage,
    outlet::{Delivery, Inbox, InboxEntry, Outlet},
    pipeline::{
        exit::{Exit, ExitGuard},
        shared::Shared,
    },
    position::{Lsn, Position, StreamIdentity},
    settings::{
        AckSettings, BrokerSettings, Columns, FirstStart, OutboxSettings, Part, PublishSettings, RowPolicy,
        Settings, SourceSettings, Template, WalSettings,
    },
    source::wal::{Stream, WalSource, open},
    status::{Board, figures::Figures},
};
use tokio::sync::{mpsc, watch};
use tokio_postgres::{Client, NoTls};
use tokio_util::sync::CancellationToken;

/// Nothing in these tests takes longer on a machine that works at all.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) const TABLE: &str = "CREATE TABLE outbox_messages (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), \
    type varchar(255) NOT NULL DEFAULT 'test', content jsonb NOT NULL DEFAULT '{}', \
    occurred_on_utc timestamptz NOT NULL DEFAULT now(), processed_on_utc timestamptz, error text)";

/// A fresh database with an outbox and a publication.
pub(crate) struct Database {
    pub(crate) client: Client,
    pub(crate) settings: Settings,
    pub(crate) wal: WalSettings,
    admin: Client,
    name: String,
}

async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("the test database");
    actix::spawn(async move {
        let _ = connection.await;
    });
    client
}

impl Database {
    /// A database of its own, with `table` as the outbox.
    pub(crate) async fn new(table: &str) -> Self {
        let url = std::env::var("POSTRIDER_TEST_DATABASE_URL").expect(
            "POSTRIDER_TEST_DATABASE_URL names a PostgreSQL superuser on a server with wal_level = logical",
        );
        let admin = connect(&url).await;
        let name = format!("wal_{:016x}", fastrand::u64(..));
        admin.batch_execute(&format!("CREATE DATABASE {name}")).await.expect("a database");
        let mut own: tokio_postgres::Config = url.parse().expect("a URL");
        own.dbname(&name);
        let host = match own.get_hosts().first() {
            Some(tokio_postgres::config::Host::Tcp(host)) => host.clone(),
            other => panic!("the tests need a TCP host, not {other:?}"),
        };
        let password = own
            .get_password()
            .map_or(String::new(), |password| format!(":{}", String::from_utf8_lossy(password)));
        let user = own.get_user().unwrap_or("postgres");
        let port = own.get_ports().first().copied().unwrap_or(5432);
        let url = format!("postgres://{user}{password}@{host}:{port}/{name}");
        let client = connect(&url).await;
        client.batch_execute(table).await.expect("an outbox");
        client
            .batch_execute("CREATE PUBLICATION postrider FOR TABLE outbox_messages WITH (publish = 'insert')")
            .await
            .expect("a publication");
        let wal = WalSettings {
            slot: name.clone(),
            publication: "postrider".to_owned(),
            first_start: FirstStart::Stream,
            recover_lost_slot: false,
        };
        Self { client, settings: settings(&url, &wal), wal, admin, name }
    }

    pub(crate) async fn sql(&self, sql: &str) {
        self.client.batch_execute(sql).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    }

    /// The first column of the first row, as text.
    pub(crate) async fn text(&self, sql: &str) -> String {
        let messages = self.client.simple_query(sql).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
        let row = messages.iter().find_map(|message| match message {
            tokio_postgres::SimpleQueryMessage::Row(row) => Some(row.get(0).unwrap_or_default().to_owned()),
            _ => None,
        });
        row.unwrap_or_default()
    }

    pub(crate) async fn confirmed(&self) -> Lsn {
        let sql = format!(
            "SELECT coalesce(confirmed_flush_lsn, '0/0') FROM pg_replication_slots WHERE slot_name = '{}'",
            self.name
        );
        self.text(&sql).await.parse().expect("an LSN")
    }

    /// Waits until `condition` returns true.
    pub(crate) async fn until(&self, what: &str, condition: &str) {
        let start = Instant::now();
        while self.text(condition).await != "t" {
            assert!(start.elapsed() < PATIENCE, "{what} did not happen: {condition}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until no session holds the slot: the server notices a moment after ours has ended.
    pub(crate) async fn slot_is_free(&self) {
        let free = format!(
            "SELECT count(*) = 0 FROM pg_replication_slots WHERE slot_name = '{}' AND active",
            self.name
        );
        self.until("the slot is released", &free).await;
    }

    /// Drops the slot once nobody holds it.
    pub(crate) async fn drop_slot(&self) {
        self.slot_is_free().await;
        self.sql(&format!(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = '{}'",
            self.name
        ))
        .await;
    }

    /// Removes the database and the slot. A test that fails leaves both for a look.
    pub(crate) async fn remove(self) {
        self.drop_slot().await;
        let drop_it = format!("DROP DATABASE {} WITH (FORCE)", self.name);
        self.admin.batch_execute(&drop_it).await.expect("the database is dropped");
    }
}

fn settings(url: &str, wal: &WalSettings) -> Settings {
    Settings {
        database: DatabaseSettings {
            url: url.to_owned(),
            direct_url: url.to_owned(),
            sslmode: SslMode::Disable,
            ca_file: None,
            cert_file: None,
            key_file: None,
            schema: "public".to_owned(),
            link: Default::default(),
        },
        broker: BrokerSettings {
            url: "amqp://127.0.0.1:1".to_owned(),
            ca_file: None,
            cert_file: None,
            key_file: None,
        },
        outbox: OutboxSettings {
            schema: "public".to_owned(),
            table: "outbox_messages".to_owned(),
            columns: Columns {
                id: "id".to_owned(),
                kind: "type".to_owned(),
                content: "content".to_owned(),
                occurred_on: "occurred_on_utc".to_owned(),
                processed_on: "processed_on_utc".to_owned(),
                error: "error".to_owned(),
                key: None,
                headers: None,
                exchange: None,
                routing_key: None,
            },
            template_columns: Vec::new(),
        },
        source: SourceSettings::Wal(wal.clone()),
        publish: PublishSettings {
            exchange: Template(vec![Part::Text("outbox".to_owned())]),
            routing_key: Template(vec![Part::Type]),
            declare: false,
            window: 256,
            exposure: 1000,
            lanes: 1,
            confirms: true,
            mandatory: true,
            persistent: true,
            max_attempts: 10,
            retry_backoff: Duration::from_millis(500),
            retry_backoff_max: Duration::from_secs(60),
            confirm_timeout: Duration::from_secs(30),
        },
        ack: AckSettings {
            rows: RowPolicy::Update,
            batch_messages: 1000,
            interval: Duration::from_millis(10),
        },
        credits: Cost { messages: 8192, bytes: 64 << 20 },
        cleanup: None,
        shutdown_timeout: Duration::from_secs(10),
    }
}

/// The publisher that the test plays: it passes batches to the test.
struct Publisher {
    entry: InboxEntry<MessageBatch>,
}

impl Actor for Publisher {
    type Context = Context<Self>;
}

impl Handler<Delivery<MessageBatch>> for Publisher {
    type Result = ();
    fn handle(&mut self, delivery: Delivery<MessageBatch>, _: &mut Context<Self>) {
        self.entry.put(delivery);
    }
}

/// Source and decoder at work.
pub(crate) struct Half {
    pub(crate) shared: Shared,
    pub(crate) intake: watch::Sender<Intake>,
    pub(crate) identity: StreamIdentity,
    pub(crate) created: bool,
    batches: Inbox<MessageBatch>,
    exits: mpsc::Receiver<Exit>,
    ledger: Ledger,
}

#[allow(clippy::disallowed_methods, reason = "the outlet's own recipient, made once")]
fn outlet<A, B>(from: Stage, to: actix::Addr<A>, slots: Arc<tokio::sync::Semaphore>) -> Outlet<B>
where
    B: Send + 'static,
    A: Actor<Context = Context<A>> + Handler<Delivery<B>>,
{
    Outlet::new(from, to.recipient(), slots)
}

impl Half {
    /// Opens the stream and starts both stages.
    pub(crate) async fn start(database: &Database, resume: Resume) -> Self {
        let stream =
            open(&database.settings, &database.wal, None, &Default::default()).await.expect("a stream");
        Self::on(database, stream, resume)
    }

    pub(crate) fn on(database: &Database, stream: Stream, resume: Resume) -> Self {
        let (intake, watched) = watch::channel(Intake::Open);
        let config = database.settings.database.url.parse().expect("a URL");
        let manager = deadpool_postgres::Manager::new(config, NoTls);
        let shared = Shared {
            settings: Arc::new(database.settings.clone()),
            pool: deadpool_postgres::Pool::builder(manager).max_size(2).build().expect("a pool"),
            board: Board::new(),
            figures: Figures::new(),
            credits: Credits::new(database.settings.credits),
            exposure: Credits::exposure(1000),
            controls: Controls { intake: watched, durable: watch::Sender::new(Lsn::ZERO) },
            stop: CancellationToken::new(),
        };
        let (report, exits) = mpsc::channel(4);
        let (entry, batches, slots) = Inbox::new(8);
        let publisher = outlet(Stage::Decode, Publisher { entry }.start(), slots);
        let (entry, inbox, slots) = Inbox::new(8);
        let exit = ExitGuard::new(Stage::Decode, report.clone());
        let decoder = Decoder::new(shared.clone(), exit, (entry, inbox), publisher, resume).start();
        let decoder = Arc::new(outlet(Stage::Source, decoder, slots));
        let (identity, created) = (stream.identity().clone(), stream.created());
        WalSource::new(shared.clone(), ExitGuard::new(Stage::Source, report), decoder, stream).start();
        Self { shared, intake, identity, created, batches, exits, ledger: Ledger::new() }
    }

    /// The next batch; panics with the stage's error where one ended instead.
    pub(crate) async fn batch(&mut self) -> MessageBatch {
        tokio::select! {
            biased;
            batch = self.batches.recv() => batch.expect("the publisher is there").0,
            exit = self.exits.recv() => panic!("a stage ended: {exit:?}"),
            () = tokio::time::sleep(PATIENCE) => panic!("nothing came"),
        }
    }

    /// Plays the acker: settles everything of `batch` and tells what is durable.
    pub(crate) fn record(&mut self, batch: &MessageBatch) {
        for message in &batch.messages {
            let place = message.envelope.place.expect("streamed");
            self.ledger.settle(message.envelope.number, Mark::Row(place.position));
        }
        for settlement in &batch.refused {
            let place = settlement.envelope.place.expect("streamed");
            self.ledger.settle(settlement.envelope.number, Mark::Row(place.position));
        }
        for passed in &batch.passed {
            self.ledger.settle(passed.number, passed.mark);
        }
        self.shared.controls.durable.send_replace(self.ledger.watermark().flush);
    }

    /// How far everything is recorded.
    pub(crate) fn watermark(&self) -> Watermark {
        self.ledger.watermark()
    }

    /// Takes and records batches until `count` messages (delivered or refused) came.
    pub(crate) async fn take(&mut self, count: usize) -> (Vec<Message>, Vec<Settlement>) {
        let (mut messages, mut refused) = (Vec::new(), Vec::new());
        while messages.len() + refused.len() < count {
            let batch = self.batch().await;
            self.record(&batch);
            messages.extend(batch.messages);
            refused.extend(batch.refused);
        }
        assert_eq!(messages.len() + refused.len(), count, "more came than were expected");
        (messages, refused)
    }

    /// Takes and records whatever comes until everything up to `lsn` is durable; returns the messages.
    pub(crate) async fn until_durable(&mut self, lsn: Lsn) -> Vec<Message> {
        let mut messages = Vec::new();
        while self.watermark().flush < lsn {
            let batch = self.batch().await;
            self.record(&batch);
            messages.extend(batch.messages);
        }
        messages
    }

    /// Stops both stages and waits for their ends.
    pub(crate) async fn stop(mut self) {
        self.shared.stop.cancel();
        for _ in 0..2 {
            let exit = tokio::time::timeout(PATIENCE, self.exits.recv()).await.expect("a stage stops");
            let exit = exit.expect("an exit");
            assert!(
                matches!(exit.status, postrider_actors::pipeline::exit::ExitStatus::Returned(Ok(()))),
                "{exit:?}"
            );
        }
    }

    /// How the first stage ends by itself.
    pub(crate) async fn ended(&mut self) -> Exit {
        loop {
            tokio::select! {
                biased;
                exit = self.exits.recv() => return exit.expect("an exit"),
                batch = self.batches.recv() => drop(batch),
                () = tokio::time::sleep(PATIENCE) => panic!("no stage ended"),
            }
        }
    }
}

pub(crate) fn id(message: &Message) -> String {
    String::from_utf8(message.envelope.row.id.to_vec()).expect("text")
}

pub(crate) fn positions(messages: &[Message]) -> Vec<Position> {
    messages.iter().map(|message| message.envelope.place.expect("streamed").position).collect()
}

pub(crate) fn bodies(messages: &[Message]) -> HashMap<String, Vec<u8>> {
    messages.iter().map(|message| (id(message), message.envelope.row.content.to_vec())).collect()
}

pub(crate) fn headers(message: &Message) -> FieldTable {
    message.properties.headers().clone().unwrap_or_default()
}
