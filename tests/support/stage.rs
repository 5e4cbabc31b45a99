//! The application's side of a test: the outbox table, and writers that commit to it.

use tokio_postgres::Client;

use super::{Database, Oracle, RelayConfig, Vhost, eventually};

/// A database with the tables of `postrider migrate`, a vhost with exchange `outbox` and an oracle on everything.
pub(crate) struct Stage {
    pub(crate) config: RelayConfig,
    pub(crate) oracle: Oracle,
    pub(crate) app: Client,
    pub(crate) vhost: Vhost,
    pub(crate) database: Database,
}

impl Stage {
    /// With the relay's defaults in `mode`; migrated, nothing started.
    pub(crate) async fn set(mode: &str) -> Self {
        Self::with(mode, |config| config).await
    }

    /// With further keys set before the migration.
    pub(crate) async fn with(mode: &str, change: impl FnOnce(RelayConfig) -> RelayConfig) -> Self {
        let (database, vhost) = (Database::fresh().await, Vhost::fresh().await);
        Self::on(mode, database, vhost, change).await
    }

    /// On servers of the test's own.
    pub(crate) async fn on(
        mode: &str,
        database: Database,
        vhost: Vhost,
        change: impl FnOnce(RelayConfig) -> RelayConfig,
    ) -> Self {
        let oracle = vhost.topic_with_oracle("outbox").await;
        let config = RelayConfig::new(&database, &vhost).mode(mode).set("source.poll.interval_ms", 50);
        let config = change(config);
        config.migrate().await;
        let app = database.connect().await;
        Self { config, oracle, app, vhost, database }
    }

    /// Commits one transaction of `n` rows whose content carries their number, counting from `first`; returns their ids
    /// in the order they were written.
    pub(crate) async fn commit(&self, first: usize, n: usize) -> Vec<String> {
        commit(&self.app, first, n).await
    }

    /// Commits one transaction of `n` rows whose type is what `kind`, SQL over the row's number `g` from 0, says; returns
    /// ids and types in order.
    pub(crate) async fn write(&self, n: usize, kind: &str) -> Vec<(String, String)> {
        let sql = format!(
            "INSERT INTO outbox_messages (id, type, content, occurred_on_utc)
             SELECT gen_random_uuid(), {kind}, jsonb_build_object('n', g), clock_timestamp()
             FROM generate_series(0, $1::int8 - 1) g ORDER BY g RETURNING id::text, type"
        );
        let rows =
            self.app.query(&sql, &[&i64::try_from(n).expect("small")]).await.expect("rows are written");
        rows.iter().map(|row| (row.get(0), row.get(1))).collect()
    }

    /// The texts that `sql` asks for, sorted.
    pub(crate) async fn texts(&self, sql: &str) -> Vec<String> {
        let rows = self.app.query(sql, &[]).await.unwrap_or_else(|e| panic!("{sql}: {e}"));
        let mut texts: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
        texts.sort_unstable();
        texts
    }

    /// Commits `n` rows, counted from `first`, in transactions of `each`, as fast as they can be: on a connection of its
    /// own, on which a commit does not wait for the disk. Returns their ids in order.
    pub(crate) async fn load(&self, first: usize, n: usize, each: usize) -> Vec<String> {
        let app = self.database.connect().await;
        let last = first + n - 1;
        let sql = format!(
            "DO $$ BEGIN
                 FOR t IN {first}..{last} BY {each} LOOP
                     INSERT INTO outbox_messages (id, type, content, occurred_on_utc)
                     SELECT gen_random_uuid(), 'order.created', jsonb_build_object('n', g), clock_timestamp()
                     FROM generate_series(t, least(t + {each} - 1, {last})) g ORDER BY g;
                     COMMIT;
                 END LOOP;
             END $$"
        );
        // By themselves: a block that commits cannot be one statement of several.
        app.batch_execute("SET synchronous_commit = off").await.expect("a setting");
        app.batch_execute(&sql).await.expect("rows are written");
        let sql = "SELECT id::text FROM outbox_messages WHERE (content->>'n')::int8 BETWEEN $1 AND $2
                   ORDER BY (content->>'n')::int8";
        let bound = |n: usize| i64::try_from(n).expect("small");
        let rows = app.query(sql, &[&bound(first), &bound(last)]).await.expect("rows are read");
        rows.iter().map(|row| row.get(0)).collect()
    }

    /// A relay that is started again delivers what is left of `all`, each as it was, and nothing else.
    pub(crate) async fn a_restart_delivers(&self, all: &[String]) {
        let mut relay = self.config.start_running().await;
        self.oracle.wait_for_all(all).await;
        relay.stop().await;
        self.oracle.assert_same_again();
        self.oracle.assert_nothing_else(all);
    }

    /// Waits until every row is recorded as processed, and none waits for another attempt.
    pub(crate) async fn all_recorded(&self) {
        let left = "SELECT (SELECT count(*) FROM outbox_messages WHERE processed_on_utc IS NULL)
                         + (SELECT count(*) FROM postrider_retries)";
        eventually("everything is recorded", async || (self.number(left).await == 0).then_some(())).await;
    }

    /// One row with this type and content, as SQL text; returns its id.
    pub(crate) async fn insert(&self, kind: &str, content: &str) -> String {
        let sql = "INSERT INTO outbox_messages (id, type, content, occurred_on_utc)
                   VALUES (gen_random_uuid(), $1, $2::text::jsonb, clock_timestamp()) RETURNING id::text";
        self.app.query_one(sql, &[&kind, &content]).await.expect("a row is written").get(0)
    }

    /// How many rows are recorded as processed without an error.
    pub(crate) async fn recorded(&self) -> i64 {
        self.number(
            "SELECT count(*) FROM outbox_messages WHERE processed_on_utc IS NOT NULL AND error IS NULL",
        )
        .await
    }

    /// The one number that `sql` asks for.
    pub(crate) async fn number(&self, sql: &str) -> i64 {
        self.app.query_one(sql, &[]).await.unwrap_or_else(|e| panic!("{sql}: {e}")).get(0)
    }
}

/// Commits one transaction of `n` rows; returns their ids in order.
pub(crate) async fn commit(app: &Client, first: usize, n: usize) -> Vec<String> {
    let sql = "INSERT INTO outbox_messages (id, type, content, occurred_on_utc)
               SELECT gen_random_uuid(), 'order.created', jsonb_build_object('n', g), clock_timestamp()
               FROM generate_series($1::int8, $1::int8 + $2::int8 - 1) g ORDER BY g RETURNING id::text";
    let (first, n) = (i64::try_from(first).expect("small"), i64::try_from(n).expect("small"));
    let rows = app.query(sql, &[&first, &n]).await.expect("rows are written");
    rows.iter().map(|row| row.get(0)).collect()
}
