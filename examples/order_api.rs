//! An order API that tells the world about each order through an outbox.
//!
//! `POST /orders` writes the order and its outbox row in one transaction: either both are there or neither is. The API
//! never talks to the broker, so a broker that is down delays messages and fails no order. postrider does the rest.
//!
//! ```text
//! export DATABASE_URL=postgres://postgres@127.0.0.1:5432/shop
//! postrider migrate                      # creates outbox_messages, once
//! cargo run --example order_api          # listens on 127.0.0.1:8080, or on $LISTEN
//! curl -i 127.0.0.1:8080/orders -H 'content-type: application/json' \
//!      -d '{"customer":"ada","item":"teapot","quantity":2,"unit_price_cents":1950}'
//! ```
//!
//! `./dev demo` runs this very file.

use std::{env, sync::Arc, time::Instant};

use actix_web::{App, HttpResponse, HttpServer, ResponseError, dev::Server, http::StatusCode, web};
use anyhow::Context;
use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod};
use serde::{Deserialize, Serialize};
use tokio_postgres::{NoTls, types::Type};
use uuid::Uuid;

/// What a customer asks for.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewOrder {
    pub(crate) customer: String,
    pub(crate) item: String,
    pub(crate) quantity: i32,
    pub(crate) unit_price_cents: i64,
}

/// An order as it is stored and shown.
#[derive(Debug, Serialize)]
pub(crate) struct Order {
    pub(crate) id: Uuid,
    #[serde(flatten)]
    pub(crate) order: NewOrder,
}

/// The outbox row's type, and by postrider's default also the message's routing key.
pub(crate) const ORDER_PLACED: &str = "order.placed";

/// The content of the outbox row: what consumers are told. It carries all they need, so that they need not ask back.
#[derive(Debug, Serialize)]
pub(crate) struct OrderPlaced<'a> {
    pub(crate) order_id: Uuid,
    pub(crate) customer: &'a str,
    pub(crate) item: &'a str,
    pub(crate) quantity: i32,
    pub(crate) total_cents: i64,
}

/// The orders of one database.
#[derive(Clone)]
pub(crate) struct Orders {
    pool: Pool,
    /// Whether to wake a relay in poll mode with `source.poll.wake = "notify"`.
    wake: bool,
    /// Told of each outbox row whose transaction has committed; the demo measures from here.
    committed: Option<Committed>,
}

/// Called with the id of an outbox row and the moment its COMMIT returned.
pub(crate) type Committed = Arc<dyn Fn(Uuid, Instant) + Send + Sync>;

impl Orders {
    pub(crate) fn new(pool: Pool, wake: bool, committed: Option<Committed>) -> Self {
        Self { pool, wake, committed }
    }

    /// Creates the application's own table. The outbox table is made by `postrider migrate`.
    pub(crate) async fn create_table(&self) -> Result<(), OrderError> {
        let sql = "CREATE TABLE IF NOT EXISTS orders (
                       id uuid PRIMARY KEY,
                       customer text NOT NULL,
                       item text NOT NULL,
                       quantity integer NOT NULL CHECK (quantity > 0),
                       unit_price_cents bigint NOT NULL CHECK (unit_price_cents >= 0),
                       placed_at timestamptz NOT NULL DEFAULT now())";
        Ok(self.pool.get().await?.batch_execute(sql).await?)
    }

    /// Stores an order and the message about it, both or neither.
    pub(crate) async fn place(&self, order: NewOrder) -> Result<Order, OrderError> {
        let total_cents = total_cents(&order)?;
        // Version 7 begins with the time, so new rows land at one end of each primary key.
        let (order_id, message_id) = (Uuid::now_v7(), Uuid::now_v7());
        let event = OrderPlaced {
            order_id,
            customer: &order.customer,
            item: &order.item,
            quantity: order.quantity,
            total_cents,
        };
        let content = serde_json::to_string(&event)?;

        let mut client = self.pool.get().await?;
        let transaction = client.transaction().await?;
        transaction
            .execute_typed(
                "INSERT INTO orders (id, customer, item, quantity, unit_price_cents) VALUES ($1, $2, $3, $4, $5)",
                &[
                    (&order_id, Type::UUID),
                    (&order.customer, Type::TEXT),
                    (&order.item, Type::TEXT),
                    (&order.quantity, Type::INT4),
                    (&order.unit_price_cents, Type::INT8),
                ],
            )
            .await?;
        transaction
            .execute_typed(
                "INSERT INTO outbox_messages (id, type, content, occurred_on_utc) VALUES ($1, $2, $3::jsonb, now())",
                &[(&message_id, Type::UUID), (&ORDER_PLACED, Type::TEXT), (&content, Type::TEXT)],
            )
            .await?;
        transaction.commit().await?;

        if let Some(committed) = &self.committed {
            committed(message_id, Instant::now());
        }
        if self.wake {
            // After the COMMIT, never inside the transaction: there it would make all commits of the database queue
            // behind one lock. Losing it loses nothing, the relay's own poll finds the row.
            if let Err(error) = client.batch_execute("NOTIFY postrider").await {
                eprintln!("order_api: NOTIFY failed, the relay's poll will find the row: {error}");
            }
        }
        Ok(Order { id: order_id, order })
    }

    /// An order, if there is one.
    pub(crate) async fn find(&self, id: Uuid) -> Result<Option<Order>, OrderError> {
        let client = self.pool.get().await?;
        let row = client
            .query_typed_opt(
                "SELECT customer, item, quantity, unit_price_cents FROM orders WHERE id = $1",
                &[(&id, Type::UUID)],
            )
            .await?;
        let Some(row) = row else { return Ok(None) };
        let order = NewOrder {
            customer: row.try_get(0)?,
            item: row.try_get(1)?,
            quantity: row.try_get(2)?,
            unit_price_cents: row.try_get(3)?,
        };
        Ok(Some(Order { id, order }))
    }
}

