//! A fresh database for each test, an outbox in it, and the shared handles of a generation.
#![allow(dead_code, unreachable_pub, unused_imports, reason = "each test binary uses a part")]

pub mod sink;

use std::{
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use postrider_actors::{
    control::{Controls, Intake},
    credit::{Cost, Credits},
    database::{self, DatabaseSettings, SslMode, outbox::Outbox, pool},
    envelope::{Envelope, Rejection, Row, Settlement, Verdict},
    pipeline::shared::Shared,
    position::Lsn,
    settings::*,
    status::{Board, figures::Figures},
};
use tokio::sync::watch;
use tokio_postgres::{Client, types::Type};
use tokio_util::sync::CancellationToken;

/// The outbox with every optional column.
const OUTBOX: &str = include_str!("outbox.sql");

/// Tables of ours, as they are created anywhere.
const TABLES: [&str; 4] = [
    include_str!("../../../migrations/V1__retries.sql"),
    include_str!("../../../migrations/V2__dead_letters.sql"),
    include_str!("../../../migrations/V3__progress.sql"),
    include_str!("../../../migrations/V4__control.sql"),
];

/// A database of this test alone, dropped with the value.
pub struct Database {
    pub name: String,
    pub settings: Settings,
    pub client: Client,
}

/// The URL of a server on which the tests may create databases.
fn server_url() -> String {
    std::env::var("POSTRIDER_TEST_DATABASE_URL")
        .expect("POSTRIDER_TEST_DATABASE_URL names a server and a superuser")
}

/// The same server by another database's name; with a pooler between if one is given and `pooled`.
fn url(name: &str, pooled: bool) -> String {
    let base = std::env::var("POSTRIDER_TEST_POOLER_URL").ok().filter(|_| pooled).unwrap_or_else(server_url);
    let (server, _) = base.rsplit_once('/').expect("the URL ends in a database's name");
    format!("{server}/{name}")
}

async fn plain(url: &str) -> Client {
    let config = tokio_postgres::Config::from_str(url).expect("a URL");
    let (client, connection) = config.connect(tokio_postgres::NoTls).await.expect("the server is up");
    tokio::spawn(connection);
    client
}

impl Database {
    /// A database with an outbox whose id is of type `id` and whose content is of type `content`.
    pub async fn of(id: &str, content: &str) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name =
            format!("postrider_test_{}_{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let server = plain(&server_url()).await;
        server.batch_execute(&format!("CREATE DATABASE {name}")).await.expect("a superuser");
        let client = plain(&url(&name, false)).await;
        let outbox = OUTBOX.replace("$ID", id).replace("$CONTENT", content);
        client.batch_execute(&outbox).await.expect("an outbox");
        for table in TABLES {
            client.batch_execute(table).await.expect("a table of ours");
        }
        Self { settings: settings(url(&name, true), url(&name, false)), client, name }
    }

    pub async fn new() -> Self {
        Self::of("uuid", "jsonb").await
    }

    /// One value of the first column of the first row.
    pub async fn value<T: for<'a> tokio_postgres::types::FromSql<'a>>(&self, sql: &str) -> T {
        self.client.query_typed_one(sql, &[]).await.expect(sql).get(0)
    }

    pub async fn count(&self, from: &str) -> i64 {
        self.value(&format!("SELECT count(*) FROM {from}")).await
    }

    pub async fn run(&self, sql: &str) {
        self.client.batch_execute(sql).await.expect(sql);
    }

    /// `n` rows of this type, a microsecond apart, the first at `from` seconds since 1970.
    pub async fn insert(&self, n: i64, kind: &str, from: i64) {
        let sql = "INSERT INTO outbox_messages (id, type, content, occurred_on_utc, key) \
                   SELECT gen_random_uuid(), $1, jsonb_build_object('n', n, 'ü', '☂'), \
                   to_timestamp($2::int8) + n * interval '1 microsecond', 'k' || n FROM generate_series(1, $3::int8) AS n";
        self.client
            .execute_typed(sql, &[(&kind, Type::TEXT), (&from, Type::INT8), (&n, Type::INT8)])
            .await
            .expect("rows");
    }

    pub async fn outbox(&self) -> Arc<Outbox> {
        Arc::new(Outbox::load(&self.client, &self.settings).await.expect("the outbox"))
    }

    /// The handles of a generation, with intake open.
    pub fn shared(&self) -> (Shared, watch::Sender<Intake>) {
        let (intake, on_intake) = watch::channel(Intake::Open);
        let shared = Shared {
            settings: Arc::new(self.settings.clone()),
            pool: pool::pool(&self.settings.database, "postrider test", 16).expect("a pool"),
            board: Board::new(),
            figures: Figures::new(),
            credits: Credits::new(self.settings.credits),
            exposure: Credits::exposure(self.settings.publish.exposure),
            controls: Controls { intake: on_intake, durable: watch::channel(Lsn::ZERO).0 },
            stop: CancellationToken::new(),
        };
        (shared, intake)
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let (name, url) = (self.name.clone(), server_url());
        // Not on the test's runtime, which is ending.
        let dropping = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let _ = plain(&url).await.batch_execute(&format!("DROP DATABASE {name} WITH (FORCE)")).await;
            });
        });
        let _ = dropping.join();
    }
}

/// Settings of a relay that polls, with short pauses.
pub fn settings(url: String, direct_url: String) -> Settings {
    let name = |name: &str| Some(name.to_owned());
    Settings {
        database: DatabaseSettings {
            url,
            direct_url,
            sslmode: SslMode::Disable,
            ca_file: None,
            cert_file: None,
            key_file: None,
            schema: "public".into(),
            link: Default::default(),
        },
        broker: BrokerSettings { url: String::new(), ca_file: None, cert_file: None, key_file: None },
        outbox: OutboxSettings {
            schema: "public".into(),
            table: "outbox_messages".into(),
            columns: Columns {
                id: "id".into(),
                kind: "type".into(),
                content: "content".into(),
                occurred_on: "occurred_on_utc".into(),
                processed_on: "processed_on_utc".into(),
                error: "error".into(),
                key: name("key"),
                headers: name("headers"),
                exchange: name("exchange"),
                routing_key: name("routing_key"),
            },
            template_columns: vec!["tenant".into()],
        },
        source: SourceSettings::Poll(PollSettings {
            workers: 3,
            batch_messages: 100,
            interval: Duration::from_millis(200),
            notify: false,
        }),
        publish: PublishSettings {
            exchange: Template(Vec::new()),
            routing_key: Template(Vec::new()),
            declare: false,
            window: 256,
            exposure: 2000,
            lanes: 1,
            confirms: true,
            mandatory: true,
            persistent: true,
            max_attempts: 3,
            retry_backoff: Duration::from_millis(20),
            retry_backoff_max: Duration::from_millis(100),
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

/// A row under way with its verdict.
pub fn settle(number: usize, row: Row, verdict: Verdict) -> Settlement {
    let bytes = row.bytes() as u32;
    let envelope = Envelope { number: number as u64, place: None, committed_at: None, row, bytes };
    Settlement { envelope, verdict, exposed: true }
}

pub fn rejected(reason: postrider_actors::envelope::Reason) -> Verdict {
    Verdict::Rejected(Rejection { reason, detail: "no route".into() })
}

/// Waits until `sql` says true.
pub async fn until(database: &Database, sql: &str, at_most: Duration) {
    let waiting = async {
        while !database.value::<bool>(sql).await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    assert!(tokio::time::timeout(at_most, waiting).await.is_ok(), "still not so after {at_most:?}: {sql}");
}

pub use database::from_postgres;
