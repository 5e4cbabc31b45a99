//! A TCP proxy before either service: what a network does to a connection, switched on and off while it runs.
//!
//! What is swallowed is acknowledged to its sender: the kernel sees a healthy peer, so only a deadline of the program
//! itself can notice. A connection that has swallowed something stays silent for ever, also after [`Proxy::heal`].

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

mod frames;
mod pipe;

pub(crate) use frames::{is_confirm, is_method};
use pipe::{Fate, Flow, serve};

/// A direction, seen from the program under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// From the relay to the server.
    Up,
    /// From the server to the relay.
    Down,
}

/// How a connection is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// An orderly end of both directions.
    Fin,
    /// A reset.
    Rst,
}

/// What becomes of a new connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Door {
    Open,
    Silent,
    Shut,
}

struct State {
    target: String,
    amqp: bool,
    up: Mutex<Flow>,
    down: Mutex<Flow>,
    door: Mutex<Door>,
    attempts: Mutex<Vec<Instant>>,
    connections: Mutex<Vec<Weak<watch::Sender<Fate>>>>,
}

/// Listens on a port of its own until dropped.
pub(crate) struct Proxy {
    state: Arc<State>,
    address: String,
    accepting: JoinHandle<()>,
}

impl Proxy {
    /// Before the server that `url` names; AMQP and PostgreSQL alike.
    pub(crate) async fn before(url: &str) -> Self {
        let (start, end) = authority(url);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("it is bound").to_string();
        let state = Arc::new(State {
            target: url[start..end].to_owned(),
            amqp: url.starts_with("amqp://"),
            up: Mutex::default(),
            down: Mutex::default(),
            door: Mutex::new(Door::Open),
            attempts: Mutex::default(),
            connections: Mutex::default(),
        });
        let accepting = tokio::spawn(accept(listener, state.clone()));
        Self { state, address, accepting }
    }

    /// `url` with this proxy's address in the place of the server's.
    pub(crate) fn url_for(&self, url: &str) -> String {
        let (start, end) = authority(url);
        format!("{}{}{}", &url[..start], self.address, &url[end..])
    }

    /// When each connection came, whatever became of it.
    pub(crate) fn attempts(&self) -> Vec<Instant> {
        lock(&self.state.attempts).clone()
    }

    /// How many are open now.
    pub(crate) fn open(&self) -> usize {
        lock(&self.state.connections).iter().filter(|c| c.strong_count() > 0).count()
    }

    /// What is sent that way arrives so much later.
    pub(crate) fn latency(&self, way: Way, latency: Duration) {
        self.flow(way).latency = latency;
    }

    /// What is sent that way trickles.
    pub(crate) fn drip(&self, way: Way, bytes_per_second: usize) {
        self.flow(way).bytes_per_second = Some(bytes_per_second);
    }

    /// The next `n` bytes that way vanish.
    pub(crate) fn swallow_bytes(&self, way: Way, n: usize) {
        self.flow(way).vanishing += n;
    }

    /// The next AMQP frame that way of which `unwanted` is true vanishes, whole.
    pub(crate) fn swallow_frame(&self, way: Way, unwanted: impl FnMut(&[u8]) -> bool + Send + 'static) {
        assert!(self.state.amqp, "only AMQP is known by its frames");
        self.flow(way).unwanted = Some(Box::new(unwanted));
    }

    /// Whether what [`Proxy::swallow_frame`] or [`Proxy::swallow_bytes`] waited for has vanished.
    pub(crate) fn swallowed(&self, way: Way) -> bool {
        let flow = self.flow(way);
        flow.unwanted.is_none() && flow.vanishing == 0
    }

    /// From here on every connection, open or new, stays open and silent.
    pub(crate) fn blackhole(&self) {
        *lock(&self.state.door) = Door::Silent;
        self.decide(Fate::Swallow);
    }

    /// The open connections stay open and silent; new ones pass: a firewall that forgot them.
    pub(crate) fn forget(&self) {
        self.decide(Fate::Swallow);
    }

    /// New connections are reset.
    pub(crate) fn shut(&self) {
        *lock(&self.state.door) = Door::Shut;
    }

    /// Ends every open connection.
    pub(crate) fn cut(&self, cut: Cut) {
        self.decide(Fate::Cut(cut));
    }

    /// The end of the stream that way passes, on every open connection; then nothing does.
    pub(crate) fn half_close(&self, way: Way) {
        self.decide(Fate::HalfClose(way));
    }

    /// New connections pass, at once and whole.
    pub(crate) fn heal(&self) {
        *lock(&self.state.door) = Door::Open;
        for way in [Way::Up, Way::Down] {
            *self.flow(way) = Flow::default();
        }
    }

    fn flow(&self, way: Way) -> MutexGuard<'_, Flow> {
        self.state.flow(way)
    }

    fn decide(&self, fate: Fate) {
        for connection in lock(&self.state.connections).iter().filter_map(Weak::upgrade) {
            connection.send_replace(fate);
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
        self.decide(Fate::Cut(Cut::Rst));
    }
}

impl State {
    fn flow(&self, way: Way) -> MutexGuard<'_, Flow> {
        lock(if way == Way::Up { &self.up } else { &self.down })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where `host:port` is in a URL.
fn authority(url: &str) -> (usize, usize) {
    let start = url.find("://").expect("a URL") + 3;
    let end = url[start..].find(['/', '?']).map_or(url.len(), |n| start + n);
    (url[start..end].rfind('@').map_or(start, |n| start + n + 1), end)
}

async fn accept(listener: TcpListener, state: Arc<State>) {
    while let Ok((client, _)) = listener.accept().await {
        lock(&state.attempts).push(Instant::now());
        let door = *lock(&state.door);
        let (fate, told) = watch::channel(if door == Door::Silent { Fate::Swallow } else { Fate::Pass });
        let fate = Arc::new(fate);
        {
            let mut connections = lock(&state.connections);
            connections.retain(|c| c.strong_count() > 0);
            connections.push(Arc::downgrade(&fate));
        }
        let state = state.clone();
        tokio::spawn(async move {
            let _counted_while_it_lives = fate;
            if door == Door::Silent {
                let mut told = told;
                let _ = told.wait_for(|fate| matches!(fate, Fate::Cut(_))).await;
            } else if door == Door::Open
                && let Ok(server) = TcpStream::connect(&state.target).await
            {
                serve(client, server, &state, told).await;
            } else {
                let _ = client.set_zero_linger();
            }
        });
    }
}
