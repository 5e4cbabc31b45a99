//! Whatever happens to the ledger and the acker in whatever order, the law holds.

#[path = "books_log.rs"]
mod log;
#[path = "books_model.rs"]
mod model;

use proptest::prelude::*;

use self::{
    log::{Transaction, end_of},
    model::{Answer, Commit, Recorded, Step, World},
};
use super::Books;
use crate::{
    envelope::{Envelope, Passed, Place, Row, Settlement, Verdict},
    ledger::{Mark, Watermark},
    position::{Lsn, Position},
};

/// Ends of transactions and rows that are refused are known while what stands before them waits to be sent: they took
/// nothing of the exposure, and must not hold any.
#[test]
fn only_what_was_sent_counts_as_ahead() {
    let row = |number, exposed| Settlement {
        envelope: Envelope {
            number,
            place: Some(Place { position: Position { commit: Lsn(10), row: number + 1 }, xid: 1 }),
            committed_at: None,
            row: Row::default(),
            bytes: 1,
        },
        verdict: Verdict::Delivered,
        exposed,
    };
    let mut books = Books::behind(Watermark::default());
    let ends: Vec<Passed> =
        (50..100).map(|number| Passed { number, mark: Mark::End(Lsn(1_000 + number)) }).collect();
    books.enter(&ends, &[row(0, true), row(2, true), row(3, false)]).unwrap();
    assert_eq!(books.exposed_ahead(), 1, "row 2 alone: 0 is in the prefix, 3 was never sent");
    books.enter(&[], &[row(1, true)]).unwrap();
    assert_eq!(books.exposed_ahead(), 0);
}

fn step() -> impl Strategy<Value = Step> {
    let answer = || {
        prop_oneof![
            6 => Just(Answer::Ack), 1 => Just(Answer::Return), 1 => Just(Answer::Nack), 1 => Just(Answer::Invalid),
        ]
    };
    let commit =
        prop_oneof![8 => Just(Commit::Done), 1 => Just(Commit::KilledBefore), 1 => Just(Commit::KilledAfter)];
    prop_oneof![
        6 => (1usize..8).prop_map(Step::Read),
        6 => (1usize..6).prop_map(Step::Send),
        10 => (0usize..16, answer()).prop_map(|(n, answer)| Step::Answer(n, answer)),
        6 => (1usize..6, commit, any::<bool>()).prop_map(|(n, commit, due)| Step::Record(n, commit, due)),
        3 => Just(Step::Release),
        3 => Just(Step::Tell),
        2 => (0usize..16, answer(), any::<bool>()).prop_map(|(n, answer, dies)| Step::Retry(n, answer, dies)),
        1 => (0usize..16).prop_map(Step::Abandon),
        1 => any::<u64>().prop_map(Step::Close),
        1 => Just(Step::Checkpoint),
        1 => Just(Step::ServerCrash),
        1 => Just(Step::Kill),
    ]
}

fn transaction() -> impl Strategy<Value = Transaction> {
    (0u8..5, 0u8..3, any::<bool>()).prop_map(|(rows, others, keepalive)| Transaction {
        rows,
        others,
        keepalive,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn the_law_holds_in_every_order_of_events(
        log in prop::collection::vec(transaction(), 1..10),
        steps in prop::collection::vec(step(), 0..150),
        keep: bool,
    ) {
        let mut world = World::of(log, keep);
        let mut relay = world.start();
        for step in steps {
            world.run(&mut relay, step);
            world.check();
        }
        world.finish();
        let (mut last_row, mut last_end) = (Position::default(), Lsn::ZERO);
        for (id, position, end) in world.rows().collect::<Vec<_>>() {
            let recorded = world.recorded.get(&id);
            let delivered = recorded == Some(&Recorded::Delivered) || (world.keep && recorded.is_none());
            prop_assert!(delivered || recorded == Some(&Recorded::Parked), "{}: {:?}", id, recorded);
            prop_assert!(!delivered || world.received.contains(&id), "{} is lost", id);
            (last_row, last_end) = (position, end);
        }
        prop_assert_eq!(world.progress.position, last_row, "all rows are in the progress");
        prop_assert!(world.confirmed >= last_end.max(end_of(world.log.len() - 1)), "the slot follows to the end");
    }
}
