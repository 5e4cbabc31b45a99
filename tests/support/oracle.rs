//! The oracle: a consumer that remembers every delivery, and says what is missing.

use super::{DEADLINE, vhost};
use futures_util::StreamExt as _;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Channel};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// One message as it arrived.
#[derive(Clone, Debug)]
pub(crate) struct Delivery {
    pub(crate) message_id: String,
    pub(crate) body: Vec<u8>,
    pub(crate) properties: BasicProperties,
    pub(crate) exchange: String,
    pub(crate) routing_key: String,
    pub(crate) queue: String,
    pub(crate) at: Instant,
}

#[derive(Default)]
struct Seen {
    deliveries: Vec<Delivery>,
    ids: HashSet<String>,
    barriers: HashSet<String>,
    consuming: usize,
}

/// What the consumers and the test share: the record, and a signal at each change of it.
struct Record {
    seen: Mutex<Seen>,
    changed: watch::Sender<()>,
}

impl Record {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Consumes its queues until dropped, over every restart of the broker. Deliveries are in order of arrival.
pub(crate) struct Oracle {
    url: String,
    queues: Vec<String>,
    record: Arc<Record>,
    tasks: Vec<JoinHandle<()>>,
}

/// The `app_id` of the oracle's own messages, which are never recorded.
const BARRIER: &str = "oracle-barrier";

impl Oracle {
    /// Returns when every queue is being consumed.
    pub(crate) async fn on(url: &str, queues: &[&str]) -> Self {
        let record = Arc::new(Record { seen: Mutex::default(), changed: watch::channel(()).0 });
        let tasks = queues
            .iter()
            .map(|queue| tokio::spawn(consume_for_ever(url.to_owned(), (*queue).to_owned(), record.clone())))
            .collect();
        let queues: Vec<String> = queues.iter().map(|q| (*q).to_owned()).collect();
        let oracle = Self { url: url.to_owned(), queues, record, tasks };
        let all = oracle.queues.len();
        oracle.until(|seen| seen.consuming == all, |_| format!("{:?} are not consumed", oracle.queues)).await;
        oracle
    }

    /// Waits on the record's signal until `done`; panics with `missing` after [`DEADLINE`].
    async fn until(&self, done: impl Fn(&Seen) -> bool, missing: impl Fn(&Seen) -> String) {
        let mut changed = self.record.changed.subscribe();
        let waiting = async {
            while !done(&self.record.seen()) {
                changed.changed().await.expect("the record outlives us");
            }
        };
        if tokio::time::timeout(DEADLINE, waiting).await.is_err() {
            panic!("not within {DEADLINE:?}: {}", missing(&self.record.seen()));
        }
    }

    /// Until `n` deliveries, repeated ones counted.
    pub(crate) async fn wait_for(&self, n: usize) {
        self.until(
            |seen| seen.deliveries.len() >= n,
            |seen| format!("{} of {n} deliveries", seen.deliveries.len()),
        )
        .await;
    }

    /// Until each of these has arrived at least once.
    pub(crate) async fn wait_for_all<I: ToString>(&self, committed: &[I]) {
        let committed: Vec<String> = committed.iter().map(ToString::to_string).collect();
        // cheap while it cannot be true yet: the set is compared only once it is large enough
        self.until(
            |seen| seen.ids.len() >= committed.len() && committed.iter().all(|id| seen.ids.contains(id)),
            |seen| describe_missing(seen, &committed),
        )
        .await;
    }

    /// Returns when everything that was in the queues before this call has been recorded: a message of our own
    /// behind it has come through. What proves that nothing more arrived, without waiting for nothing.
    pub(crate) async fn barrier(&self) {
        let mut tokens = Vec::new();
        let connection = vhost::try_connect(&self.url).await.unwrap_or_else(|e| panic!("{}: {e}", self.url));
        let channel = connection.create_channel().await.expect("a channel opens");
        for queue in &self.queues {
            let token = super::unique();
            let properties = BasicProperties::default()
                .with_app_id(BARRIER.into())
                .with_delivery_mode(2)
                .with_message_id(token.as_str().into());
            vhost::publish_confirmed(&channel, "", queue, properties, b"")
                .await
                .expect("the barrier is stored");
            tokens.push(token);
        }
        self.until(|seen| tokens.iter().all(|t| seen.barriers.contains(t)), |_| "the barrier".to_owned())
            .await;
    }

    /// Every delivery so far, in order of arrival.
    pub(crate) fn deliveries(&self) -> Vec<Delivery> {
        self.record.seen().deliveries.clone()
    }

    pub(crate) fn count(&self) -> usize {
        self.record.seen().deliveries.len()
    }

    /// The first delivery of this message.
    pub(crate) fn get(&self, id: impl ToString) -> Option<Delivery> {
        let id = id.to_string();
        self.record.seen().deliveries.iter().find(|d| d.message_id == id).cloned()
    }

    /// The ids in the order of their first delivery.
    pub(crate) fn first_deliveries(&self) -> Vec<String> {
        let mut before = HashSet::new();
        let seen = self.record.seen();
        seen.deliveries
            .iter()
            .filter(|d| before.insert(&d.message_id))
            .map(|d| d.message_id.clone())
            .collect()
    }

    /// How often each message came that came more than once (on one queue).
    pub(crate) fn duplicates(&self) -> BTreeMap<String, usize> {
        let mut counts: HashMap<(String, String), usize> = HashMap::new();
        for d in &self.record.seen().deliveries {
            *counts.entry((d.queue.clone(), d.message_id.clone())).or_default() += 1;
        }
        counts.into_iter().filter(|(_, n)| *n > 1).map(|((_, id), n)| (id, n)).collect()
    }

