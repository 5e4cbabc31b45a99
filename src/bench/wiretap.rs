//! Counts what a relay says to PostgreSQL, between the two: statements, those that name the outbox, and bytes. It needs
//! no extension on the server and sees every statement, which are not encrypted on this machine.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::{JoinHandle, JoinSet},
};

use crate::failure::Failure;

/// What was counted.
#[derive(Debug, Default)]
pub(super) struct Counts {
    /// Statements: simple queries and parsed ones.
    pub statements: AtomicU64,
    /// Those that name the outbox table.
    pub outbox: AtomicU64,
    /// Bytes in both directions.
    pub bytes: AtomicU64,
}

/// Passes connections on until dropped.
pub(super) struct Wiretap {
    /// Where it listens.
    pub address: SocketAddr,
    /// What it counts.
    pub counts: Arc<Counts>,
    task: JoinHandle<()>,
}

impl Drop for Wiretap {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Opens one before `server`, for statements about a table of this name.
pub(super) async fn open(server: String, table: &'static str) -> Result<Wiretap, Failure> {
    let listener = TcpListener::bind("127.0.0.1:0")
        .await
        .map_err(|error| Failure::new(format!("listen for the relay: {error}")))?;
    let address =
        listener.local_addr().map_err(|error| Failure::new(format!("listen for the relay: {error}")))?;
    let counts = Arc::new(Counts::default());
    let counting = Arc::clone(&counts);
    let task = tokio::spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((client, _)) = listener.accept().await {
            let (server, counts) = (server.clone(), Arc::clone(&counting));
            connections.spawn(async move {
                // A connection that breaks is the relay's to make anew.
                let _ = pass(client, &server, &counts, table).await;
            });
        }
    });
    Ok(Wiretap { address, counts, task })
}

async fn pass(client: TcpStream, server: &str, counts: &Counts, table: &str) -> std::io::Result<()> {
    let server = TcpStream::connect(server).await?;
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let asked = async {
        let mut frames = Frames::new(table);
        let mut buffer = vec![0; 16 * 1024];
        loop {
            let read = from_client.read(&mut buffer).await?;
            if read == 0 {
                return to_server.shutdown().await;
            }
            counts.bytes.fetch_add(read as u64, Relaxed);
            frames.count(&buffer[..read], counts);
            to_server.write_all(&buffer[..read]).await?;
        }
    };
    let answered = async {
        let mut buffer = vec![0; 16 * 1024];
        loop {
            let read = from_server.read(&mut buffer).await?;
            if read == 0 {
                return to_client.shutdown().await;
            }
            counts.bytes.fetch_add(read as u64, Relaxed);
            to_client.write_all(&buffer[..read]).await?;
        }
    };
    tokio::try_join!(asked, answered).map(|_| ())
}

/// Cuts what a client sends into messages: a length and a body at first, then a type byte before each
/// (<https://www.postgresql.org/docs/current/protocol-message-formats.html>).
struct Frames<'a> {
    table: &'a str,
    pending: Vec<u8>,
    started: bool,
}

impl<'a> Frames<'a> {
    fn new(table: &'a str) -> Self {
        Self { table, pending: Vec::new(), started: false }
    }

    fn count(&mut self, bytes: &[u8], counts: &Counts) {
        self.pending.extend_from_slice(bytes);
        let mut at = 0;
        loop {
            let head = usize::from(self.started);
            let Some(length) = self.pending.get(at + head..at + head + 4) else { break };
            let length = length.iter().fold(0_usize, |length, byte| length << 8 | usize::from(*byte));
            let Some(message) = self.pending.get(at..at + head + length.max(4)) else { break };
            if !self.started {
                // A request for TLS comes before the real start (its code is 80877103).
                self.started = message.get(4..8) != Some(&[4, 210, 22, 47]);
            } else if matches!(message.first(), Some(b'Q' | b'P')) {
                counts.statements.fetch_add(1, Relaxed);
                let text = String::from_utf8_lossy(message);
                counts.outbox.fetch_add(u64::from(text.contains(self.table)), Relaxed);
            }
            at += head + length.max(4);
        }
        self.pending.drain(..at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: Option<u8>, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(body.len() + 4).unwrap().to_be_bytes();
        kind.into_iter().chain(length).chain(body.iter().copied()).collect()
    }

    #[test]
    fn statements_are_counted_however_they_are_cut() {
        let conversation = [
            message(None, &80_877_103_u32.to_be_bytes()),
            message(None, b"\0\x03\0\0user\0me\0\0"),
            message(Some(b'p'), b"secret\0"),
            message(Some(b'Q'), b"SELECT 1\0"),
            message(Some(b'P'), b"\0SELECT FROM \"outbox_messages\"\0\0\0"),
            message(Some(b'S'), b""),
        ]
        .concat();
        for cut in [1, 3, 7, conversation.len()] {
            let counts = Counts::default();
            let mut frames = Frames::new("outbox_messages");
            for piece in conversation.chunks(cut) {
                frames.count(piece, &counts);
            }
            assert_eq!((counts.statements.into_inner(), counts.outbox.into_inner()), (2, 1), "cut at {cut}");
        }
    }
}
