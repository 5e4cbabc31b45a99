//! What an error of the database leads to, by its SQLSTATE: waiting in place is in `locks` and `database`, another
//! generation there too, one row's parking in `poison`; here what halts the relay until a person has acted.

use crate::support::{Stage, eventually, full};

/// What the table's owner may have put there, and how it is undone.
const REFUSALS: [(&str, &str); 3] = [
    (
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no: %', NEW.content; END $$;
         CREATE TRIGGER refuse BEFORE UPDATE OR DELETE ON outbox_messages FOR EACH ROW EXECUTE FUNCTION refuse()",
        "DROP TRIGGER refuse ON outbox_messages",
    ),
    (
        "ALTER TABLE outbox_messages ADD CONSTRAINT refuse CHECK (processed_on_utc IS NULL) NOT VALID",
        "ALTER TABLE outbox_messages DROP CONSTRAINT refuse",
    ),
    (
        "ALTER TABLE outbox_messages RENAME processed_on_utc TO refuse",
        "ALTER TABLE outbox_messages RENAME refuse TO processed_on_utc",
    ),
];

/// C18: a table that refuses to be marked is a person's to mend: said with a remedy, never ready, the process lives, no
/// row's content in the log, and everything goes on by itself when it is mended.
async fn a_table_that_refuses_to_be_marked_is_said_until_it_is_mended(mode: &str) {
    let stage = Stage::set(mode).await;
    let mut relay = stage.config.start_running().await;
    let mut all = stage.commit(0, 10).await;
    eventually("they are recorded", async || (stage.recorded().await == 10).then_some(())).await;
    for (n, (refuse, mend)) in REFUSALS.into_iter().enumerate() {
        stage.app.batch_execute(refuse).await.unwrap();
        all.extend(stage.commit(100 + n, 1).await);
        let status = relay.wait_status("it is said", |status| status["reason"] == "schema_changed").await;
        assert!(status["remedy"].as_str().is_some_and(|remedy| remedy.len() > 10), "{refuse}: {status}");
        assert!(matches!(status["state"].as_str(), Some("failed" | "blocked")), "{refuse}: {status}");
        eventually("it is not ready", async || (relay.get("/readyz").await.status == 503).then_some(()))
            .await;
        // It looks again and again whether a person has acted, and sends nothing again to find out.
        let generation = status["generation"].as_u64().unwrap();
        relay
            .wait_status("it looks again", |status| {
                status["generation"].as_u64().is_some_and(|n| n >= generation + full(2, 5))
            })
            .await;
        stage.app.batch_execute(mend).await.unwrap();
        relay.wait_state("running").await;
        eventually("it is recorded", async || (stage.recorded().await == all.len() as i64).then_some(()))
            .await;
    }
    assert!(!relay.log().contains("no: {"), "a trigger's words may quote a row");
    relay.stop().await;
    stage.oracle.assert_nothing_lost(&all);
    stage.oracle.barrier().await;
    for (id, times) in stage.oracle.duplicates() {
        assert!(times <= 2, "{id} came {times} times: before the halt, and when it was mended");
    }
}

both_modes!(a_table_that_refuses_to_be_marked_is_said_until_it_is_mended);
