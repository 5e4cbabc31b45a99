//! Everything a poll source does, behind a pooler that gives each transaction another session.

mod support;

use std::{
    net::TcpListener,
    process::{Child, Command, Stdio},
    sync::atomic::Ordering,
    time::Duration,
};

use actix::Actor;
use postrider_actors::{
    envelope::{Reason, Verdict},
    metrics::Stage,
    pipeline::exit::ExitGuard,
    source::claims::ClaimSource,
};
use support::{Database, rejected, sink, until};
use tokio_postgres::{Config, config::Host};

/// A private pgbouncer in transaction mode before one database; killed with the value.
struct Pooler(Child, std::path::PathBuf);

impl Pooler {
    /// With fewer server connections than the source has clients, so that they do share them.
    fn start(database: &Database) -> (Self, String) {
        let server = connection_of(&database.settings.database.direct_url);
        let port = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("bound").port();
        let directory = std::env::temp_dir().join(&database.name);
        std::fs::create_dir_all(&directory).expect("a directory");
        let file = directory.join("pgbouncer.ini");
        let settings = format!(
            "[databases]\n* = {server}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
             unix_socket_dir =\nauth_type = any\npool_mode = transaction\ndefault_pool_size = 4\nmax_client_conn = 100\n"
        );
        std::fs::write(&file, settings).expect("a file");
        let mut command = Command::new("pgbouncer");
        // It refuses to run as root.
        let id = Command::new("id").arg("-u").output().expect("id");
        if id.stdout == b"0\n" {
            command.args(["-u", "nobody"]);
        }
        let child = command.arg(&file).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let child = child.expect("pgbouncer is installed (./dev up installs it)");
        (Self(child, directory), format!("postgres://postgres@127.0.0.1:{port}/{}", database.name))
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        let _ = std::fs::remove_dir_all(&self.1);
    }
}

/// A URL's host, port and user as pgbouncer writes them.
fn connection_of(url: &str) -> String {
    let config: Config = url.parse().expect("a URL");
    let host = match &config.get_hosts()[0] {
        Host::Tcp(name) => name.clone(),
        Host::Unix(path) => path.display().to_string(),
    };
    let port = config.get_ports().first().copied().unwrap_or(5432);
    let password = config.get_password().map(String::from_utf8_lossy);
    let password = password.map_or(String::new(), |password| format!(" password={password}"));
    format!("host={host} port={port} user={}{password}", config.get_user().unwrap_or("postgres"))
}

#[actix::test]
async fn claims_retries_and_parking_work_behind_a_transaction_pooler() {
    let mut database = Database::new().await;
    let (_pooler, url) = Pooler::start(&database);
    database.settings.database.url = url;
    database.insert(1_000, "good", 1_000).await;
    database.insert(20, "poison", 900).await;
    let (shared, _intake) = database.shared();
    let (decoder, seen) = sink::start(&shared, |row| {
        Some(if row.kind == "poison" { rejected(Reason::Nacked) } else { Verdict::Delivered })
    });
    let (to, mut exits) = tokio::sync::mpsc::channel(1);
    ClaimSource::new(shared.clone(), ExitGuard::new(Stage::Source, to), decoder, 4).start();
    let good =
        "SELECT count(*) = 1000 FROM outbox_messages WHERE type = 'good' AND processed_on_utc IS NOT NULL";
    until(&database, good, Duration::from_secs(10)).await;
    until(&database, "SELECT count(*) = 20 FROM postrider_dead_letters", Duration::from_secs(10)).await;
    assert!(exits.try_recv().is_err(), "the stage lives");
    assert!(seen.batches.load(Ordering::SeqCst) >= 11);
    shared.stop.cancel();
}
