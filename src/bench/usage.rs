//! Processor time and memory of processes on this machine, from `/proc`. A server that runs elsewhere has none.

use std::{collections::HashMap, net::SocketAddr, net::ToSocketAddrs, str::FromStr};

use lapin::uri::AMQPUri;
use procfs::{
    net::{TcpState, tcp, tcp6},
    process::{FDTarget, Process, all_processes},
};
use serde::Serialize;

use super::arena::Arena;

/// Seconds of processor time, user and system.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct Cpu {
    /// Of the publisher or relay.
    pub relay: f64,
    /// Of PostgreSQL with all its processes, where it runs here.
    pub postgres: Option<f64>,
    /// Of the broker, where it runs here.
    pub broker: Option<f64>,
}

/// What is being counted.
#[derive(Debug)]
pub(super) struct Usage {
    relay: u32,
    postgres: Option<i32>,
    broker: Option<i32>,
    at_begin: Cpu,
}

impl Usage {
    /// Begins to count for process `relay` and the two servers.
    pub(super) async fn begin(arena: &Arena, relay: u32) -> Self {
        let postgres = postmaster(arena).await;
        let broker = AMQPUri::from_str(arena.config.broker.url.expose())
            .ok()
            .and_then(|uri| listener(&uri.authority.host, uri.authority.port));
        let mut usage = Self { relay, postgres, broker, at_begin: Cpu::default() };
        usage.at_begin = usage.now();
        usage
    }

    fn now(&self) -> Cpu {
        let times = Times::read();
        Cpu {
            relay: i32::try_from(self.relay).map_or(0.0, |pid| times.of(pid)),
            postgres: self.postgres.map(|pid| times.of_tree(pid)),
            broker: self.broker.map(|pid| times.of_tree(pid)),
        }
    }

    /// What was used since the beginning.
    pub(super) async fn end(self) -> Cpu {
        let (begin, end) = (self.at_begin, self.now());
        let since = |end: Option<f64>, begin: Option<f64>| Some((end? - begin?).max(0.0));
        Cpu {
            relay: (end.relay - begin.relay).max(0.0),
            postgres: since(end.postgres, begin.postgres),
            broker: since(end.broker, begin.broker),
        }
    }
}

/// Every process's time, and its children.
struct Times {
    own: HashMap<i32, f64>,
    children: HashMap<i32, Vec<i32>>,
}

impl Times {
    fn read() -> Self {
        let (mut own, mut children) = (HashMap::new(), HashMap::<i32, Vec<i32>>::new());
        let tick = 1.0 / procfs::ticks_per_second() as f64;
        for stat in all_processes().into_iter().flatten().flatten().filter_map(|process| process.stat().ok())
        {
            // Children that have ended and were waited for count as their parent's.
            let waited = u64::try_from(stat.cutime + stat.cstime).unwrap_or_default();
            own.insert(stat.pid, (stat.utime + stat.stime + waited) as f64 * tick);
            children.entry(stat.ppid).or_default().push(stat.pid);
        }
        Self { own, children }
    }

    fn of(&self, pid: i32) -> f64 {
        self.own.get(&pid).copied().unwrap_or_default()
    }

    fn of_tree(&self, pid: i32) -> f64 {
        let children = self.children.get(&pid).into_iter().flatten();
        self.of(pid) + children.map(|child| self.of_tree(*child)).sum::<f64>()
    }
}

/// The parent of our own backend, if the server is on this machine.
async fn postmaster(arena: &Arena) -> Option<i32> {
    let row = arena.sql.query_typed_one("SELECT pg_backend_pid()", &[]).await.ok()?;
    let backend = Process::new(row.get(0)).ok()?;
    // A process with that number may be anything where the server is elsewhere.
    let stat = backend.stat().ok().filter(|stat| stat.comm.starts_with("postgres"))?;
    Some(stat.ppid)
}

/// The process that listens at this address. Found only where its descriptors may be read.
fn listener(host: &str, port: u16) -> Option<i32> {
    let wanted: Vec<SocketAddr> = (host, port).to_socket_addrs().ok()?.collect();
    let sockets = tcp().into_iter().chain(tcp6()).flatten();
    let inode = sockets
        .filter(|socket| socket.state == TcpState::Listen && socket.local_address.port() == port)
        .find(|socket| {
            let ip = socket.local_address.ip();
            ip.is_unspecified()
                || wanted.iter().any(|address| address.ip().to_canonical() == ip.to_canonical())
        })?
        .inode;
    let holds = |process: &Process| {
        process
            .fd()
            .into_iter()
            .flatten()
            .flatten()
            .any(|fd| matches!(fd.target, FDTarget::Socket(i) if i == inode))
    };
    all_processes().ok()?.flatten().find(holds).map(|process| process.pid)
}

/// The largest memory a process ever had, in bytes.
pub(super) fn peak_rss(pid: u32) -> u64 {
    let status = i32::try_from(pid).ok().and_then(|pid| Process::new(pid).ok()?.status().ok());
    status.and_then(|status| status.vmhwm).unwrap_or_default() * 1024
}