fn total_cents(order: &NewOrder) -> Result<i64, OrderError> {
    if order.customer.is_empty() || order.item.is_empty() {
        return Err(OrderError::Invalid("customer and item must not be empty"));
    }
    // PostgreSQL's text holds any character but this one.
    if order.customer.contains('\0') || order.item.contains('\0') {
        return Err(OrderError::Invalid("customer and item must not contain NUL"));
    }
    if order.quantity <= 0 || order.unit_price_cents < 0 {
        return Err(OrderError::Invalid("quantity must be positive and unit_price_cents not negative"));
    }
    order
        .unit_price_cents
        .checked_mul(order.quantity.into())
        .ok_or(OrderError::Invalid("the total is too large"))
}

/// Why an order was not stored, or not found out about.
#[derive(Debug)]
pub(crate) enum OrderError {
    Invalid(&'static str),
    Unavailable(anyhow::Error),
}

impl<E: std::error::Error + Send + Sync + 'static> From<E> for OrderError {
    fn from(error: E) -> Self {
        Self::Unavailable(error.into())
    }
}

impl std::fmt::Display for OrderError {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Invalid(why) => out.write_str(why),
            Self::Unavailable(_) => out.write_str("the database is not available, try again"),
        }
    }
}

impl ResponseError for OrderError {
    fn status_code(&self) -> StatusCode {
        match self {
            Self::Invalid(_) => StatusCode::UNPROCESSABLE_ENTITY,
            Self::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    fn error_response(&self) -> HttpResponse {
        if let Self::Unavailable(error) = self {
            eprintln!("order_api: {error:#}");
        }
        HttpResponse::build(self.status_code()).json(serde_json::json!({ "error": self.to_string() }))
    }
}

async fn post_order(
    orders: web::Data<Orders>,
    order: web::Json<NewOrder>,
) -> Result<HttpResponse, OrderError> {
    let order = orders.place(order.into_inner()).await?;
    Ok(HttpResponse::Created().insert_header(("location", format!("/orders/{}", order.id))).json(order))
}

async fn get_order(orders: web::Data<Orders>, id: web::Path<Uuid>) -> Result<HttpResponse, OrderError> {
    Ok(match orders.find(*id).await? {
        Some(order) => HttpResponse::Ok().json(order),
        None => HttpResponse::NotFound().json(serde_json::json!({ "error": "no such order" })),
    })
}

/// The server, not yet running, and the address it is bound to.
pub(crate) fn server(orders: Orders, listen: &str) -> anyhow::Result<(Server, std::net::SocketAddr)> {
    let orders = web::Data::new(orders);
    let server = HttpServer::new(move || {
        App::new()
            .app_data(orders.clone())
            .route("/orders", web::post().to(post_order))
            .route("/orders/{id}", web::get().to(get_order))
    })
    .workers(2)
    .bind(listen)
    .with_context(|| format!("cannot listen on {listen}"))?;
    let address = server.addrs().first().copied().context("bound to no address")?;
    // Whoever runs this decides what a signal means.
    Ok((server.disable_signals().run(), address))
}

/// A pool of connections; nothing is connected yet. `NoTls` is for a database on this machine.
pub(crate) fn pool(database_url: &str, size: usize) -> anyhow::Result<Pool> {
    let mut config: tokio_postgres::Config = database_url.parse().context("DATABASE_URL")?;
    config.application_name("order_api");
    let manager =
        Manager::from_config(config, NoTls, ManagerConfig { recycling_method: RecyclingMethod::Fast });
    Ok(Pool::builder(manager).max_size(size).build()?)
}

#[actix_web::main]
async fn main() -> anyhow::Result<()> {
    let database_url = env::var("DATABASE_URL").context("DATABASE_URL is not set")?;
    let listen = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:8080".to_owned());
    let wake = env::var("WAKE").is_ok_and(|wake| wake == "notify");

    let orders = Orders::new(pool(&database_url, 16)?, wake, None);
    if let Err(OrderError::Unavailable(error)) = orders.create_table().await {
        return Err(error.context("cannot create the table orders"));
    }
    let (server, address) = server(orders, &listen)?;
    println!("order_api: http://{address}/orders");
    let handle = server.handle();
    tokio::spawn(async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            handle.stop(true).await;
        }
    });
    Ok(server.await?)
}
