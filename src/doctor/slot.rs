//! The replication slot, which `run` creates: whether it is ours to use and still holds what it must.

use postrider_actors::database::quote_literal;
use tokio_postgres::types::Type;

use super::{Finding, Patient};
use crate::config::SourceMode;

const SUBJECT: &str = "slot";

struct Slot {
    kind: String,
    plugin: Option<String>,
    database: Option<String>,
    active: bool,
    wal_status: Option<String>,
    here: String,
    retained: Option<String>,
}

pub(super) async fn examine(patient: &Patient<'_>) -> Result<Vec<Finding>, tokio_postgres::Error> {
    let name = patient.config.source.wal.slot.as_str();
    let statement = "select slot_type::text, plugin::text, database::text, active, wal_status::text,
            current_database()::text,
            case when pg_is_in_recovery() then null
                 else pg_size_pretty(pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)) end
        from pg_replication_slots where slot_name = $1";
    let row = patient.client.query_typed_opt(statement, &[(&name, Type::TEXT)]).await?;
    let slot = row.map(|row| Slot {
        kind: row.get(0),
        plugin: row.get(1),
        database: row.get(2),
        active: row.get(3),
        wal_status: row.get(4),
        here: row.get(5),
        retained: row.get(6),
    });
    Ok(match (patient.config.source.mode, slot) {
        (SourceMode::Wal, None) => {
            vec![Finding::ok(SUBJECT, format!("{name} is not there yet; `postrider run` creates it"))]
        }
        (SourceMode::Wal, Some(slot)) => judge(name, &slot),
        // Nobody reads it in poll mode, and it keeps WAL for ever.
        (SourceMode::Poll, Some(slot)) if !slot.active => {
            let retained = slot.retained.unwrap_or_else(|| "WAL".to_owned());
            let message = format!("{name} exists and nobody reads it in poll mode; it retains {retained}");
            vec![Finding::warn(SUBJECT, message, drop(name))]
        }
        (SourceMode::Poll, _) => Vec::new(),
    })
}

fn drop(name: &str) -> String {
    format!("SELECT pg_drop_replication_slot({});", quote_literal(name))
}

fn judge(name: &str, slot: &Slot) -> Vec<Finding> {
    let other = "or name another in source.wal.slot";
    if slot.kind != "logical" || slot.plugin.as_deref() != Some("pgoutput") {
        let plugin = slot.plugin.as_deref().unwrap_or(slot.kind.as_str());
        let message = format!("{name} is a slot of {plugin}, needed: pgoutput");
        return vec![Finding::fail(SUBJECT, message, format!("{} {other}", drop(name)))];
    }
    if slot.database.as_deref() != Some(slot.here.as_str()) {
        let database = slot.database.as_deref().unwrap_or_default();
        let message = format!("{name} belongs to database {database}, needed: {}", slot.here);
        return vec![Finding::fail(SUBJECT, message, other.trim_start_matches("or ").to_owned())];
    }
    let retained = slot.retained.as_deref().unwrap_or("unknown");
    match slot.wal_status.as_deref() {
        Some("lost") => {
            let remedy =
                format!("postrider run with source.wal.on_lost_slot = \"recover\", after {}", drop(name));
            return vec![Finding::fail(
                SUBJECT,
                format!("{name} is lost: the server removed WAL it needed"),
                remedy,
            )];
        }
        Some("unreserved") => {
            let message =
                format!("{name} is about to be lost: it retains {retained}, more than the server keeps");
            let remedy = "start the relay now, or ALTER SYSTEM SET max_slot_wal_keep_size = -1; SELECT pg_reload_conf();";
            return vec![Finding::warn(SUBJECT, message, remedy)];
        }
        _ => {}
    }
    let reader = if slot.active { "a relay reads it" } else { "nobody reads it" };
    vec![Finding::ok(SUBJECT, format!("{name}: {reader}, it retains {retained}"))]
}

#[cfg(test)]
mod tests {
    use super::{super::Verdict, *};

    fn slot() -> Slot {
        Slot {
            kind: "logical".into(),
            plugin: Some("pgoutput".into()),
            database: Some("orders".into()),
            active: false,
            wal_status: Some("reserved".into()),
            here: "orders".into(),
            retained: Some("16 MB".into()),
        }
    }

    #[test]
    fn a_slot_of_ours_is_fine_and_says_what_it_retains() {
        let findings = judge("postrider", &slot());
        assert_eq!(findings, [Finding::ok("slot", "postrider: nobody reads it, it retains 16 MB")]);
    }

    #[test]
    fn a_slot_of_another_plugin_or_database_or_a_lost_one_fails_with_the_statement() {
        for bad in [
            Slot { plugin: Some("test_decoding".into()), ..slot() },
            Slot { kind: "physical".into(), plugin: None, ..slot() },
            Slot { wal_status: Some("lost".into()), ..slot() },
        ] {
            let findings = judge("postrider", &bad);
            assert_eq!(findings[0].verdict, Verdict::Fail);
            assert!(findings[0].remedy.as_deref().unwrap().contains("pg_drop_replication_slot('postrider')"));
        }
        assert_eq!(
            judge("postrider", &Slot { database: Some("x".into()), ..slot() })[0].verdict,
            Verdict::Fail
        );
    }
}
