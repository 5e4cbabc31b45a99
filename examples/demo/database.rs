//! The demo's own database on the server it is given.

use std::time::Duration;

use anyhow::{Context, bail};
use tokio::time::sleep;
use tokio_postgres::{Client, NoTls, types::Type};

/// Dropped and recreated by each run.
pub(crate) const NAME: &str = "postrider_demo";
/// Slots are named per server, not per database: a relay of the user's own may hold the default name.
pub(crate) const SLOT: &str = "postrider_demo";

/// What the tables hold at the end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows {
    /// Orders, each committed with its outbox row.
    pub(crate) orders: u64,
    /// Outbox rows the relay has recorded as delivered.
    pub(crate) recorded: u64,
    /// Orders the consumer has applied.
    pub(crate) applied: u64,
}

/// Drops what an earlier run left and creates the database anew.
pub(crate) async fn recreate(server: &str) -> anyhow::Result<()> {
    let client = connect(server).await?;
    if client
        .query_typed_opt("SELECT FROM pg_database WHERE datname = $1", &[(&NAME, Type::TEXT)])
        .await?
        .is_some()
    {
        remove(&client)
            .await
            .with_context(|| format!("cannot drop the database {NAME} of an earlier run"))?;
    }
    client.batch_execute(&format!("CREATE DATABASE {NAME}")).await.context(
        "cannot create the demo's database: the role in DATABASE_URL needs CREATEDB (and REPLICATION for --mode wal)",
    )?;
    Ok(())
}

/// A relay that survived its demo would reconnect as fast as it is thrown out, and no database with an active slot can
/// be dropped: nobody gets in any more, then all get out.
async fn remove(client: &Client) -> anyhow::Result<()> {
    client.batch_execute(&format!("ALTER DATABASE {NAME} WITH ALLOW_CONNECTIONS false")).await?;
    for _ in 0..50 {
        client
            .query_typed(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1",
                &[(&NAME, Type::TEXT)],
            )
            .await?;
        let active = client
            .query_typed_opt(
                "SELECT FROM pg_replication_slots WHERE database = $1 AND active LIMIT 1",
                &[(&NAME, Type::TEXT)],
            )
            .await?;
        if active.is_none() {
            // Its inactive slots go with it.
            return Ok(client.batch_execute(&format!("DROP DATABASE {NAME} WITH (FORCE)")).await?);
        }
        sleep(Duration::from_millis(100)).await;
    }
    bail!("its replication slot stays in use")
}

/// Counts what the run left in the tables: the last word on what was committed and applied.
pub(crate) async fn count(url: &str) -> anyhow::Result<Rows> {
    let row = connect(url)
        .await?
        .query_typed_one(
            "SELECT (SELECT count(*) FROM orders),
                    (SELECT count(*) FROM outbox_messages WHERE processed_on_utc IS NOT NULL AND error IS NULL),
                    (SELECT coalesce(sum(orders), 0)::bigint FROM customer_totals)",
            &[],
        )
        .await?;
    let number = |column| anyhow::Ok(u64::try_from(row.try_get::<_, i64>(column)?)?);
    Ok(Rows { orders: number(0)?, recorded: number(1)?, applied: number(2)? })
}

/// Connects without TLS: the demo is for servers at hand.
pub(crate) async fn connect(url: &str) -> anyhow::Result<Client> {
    let (client, connection) =
        tokio_postgres::connect(url, NoTls).await.context("cannot connect to PostgreSQL (DATABASE_URL)")?;
    tokio::spawn(connection);
    Ok(client)
}

/// The demo's database on `server`, with the same user and options.
pub(crate) fn url(server: &str) -> anyhow::Result<String> {
    let (scheme, rest) = server.split_once("://").context("DATABASE_URL is no postgres:// URL")?;
    let (rest, query) = match rest.split_once('?') {
        Some((rest, query)) => (rest, format!("?{query}")),
        None => (rest, String::new()),
    };
    let authority = rest.split('/').next().unwrap_or_default();
    Ok(format!("{scheme}://{authority}/{NAME}{query}"))
}
