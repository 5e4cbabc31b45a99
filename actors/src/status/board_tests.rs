use super::*;

#[test]
fn the_state_is_the_most_important_thing_on_the_board() {
    let cases = [
        (Phase::Running, false, Desired::Run, false, State::Running),
        (Phase::Running, true, Desired::Run, false, State::Blocked),
        (Phase::Running, true, Desired::Pause, false, State::Blocked),
        (Phase::Running, false, Desired::Pause, false, State::Paused),
        (Phase::Running, false, Desired::Drain, false, State::Draining),
        (Phase::Running, false, Desired::Drain, true, State::Drained),
        (Phase::Sweeping, false, Desired::Run, false, State::Sweeping),
        (Phase::Standby, true, Desired::Run, false, State::Standby),
        (Phase::Failed, true, Desired::Pause, false, State::Failed),
        (Phase::Starting, false, Desired::Run, false, State::Starting),
    ];
    for (phase, conditions, desired, drained, state) in cases {
        assert_eq!(derive(phase, conditions, desired, drained), state, "{phase:?} {conditions} {desired:?}");
    }
}

#[test]
fn the_most_urgent_reason_is_said_first_and_the_next_follows() {
    let board = Board::new();
    board.set_phase(Phase::Running);
    board.raise(Reason::BrokerDown, "refused", "start it");
    board.raise(Reason::DatabaseDown, "refused", "start it");
    assert_eq!(board.report().reason, Some(Reason::DatabaseDown));
    board.clear(Reason::DatabaseDown);
    assert_eq!(board.report().reason, Some(Reason::BrokerDown));
    board.clear(Reason::BrokerDown);
    assert_eq!(board.report().state, State::Running);
}

#[test]
fn a_database_that_answers_is_not_down() {
    let board = Board::new();
    board.raise_error(&Error::new(Kind::DatabaseDown, "connect"));
    board.raise_error(&Error::new(Kind::DatabaseReadonly, "claim rows"));
    assert_eq!(board.report().reason, Some(Reason::DatabaseReadonly));
    assert_eq!(board.conditions().len(), 1);
}

#[test]
fn a_starting_relay_is_not_ready_and_a_block_of_a_moment_does_not_unready_a_running_one() {
    let board = Board::new();
    assert!(!board.report().ready);
    board.set_phase(Phase::Running);
    assert!(board.report().ready);
    board.raise(Reason::BrokerAlarm, "memory", "free some");
    assert!(board.report().ready);
    let long_ago = Instant::now().checked_sub(READY_GRACE).unwrap();
    board.raise_since(long_ago, Reason::DatabaseDown, "silent", "look at it");
    assert!(!board.report().ready, "a silence counts from its beginning");
}
