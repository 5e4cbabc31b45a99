//! Servers of a test's own, which it may freeze, block, kill and restart. Each goes when its value is dropped.

use super::{Database, Vhost, dev};

macro_rules! server {
    ($name:ident, $kind:literal) => {
        impl $name {
            /// What `./dev` knows it as.
            pub(crate) fn name(&self) -> &str {
                &self.name
            }

            async fn dev(&self, action: &str) -> String {
                dev::call(&[$kind, action, &self.name]).await
            }

            /// An orderly stop.
            pub(crate) async fn stop(&self) {
                self.dev("stop").await;
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                if let Err(error) = dev::run(&[$kind, "rm", &self.name]) {
                    eprintln!("{error}");
                }
            }
        }
    };
}

macro_rules! faults {
    ($name:ident) => {
        impl $name {
            /// Starts it again where it was, with what it had stored.
            pub(crate) async fn start_again(&self) {
                self.dev("start").await;
            }

            /// An orderly stop and a start.
            pub(crate) async fn restart(&self) {
                self.dev("restart").await;
            }

            /// SIGKILL to all of its processes.
            pub(crate) async fn kill9(&self) {
                self.dev("kill9").await;
            }

            /// SIGSTOP to all of its processes: connections stay, nothing answers.
            pub(crate) async fn freeze(&self) {
                self.dev("freeze").await;
            }

            /// Undoes a freeze.
            pub(crate) async fn thaw(&self) {
                self.dev("thaw").await;
            }
        }
    };
}

/// A RabbitMQ broker of the test's own.
#[derive(Debug)]
pub(crate) struct PrivateBroker {
    name: String,
    url: String,
    management: String,
}

server!(PrivateBroker, "broker");
faults!(PrivateBroker);

impl PrivateBroker {
    /// Of the version that the shared one has.
    pub(crate) async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// Of this major version, 3 or 4; panics with the reason where the machine cannot have it.
    pub(crate) async fn start_version(major: u8) -> Self {
        Self::start_with(&["--version", &major.to_string()]).await
    }

    /// With further arguments of `./dev broker start`: `-c key=value` for a line of its configuration.
    pub(crate) async fn start_with(args: &[&str]) -> Self {
        let name = super::unique();
        // owned before it runs, so that a failed start is removed too
        let mut broker = Self { name, url: String::new(), management: String::new() };
        broker.url = dev::call(&[&["broker", "start", broker.name.as_str()], args].concat()).await;
        broker.management = broker.dev("management").await;
        broker
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) async fn vhost(&self) -> Vhost {
        Vhost::on(&self.url, &self.management).await
    }

    /// Raises a memory alarm: publishers are blocked from here on.
    pub(crate) async fn block(&self) {
        self.dev("block").await;
    }

    pub(crate) async fn unblock(&self) {
        self.dev("unblock").await;
    }

    /// `rabbitmqctl ARGS` on this broker.
    pub(crate) async fn ctl(&self, args: &[&str]) -> String {
        dev::call(&[&["broker", "ctl", self.name.as_str()], args].concat()).await
    }
}

/// A PostgreSQL server of the test's own.
#[derive(Debug)]
pub(crate) struct PrivatePostgres {
    name: String,
    url: String,
}

server!(PrivatePostgres, "postgres");
faults!(PrivatePostgres);

impl PrivatePostgres {
    /// With these settings (`key=value`); `fsync=off` unless they say otherwise.
    pub(crate) async fn start(settings: &[&str]) -> Self {
        let name = super::unique();
        let mut server = Self { name, url: String::new() };
        let mut args = vec!["postgres", "start", server.name.as_str(), "-c", "fsync=off"];
        for setting in settings {
            args.extend(["-c", setting]);
        }
        server.url = dev::call(&args).await;
        server
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) async fn database(&self) -> Database {
        Database::on(&self.url).await
    }
}

/// A transaction-pooling pgbouncer before a database.
#[derive(Debug)]
pub(crate) struct Pgbouncer {
    name: String,
    url: String,
}

server!(Pgbouncer, "pgbouncer");

impl Pgbouncer {
    pub(crate) async fn before(database: &Database) -> Self {
        let name = super::unique();
        let mut bouncer = Self { name, url: String::new() };
        bouncer.url = dev::call(&["pgbouncer", "start", &bouncer.name, &database.url()]).await;
        bouncer
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }
}
