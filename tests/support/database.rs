//! A database of its own for each test.

use super::{DEADLINE, dev};
use std::time::Duration;
use tokio_postgres::{Client, NoTls};

/// A fresh, empty database; dropped, with its slots, when this value is.
#[derive(Debug)]
pub(crate) struct Database {
    server: String,
    name: String,
}

impl Database {
    /// On the shared server.
    pub(crate) async fn fresh() -> Self {
        Self::on(&dev::services().database_url).await
    }

    /// On the server of `server_url`, whatever database that names.
    pub(crate) async fn on(server_url: &str) -> Self {
        let name = super::unique().replace('-', "_");
        let admin = connect(server_url).await.unwrap_or_else(|e| panic!("{server_url}: {e}"));
        admin.batch_execute(&format!("CREATE DATABASE {name}")).await.expect("a database is created");
        Self { server: server_url.to_owned(), name }
    }

    /// Its name, which also does as a slot's: slots share one namespace a server.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn url(&self) -> String {
        with_database(&self.server, &self.name)
    }

    /// The server this database is on, through its maintenance database.
    pub(crate) fn server_url(&self) -> &str {
        &self.server
    }

    pub(crate) async fn connect(&self) -> Client {
        connect(&self.url()).await.unwrap_or_else(|e| panic!("{}: {e}", self.url()))
    }
}

/// A client whose connection runs on a task of its own.
pub(crate) async fn connect(url: &str) -> Result<Client, tokio_postgres::Error> {
    let mut config: tokio_postgres::Config = url.parse()?;
    config.connect_timeout(Duration::from_secs(10));
    let (client, connection) = config.connect(NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

fn with_database(server: &str, name: &str) -> String {
    let (address, query) = server.split_once('?').map_or((server, None), |(a, q)| (a, Some(q)));
    let (host, _) = address.rsplit_once('/').expect("a URL that names a database");
    query.map_or_else(|| format!("{host}/{name}"), |q| format!("{host}/{name}?{q}"))
}

impl Drop for Database {
    fn drop(&mut self) {
        let (server, name) = (self.server.clone(), self.name.clone());
        // a runtime of its own: the test's may be the one that drops us
        let dropped = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                tokio::time::timeout(DEADLINE, drop_database(&server, &name))
                    .await
                    .map_err(std::io::Error::other)
            })
        });
        match dropped.join() {
            Ok(Ok(Ok(()))) => {}
            Ok(Ok(Err(e))) => eprintln!("database {} was left behind: {e}", self.name),
            Ok(Err(e)) => eprintln!("database {} was left behind: {e}", self.name),
            Err(_) => eprintln!("database {} was left behind", self.name),
        }
    }
}

async fn drop_database(server: &str, name: &str) -> Result<(), tokio_postgres::Error> {
    let admin = connect(server).await?;
    // nobody comes back while the slots go
    admin.batch_execute(&format!("ALTER DATABASE {name} WITH ALLOW_CONNECTIONS false")).await?;
    loop {
        let query = "SELECT slot_name, active_pid FROM pg_replication_slots WHERE database = $1";
        let slots = admin.query(query, &[&name]).await?;
        if slots.is_empty() {
            break;
        }
        for slot in slots {
            if let Some(pid) = slot.get::<_, Option<i32>>("active_pid") {
                admin.query("SELECT pg_terminate_backend($1, 5000)", &[&pid]).await?;
            }
            // in use again or gone meanwhile: the next look tells
            let drop = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots
                        WHERE slot_name = $1::text::name AND active_pid IS NULL";
            let _ = admin.query(drop, &[&slot.get::<_, &str>("slot_name")]).await;
        }
    }
    admin.batch_execute(&format!("DROP DATABASE {name} WITH (FORCE)")).await
}