    /// How many deliveries were repetitions (on one queue). Each must be what it repeats: the same body and properties.
    pub(crate) fn repetitions(&self) -> usize {
        let seen = self.record.seen();
        let mut first: HashMap<(&str, &str), &Delivery> = HashMap::new();
        let mut repeated = 0;
        for d in &seen.deliveries {
            let Some(before) = first.insert((&d.queue, &d.message_id), d) else { continue };
            assert_eq!(before.body, d.body, "{}: repeated with another body", d.message_id);
            assert_eq!(before.properties, d.properties, "{}: repeated with other properties", d.message_id);
            repeated += 1;
        }
        repeated
    }

    /// Whatever came again was what had come before.
    pub(crate) fn assert_same_again(&self) {
        self.repetitions();
    }

    /// Each of these arrived at least once.
    pub(crate) fn assert_nothing_lost<I: ToString>(&self, committed: &[I]) {
        let committed: Vec<String> = committed.iter().map(ToString::to_string).collect();
        let seen = self.record.seen();
        assert!(committed.iter().all(|id| seen.ids.contains(id)), "{}", describe_missing(&seen, &committed));
    }

    /// Nothing arrived that is not among these: no uncommitted row, none rolled back.
    pub(crate) fn assert_nothing_else<I: ToString>(&self, committed: &[I]) {
        let committed: HashSet<String> = committed.iter().map(ToString::to_string).collect();
        let seen = self.record.seen();
        let others: Vec<&String> = seen.ids.iter().filter(|id| !committed.contains(*id)).take(10).collect();
        assert!(others.is_empty(), "never committed, yet delivered: {others:?}");
    }

    /// No message came twice.
    pub(crate) fn assert_no_duplicates(&self) {
        let duplicates = self.duplicates();
        assert!(duplicates.is_empty(), "delivered more than once: {duplicates:?}");
    }

    /// First deliveries came in exactly this order.
    pub(crate) fn assert_order<I: ToString>(&self, committed: &[I]) {
        let first = self.first_deliveries();
        for (at, (expected, got)) in committed.iter().map(ToString::to_string).zip(&first).enumerate() {
            assert_eq!(&expected, got, "the delivery at {at} is out of order");
        }
        assert_eq!(first.len(), committed.len(), "as many messages delivered as committed");
    }
}

impl Drop for Oracle {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

fn describe_missing(seen: &Seen, committed: &[String]) -> String {
    let missing: Vec<&String> = committed.iter().filter(|id| !seen.ids.contains(*id)).collect();
    let some = missing.iter().take(10).collect::<Vec<_>>();
    format!("{} of {} messages are missing, among them {some:?}", missing.len(), committed.len())
}

/// What a consumer does with what arrives.
pub(crate) trait Sink: Send + Sync + 'static {
    /// The queue is being consumed, for the first time or again.
    fn consuming(&self);

    /// One message; what is left of one that was not acknowledged comes once more, as redelivered.
    fn receive(&self, queue: &str, delivery: lapin::message::Delivery);

    /// Everything that had arrived has been received.
    fn received(&self);
}

/// Consumes `queue` over every restart of the broker, and acknowledges what the sink has received.
pub(crate) async fn consume_for_ever(url: String, queue: String, sink: Arc<impl Sink>) {
    let mut told = String::new();
    loop {
        if let Err(error) = consume(&url, &queue, &*sink).await
            && told != error.to_string()
        {
            told = error.to_string();
            eprintln!("the oracle on {queue} reconnects: {told}");
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

async fn consume(url: &str, queue: &str, sink: &impl Sink) -> lapin::Result<()> {
    let connection = vhost::try_connect(url).await?;
    let channel: Channel = connection.create_channel().await?;
    channel.basic_qos(1000, BasicQosOptions::default()).await?;
    let mut consumer = channel
        .basic_consume(queue.into(), "oracle".into(), BasicConsumeOptions::default(), FieldTable::default())
        .await?;
    sink.consuming();
    while let Some(delivery) = consumer.next().await {
        let mut last = receive(sink, queue, delivery?);
        // one acknowledgement for all that is here already
        while let Some(Some(delivery)) = futures_util::FutureExt::now_or_never(consumer.next()) {
            last = receive(sink, queue, delivery?);
        }
        sink.received();
        channel.basic_ack(last, BasicAckOptions { multiple: true }).await?;
    }
    Ok(())
}

fn receive(sink: &impl Sink, queue: &str, delivery: lapin::message::Delivery) -> u64 {
    let tag = delivery.delivery_tag;
    sink.receive(queue, delivery);
    tag
}

impl Sink for Record {
    fn consuming(&self) {
        self.seen().consuming += 1;
        self.changed.send_replace(());
    }

    fn receive(&self, queue: &str, delivery: lapin::message::Delivery) {
        let text = |s: &Option<lapin::types::ShortString>| s.as_ref().map_or("", |s| s.as_str()).to_owned();
        let message_id = text(delivery.properties.message_id());
        let mut seen = self.seen();
        if text(delivery.properties.app_id()) == BARRIER {
            seen.barriers.insert(message_id);
            return;
        }
        // our own acknowledgement may have been lost with the connection: that repetition is the broker's, not the relay's
        let again = delivery.redelivered
            && seen.ids.contains(&message_id)
            && seen.deliveries.iter().any(|d| d.queue == queue && d.message_id == message_id);
        if !again {
            seen.ids.insert(message_id.clone());
            seen.deliveries.push(Delivery {
                message_id,
                body: delivery.data,
                properties: delivery.properties,
                exchange: delivery.exchange.to_string(),
                routing_key: delivery.routing_key.to_string(),
                queue: queue.to_owned(),
                at: Instant::now(),
            });
        }
    }

    fn received(&self) {
        self.changed.send_replace(());
    }
}
