//! The order API as a real HTTP server, and those who order.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::bail;
use tokio::{
    sync::Semaphore,
    task::{JoinHandle, spawn_blocking},
    time::{MissedTickBehavior, interval, timeout},
};
use uuid::Uuid;

use crate::{
    order_api::{self, NewOrder, Orders},
    tally::Tally,
};

/// Orders sent and not answered yet, at most; each holds a thread. Beyond it an order is skipped and counted: a stuck
/// database must show as that, not as a demo that eats all memory.
const UNANSWERED: u32 = 256;
/// How long an order may take to be answered.
const ANSWER: Duration = Duration::from_secs(10);
/// Enough for 1,000 orders a second of a few milliseconds each.
const CONNECTIONS: usize = 16;

/// Places orders at a steady rate.
pub(crate) struct Load {
    address: SocketAddr,
    tally: Arc<Tally>,
    unanswered: Arc<Semaphore>,
    placing: Option<JoinHandle<()>>,
}

impl Load {
    /// Starts the order API on a free port.
    pub(crate) async fn open(database: &str, wake: bool, tally: &Arc<Tally>) -> anyhow::Result<Self> {
        let committed = tally.clone();
        let orders = Orders::new(
            order_api::pool(database, CONNECTIONS)?,
            wake,
            Some(Arc::new(move |id, at| committed.committed(id, at))),
        );
        if orders.create_table().await.is_err() {
            bail!("cannot create the table orders");
        }
        let (server, address) = order_api::server(orders, "127.0.0.1:0")?;
        tokio::spawn(server);
        let unanswered = Arc::new(Semaphore::new(UNANSWERED as usize));
        Ok(Self { address, tally: tally.clone(), unanswered, placing: None })
    }

    /// Where the API listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Begins to place `rate` orders a second, each at its own time however long the others take.
    pub(crate) fn start(&mut self, rate: u32) {
        let (tally, unanswered) = (self.tally.clone(), self.unanswered.clone());
        let url = format!("http://{}/orders", self.address);
        let agent = ureq::Agent::from(
            ureq::Agent::config_builder()
                .timeout_global(Some(ANSWER))
                .max_idle_connections_per_host(UNANSWERED as usize)
                // The API is here; a proxy configured for the outside world is not asked.
                .proxy(None)
                .build(),
        );
        self.placing = Some(tokio::spawn(async move {
            let mut tick = interval(Duration::from_secs(1) / rate);
            tick.set_missed_tick_behavior(MissedTickBehavior::Burst);
            loop {
                tick.tick().await;
                let Ok(permit) = unanswered.clone().try_acquire_owned() else {
                    tally.skipped();
                    continue;
                };
                let (agent, url, tally) = (agent.clone(), url.clone(), tally.clone());
                spawn_blocking(move || {
                    if place(&agent, &url).is_err() {
                        tally.failed();
                    }
                    drop(permit);
                });
            }
        }));
    }

    /// Places no more orders and waits for the answers to those on their way.
    pub(crate) async fn stop(&mut self) {
        if let Some(placing) = self.placing.take() {
            placing.abort();
        }
        // The client's own deadline has ended them all by then.
        let _all = timeout(ANSWER + Duration::from_secs(1), self.unanswered.acquire_many(UNANSWERED)).await;
    }
}

/// Any answer but a success is an error.
fn place(agent: &ureq::Agent, url: &str) -> anyhow::Result<()> {
    let order = serde_json::to_vec(&any_order())?;
    let mut response = agent.post(url).header("content-type", "application/json").send(order)?;
    // Read to its end, or the connection is not used again.
    response.body_mut().read_to_vec()?;
    Ok(())
}

/// An order of one of fifty customers.
pub(crate) fn any_order() -> NewOrder {
    const ITEMS: [&str; 4] = ["teapot", "kettle", "cup", "saucer"];
    let [customer, item, quantity, price, ..] = *Uuid::new_v4().as_bytes();
    NewOrder {
        customer: format!("customer-{:02}", customer % 50),
        item: ITEMS[usize::from(item) % ITEMS.len()].to_owned(),
        quantity: i32::from(quantity % 9) + 1,
        unit_price_cents: i64::from(price) * 10 + 95,
    }
}
