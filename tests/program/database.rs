//! A database of its own for each test, and the program run against it.

use std::{
    collections::BTreeMap,
    process::{Command, Output},
};

use tokio_postgres::{Client, NoTls};

/// A fresh database; dropped, with everybody in it, when this value is.
pub(crate) struct Database {
    server: String,
    pub(crate) name: String,
}

impl Database {
    pub(crate) async fn fresh() -> Self {
        let server = std::env::var("POSTRIDER_TEST_DATABASE_URL")
            .expect("POSTRIDER_TEST_DATABASE_URL is set: run ./dev test, or ./dev up before cargo test");
        let name = format!("program_{}", uuid::Uuid::new_v4().simple());
        let admin = connect(&server).await;
        admin.batch_execute(&format!("create database {name}")).await.expect("a database is created");
        Self { server, name }
    }

    pub(crate) fn url(&self) -> String {
        let (address, query) = self.server.split_once('?').unwrap_or((&self.server, ""));
        let (host, _) = address.rsplit_once('/').expect("the URL names a database");
        format!("{host}/{}?{query}", self.name).trim_end_matches('?').to_owned()
    }

    /// The URL of another role on the same server.
    pub(crate) fn url_of(&self, role: &str, password: &str) -> String {
        let url = self.url();
        let (_, host) = url.rsplit_once('@').expect("the URL names a user");
        format!("postgres://{role}:{password}@{host}")
    }

    pub(crate) async fn client(&self) -> Client {
        connect(&self.url()).await
    }

    /// The program against this database, with `variables` over the defaults.
    pub(crate) fn postrider(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
        let url = self.url();
        let mut all = BTreeMap::from([("POSTRIDER_DATABASE__URL", url.as_str())]);
        all.extend(variables.iter().copied());
        postrider(arguments, &all)
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let (server, statement) = (self.server.clone(), format!("drop database {} with (force)", self.name));
        let dropped = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async { connect(&server).await.batch_execute(&statement).await })
        });
        match dropped.join() {
            Ok(Ok(())) => {}
            _ => eprintln!("database {} was left behind", self.name),
        }
    }
}

pub(crate) async fn connect(url: &str) -> Client {
    let (client, connection) =
        tokio_postgres::connect(url, NoTls).await.unwrap_or_else(|error| panic!("{url}: {error}"));
    tokio::spawn(connection);
    client
}

/// Runs the program in an empty folder with nothing in its environment but `variables`.
pub(crate) fn postrider(arguments: &[&str], variables: &BTreeMap<&str, &str>) -> Output {
    Command::new(env!("CARGO_BIN_EXE_postrider"))
        .args(arguments)
        .env_clear()
        .envs(variables)
        .current_dir(env!("CARGO_TARGET_TMPDIR"))
        .output()
        .expect("the program runs")
}

/// What a command printed, when it should have succeeded.
pub(crate) fn printed(output: &Output) -> String {
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The rows of a query as text, columns separated by `|`.
pub(crate) async fn rows(client: &Client, query: &str) -> Vec<String> {
    let messages = client.simple_query(query).await.unwrap_or_else(|error| panic!("{query}: {error:?}"));
    let line = |message: tokio_postgres::SimpleQueryMessage| match message {
        tokio_postgres::SimpleQueryMessage::Row(row) => {
            let cells: Vec<_> =
                (0..row.len()).map(|index| row.get(index).unwrap_or("null").to_owned()).collect();
            Some(cells.join("|"))
        }
        _ => None,
    };
    messages.into_iter().filter_map(line).collect()
}
