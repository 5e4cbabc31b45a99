//! The server's version and settings.

use tokio_postgres::types::Type;

use super::{Finding, Patient};

/// The oldest server tests run against. 15 brought publications with row filters and `pg_publication_tables.attnames`.
const OLDEST: i32 = 150_000;

pub(super) async fn examine(patient: &Patient<'_>) -> Result<Vec<Finding>, tokio_postgres::Error> {
    let mut findings = vec![version(patient).await?, writable(patient).await?];
    if patient.streams() {
        findings.extend(streaming(patient).await?);
    }
    Ok(findings)
}

async fn setting(patient: &Patient<'_>, name: &str) -> Result<Option<String>, tokio_postgres::Error> {
    let row =
        patient.client.query_typed_one("select current_setting($1, true)", &[(&name, Type::TEXT)]).await?;
    Ok(row.get(0))
}

async fn version(patient: &Patient<'_>) -> Result<Finding, tokio_postgres::Error> {
    let number =
        setting(patient, "server_version_num").await?.and_then(|text| text.parse().ok()).unwrap_or(0);
    let version = setting(patient, "server_version").await?.unwrap_or_default();
    Ok(if number >= OLDEST {
        Finding::ok("version", format!("PostgreSQL {version}"))
    } else {
        Finding::fail(
            "version",
            format!("PostgreSQL {version}, supported: 15 and later"),
            "upgrade the server",
        )
    })
}

async fn writable(patient: &Patient<'_>) -> Result<Finding, tokio_postgres::Error> {
    let row = patient.client.query_typed_one("select pg_is_in_recovery()", &[]).await?;
    if row.get(0) {
        let remedy = "name the primary in database.url (several hosts: add target_session_attrs=read-write)";
        return Ok(Finding::fail("writable", "this server is a standby", remedy));
    }
    let default = setting(patient, "default_transaction_read_only").await?;
    Ok(if default.as_deref() == Some("on") {
        let remedy = "ALTER ROLE CURRENT_USER SET default_transaction_read_only = off;";
        Finding::fail("writable", "transactions of this role are read-only by default", remedy)
    } else {
        Finding::ok("writable", "takes writes")
    })
}

async fn streaming(patient: &Patient<'_>) -> Result<Vec<Finding>, tokio_postgres::Error> {
    let mut findings = Vec::new();
    let level = setting(patient, "wal_level").await?.unwrap_or_default();
    findings.push(if level == "logical" {
        Finding::ok("wal_level", "logical")
    } else {
        let remedy =
            "ALTER SYSTEM SET wal_level = 'logical'; then restart PostgreSQL (or use source.mode = \"poll\")";
        Finding::fail("wal_level", format!("found {level}, needed: logical"), remedy)
    });

    let slot = patient.config.source.wal.slot.as_str();
    let statement =
        "select current_setting('max_replication_slots')::int, (select count(*) from pg_replication_slots),
            exists (select from pg_replication_slots where slot_name = $1),
            current_setting('max_wal_senders')::int, (select count(*) from pg_stat_replication)";
    let row = patient.client.query_typed_one(statement, &[(&slot, Type::TEXT)]).await?;
    let (slots, used, ours): (i32, i64, bool) = (row.get(0), row.get(1), row.get(2));
    let free = i64::from(slots) - used;
    findings.push(if ours || free > 0 {
        Finding::ok("slots", format!("{used} of {slots} used"))
    } else {
        let remedy =
            format!("ALTER SYSTEM SET max_replication_slots = {}; then restart PostgreSQL", slots + 5);
        Finding::fail("slots", format!("all {slots} replication slots are used"), remedy)
    });
    let (senders, busy): (i32, i64) = (row.get(3), row.get(4));
    findings.push(if i64::from(senders) > busy {
        Finding::ok("senders", format!("{busy} of {senders} used"))
    } else {
        let remedy = format!("ALTER SYSTEM SET max_wal_senders = {}; then restart PostgreSQL", senders + 5);
        Finding::fail("senders", format!("all {senders} walsenders are used"), remedy)
    });

    let standbys = setting(patient, "synchronous_standby_names").await?.unwrap_or_default();
    if standbys.contains('*') {
        let remedy = "ALTER SYSTEM SET synchronous_standby_names = 'NAME'; SELECT pg_reload_conf(); with your standby's name";
        let message =
            "synchronous_standby_names has *, which counts the relay: commits would wait for the broker";
        findings.push(Finding::warn("standbys", message, remedy));
    }
    // Only newer minor releases have it; absent means every plugin is allowed.
    if let Some(allowed) = setting(patient, "output_plugin_libraries").await?
        && !allowed.is_empty()
        && !allowed
            .split(',')
            .any(|plugin| matches!(plugin.trim().trim_matches(['"', '\'']), "pgoutput" | "*"))
    {
        let remedy = "add pgoutput: ALTER SYSTEM SET output_plugin_libraries = '…, pgoutput'; SELECT pg_reload_conf();";
        findings.push(Finding::fail("plugins", format!("output_plugin_libraries is {allowed}"), remedy));
    }
    Ok(findings)
}
