//! The pure work on the way of each message, without a server: `cargo bench -p postrider-actors`.

use std::hint::black_box;

use bytes::{BufMut, Bytes, BytesMut};
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use postrider_actors::{
    decode::{headers, pgoutput},
    ledger::{Ledger, Mark},
    position::{Lsn, Position},
};

/// An INSERT of an outbox row with a body of so many bytes, as pgoutput sends it.
fn insert(body: usize) -> Bytes {
    let mut message = BytesMut::new();
    message.put_u8(b'I');
    message.put_u32(16_384);
    message.put_u8(b'N');
    message.put_u16(6);
    let body = "x".repeat(body);
    for text in
        ["0192f0c1-7d5e-7cc3-98c4-dc0c0c07398f", "order.created", &body, "2026-01-01 12:00:00.123456+00"]
    {
        message.put_u8(b't');
        message.put_u32(u32::try_from(text.len()).expect("short"));
        message.put_slice(text.as_bytes());
    }
    message.put_slice(b"nn");
    message.freeze()
}

fn decode(c: &mut Criterion) {
    let mut group = c.benchmark_group("pgoutput");
    group.throughput(Throughput::Elements(1));
    for body in [150, 10_000] {
        let message = insert(body);
        group.bench_function(format!("insert of {body} bytes"), |b| {
            b.iter(|| {
                let Ok(pgoutput::Message::Insert { mut tuple, .. }) = pgoutput::decode(message.clone())
                else {
                    unreachable!("an insert")
                };
                while let Some(value) = tuple.next_value().expect("well formed") {
                    black_box(value);
                }
            });
        });
    }
    group.finish();
}

fn header_table(c: &mut Criterion) {
    let json = br#"{"tenant": "acme", "attempt": 3, "priority": 1.5, "trace": {"id": "4bf92f3577b34da6", "sampled": true}}"#;
    let mut group = c.benchmark_group("headers");
    group.throughput(Throughput::Elements(1));
    group.bench_function("four, one nested", |b| b.iter(|| headers::parse(black_box(json), 100_000)));
    group.finish();
}

fn settle(c: &mut Criterion) {
    const ROWS: u64 = 1_000;
    let mut group = c.benchmark_group("ledger");
    group.throughput(Throughput::Elements(ROWS));
    let mark = |row| Mark::Row(Position { commit: Lsn(1), row });
    group.bench_function("in order", |b| {
        b.iter_batched_ref(
            Ledger::new,
            |ledger| (0..ROWS).for_each(|row| ledger.settle(row, mark(row))),
            BatchSize::SmallInput,
        );
    });
    group.bench_function("a window of 256 from its end", |b| {
        b.iter_batched_ref(
            Ledger::new,
            |ledger| {
                for window in 0..ROWS / 250 {
                    (window * 250..(window + 1) * 250).rev().for_each(|row| ledger.settle(row, mark(row)));
                }
            },
            BatchSize::SmallInput,
        );
    });
    group.finish();
}

criterion_group!(hot_paths, decode, header_table, settle);
criterion_main!(hot_paths);
