//! Requeueing and discarding. Each step is one statement, so it is done whole or not at all, and a caller that goes away
//! leaves no open transaction on a pooled connection.

use deadpool_postgres::Pool;
use tokio_postgres::{Client, types::Type};

use super::{
    Filter, Moved, Selection,
    look::{PARKED, Parameters, condition},
};
use crate::{
    database::{
        from_postgres,
        outbox::{COPIED, Outbox},
        pool,
    },
    error::Result,
    settings::RowPolicy,
};

/// So many dead letters are moved by one statement: with bodies of a megabyte still well within its time.
const STEP: i64 = 200;

/// How many dead letters a filter lets through.
///
/// # Errors
/// As the server's errors are classified.
pub async fn count(client: &Client, outbox: &Outbox, filter: &Filter) -> Result<u64> {
    let sql =
        format!("SELECT count(*) FROM {} AS d WHERE {}", outbox.sql.dead_letters_table, condition(PARKED));
    let filter = Parameters::of(filter);
    let row = client.query_typed_one(&sql, &filter.typed()).await;
    let count: i64 =
        row.and_then(|row| row.try_get(0)).map_err(|error| from_postgres(error, "count dead letters"))?;
    Ok(count.unsigned_abs())
}

/// Has dead letters published again: moves them into the retries, due at once. Each begins a new round of attempts, of
/// which the last one before counts as the first.
///
/// # Errors
/// As the server's errors are classified. What was moved by then stays moved.
pub async fn requeue(pool: &Pool, outbox: &Outbox, selection: &Selection) -> Result<Moved> {
    let retries = &outbox.sql.retries_table;
    let back = format!(
        ", back AS (INSERT INTO {retries} ({COPIED}, attempts, reason, detail, first_failed_at, last_failed_at, \
         next_attempt_at) SELECT {COPIED}, 1, reason, detail, first_failed_at, last_failed_at, clock_timestamp() \
         FROM gone ORDER BY seq)"
    );
    // A kept row is never written to.
    let told = match outbox.policy {
        RowPolicy::Keep => "",
        RowPolicy::Update | RowPolicy::Delete => &outbox.sql.unpark,
    };
    moved(pool, outbox, selection, &format!("{back}{told}"), "requeue dead letters").await
}

/// Gives dead letters up: they are deleted. Their outbox rows stay as they are, processed with an error.
///
/// # Errors
/// As the server's errors are classified. What was deleted by then stays deleted.
pub async fn discard(pool: &Pool, outbox: &Outbox, selection: &Selection) -> Result<Moved> {
    moved(pool, outbox, selection, "", "discard dead letters").await
}

/// Deletes what is selected from the dead letters and does `then` with it, which sees it as `gone`.
async fn moved(
    pool: &Pool,
    outbox: &Outbox,
    selection: &Selection,
    then: &str,
    op: &'static str,
) -> Result<Moved> {
    match selection {
        Selection::Ids(ids) => {
            pool::ask(pool, op, async |client| by_id(client, outbox, ids, then, op).await).await
        }
        Selection::All(filter) => all(pool, outbox, filter, then, op).await,
    }
}

async fn by_id(
    client: &Client,
    outbox: &Outbox,
    ids: &[String],
    then: &str,
    op: &'static str,
) -> Result<Moved> {
    let dead = &outbox.sql.dead_letters_table;
    let sql = format!(
        "WITH asked AS MATERIALIZED (SELECT DISTINCT v.id FROM unnest($1::text[]) AS v(id)), \
         found AS MATERIALIZED (SELECT d.seq, d.message_id FROM asked JOIN {dead} AS d \
         ON hashtextextended(d.message_id, 0) = hashtextextended(asked.id, 0) AND d.message_id = asked.id \
         ORDER BY d.seq FOR UPDATE OF d), \
         missing AS MATERIALIZED (SELECT id FROM asked EXCEPT SELECT message_id FROM found), \
         gone AS (DELETE FROM {dead} AS d USING found WHERE d.seq = found.seq \
         AND NOT EXISTS (SELECT FROM missing) RETURNING d.*){then} \
         SELECT (SELECT count(*) FROM gone), ARRAY(SELECT id FROM missing ORDER BY id)"
    );
    let failed = |error| from_postgres(error, op);
    let row = client.query_typed_one(&sql, &[(&ids, Type::TEXT_ARRAY)]).await.map_err(failed)?;
    let missing: Vec<String> = row.try_get(1).map_err(failed)?;
    if !missing.is_empty() {
        return Ok(Moved::NotParked(missing));
    }
    Ok(Moved::Done(row.try_get::<_, i64>(0).map_err(failed)?.unsigned_abs()))
}

async fn all(pool: &Pool, outbox: &Outbox, filter: &Filter, then: &str, op: &'static str) -> Result<Moved> {
    let failed = |error| from_postgres(error, op);
    let dead = &outbox.sql.dead_letters_table;
    let newest = format!("SELECT max(seq) FROM {dead}");
    // What is parked meanwhile, a requeued one that was rejected again among it, is not of this move.
    let newest: Option<i64> = pool::ask(pool, op, async |client| {
        client.query_typed_one(&newest, &[]).await.and_then(|row| row.try_get(0)).map_err(failed)
    })
    .await?;
    let Some(newest) = newest else { return Ok(Moved::Done(0)) };
    let sql = format!(
        "WITH found AS MATERIALIZED (SELECT d.seq FROM {dead} AS d WHERE {} AND d.seq > $5 AND d.seq <= $6 \
         ORDER BY d.seq LIMIT $7 FOR UPDATE), \
         gone AS (DELETE FROM {dead} AS d USING found WHERE d.seq = found.seq RETURNING d.*){then} \
         SELECT (SELECT count(*) FROM gone), (SELECT max(seq) FROM found)",
        condition(PARKED)
    );
    let filter = Parameters::of(filter);
    let (mut done, mut reached) = (0, i64::MIN);
    loop {
        let mut parameters = filter.typed().to_vec();
        parameters.extend([
            (&reached as _, Type::INT8),
            (&newest as _, Type::INT8),
            (&STEP as _, Type::INT8),
        ]);
        let (moved, last): (i64, Option<i64>) = pool::ask(pool, op, async |client| {
            let row = client.query_typed_one(&sql, &parameters).await.map_err(failed)?;
            Ok((row.try_get(0).map_err(failed)?, row.try_get(1).map_err(failed)?))
        })
        .await?;
        done += moved.unsigned_abs();
        match last {
            Some(last) => reached = last,
            None => return Ok(Moved::Done(done)),
        }
    }
}
