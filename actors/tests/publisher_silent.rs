//! A broker that accepts connections and says nothing. In a binary of its own, because it counts the process's threads.

mod publishing;

use std::time::{Duration, Instant};

use postrider_actors::status::Reason as StateReason;
use publishing::stage::{Stage3, settings};

/// A port that is open and silent costs no thread and no descriptor, however often it is tried.
#[actix::test]
async fn a_silent_port_leaves_nothing_behind() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("amqp://guest:guest@{}/", listener.local_addr().expect("its address"));
    let count = || {
        let fds = std::fs::read_dir("/proc/self/fd").expect("proc").count();
        let threads = std::fs::read_dir("/proc/self/task").expect("proc").count();
        (fds, threads)
    };
    let stage = Stage3::start(settings(&url, "outbox")).await;
    let until = Instant::now() + Duration::from_secs(30);
    while !stage.shared.board.holds(StateReason::BrokerDown) {
        assert!(Instant::now() < until, "nobody said that there is no answer");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // the first attempt has been given up by then, and what is made once for all has been made
    tokio::time::sleep(Duration::from_secs(12)).await;
    let (fds, threads) = count();
    tokio::time::sleep(Duration::from_secs(25)).await;
    let (later_fds, later_threads) = count();
    assert!(later_fds <= fds + 3, "{fds} descriptors became {later_fds}");
    assert!(later_threads <= threads + 1, "{threads} threads became {later_threads}");
    stage.stop().await;
}
