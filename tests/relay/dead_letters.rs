//! Rejected rows in an operator's hands: looked at, published again, given up, by command line and over HTTP.

use serde_json::{Value, json};

use crate::support::{RelayConfig, Stage, eventually};

const PARKED: &str = "SELECT count(*) FROM postrider_dead_letters";
const RETRYING: &str = "SELECT count(*) FROM postrider_retries";

/// An outbox with ids of this type; a row that is not routed is parked at once.
async fn stage(mode: &str, rows: &str, id_type: &str) -> Stage {
    let stage = Stage::with(mode, |config| {
        let config = config.set("publish.max_attempts", 1).set("ack.rows", rows);
        if rows == "keep" { config.set("source.wal.first_start", "stream") } else { config }
    })
    .await;
    let retype = format!("ALTER TABLE outbox_messages ALTER id TYPE {id_type} USING NULL");
    stage.app.batch_execute(&retype).await.unwrap();
    stage.vhost.unbind("all", "outbox", "#").await;
    stage
}

async fn insert(stage: &Stage, id: &str, id_type: &str, kind: &str) {
    let sql = format!(
        "INSERT INTO outbox_messages (id, type, content, occurred_on_utc)
         VALUES ($1::text::{id_type}, $2, '{{\"a\": 1.10}}', now())"
    );
    stage.app.execute(&sql, &[&id, &kind]).await.unwrap();
}

async fn parked(stage: &Stage, n: i64) {
    eventually(&format!("{n} are parked"), async || (stage.number(PARKED).await == n).then_some(())).await;
}

/// Runs a command that must succeed, and reads its JSON.
async fn ask(config: &RelayConfig, args: &[&str]) -> Value {
    let ran = config.run(&[&["dead-letters"], args, &["--json"]].concat()).await;
    assert_eq!(ran.code, Some(0), "{ran:?}");
    serde_json::from_str(&ran.stdout).unwrap_or_else(|error| panic!("{error}: {ran:?}"))
}

fn ids(list: &Value) -> Vec<&str> {
    list["dead_letters"].as_array().unwrap().iter().map(|row| row["id"].as_str().unwrap()).collect()
}

