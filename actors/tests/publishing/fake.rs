//! A broker that follows a script: it answers a number of publishes with exactly the confirms it was given, in one piece.

use std::{
    collections::HashMap,
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
};

/// A confirm: its tag, and whether it stands for all before it too.
#[derive(Debug, Clone, Copy)]
pub enum Confirm {
    Ack(u64, bool),
    Nack(u64, bool),
}

/// Listens on a port of its own and returns the URL. After `after` publishes on the first connection comes `script`; from
/// then on each publish is acknowledged.
pub fn broker(after: u64, script: Vec<Confirm>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("amqp://guest:guest@{}/", listener.local_addr().expect("its address"));
    std::thread::spawn(move || {
        let mut script = Some(script);
        for stream in listener.incoming().map_while(Result::ok) {
            let script = script.take();
            // The peer's going away ends it.
            std::thread::spawn(move || serve(stream, after, script));
        }
    });
    url
}

fn serve(mut peer: TcpStream, after: u64, mut script: Option<Vec<Confirm>>) -> io::Result<()> {
    peer.read_exact(&mut [0; 8])?;
    // Version 0-9, no properties, PLAIN, en_US.
    let start = [&[0, 9][..], &table(), &long(b"PLAIN"), &long(b"en_US")].concat();
    peer.write_all(&method(0, (10, 10), &start))?;
    let mut published: HashMap<u16, u64> = HashMap::new();
    loop {
        let (kind, channel, payload) = frame(&mut peer)?;
        if kind != 1 {
            continue;
        }
        let (class, id) = (short(&payload[0..2]), short(&payload[2..4]));
        let answer = match (class, id) {
            // start-ok: tune to no limit of channels, 128 KiB, no heartbeats.
            (10, 11) => method(0, (10, 30), &[&[0, 0][..], &131_072u32.to_be_bytes(), &[0, 0]].concat()),
            (10, 40) => method(0, (10, 41), &[0]),
            (10, 50) => method(0, (10, 51), &[]),
            // Tags count from 1 on each channel that is opened.
            (20, 10) => {
                published.remove(&channel);
                method(channel, (20, 11), &[0; 4])
            }
            (20, 40) => method(channel, (20, 41), &[]),
            (85, 10) => method(channel, (85, 11), &[]),
            (40, 10) => method(channel, (40, 11), &[]),
            (60, 40) => {
                let tag = published.entry(channel).or_default();
                *tag += 1;
                match &script {
                    None => confirm(channel, Confirm::Ack(*tag, false)),
                    Some(_) if *tag < after => continue,
                    Some(_) => {
                        let script = script.take().unwrap_or_default();
                        script.into_iter().flat_map(|one| confirm(channel, one)).collect()
                    }
                }
            }
            _ => continue,
        };
        peer.write_all(&answer)?;
    }
}

fn confirm(channel: u16, confirm: Confirm) -> Vec<u8> {
    let (id, tag, multiple) = match confirm {
        Confirm::Ack(tag, multiple) => (80, tag, multiple),
        Confirm::Nack(tag, multiple) => (120, tag, multiple),
    };
    method(channel, (60, id), &[&tag.to_be_bytes()[..], &[u8::from(multiple)]].concat())
}

fn frame(peer: &mut TcpStream) -> io::Result<(u8, u16, Vec<u8>)> {
    let mut head = [0; 7];
    peer.read_exact(&mut head)?;
    let length = u32::from_be_bytes([head[3], head[4], head[5], head[6]]) as usize;
    let mut payload = vec![0; length + 1];
    peer.read_exact(&mut payload)?;
    payload.pop();
    Ok((head[0], short(&head[1..3]), payload))
}

fn method(channel: u16, (class, id): (u16, u16), arguments: &[u8]) -> Vec<u8> {
    let length = u32::try_from(arguments.len() + 4).expect("small");
    [
        &[1][..],
        &channel.to_be_bytes(),
        &length.to_be_bytes(),
        &class.to_be_bytes(),
        &id.to_be_bytes(),
        arguments,
        &[0xCE],
    ]
    .concat()
}

fn short(bytes: &[u8]) -> u16 {
    u16::from_be_bytes([bytes[0], bytes[1]])
}

fn long(text: &[u8]) -> Vec<u8> {
    [&u32::try_from(text.len()).expect("small").to_be_bytes()[..], text].concat()
}

fn table() -> [u8; 4] {
    [0; 4]
}
