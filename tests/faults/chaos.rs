//! The soak's schedule: the same for the same seed, survivable, and over in time.

#[path = "../chaos/schedule.rs"]
mod schedule;

use std::collections::HashSet;
use std::time::Duration;

use schedule::{Kind, last_calm, schedule};

const LENGTHS: [Duration; 3] = [Duration::from_secs(60), Duration::from_secs(180), Duration::from_secs(600)];

#[test]
fn the_same_seed_and_length_make_the_same_faults_and_another_seed_makes_others() {
    for length in LENGTHS {
        let schedules: Vec<_> = (0..50).map(|seed| schedule(seed, length)).collect();
        for (seed, once) in (0..).zip(&schedules) {
            assert_eq!(once, &schedule(seed, length), "seed {seed}");
        }
        let different: HashSet<String> = schedules.iter().map(|s| format!("{s:?}")).collect();
        assert_eq!(different.len(), schedules.len(), "{length:?}");
    }
}

#[test]
fn faults_come_one_at_a_time_with_calm_between_and_a_long_calm_at_the_end() {
    for length in LENGTHS {
        for seed in 0..200 {
            let mut calm_until = Duration::ZERO;
            let episodes = schedule(seed, length);
            assert!(episodes.len() >= 3, "seed {seed}, {length:?}: {episodes:?}");
            for episode in episodes {
                let fault = episode.fault;
                assert!(fault.at > calm_until, "seed {seed}: {fault} comes too early");
                assert!(fault.lasts <= Duration::from_secs(8), "seed {seed}: {fault} is too long");
                if let Some(second) = episode.meanwhile {
                    assert!(fault.at < second.at && second.ends() < fault.ends(), "seed {seed}: {episode}");
                    assert_ne!(fault.kind, Kind::RelayFrozen, "seed {seed}: who is frozen cannot stop");
                }
                calm_until = fault.ends() + Duration::from_secs(1);
            }
            assert!(
                calm_until + last_calm(length) <= length + Duration::from_secs(1),
                "seed {seed}, {length:?}"
            );
        }
    }
}

#[test]
fn ten_minutes_have_faults_of_every_kind() {
    for seed in 0..50 {
        let kinds: HashSet<Kind> =
            schedule(seed, Duration::from_secs(600)).iter().map(|e| e.fault.kind).collect();
        assert_eq!(kinds.len(), Kind::ALL.len(), "seed {seed}");
    }
}
