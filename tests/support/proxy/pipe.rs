//! What happens to the bytes of one connection.

use std::io;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::sync::{mpsc, watch};

use super::frames::Frames;
use super::{Cut, State, Way};

/// What happens to a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Pass,
    /// Nothing passes any more, in either direction, the end of the stream included.
    Swallow,
    /// The end of the stream passes, then nothing.
    HalfClose(Way),
    Cut(Cut),
}

/// Which frame is not to pass.
pub(super) type Unwanted = Box<dyn FnMut(&[u8]) -> bool + Send>;

/// One direction of every connection.
#[derive(Default)]
pub(super) struct Flow {
    pub(super) latency: Duration,
    pub(super) bytes_per_second: Option<usize>,
    /// So many bytes are still to vanish.
    pub(super) vanishing: usize,
    /// Asked of each AMQP frame: the first of which it is true vanishes.
    pub(super) unwanted: Option<Unwanted>,
}

impl Flow {
    /// What is left of `piece`, and how much later it arrives.
    fn pass(&mut self, mut piece: Vec<u8>) -> (Vec<u8>, Duration) {
        let vanished = piece.len().min(self.vanishing);
        self.vanishing -= vanished;
        piece.drain(..vanished);
        if self.unwanted.as_mut().is_some_and(|unwanted| unwanted(&piece)) {
            self.unwanted = None;
            piece.clear();
        }
        (piece, self.latency)
    }
}

/// Joins the two until either ends or the proxy cuts them.
pub(super) async fn serve(
    mut client: TcpStream,
    mut server: TcpStream,
    state: &State,
    mut told: watch::Receiver<Fate>,
) {
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let cut = {
        let (client_in, client_out) = client.split();
        let (server_in, server_out) = server.split();
        let up = pump(Way::Up, client_in, server_out, state, told.clone());
        let down = pump(Way::Down, server_in, client_out, state, told.clone());
        tokio::select! {
            ended = async { tokio::try_join!(up, down) } => if ended.is_ok() { Cut::Fin } else { Cut::Rst },
            fate = told.wait_for(|fate| matches!(fate, Fate::Cut(_))) => match fate.as_deref() {
                Ok(Fate::Cut(cut)) => *cut,
                _ => Cut::Rst,
            },
        }
    };
    for mut socket in [client, server] {
        match cut {
            Cut::Fin => drop(socket.shutdown().await),
            Cut::Rst => drop(socket.set_zero_linger()),
        }
    }
}

/// Moves one direction until its end. An error is a connection that broke.
async fn pump(
    way: Way,
    from: ReadHalf<'_>,
    to: WriteHalf<'_>,
    state: &State,
    told: watch::Receiver<Fate>,
) -> io::Result<()> {
    let (queue, due) = mpsc::channel(1024);
    let ended = tokio::try_join!(read(way, from, state, queue), write(way, to, state, told.clone(), due));
    if *told.borrow() != Fate::Pass {
        // the other side must not see that this one has ended
        std::future::pending::<()>().await;
    }
    ended.map(drop)
}

async fn read(
    way: Way,
    mut from: ReadHalf<'_>,
    state: &State,
    queue: mpsc::Sender<(Instant, Vec<u8>)>,
) -> io::Result<()> {
    let mut buffer = vec![0; 64 * 1024];
    let mut frames = state.amqp.then(Frames::default);
    loop {
        let n = from.read(&mut buffer).await?;
        if n == 0 {
            return Ok(());
        }
        let pieces = match &mut frames {
            Some(frames) => frames.split(&buffer[..n]),
            None => vec![buffer[..n].to_vec()],
        };
        for piece in pieces {
            let (piece, latency) = state.flow(way).pass(piece);
            if queue.send((Instant::now() + latency, piece)).await.is_err() {
                return Ok(());
            }
        }
    }
}

async fn write(
    way: Way,
    mut to: WriteHalf<'_>,
    state: &State,
    mut told: watch::Receiver<Fate>,
    mut due: mpsc::Receiver<(Instant, Vec<u8>)>,
) -> io::Result<()> {
    let fate = tokio::select! {
        ended = deliver(way, &mut to, state, &mut due) => return ended,
        fate = told.wait_for(|fate| *fate != Fate::Pass) => fate.map(|fate| *fate),
    };
    if matches!(fate, Ok(Fate::HalfClose(half)) if half == way) {
        to.shutdown().await?;
    }
    while due.recv().await.is_some() {}
    Ok(())
}

async fn deliver(
    way: Way,
    to: &mut WriteHalf<'_>,
    state: &State,
    due: &mut mpsc::Receiver<(Instant, Vec<u8>)>,
) -> io::Result<()> {
    const STEPS_A_SECOND: usize = 20;
    while let Some((at, piece)) = due.recv().await {
        tokio::time::sleep_until(at.into()).await;
        let mut rest = piece.as_slice();
        while !rest.is_empty() {
            let rate = state.flow(way).bytes_per_second;
            let step = rate.map_or(rest.len(), |rate| (rate / STEPS_A_SECOND).clamp(1, rest.len()));
            to.write_all(&rest[..step]).await?;
            rest = &rest[step..];
            if let Some(rate) = rate {
                tokio::time::sleep(Duration::from_secs_f64(step as f64 / rate as f64)).await;
            }
        }
    }
    to.shutdown().await
}
