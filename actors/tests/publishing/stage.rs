//! The publisher between a fake decoder, which is the test, and a fake acker, which gives everything back at once.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use actix::{Actor, Arbiter, Context, Handler};
use bytes::Bytes;
use lapin::{BasicProperties, types::ShortString};
use postrider_actors::{
    control::{Controls, Intake},
    credit::{Cost, Credits},
    database::{DatabaseSettings, SslMode},
    envelope::{Envelope, Message, MessageBatch, Origin, Row, Settled, Verdict},
    metrics::Stage,
    outlet::{Delivery, Inbox, InboxEntry, Outlet},
    pipeline::{
        exit::{Exit, ExitGuard},
        shared::Shared,
    },
    position::Lsn,
    publish::Publisher,
    settings::{
        AckSettings, BrokerSettings, Columns, FirstStart, OutboxSettings, Part, PublishSettings, RowPolicy,
        Settings, SourceSettings, Template, WalSettings,
    },
    status::{Board, figures::Figures},
};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

/// Settings of a relay that publishes to `exchange` at `url`.
pub fn settings(url: &str, exchange: &str) -> Settings {
    let text = |text: &str| Template(vec![Part::Text(text.to_owned())]);
    Settings {
        database: DatabaseSettings {
            url: "postgres://nowhere/nothing".to_owned(),
            direct_url: "postgres://nowhere/nothing".to_owned(),
            sslmode: SslMode::Disable,
            ca_file: None,
            cert_file: None,
            key_file: None,
            schema: "public".to_owned(),
            link: Default::default(),
        },
        broker: BrokerSettings { url: url.to_owned(), ca_file: None, cert_file: None, key_file: None },
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
        source: SourceSettings::Wal(WalSettings {
            slot: "postrider".to_owned(),
            publication: "postrider".to_owned(),
            first_start: FirstStart::Stream,
            recover_lost_slot: false,
        }),
        publish: PublishSettings {
            exchange: text(exchange),
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
        ack: AckSettings { rows: RowPolicy::Keep, batch_messages: 1000, interval: Duration::from_millis(10) },
        credits: Cost { messages: 8192, bytes: 64 << 20 },
        cleanup: None,
        shutdown_timeout: Duration::from_secs(10),
    }
}

/// A message as the decoder makes it.
pub fn message(number: u64, exchange: &str, routing_key: &str, persistent: bool) -> Message {
    let id = format!("{number:08}");
    let row = Row {
        id: Bytes::from(id.clone()),
        kind: Bytes::copy_from_slice(routing_key.as_bytes()),
        content: Bytes::from(format!("{{\"number\":{number},\"text\":\"{}\"}}", "x".repeat(100))),
        ..Row::default()
    };
    let bytes = u32::try_from(row.bytes()).expect("small");
    let properties = BasicProperties::default()
        .with_message_id(ShortString::from(id))
        .with_type(ShortString::from(routing_key))
        .with_content_type("application/json".into())
        .with_app_id("postrider".into())
        .with_delivery_mode(if persistent { 2 } else { 1 });
    Message {
        envelope: Envelope { number, place: None, committed_at: None, row, bytes },
        exchange: exchange.into(),
        own_exchange: false,
        routing_key: routing_key.into(),
        properties,
    }
}

/// Verdicts in the order they came, by number.
pub type Verdicts = Arc<Mutex<Vec<(u64, Verdict)>>>;

struct Acker {
    entry: InboxEntry<Settled>,
    inbox: Option<Inbox<Settled>>,
    verdicts: Verdicts,
    claims: Arc<Mutex<Vec<usize>>>,
}

impl Actor for Acker {
    type Context = Context<Self>;

    fn started(&mut self, _: &mut Self::Context) {
        let mut inbox = self.inbox.take().expect("started once");
        let (verdicts, claims) = (Arc::clone(&self.verdicts), Arc::clone(&self.claims));
        actix::spawn(async move {
            while let Some((settled, _)) = inbox.recv().await {
                let messages = settled.settlements.len() as u32;
                settled.exposure.give_back();
                assert_eq!(settled.credit.cost().messages, messages, "a credit goes with each verdict");
                if matches!(settled.origin, Origin::Claim(_)) {
                    claims.lock().unwrap_or_else(PoisonError::into_inner).push(messages as usize);
                }
                let mut verdicts = verdicts.lock().unwrap_or_else(PoisonError::into_inner);
                verdicts.extend(settled.settlements.into_iter().map(|s| (s.envelope.number, s.verdict)));
            }
        });
    }
}

impl Handler<Delivery<Settled>> for Acker {
    type Result = ();

    fn handle(&mut self, delivery: Delivery<Settled>, _: &mut Self::Context) {
        self.entry.put(delivery);
    }
}

/// A running publisher.
pub struct Stage3 {
    pub shared: Shared,
    pub verdicts: Verdicts,
    claims: Arc<Mutex<Vec<usize>>>,
    outlet: Outlet<MessageBatch>,
    exits: mpsc::Receiver<Exit>,
}

impl Stage3 {
    /// Starts it on an arbiter of its own.
    pub async fn start(settings: Settings) -> Self {
        let exposure = Credits::exposure(settings.publish.exposure);
        let manager =
            deadpool_postgres::Manager::new("host=nowhere".parse().expect("a config"), tokio_postgres::NoTls);
        let (_, intake) = watch::channel(Intake::Open);
        let shared = Shared {
            pool: deadpool_postgres::Pool::builder(manager).build().expect("a pool"),
            board: Board::new(),
            figures: Figures::new(),
            credits: Credits::new(settings.credits),
            exposure,
            controls: Controls { intake, durable: watch::Sender::new(Lsn::default()) },
            stop: CancellationToken::new(),
            settings: Arc::new(settings),
        };
        let verdicts = Verdicts::default();
        let (entry, inbox, acker_slots) = Inbox::new(4);
        let claims = Arc::<Mutex<Vec<usize>>>::default();
        let (seen, counts) = (Arc::clone(&verdicts), Arc::clone(&claims));
        let acker = Acker { entry, inbox: Some(inbox), verdicts: seen, claims: counts };
        let acker = Acker::start_in_arbiter(&Arbiter::new().handle(), |_| acker);
        #[allow(clippy::disallowed_methods, reason = "the outlet's own recipient")]
        let acker = Outlet::new(Stage::Publish, acker.recipient(), acker_slots);
        let (entry, inbox, slots) = Inbox::new(4);
        let (to, exits) = mpsc::channel(4);
        let guard = ExitGuard::new(Stage::Publish, to);
        let theirs = shared.clone();
        let publisher = Publisher::start_in_arbiter(&Arbiter::new().handle(), move |_| {
            Publisher::new(theirs, guard, (entry, inbox), acker)
        });
        #[allow(clippy::disallowed_methods, reason = "the outlet's own recipient")]
        let outlet = Outlet::new(Stage::Decode, publisher.recipient(), slots);
        Self { shared, verdicts, claims, outlet, exits }
    }

    /// The sizes of the claims that came back.
    pub fn claims(&self) -> Vec<usize> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sends a batch of the stream, having waited for its credits.
    pub async fn send(&self, messages: Vec<Message>) {
        self.send_as(Origin::Stream, messages).await;
    }

    /// Sends a batch.
    pub async fn send_as(&self, origin: Origin, messages: Vec<Message>) {
        let cost = messages
            .iter()
            .fold(Cost::default(), |sum, m| sum + Cost { messages: 1, bytes: m.envelope.bytes });
        let credit = self.shared.credits.acquire(cost, &self.shared.stop).await.expect("credits");
        let batch = MessageBatch { origin, messages, refused: Vec::new(), passed: Vec::new(), credit };
        self.outlet.hand_over(batch, &self.shared.stop).await.expect("the publisher runs");
    }

    /// Waits until so many verdicts came, and gives them in the order of their numbers.
    pub async fn verdicts(&self, count: usize) -> Vec<(u64, Verdict)> {
        self.reach(Duration::from_secs(60), |seen| seen.len() >= count).await;
        let mut all = self.verdicts.lock().unwrap_or_else(PoisonError::into_inner).clone();
        all.sort_by_key(|(number, _)| *number);
        assert_eq!(all.len(), count, "one verdict a message");
        all
    }

    /// Waits until the verdicts are as `done` wants them.
    pub async fn reach(&self, within: Duration, done: impl Fn(&[(u64, Verdict)]) -> bool) {
        let until = Instant::now() + within;
        loop {
            let seen = {
                let verdicts = self.verdicts.lock().unwrap_or_else(PoisonError::into_inner);
                if done(&verdicts) {
                    return;
                }
                verdicts.len()
            };
            let conditions = self.shared.board.conditions();
            assert!(Instant::now() < until, "stopped at {seen} verdicts: {conditions:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Stops it and waits for its end; all credits it held are given back.
    pub async fn stop(mut self) {
        self.shared.stop.cancel();
        let exit =
            tokio::time::timeout(Duration::from_secs(3), self.exits.recv()).await.expect("it ends in time");
        assert!(format!("{exit:?}").contains("Returned(Ok"), "{exit:?}");
        let credits = self.shared.credits.clone();
        drop(self);
        let never = CancellationToken::new();
        let settled = tokio::time::timeout(Duration::from_secs(3), credits.settle(&never)).await;
        settled.expect("nothing is leaked").expect("never stopped");
    }
}
