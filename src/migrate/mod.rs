//! `postrider migrate`: what the relay needs in the database.
//!
//! postrider's own tables are versioned migrations (`migrations/`). What depends on the configuration is ensured
//! instead, step by step, each looking first: the outbox table if absent, the index on waiting rows, the
//! publication, the grants. Every step may be interrupted and repeated. Nothing of the user's is changed: no column
//! added, nothing rewritten, nothing dropped but an unfinished index of our own name.

mod ensure;
mod executor;
mod grants;
mod versioned;

use std::time::Duration;

use postrider_actors::{
    database::{self, quote_identifier},
    error::{Error, Result},
};
use tokio_postgres::{Client, types::Type};

use crate::{catalog, config::Config};
use executor::Executor;

pub use ensure::{create_index, create_publication};
pub use grants::{TABLES, on_outbox};
pub use versioned::pending;

/// How long a statement may wait for a lock. Whoever waits for a table lock makes everybody behind it wait too: an
/// application stalls this long at most, and a migrate that gave up can simply be run again.
const LOCK_TIMEOUT: &str = "5s";

/// "postride", read as a number: one migrate at a time in a database.
const ADVISORY_LOCK: i64 = 0x706f_7374_7269_6465;

/// Pause between attempts at the advisory lock. It is polled, not waited for in the server: a waiting statement holds
/// a snapshot, and `CREATE INDEX CONCURRENTLY` in the process that has the lock would wait for that snapshot.
const LOCK_POLL: Duration = Duration::from_millis(200);

/// What `migrate` was asked for.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Grant this role what the relay needs.
    pub role: Option<String>,
    /// Tell the SQL and change nothing.
    pub dry_run: bool,
}

/// What happens, told as it does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// This statement is about to run (or would).
    Statement {
        /// What it is for.
        what: String,
        /// The statement, without its semicolon.
        sql: String,
    },
    /// Another migrate is at work.
    Waiting,
    /// Something a person should know or do.
    Note(String),
}

/// Receives the events of a migration.
pub type Narrator<'a> = &'a mut (dyn FnMut(Event) + Send);

/// Brings the database to what `config` needs.
pub async fn migrate(config: &Config, options: &Options, narrate: Narrator<'_>) -> Result<()> {
    let client = database::connect_direct(&config.database_settings(), "postrider migrate").await?;
    if !options.dry_run {
        lock(&client, narrate).await?;
    }
    // Looking waits for locks too: the catalog's functions open the table they describe.
    let bounded = format!("SET lock_timeout = '{LOCK_TIMEOUT}'");
    client.batch_execute(&bounded).await.map_err(|error| failed(error, "prepare the session"))?;
    let schema = config.database.schema.as_str();
    let prologue = vec![
        bounded,
        // A limit the role has for its queries is none for building an index.
        "SET statement_timeout = 0".to_owned(),
        // The migrations name no schema; this is the only one they create in.
        format!("SET search_path TO {}, pg_catalog", quote_identifier(schema)),
    ];
    let mut executor = Executor::new(&client, options.dry_run, prologue, narrate);
    let (outbox_schema, outbox) = config.outbox_table();
    ensure::schemas(&mut executor, &[schema, outbox_schema]).await?;
    versioned::apply(&mut executor, schema).await?;
    let found =
        executor.ask("look for the outbox table", catalog::table(&client, outbox_schema, outbox)).await?;
    ensure::outbox(&mut executor, config, found.as_ref()).await?;
    ensure::index(&mut executor, config, found.as_ref()).await?;
    ensure::publication(&mut executor, config, found.as_ref()).await?;
    if let Some(role) = &options.role {
        grants::grant(&mut executor, config, role).await?;
    }
    Ok(())
}

/// Takes the advisory lock; the server gives it back when the connection ends, however it ends.
async fn lock(client: &Client, narrate: Narrator<'_>) -> Result<()> {
    let mut told = false;
    loop {
        let row = client
            .query_typed_one("select pg_try_advisory_lock($1)", &[(&ADVISORY_LOCK, Type::INT8)])
            .await
            .map_err(|error| database::from_postgres(error, "take the migration lock"))?;
        if row.get(0) {
            return Ok(());
        }
        if !std::mem::replace(&mut told, true) {
            narrate(Event::Waiting);
        }
        tokio::time::sleep(LOCK_POLL).await;
    }
}

/// Classifies a statement's failure, with a remedy that fits whoever runs migrations.
fn failed(error: tokio_postgres::Error, what: &str) -> Error {
    use tokio_postgres::error::SqlState;
    let remedy = match error.code() {
        Some(&SqlState::INSUFFICIENT_PRIVILEGE) => Some(
            "run migrate as the owner of the outbox table: POSTRIDER_DATABASE__DIRECT_URL=postgres://OWNER@… postrider migrate",
        ),
        Some(&SqlState::LOCK_NOT_AVAILABLE) => Some(
            "another transaction holds the table; end it, or run migrate again later: what is done is kept",
        ),
        _ => None,
    };
    let classified = database::from_postgres(error, format!("migrate: {what}"));
    match remedy {
        Some(remedy) => classified.with_remedy(remedy),
        None => classified,
    }
}
