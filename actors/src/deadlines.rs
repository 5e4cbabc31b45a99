//! How long anything may wait for a peer: every await of a broker or a database ends by one of these.
//!
//! | wait | at most | then |
//! |---|---|---|
//! | connect: name, TCP, TLS, authentication, first answer | [`CONNECT`] | the attempt failed; the next not before [`ATTEMPT_EVERY`] |
//! | a connection of the pool, while all are in use | [`CONNECT`] | the attempt failed |
//! | an SQL statement, on the server | [`STATEMENT`], a lock [`LOCK`], idle in a claim [`CLAIM_IDLE`] | the server ends it |
//! | an SQL answer, COMMIT and ROLLBACK included | [`ANSWER`], of the control plane [`ASK`] | the connection is closed; after a silence towards the control plane, all are |
//! | each step of opening a replication session, a channel or an exchange | [`STEP`] | the session is given up |
//! | the replication stream, silent | [`SILENCE`] | the database is asked whether the walsender is there, for [`ASK`] |
//! | the connection that listens, silent | [`LISTEN_SILENCE`] | it is asked, for [`ASK`] |
//! | the broker, silent | twice [`HEARTBEAT`] | the connection ends |
//! | a publish or a confirm | `publish.confirm_timeout_ms` | the channel is thrown away, what was under way is sent again |
//! | an orderly close | [`CLOSE_BROKER`], [`CLOSE_STREAM`] | the socket is shut down |
//! | what is in flight at a stop | `shutdown.timeout_ms` | it is repeated at the next start |
//! | a stage that was told to stop | [`STOP`] | the process ends |
//! | below all of these, the kernel | [`KEEPALIVE_IDLE`] + [`KEEPALIVE_RETRIES`] × [`KEEPALIVE_INTERVAL`], [`TCP_USER_TIMEOUT`] | the socket ends |
//!
//! Whatever waits for a peer longer than [`PATIENCE`] while something is to be moved says so on the board, long before it
//! gives up: `/readyz` follows progress. The one socket the kernel's limits cannot be set on is that of the replication
//! session, which `pgwire-replication` opens itself; [`SILENCE`] stands in for them.

use std::time::Duration;

/// Reaching and greeting a server. Longer than a TCP retransmission or two and a slow name server; short enough that a
/// backoff loop notices a dead host several times a minute.
pub const CONNECT: Duration = Duration::from_secs(10);

/// Between attempts to connect to a service while they fail, all parts of the relay together: a server that starts is
/// noticed soon, one that is down is not hammered.
pub const ATTEMPT_EVERY: Duration = Duration::from_secs(1);

/// One step of opening a session, such as a channel. As long as connecting may take.
pub const STEP: Duration = Duration::from_secs(10);

/// One statement, on the server: a claim or a recording takes milliseconds where the index of `migrate` is there.
pub const STATEMENT: Duration = Duration::from_secs(20);

/// A statement's wait for a lock: claims skip locked rows, so this is mostly the table itself (`LOCK TABLE`, DDL). Shorter
/// than [`PATIENCE`]: a lock is told from a silent server.
pub const LOCK: Duration = Duration::from_secs(2);

/// How long a claim may wait for its verdicts before the server ends it. Longer than the publisher keeps one, 16 s and 4 s
/// before it is begun; short enough that the rows of a relay that vanished or is frozen move on within half a minute.
pub const CLAIM_IDLE: Duration = Duration::from_secs(25);

/// An SQL answer: longer than [`STATEMENT`], so that a server that lives answers first; short enough that a connection
/// which fell silent stalls nothing for half a minute.
pub const ANSWER: Duration = Duration::from_secs(25);

/// An answer to a small question that nothing but a dead peer delays.
pub const ASK: Duration = Duration::from_secs(10);

/// When a wait counts as "nothing moves" and is put on the board. A healthy peer answers in milliseconds, one that
/// writes to a busy disk within a second or two.
pub const PATIENCE: Duration = Duration::from_secs(3);

/// The stream's silence. A server that writes nothing sends nothing, so it proves nothing and costs one small query.
pub const SILENCE: Duration = Duration::from_secs(10);

/// The silence of a connection that only listens. It can take its time: polling goes on without it.
pub const LISTEN_SILENCE: Duration = Duration::from_secs(30);

/// AMQP's heartbeat where `broker.url` names none: RabbitMQ's own 60 s would leave a frozen broker unnoticed for two
/// minutes, and its documentation calls 5 to 20 s right for most.
pub const HEARTBEAT: Duration = Duration::from_secs(10);

/// An orderly close of the broker's connection. One that is blocked or gone never answers it.
pub const CLOSE_BROKER: Duration = Duration::from_secs(1);

/// An orderly end of the replication session; then it is cut, and the server notices by itself.
pub const CLOSE_STREAM: Duration = Duration::from_secs(2);

/// A stage that was told to stop. One that has not by then holds something nobody may take again.
pub const STOP: Duration = Duration::from_secs(10);

/// Silence after which the kernel probes the peer. Well below the idle timeouts of common firewalls and load balancers
/// (AWS drops a flow after 350 s), so an idle connection is kept open and a vanished server noticed.
pub const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);
/// Time between probes.
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// Probes without an answer that end the connection: 15 + 3 × 5 = 30 s from silence to a verdict.
pub const KEEPALIVE_RETRIES: u32 = 3;

/// How long sent data may stay unacknowledged, which keepalives do not cover: they are not sent while data is in flight,
/// and the kernel's own retransmission would take a quarter of an hour to give up.
pub const TCP_USER_TIMEOUT: Duration = Duration::from_secs(30);
