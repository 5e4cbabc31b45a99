//! Attribution against a model of lapin's queue: `acknowledgement.rs` and `returned_messages.rs` of lapin 4.12.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::{
    ledger::{Ledger, Mark, Watermark},
    position::{Lsn, Position},
};

fn id(n: usize) -> Bytes {
    Bytes::from(n.to_string())
}

fn words() -> String {
    "312 NO_ROUTE".to_owned()
}

/// lapin's side of one channel.
#[derive(Default)]
struct Lapin {
    pending: Vec<usize>,
    queue: VecDeque<usize>,
    /// Completions the relay has not seen yet: message, acked, carried.
    resolved: Vec<(usize, bool, Option<usize>)>,
}

impl Lapin {
    fn complete(&mut self, message: usize, acked: bool) {
        self.pending.retain(|&pending| pending != message);
        let carried = self.queue.pop_front();
        self.resolved.push((message, acked, carried));
    }

    /// A multiple ack completes the tags of a hash map, in no order.
    fn complete_before(&mut self, message: usize, acked: bool, shuffle: usize) {
        let mut all: Vec<usize> = self.pending.iter().copied().filter(|&p| p <= message).collect();
        if !all.is_empty() {
            let by = shuffle % all.len();
            all.rotate_left(by);
            if shuffle % 2 == 1 {
                all.reverse();
            }
        }
        for each in all {
            self.complete(each, acked);
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Send,
    /// The broker returns the nth outstanding unroutable message that was not returned yet.
    Return(usize),
    Confirm(usize),
    ConfirmBefore(usize, usize),
    /// The relay collects what is ready, in an order rotated by this, and settles.
    Collect(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(
        prop_oneof![
            3 => Just(Step::Send),
            2 => (0usize..64).prop_map(Step::Return),
            2 => (0usize..64).prop_map(Step::Confirm),
            1 => (0usize..64, 0usize..64).prop_map(|(a, b)| Step::ConfirmBefore(a, b)),
            2 => (0usize..64).prop_map(Step::Collect),
        ],
        0..400,
    )
}

fn collect(lapin: &mut Lapin, relay: &mut Attribution<usize>, rotate: usize, seen: &mut [Option<Outcome>]) {
    let mut ready = std::mem::take(&mut lapin.resolved);
    if !ready.is_empty() {
        let by = rotate % ready.len();
        ready.rotate_left(by);
    }
    for (message, acked, carried) in ready {
        let carried = carried.map(|n| Returned { id: id(n), words: words() });
        relay.completed(message as u64, acked, carried);
    }
    relay.settle(|message, outcome| {
        assert!(seen[message].is_none(), "two outcomes of one message");
        seen[message] = Some(outcome);
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Whatever the order of acks, nacks and returns, each message gets its own outcome, and never another's.
    #[test]
    fn every_outcome_is_the_messages_own(
        steps in steps(),
        fates in prop::collection::vec((any::<bool>(), any::<bool>()), 400),
    ) {
        let (mut lapin, mut relay) = (Lapin::default(), Attribution::default());
        let mut seen: Vec<Option<Outcome>> = vec![None; 400];
        let mut returned = vec![false; 400];
        let mut sent = 0;
        // fate.0: routable, fate.1: acked
        let give_back = |lapin: &mut Lapin, returned: &mut Vec<bool>, message: usize| {
            if !fates[message].0 && !returned[message] {
                returned[message] = true;
                lapin.queue.push_back(message);
            }
        };
        for step in steps {
            match step {
                Step::Send if sent < 400 => {
                    prop_assert_eq!(relay.sent(id(sent), sent), sent as u64);
                    lapin.pending.push(sent);
                    sent += 1;
                }
                Step::Send => {}
                Step::Return(n) if !lapin.pending.is_empty() => {
                    let message = lapin.pending[n % lapin.pending.len()];
                    give_back(&mut lapin, &mut returned, message);
                }
                Step::Confirm(n) if !lapin.pending.is_empty() => {
                    let message = lapin.pending[n % lapin.pending.len()];
                    give_back(&mut lapin, &mut returned, message);
                    lapin.complete(message, fates[message].1);
                }
                Step::ConfirmBefore(n, shuffle) if !lapin.pending.is_empty() => {
                    let message = lapin.pending[n % lapin.pending.len()];
                    let acked = fates[message].1;
                    // One frame, one answer: only messages of the same fate may be confirmed by it.
                    let same = lapin.pending.iter().all(|&p| p > message || fates[p].1 == acked);
                    if same {
                        for p in lapin.pending.clone() {
                            if p <= message {
                                give_back(&mut lapin, &mut returned, p);
                            }
                        }
                        lapin.complete_before(message, acked, shuffle);
                    }
                }
                Step::Collect(rotate) => collect(&mut lapin, &mut relay, rotate, &mut seen),
                _ => {}
            }
        }
        for message in lapin.pending.clone() {
            give_back(&mut lapin, &mut returned, message);
            lapin.complete(message, fates[message].1);
        }
        collect(&mut lapin, &mut relay, 0, &mut seen);
        for message in 0..sent {
            let right = match fates[message] {
                (false, _) => Outcome::Returned(words()),
                (true, true) => Outcome::Delivered,
                (true, false) => Outcome::Nacked,
            };
            prop_assert_eq!(seen[message].as_ref(), Some(&right), "message {}", message);
        }
        prop_assert!(relay.is_empty());
        prop_assert_eq!(relay.outstanding(), 0);
        prop_assert!(relay.returned.is_empty(), "a return is never kept for ever");
    }
}

/// C04: ack 2, nack 1 multiple, ack 5 multiple, nack 4 (tags counted from 1).
#[test]
fn only_what_was_acked_is_delivered_when_acks_and_nacks_mix() {
    let (mut lapin, mut relay) = (Lapin::default(), Attribution::default());
    for n in 0..5 {
        relay.sent(id(n), n);
        lapin.pending.push(n);
    }
    lapin.complete(1, true);
    lapin.complete_before(0, false, 0);
    // A multiple ack covers every open tag up to its own, so the nack of 4 takes effect before it: RabbitMQ never puts
    // a tag it will nack into the range of a multiple ack, and lapin closes a channel that is told both.
    lapin.complete(3, false);
    lapin.complete_before(4, true, 1);
    let mut seen = vec![None; 5];
    collect(&mut lapin, &mut relay, 2, &mut seen);
    let delivered: Vec<usize> =
        (0..5).filter(|&n| seen[n] == Some(Outcome::Delivered)).map(|n| n + 1).collect();
    assert_eq!(delivered, [2, 3, 5]);
}

#[test]
fn a_returned_message_is_never_recorded_as_delivered_whoever_carries_its_return() {
    let mut relay = Attribution::default();
    for n in 0..3 {
        relay.sent(id(n), n);
    }
    let mut seen = Vec::new();
    // 2's return is carried by 0's confirm, while 2 itself has no confirm yet.
    relay.completed(0, true, Some(Returned { id: id(2), words: words() }));
    relay.settle(|n, outcome| seen.push((n, outcome)));
    assert!(seen.is_empty(), "0 may have been returned too: its return could still be queued");
    relay.completed(2, true, None);
    relay.settle(|n, outcome| seen.push((n, outcome)));
    assert_eq!(seen, [(2, Outcome::Returned(words()))]);
    relay.completed(1, true, None);
    relay.settle(|n, outcome| seen.push((n, outcome)));
    assert_eq!(seen[1..], [(0, Outcome::Delivered), (1, Outcome::Delivered)]);
}

#[test]
fn a_nack_of_a_returned_message_keeps_the_brokers_words() {
    let mut relay = Attribution::default();
    relay.sent(id(0), 0);
    relay.completed(0, false, Some(Returned { id: id(0), words: words() }));
    let mut seen = Vec::new();
    relay.settle(|n, outcome| seen.push((n, outcome)));
    assert_eq!(seen, [(0, Outcome::Returned(words()))]);
}

#[test]
fn what_a_dead_channel_leaves_comes_back_in_the_order_it_was_sent() {
    let mut relay = Attribution::default();
    for n in 0..5 {
        relay.sent(id(n), n);
    }
    relay.completed(1, true, None);
    relay.completed(3, true, Some(Returned { id: id(4), words: words() }));
    relay.settle(|n, outcome| assert_eq!((n, outcome), (1, Outcome::Delivered)));
    assert_eq!(relay.take_back(), [(0, true), (2, true), (3, false), (4, true)]);
    assert!(relay.is_empty());
}

/// C04: ack 2, nack 1 and all before, ack 5 and all before, nack 4.
#[test]
fn exactly_what_was_acknowledged_is_delivered_and_the_watermark_stays_before_what_was_not() {
    let mut relay: Attribution<u64> = Attribution::default();
    let mut ledger = Ledger::new();
    let mut delivered = Vec::new();
    for n in 0..5 {
        relay.sent(id(n), n as u64);
    }
    let position = |n: u64| Position { commit: Lsn(100), row: n + 1 };
    for (tag, acked) in [(1, true), (0, false), (2, true), (4, true), (3, false)] {
        relay.completed(tag, acked, None);
        relay.settle(|n, outcome| {
            if outcome == Outcome::Delivered {
                delivered.push(n + 1);
                ledger.settle(n, Mark::Row(position(n)));
            }
        });
    }
    assert_eq!(delivered, [2, 3, 5]);
    assert_eq!(ledger.watermark(), Watermark::default(), "before 1");
    ledger.settle(0, Mark::Row(position(0)));
    assert_eq!(ledger.watermark().position, position(2), "before 4");
}
