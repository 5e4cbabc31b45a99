//! The proxy, tested: one that does nothing would let every test of a network pass.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::support::{Cut, Proxy, Way, is_confirm};

/// A client and a server with a proxy between.
struct Pair {
    proxy: Proxy,
    client: TcpStream,
    server: TcpStream,
    listener: TcpListener,
}

impl Pair {
    async fn of(scheme: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("{scheme}://user:p@{}/x?y=z", listener.local_addr().unwrap());
        let proxy = Proxy::before(&url).await;
        let client = connect(&proxy, &url).await;
        let (server, _) = listener.accept().await.unwrap();
        Self { proxy, client, server, listener }
    }
}

async fn connect(proxy: &Proxy, url: &str) -> TcpStream {
    let through = proxy.url_for(url);
    let (start, end) = (through.find('@').unwrap() + 1, through.rfind('/').unwrap());
    assert!(through.ends_with("/x?y=z"), "{through}");
    TcpStream::connect(&through[start..end]).await.unwrap()
}

/// What comes within a moment: the bytes, or `None`.
async fn hears(socket: &mut TcpStream) -> Option<Result<Vec<u8>, ErrorKind>> {
    let mut buffer = [0; 256];
    let read = tokio::time::timeout(Duration::from_millis(300), socket.read(&mut buffer)).await.ok()?;
    Some(read.map(|n| buffer[..n].to_vec()).map_err(|error| error.kind()))
}

#[tokio::test]
async fn a_proxy_passes_both_ways_and_counts_connections() {
    let mut pair = Pair::of("postgres").await;
    pair.client.write_all(b"question").await.unwrap();
    assert_eq!(hears(&mut pair.server).await, Some(Ok(b"question".to_vec())));
    pair.server.write_all(b"answer").await.unwrap();
    assert_eq!(hears(&mut pair.client).await, Some(Ok(b"answer".to_vec())));
    pair.client.shutdown().await.unwrap();
    assert_eq!(hears(&mut pair.server).await, Some(Ok(Vec::new())), "the end passes too");
    assert_eq!((pair.proxy.attempts().len(), pair.proxy.open()), (1, 1));
}

#[tokio::test]
async fn a_proxy_delays_without_slowing_and_drips() {
    let mut pair = Pair::of("postgres").await;
    pair.proxy.latency(Way::Up, Duration::from_millis(200));
    let began = Instant::now();
    for _ in 0..20 {
        pair.client.write_all(b"x").await.unwrap();
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let mut all = [0; 20];
    pair.server.read_exact(&mut all).await.unwrap();
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(200) && took < Duration::from_secs(2), "{took:?}");

    pair.proxy.drip(Way::Down, 40);
    let began = Instant::now();
    pair.server.write_all(&all).await.unwrap();
    pair.client.read_exact(&mut all).await.unwrap();
    assert!(began.elapsed() >= Duration::from_millis(400), "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_blackhole_takes_everything_and_says_nothing_and_what_it_took_stays_silent() {
    let mut pair = Pair::of("postgres").await;
    pair.proxy.blackhole();
    let mut second = connect(&pair.proxy, "postgres://a@h/x?y=z").await;
    pair.client.write_all(b"lost").await.unwrap();
    second.write_all(b"lost").await.unwrap();
    pair.client.shutdown().await.unwrap();
    assert_eq!((hears(&mut pair.server).await, hears(&mut second).await), (None, None));
    pair.proxy.heal();
    pair.server.write_all(b"lost as well").await.unwrap();
    assert_eq!((hears(&mut pair.client).await, hears(&mut second).await), (None, None));
    let mut third = connect(&pair.proxy, "postgres://a@h/x?y=z").await;
    let (mut server, _) = pair.listener.accept().await.unwrap();
    third.write_all(b"passes").await.unwrap();
    assert_eq!(hears(&mut server).await, Some(Ok(b"passes".to_vec())));
    assert_eq!(pair.proxy.attempts().len(), 3);
}

#[tokio::test]
async fn a_cut_is_an_end_or_a_reset_and_a_half_close_leaves_the_other_way_silent() {
    let mut pair = Pair::of("postgres").await;
    pair.proxy.cut(Cut::Fin);
    assert_eq!(hears(&mut pair.client).await, Some(Ok(Vec::new())));
    assert_eq!(hears(&mut pair.server).await, Some(Ok(Vec::new())));

    let mut pair = Pair::of("postgres").await;
    pair.proxy.cut(Cut::Rst);
    assert_eq!(hears(&mut pair.client).await, Some(Err(ErrorKind::ConnectionReset)));
    assert_eq!(hears(&mut pair.server).await, Some(Err(ErrorKind::ConnectionReset)));

    let mut pair = Pair::of("postgres").await;
    pair.proxy.half_close(Way::Down);
    assert_eq!(hears(&mut pair.client).await, Some(Ok(Vec::new())));
    pair.client.write_all(b"still writes").await.unwrap();
    assert_eq!(hears(&mut pair.server).await, None);

    pair.proxy.shut();
    let mut refused = connect(&pair.proxy, "postgres://a@h/x?y=z").await;
    assert_eq!(hears(&mut refused).await, Some(Err(ErrorKind::ConnectionReset)));
}

#[tokio::test]
async fn a_proxy_swallows_bytes_or_one_frame() {
    let mut pair = Pair::of("postgres").await;
    pair.proxy.swallow_bytes(Way::Up, 3);
    pair.client.write_all(b"abcdef").await.unwrap();
    assert_eq!(hears(&mut pair.server).await, Some(Ok(b"def".to_vec())));
    assert!(pair.proxy.swallowed(Way::Up));

    let mut pair = Pair::of("amqp").await;
    let frame = |class: u8, method: u8| vec![1, 0, 1, 0, 0, 0, 4, 0, class, 0, method, 0xCE];
    let (nack, ack) = (frame(60, 120), frame(60, 80));
    pair.proxy.swallow_frame(Way::Down, is_confirm);
    let all = [b"AMQP\x00\x00\x09\x01".as_slice(), &nack, &ack, &ack].concat();
    // in pieces that no frame ends with
    for piece in all.chunks(5) {
        pair.server.write_all(piece).await.unwrap();
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let expected = [b"AMQP\x00\x00\x09\x01".as_slice(), &nack, &ack].concat();
    let mut heard = vec![0; expected.len()];
    pair.client.read_exact(&mut heard).await.unwrap();
    assert_eq!(heard, expected);
    assert_eq!(hears(&mut pair.client).await, None);
}
