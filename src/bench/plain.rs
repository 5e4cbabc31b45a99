//! The poller that is written first, and its usual improvements: what a relay of one's own does. Measured beside ours,
//! on the same rows, exchange and broker. It has no retries, no returns and no bounds; it is here to be compared with.

use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream::FuturesUnordered};
use lapin::{
    Channel,
    options::{BasicPublishOptions, ConfirmSelectOptions},
};
use postrider_actors::database::quote_identifier;
use tokio::task::JoinSet;
use tokio_postgres::{Client, types::Type};
use uuid::Uuid;

use super::{
    arena::{Arena, KIND, NAME, failed, refused},
    bare,
    drain::{Drained, empty},
    options::Bench,
    usage::Usage,
};
use crate::{cli::output, failure::Failure, migrate};

/// Rows a claim takes.
const BATCH: i64 = 100;

/// What it does and does not.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plain {
    /// Loops that claim, each with a connection and a channel.
    pub workers: u32,
    /// Whether an index serves the claim.
    pub index: bool,
    /// Whether a claim's confirms are awaited together instead of one by one.
    pub pipelined: bool,
    /// Whether a claim's rows are marked by one statement.
    pub one_update: bool,
}

/// Drains a backlog, or as much of it as `seconds` allow.
pub(super) async fn drain(
    arena: &Arena,
    plain: Plain,
    options: &Bench,
    label: &str,
) -> Result<Drained, Failure> {
    arena.clear().await?;
    indexed(arena, plain.index).await?;
    arena.seed(options.rows, options.transaction, options.body).await?;
    output::progress(label);
    let usage = Usage::begin(arena, std::process::id()).await;
    let began = Instant::now();
    let until = began + Duration::from_secs(options.seconds);
    let mut workers = JoinSet::new();
    let mut connections = Vec::new();
    for _ in 0..plain.workers {
        let connection = arena.dial().await?;
        let channel = connection.create_channel().await.map_err(refused)?;
        channel.confirm_select(ConfirmSelectOptions::default()).await.map_err(refused)?;
        connections.push(connection);
        let (client, statements) = (arena.connect().await?, Statements::of(arena));
        workers.spawn(async move {
            while Instant::now() < until && claim(&client, &channel, &statements, plain).await? > 0 {}
            Ok::<(), Failure>(())
        });
    }
    while let Some(worker) = workers.join_next().await {
        worker.map_err(|error| Failure::new(format!("a worker: {error}")))??;
    }
    let seconds = began.elapsed().as_secs_f64();
    let used = usage.end().await;
    drop(connections);
    let left = arena.unrecorded().await?;
    indexed(arena, true).await?;
    Ok(Drained { messages: options.rows - left, seconds, used, held: arena.held().await?, ..empty() })
}

/// Claims an empty table over and over for some seconds; claims a minute.
pub(super) async fn spin(arena: &Arena, seconds: u64) -> Result<f64, Failure> {
    arena.clear().await?;
    let statements = Statements::of(arena);
    let (began, mut claims) = (Instant::now(), 0_u64);
    while began.elapsed() < Duration::from_secs(seconds) {
        arena.sql.query_typed(&statements.claim, &[(&BATCH, Type::INT8)]).await.map_err(failed("claim"))?;
        claims += 1;
    }
    Ok(claims as f64 * 60.0 / began.elapsed().as_secs_f64())
}

/// Takes the claim's index away, or has `migrate` make it again.
async fn indexed(arena: &Arena, wanted: bool) -> Result<(), Failure> {
    if wanted {
        return Ok(migrate::migrate(&arena.config, &migrate::Options::default(), &mut |_| {}).await?);
    }
    let drop = format!(
        "DO $drop$ DECLARE name text; BEGIN
             FOR name IN SELECT i.indexrelid::regclass::text FROM pg_index i
                         WHERE i.indrelid = '{NAME}.outbox_messages'::regclass AND NOT i.indisprimary
             LOOP EXECUTE 'DROP INDEX ' || name; END LOOP;
         END $drop$"
    );
    arena.sql.batch_execute(&drop).await.map_err(failed("drop the index"))
}

#[derive(Clone)]
struct Statements {
    claim: String,
    mark: String,
}

impl Statements {
    fn of(arena: &Arena) -> Self {
        let columns = &arena.config.outbox.columns;
        let (id, content) = (quote_identifier(&columns.id), quote_identifier(&columns.content));
        let (occurred, processed) =
            (quote_identifier(&columns.occurred_on), quote_identifier(&columns.processed_on));
        Self {
            claim: format!(
                "SELECT {id}, {content}::text FROM {NAME}.outbox_messages WHERE {processed} IS NULL
                 ORDER BY {occurred} LIMIT $1 FOR UPDATE SKIP LOCKED"
            ),
            mark: format!("UPDATE {NAME}.outbox_messages SET {processed} = now() WHERE {id} = ANY($1)"),
        }
    }
}

/// One claim: rows taken, published, marked, committed. How many there were.
async fn claim(
    client: &Client,
    channel: &Channel,
    statements: &Statements,
    plain: Plain,
) -> Result<usize, Failure> {
    client.batch_execute("BEGIN").await.map_err(failed("begin"))?;
    let rows =
        client.query_typed(&statements.claim, &[(&BATCH, Type::INT8)]).await.map_err(failed("claim"))?;
    let mut confirms = FuturesUnordered::new();
    let mut ids = Vec::with_capacity(rows.len());
    for row in &rows {
        let (id, body): (Uuid, String) = (row.get(0), row.get(1));
        let properties = bare::properties(2).with_message_id(id.to_string().as_str().into());
        let options = BasicPublishOptions { mandatory: true, ..Default::default() };
        let publish = channel.basic_publish(NAME.into(), KIND.into(), options, body.as_bytes(), properties);
        let confirm = publish.await.map_err(refused)?;
        if plain.pipelined {
            confirms.push(confirm);
        } else {
            confirm.await.map_err(refused)?;
        }
        ids.push(id);
    }
    while let Some(confirm) = confirms.next().await {
        confirm.map_err(refused)?;
    }
    let batch = if plain.one_update { ids.len().max(1) } else { 1 };
    for ids in ids.chunks(batch) {
        client.execute_typed(&statements.mark, &[(&ids, Type::UUID_ARRAY)]).await.map_err(failed("mark"))?;
    }
    client.batch_execute("COMMIT").await.map_err(failed("commit"))?;
    Ok(rows.len())
}
