//! The admin server: probes, metrics, status, and the hands that pause, resume and drain.
//!
//! It runs on a thread of its own, so a probe is answered however busy the pipeline is. Requests are small and bounded;
//! what changes something wants an operator's token where one is configured, and never obeys another site's page.

pub mod access;
mod letters;
pub mod status;

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, SystemTime},
};

use actix_web::{
    App, HttpResponse, HttpServer,
    dev::Server,
    http::header::ContentType,
    middleware::from_fn,
    web::{self, Data},
};
use metrics_exporter_prometheus::PrometheusHandle;
use postrider_actors::{
    error::Error,
    pipeline::Plane,
    settings::Settings,
    status::{Board, figures::Figures},
};

use crate::letters::Desk;
use access::{Access, Tokens};
use status::Status;

/// Largest body of a request: every request of this API fits many times.
const BODY_BYTES: usize = 64 * 1024;

/// How long a client may take to send its head, and an idle connection is kept.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(5);

/// Connections served at a time; more wait in the kernel's queue.
const CONNECTIONS: usize = 256;

/// What the handlers look at.
pub struct Admin {
    /// What the relay was told to do.
    pub settings: Arc<Settings>,
    /// What it says about itself.
    pub board: Board,
    /// The figures behind that.
    pub figures: Arc<Figures>,
    /// What the operator asked for.
    pub plane: Arc<Plane>,
    /// Renders the metrics.
    pub metrics: PrometheusHandle,
    /// What may be done with rejected rows.
    pub letters: Desk,
    /// Who may do what.
    pub tokens: Tokens,
    /// When the process started.
    pub started: SystemTime,
}

/// Binds `listen` and serves; the server runs when the returned future is awaited or spawned.
///
/// # Errors
/// When the address cannot be bound: it is in use, or not ours.
pub fn serve(listen: SocketAddr, admin: Admin) -> std::io::Result<Server> {
    let admin = Data::new(admin);
    let server = HttpServer::new(move || {
        App::new()
            .app_data(admin.clone())
            .app_data(web::PayloadConfig::new(BODY_BYTES))
            .wrap(from_fn(access::guard))
            .service(web::resource("/livez").route(web::get().to(livez)))
            .service(web::resource("/readyz").route(web::get().to(readyz)))
            .service(web::resource("/metrics").route(web::get().to(metrics)))
            .service(web::resource("/api/status").route(web::get().to(show_status)))
            .service(web::resource("/api/pause").route(web::post().to(pause)))
            .service(web::resource("/api/resume").route(web::post().to(resume)))
            .service(web::resource("/api/drain").route(web::post().to(drain)))
            .service(web::resource("/api/retries").route(web::get().to(letters::retries)))
            .service(web::resource("/api/dead-letters").route(web::get().to(letters::dead_letters)))
            .service(web::resource("/api/dead-letters/requeue").route(web::post().to(letters::requeue)))
            .service(web::resource("/api/dead-letters/discard").route(web::post().to(letters::discard)))
            .service(web::resource("/api/dead-letters/{id:.+}").route(web::get().to(letters::show)))
    })
    .workers(1)
    .max_connections(CONNECTIONS)
    .client_request_timeout(CLIENT_TIMEOUT)
    .keep_alive(CLIENT_TIMEOUT)
    .shutdown_timeout(1)
    .disable_signals()
    .bind(listen)?;
    Ok(server.run())
}

/// The process lives and answers: that is all a liveness probe may ask.
async fn livez() -> HttpResponse {
    word(HttpResponse::Ok(), "live")
}

/// Readiness follows progress: a relay that is blocked is not ready, however alive.
async fn readyz(admin: Data<Admin>) -> HttpResponse {
    let report = admin.board.report();
    let builder = if report.ready { HttpResponse::Ok() } else { HttpResponse::ServiceUnavailable() };
    word(builder, report.state.as_str())
}

async fn metrics(admin: Data<Admin>) -> HttpResponse {
    status::copy_levels(&admin);
    HttpResponse::Ok().content_type("text/plain; version=0.0.4; charset=utf-8").body(admin.metrics.render())
}

async fn show_status(admin: Data<Admin>) -> HttpResponse {
    HttpResponse::Ok().json(Status::of(&admin))
}

async fn pause(admin: Data<Admin>) -> HttpResponse {
    answer(&admin, admin.plane.pause().await)
}

async fn resume(admin: Data<Admin>) -> HttpResponse {
    answer(&admin, admin.plane.resume().await)
}

async fn drain(admin: Data<Admin>) -> HttpResponse {
    answer(&admin, admin.plane.drain().await)
}

/// The new status, or why nothing changed.
fn answer(admin: &Admin, result: Result<(), Error>) -> HttpResponse {
    match result {
        Ok(()) => HttpResponse::Ok().json(Status::of(admin)),
        Err(error) => problem(503, "not stored, so nothing changed", &error.chain()),
    }
}

/// An error as `application/problem+json` (RFC 9457).
pub(crate) fn problem(status: u16, title: &str, detail: &str) -> HttpResponse {
    let code = actix_web::http::StatusCode::from_u16(status)
        .unwrap_or(actix_web::http::StatusCode::INTERNAL_SERVER_ERROR);
    let body =
        serde_json::json!({ "type": "about:blank", "title": title, "status": status, "detail": detail });
    HttpResponse::build(code).content_type("application/problem+json").body(body.to_string())
}

fn word(mut builder: actix_web::HttpResponseBuilder, word: &str) -> HttpResponse {
    builder.content_type(ContentType::plaintext()).body(format!("{word}\n"))
}

impl Admin {
    /// What a request for `path` by `method` needs.
    pub(crate) fn needs(method: &actix_web::http::Method, path: &str) -> Access {
        match (method.as_str(), path) {
            (_, "/livez" | "/readyz") => Access::Anyone,
            ("GET" | "HEAD", _) => Access::Reader,
            _ => Access::Operator,
        }
    }
}
