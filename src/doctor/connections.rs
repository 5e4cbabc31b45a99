//! Whether PostgreSQL can be reached, for SQL, directly, and for replication.

use std::time::Duration;

use pgwire_replication::ReplicationClient;
use postrider_actors::database;
use tokio_postgres::Client;

use super::{Finding, failed};
use crate::config::{Config, SourceMode};

/// How long a connection for replication may take. As for every other connection to the database.
const DEADLINE: Duration = Duration::from_secs(10);

/// Connects in every way the relay does; returns the connection for the other examinations.
pub(super) async fn sql(config: &Config, findings: &mut Vec<Finding>) -> Option<Client> {
    let settings = config.database_settings();
    let client = match database::connect(&settings, "postrider check").await {
        Ok(client) => {
            findings.push(Finding::ok("database", format!("connected to {}", config.database.url)));
            client
        }
        Err(error) => {
            let mut finding = failed("database", &error);
            finding.message = format!("{}: {}", config.database.url, finding.message);
            if error.remedy().is_none() {
                finding.remedy = Some("start PostgreSQL, or correct database.url".to_owned());
            }
            findings.push(finding);
            return None;
        }
    };
    if config.database.direct_url.is_some() {
        findings.push(match database::connect_direct(&settings, "postrider check").await {
            Ok(_) => Finding::ok("direct_url", format!("connected to {}", config.direct_url())),
            Err(error) => failed("direct_url", &error),
        });
    }
    if config.source.mode == SourceMode::Wal {
        findings.push(replication(config).await);
    }
    Some(client)
}

/// Connects for replication and asks who is there, without touching the slot.
async fn replication(config: &Config) -> Finding {
    const SUBJECT: &str = "replication";
    let wal = &config.source.wal;
    let settings = config.database_settings();
    let replication = match database::replication_config(&settings, &wal.slot, &wal.publication, DEADLINE) {
        Ok(replication) => replication,
        Err(error) => return failed(SUBJECT, &error),
    };
    let user = replication.user.clone();
    let asked = async {
        let mut client = ReplicationClient::connect_gated(replication).await?;
        let system = client.identify_system().await;
        client.abort();
        system
    };
    let remedy = format!(
        "ALTER ROLE {} REPLICATION; and allow its host in pg_hba.conf; \
         where database.url leads through a pooler, set database.direct_url",
        database::quote_identifier(&user)
    );
    match tokio::time::timeout(DEADLINE, asked).await {
        Ok(Ok(system)) => {
            Finding::ok(SUBJECT, format!("system {}, timeline {}", system.system_id, system.timeline))
        }
        Ok(Err(error)) => {
            let message = format!("cannot connect for replication: {error}");
            // pgwire-replication 0.5 checks the name with verify-ca too, where rustls names the mismatch in detail.
            let named = message.contains("not valid for name");
            let certificate = "name the host in database.direct_url as the server's certificate does";
            Finding::fail(SUBJECT, message, if named { certificate.to_owned() } else { remedy })
        }
        Err(_) => Finding::fail(SUBJECT, "no answer within 10 s", remedy),
    }
}
