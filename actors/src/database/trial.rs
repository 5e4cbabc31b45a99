//! Whether rows can be marked again, found out without sending any.
//!
//! Where the table refused a recording (a trigger that raises, a constraint), what was sent is sent again once the
//! generation is rebuilt. To look by going on would send it at every look; this marks what waits and rolls back.

use tokio_postgres::{Client, types::Type};

use crate::{
    database::{from_postgres, outbox::Outbox},
    deadlines::{LOCK, STATEMENT},
    error::Result,
    settings::RowPolicy,
};

/// Marks up to `rows` of the oldest waiting rows, those that were refused among them, and takes it back.
///
/// # Errors
/// What the server has against it. The connection is inside a transaction then.
pub(crate) async fn mark(client: &Client, outbox: &Outbox, rows: u32) -> Result<()> {
    const OP: &str = "try whether rows can be marked";
    if outbox.policy == RowPolicy::Keep {
        return Ok(());
    }
    let failed = |error| from_postgres(error, OP);
    let begin = format!(
        "BEGIN; SET LOCAL lock_timeout = {}; SET LOCAL statement_timeout = {}",
        LOCK.as_millis(),
        STATEMENT.as_millis()
    );
    client.batch_execute(&begin).await.map_err(failed)?;
    client.execute_typed(&outbox.sql.trial, &[(&i64::from(rows), Type::INT8)]).await.map_err(failed)?;
    // What is deferred to the COMMIT is checked too.
    client.batch_execute("SET CONSTRAINTS ALL IMMEDIATE; ROLLBACK").await.map_err(failed)
}
