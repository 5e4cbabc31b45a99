//! `postrider check`: examines database, broker and configuration, and names the statement that mends each finding.
//!
//! Nothing is changed and no slot is taken, so it may run beside a working relay. Each examination is one function
//! from a `Patient` to findings; what the catalog says is read by [`crate::catalog`].

mod broker;
mod columns;
mod connections;
mod finding;
mod indexes;
mod privileges;
mod publication;
mod server;
mod slot;
mod triggers;

use std::time::Duration;

use postrider_actors::{database, error::Error};
use tokio_postgres::Client;

use crate::{
    catalog::{self, Table},
    config::{Config, SourceMode},
};

pub(crate) use broker::tls as broker_tls;
pub use finding::{Finding, Verdict, human, json, passed};

/// How long one examination may take. Each is a few catalog queries; only a lock makes them wait.
const DEADLINE: Duration = Duration::from_secs(5);

/// What every examination may look at.
struct Patient<'a> {
    config: &'a Config,
    client: &'a Client,
    /// The outbox table, if it is one.
    table: Option<Table>,
}

impl Patient<'_> {
    fn streams(&self) -> bool {
        self.config.source.mode == SourceMode::Wal
    }
}

/// Examines everything `config` names.
pub async fn examine(config: &Config) -> Vec<Finding> {
    let mut findings = Vec::new();
    match connections::sql(config, &mut findings).await {
        Some(client) => database(config, &client, &mut findings).await,
        None => findings.push(unanswered("database", "its other checks need a connection")),
    }
    findings.extend(broker::examine(config).await);
    findings
}

async fn database(config: &Config, client: &Client, findings: &mut Vec<Finding>) {
    let (schema, name) = config.outbox_table();
    let table = match catalog::table(client, schema, name).await {
        Ok(table) => table,
        Err(error) => return findings.push(broken("table", error)),
    };
    let patient = Patient { config, client, table };
    findings.extend(within("server", server::examine(&patient)).await);
    findings.extend(within("privileges", privileges::examine(&patient)).await);
    findings.extend(columns::examine(&patient));
    findings.extend(within("migrations", privileges::migrations(&patient)).await);
    findings.extend(within("index", indexes::examine(&patient)).await);
    findings.extend(within("publication", publication::examine(&patient)).await);
    findings.extend(within("slot", slot::examine(&patient)).await);
    findings.extend(within("trigger", triggers::examine(&patient)).await);
}

/// One examination, which ends: the catalog's functions wait for whoever holds a lock on the table they describe.
async fn within(
    subject: &'static str,
    examination: impl Future<Output = Result<Vec<Finding>, tokio_postgres::Error>>,
) -> Vec<Finding> {
    match tokio::time::timeout(DEADLINE, examination).await {
        Ok(Ok(findings)) => findings,
        Ok(Err(error)) => vec![broken(subject, error)],
        Err(_) => {
            let message =
                format!("no answer within {} s; the outbox table may be locked", DEADLINE.as_secs());
            let remedy = "SELECT pid, query FROM pg_stat_activity WHERE pid IN \
                          (SELECT pid FROM pg_locks WHERE granted AND mode = 'AccessExclusiveLock');";
            vec![Finding::fail(subject, message, remedy)]
        }
    }
}

/// An examination whose query failed.
fn broken(subject: &'static str, error: tokio_postgres::Error) -> Finding {
    failed(subject, &database::from_postgres(error, "examine the database"))
}

fn failed(subject: &'static str, error: &Error) -> Finding {
    Finding::fail(subject, error.chain(), error.remedy().unwrap_or("mend the cause and check again"))
}

fn unanswered(subject: &'static str, why: &str) -> Finding {
    Finding::warn(subject, format!("not examined: {why}"), "mend the failure above and check again")
}