/// Everything but the relay's work is done while no relay runs.
async fn a_parked_row_is_listed_shown_requeued_and_delivered(
    mode: &str,
    rows: &str,
    id_type: &str,
    id: [&str; 3],
) {
    let stage = stage(mode, rows, id_type).await;
    let config = &stage.config;
    let mut relay = config.start_running().await;
    for (n, id) in id.iter().enumerate() {
        insert(&stage, id, id_type, if n == 2 { "late" } else { "early" }).await;
        parked(&stage, n as i64 + 1).await;
    }
    relay.stop().await;

    let list = ask(config, &["list"]).await;
    assert_eq!(ids(&list), [id[2], id[1], id[0]], "newest first: {list}");
    let row = &list["dead_letters"][0];
    assert_eq!(
        (&row["reason"], &row["attempts"], &row["type"]),
        (&json!("unroutable"), &json!(1), &json!("late"))
    );
    assert!(row["detail"].as_str().unwrap().contains("312"), "the broker's words: {row}");
    let page = ask(config, &["list", "--limit", "2"]).await;
    assert_eq!(ids(&page), [id[2], id[1]]);
    let cursor = page["next_cursor"].to_string();
    assert_eq!(ids(&ask(config, &["list", "--limit", "2", "--cursor", &cursor]).await), [id[0]]);
    assert_eq!(ids(&ask(config, &["list", "--type", "early", "--from", "1h"]).await), [id[1], id[0]]);
    assert!(ids(&ask(config, &["list", "--reason", "nacked"]).await).is_empty());
    assert!(ids(&ask(config, &["list", "--to", "1h"]).await).is_empty());
    let shown = ask(config, &["show", id[0]]).await;
    assert_eq!((&shown[0]["state"], &shown[0]["content"]), (&json!("parked"), &json!("{\"a\": 1.10}")));
    let human = config.run(&["dead-letters", "list"]).await;
    assert!(human.stdout.starts_with("PARKED") && human.stdout.contains(id[0]), "{human:?}");

    // The first is requeued with its row gone, the second with it; the third stays.
    stage.app.execute("DELETE FROM outbox_messages WHERE id::text = $1", &[&id[0]]).await.unwrap();
    let done = ask(config, &["requeue", id[0], id[1]]).await;
    assert_eq!(done["requeued"], 2);
    assert_eq!((stage.number(PARKED).await, stage.number(RETRYING).await), (1, 2), "never nowhere");
    let waits = stage
        .number("SELECT count(*) FROM outbox_messages WHERE processed_on_utc IS NULL AND error IS NOT NULL");
    assert_eq!(waits.await, i64::from(rows != "keep"), "its row waits for retry again");
    let retrying = ask(config, &["list", "--retrying"]).await;
    assert_eq!(retrying["retries"].as_array().unwrap().len(), 2, "{retrying}");
    assert!(retrying["retries"][0]["next_attempt_at"].is_string(), "{retrying}");

    stage.vhost.bind("all", "outbox", "#").await;
    let mut relay = config.start_running().await;
    stage.oracle.wait_for_all(&id[..2]).await;
    assert_eq!(stage.oracle.get(id[0]).unwrap().body, b"{\"a\": 1.10}", "byte for byte");
    eventually("both are recorded", async || (stage.number(RETRYING).await == 0).then_some(())).await;
    relay.stop().await;
    stage.oracle.barrier().await;
    stage.oracle.assert_nothing_else(&id[..2]);
    stage.oracle.assert_no_duplicates();
    assert_eq!(stage.number(PARKED).await, 1);
    assert_eq!(
        stage.recorded().await,
        i64::from(rows == "update"),
        "the one whose row is there and is marked"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parked_rows_are_moved_in_both_modes_with_ids_of_every_type_and_every_way_to_record() {
    let uuids = [
        "0b8f3f6e-6f63-4d0e-9d6b-3a7f0b1c2d3e",
        "1b8f3f6e-6f63-4d0e-9d6b-3a7f0b1c2d3e",
        "2b8f3f6e-6f63-4d0e-9d6b-3a7f0b1c2d3e",
    ];
    let texts = ["order 1/ä", "it's", "{x}"];
    for (mode, rows, id_type, id) in [
        ("wal", "update", "uuid", uuids),
        ("wal", "keep", "text", texts),
        ("poll", "update", "bigint", ["7", "-8", "9000000000"]),
        ("poll", "delete", "text", texts),
    ] {
        a_parked_row_is_listed_shown_requeued_and_delivered(mode, rows, id_type, id).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_moved_is_named_and_nothing_is() {
    let stage = stage("poll", "update", "bigint").await;
    let config = &stage.config;
    let mut relay = config.start_running().await;
    for id in ["1", "2", "3"] {
        insert(&stage, id, "bigint", "t").await;
    }
    parked(&stage, 3).await;
    relay.stop().await;
    for (args, code, said) in [
        (&["requeue", "1", "44"][..], 1, "not waiting there: 44"),
        (&["discard", "--yes", "1", "44"], 1, "not waiting there: 44"),
        (&["show", "44"], 1, "44"),
        (&["requeue", "1", "x"], 2, "\"x\" is no id of this outbox: its ids are whole numbers"),
        (&["requeue"], 2, "<ID"),
        (&["requeue", "1", "--all"], 2, "cannot be used with"),
        (&["requeue", "1", "--dry-run"], 2, "cannot be used with"),
        (&["requeue", "--all", "--reason", "nack"], 2, "unroutable, nacked"),
        (&["list", "--from", "noon"], 2, "is no time"),
        (&["list", "--limit", "0"], 2, "limit must be from 1"),
        (&["discard", "1"], 2, "add --yes"),
        (&["discard", "--all"], 2, "add --yes"),
    ] {
        let ran = config.run(&[&["dead-letters"], args].concat()).await;
        assert_eq!(ran.code, Some(code), "{args:?}: {ran:?}");
        assert!(ran.stderr.contains(said), "{args:?}: {ran:?}");
    }
    assert_eq!(
        ask(config, &["requeue", "--all", "--dry-run"]).await,
        json!({"requeued": 3, "dry_run": true})
    );
    assert_eq!(stage.number(PARKED).await, 3, "nothing was moved by any of these");
    let ran = config.run(&["dead-letters", "discard", "--all", "--type", "t", "--yes"]).await;
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "3 discarded\n"), "{ran:?}");
    assert!(
        ran.stderr.contains("dead letters discarded") && ran.stderr.contains("count=3"),
        "an audit line: {ran:?}"
    );
    assert_eq!((stage.number(PARKED).await, stage.number(RETRYING).await), (0, 0));
    let ended =
        "SELECT count(*) FROM outbox_messages WHERE processed_on_utc IS NOT NULL AND error IS NOT NULL";
    assert_eq!(stage.number(ended).await, 3, "the rows themselves say that they were never delivered");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_api_lists_and_moves_and_a_readers_token_only_looks() {
    let stage = stage("poll", "update", "bigint").await;
    let folder = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let file = |name: &str, token: &str| {
        let path = folder.join(format!("{}-{name}", stage.database.name()));
        std::fs::write(&path, token).unwrap();
        path.display().to_string()
    };
    let open = stage.config.clone();
    let guarded = open
        .clone()
        .set("admin.token_file", file("operator", "op"))
        .set("admin.read_token_file", file("reader", "read"));
    let mut relay = open.start_running().await;
    for n in 0..450 {
        insert(&stage, &n.to_string(), "bigint", if n < 5 { "few" } else { "many" }).await;
    }
    parked(&stage, 450).await;

    let list = relay.get("/api/dead-letters?type=few&limit=3").await.json();
    assert_eq!(ids(&list).len(), 3);
    let path = format!("/api/dead-letters?type=few&limit=3&cursor={}", list["next_cursor"]);
    let rest = relay.get(&path).await.json();
    assert_eq!((ids(&rest).len(), &rest["next_cursor"]), (2, &Value::Null));
    assert_eq!(relay.get("/api/dead-letters/7").await.json()[0]["content"], "{\"a\": 1.10}");
    for (path, status) in [
        ("/api/dead-letters?reason=none", 400),
        ("/api/dead-letters?limit=x", 400),
        ("/api/dead-letters?offset=1", 400),
        ("/api/dead-letters/x", 400),
        ("/api/dead-letters/99999", 404),
    ] {
        let answer = relay.get(path).await;
        assert_eq!(answer.status, status, "{path}: {answer:?}");
        assert!(answer.json()["detail"].is_string(), "{answer:?}");
    }
    let discarded =
        relay.post_json("/api/dead-letters/discard", Some(json!({"all": true, "type": "few"}))).await;
    assert_eq!(discarded.json(), json!({"discarded": 5, "dry_run": false}));
    assert!(relay.log().contains("dead letters discarded"), "an audit line");
    for (body, status) in [
        (json!({"ids": [7, "1"]}), 404),
        (json!({"ids": ["x"]}), 400),
        (json!({"ids": []}), 400),
        (json!({}), 400),
        (json!({"all": true, "tpye": "few"}), 400),
    ] {
        let answer = relay.post_json("/api/dead-letters/requeue", Some(body.clone())).await;
        assert_eq!(answer.status, status, "{body}: {answer:?}");
    }
    assert_eq!(stage.number(PARKED).await, 445);
    stage.vhost.bind("all", "outbox", "#").await;
    let one = relay.post_json("/api/dead-letters/requeue", Some(json!({"ids": [7]}))).await;
    assert_eq!(one.json(), json!({"requeued": 1, "dry_run": false}));
    let all = relay.post_json("/api/dead-letters/requeue", Some(json!({"all": true}))).await;
    assert_eq!(all.json(), json!({"requeued": 444, "dry_run": false}));
    stage.oracle.wait_for_all(&(5..450).collect::<Vec<_>>()).await;
    eventually("all are recorded", async || (stage.number(RETRYING).await == 0).then_some(())).await;
    assert_eq!(relay.get("/api/retries").await.json()["retries"], json!([]));
    let counts = relay.wait_status("counts", |status| status["waiting"]["dead_letters"] == 0).await;
    assert_eq!(counts["waiting"]["retries"], 0);
    relay.stop().await;
    stage.oracle.assert_no_duplicates();

    let mut relay = guarded.start();
    eventually("it answers", async || relay.try_get("/livez").await.ok()).await;
    assert_eq!(relay.get("/api/dead-letters").await.status, 401);
    let ask = |method: &str, path: &str, token: &str| {
        let request = ureq::http::Request::builder()
            .method(method)
            .uri(relay.admin(path))
            .header("authorization", format!("Bearer {token}"))
            .body("{\"all\": true}".to_owned())
            .unwrap();
        let config =
            ureq::Agent::config_builder().http_status_as_error(false).allow_non_standard_methods(true);
        ureq::Agent::from(config.build()).run(request).unwrap().status().as_u16()
    };
    assert_eq!(ask("GET", "/api/dead-letters", "read"), 200);
    assert_eq!(ask("GET", "/api/retries", "read"), 200);
    assert_eq!(ask("POST", "/api/dead-letters/discard", "read"), 401);
    assert_eq!(ask("POST", "/api/dead-letters/requeue", "op"), 200);
    relay.kill9();
}

/// Wherever a KILL falls, a requeued row is in exactly one table, and what is rejected again is parked again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_requeued_row_is_never_nowhere_and_is_parked_again_where_nothing_was_mended() {
    for mode in ["wal", "poll"] {
        let stage = stage(mode, "update", "bigint").await;
        let mut relay = stage.config.start_running().await;
        for n in 0..50 {
            insert(&stage, &n.to_string(), "bigint", "t").await;
        }
        parked(&stage, 50).await;
        for round in 0..5_u64 {
            assert_eq!(ask(&stage.config, &["requeue", "--all"]).await["requeued"], 50);
            tokio::time::sleep(std::time::Duration::from_millis(150 * round)).await;
            relay.kill9();
            let (parked, retrying) = (stage.number(PARKED).await, stage.number(RETRYING).await);
            assert_eq!(parked + retrying, 50, "round {round}: {parked} parked, {retrying} waiting");
            relay = stage.config.start_running().await;
            self::parked(&stage, 50).await;
        }
        let ids = "SELECT count(DISTINCT message_id) FROM postrider_dead_letters";
        assert_eq!(stage.number(ids).await, 50);
        let both = "SELECT count(*) FROM outbox_messages WHERE processed_on_utc IS NOT NULL AND error LIKE 'unroutable: 312%'";
        assert_eq!(stage.number(both).await, 50);
        relay.stop().await;
        assert_eq!(stage.oracle.count(), 0);
    }
}
