//! One small HTTP call, for the admin API and the broker's.

use std::time::Duration;

/// An answer, whatever its status.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("no JSON ({e}): {}", self.body))
    }
}

/// `url` may carry `user:password@`. An error is a server that could not be reached or gave no answer in 10 s.
pub(crate) async fn call(
    method: &'static str,
    url: String,
    body: Option<serde_json::Value>,
) -> Result<Answer, String> {
    tokio::task::spawn_blocking(move || blocking(method, &url, body.as_ref()))
        .await
        .map_err(|e| e.to_string())?
}

pub(crate) fn blocking(method: &str, url: &str, body: Option<&serde_json::Value>) -> Result<Answer, String> {
    let agent = ureq::Agent::new_with_config(
        ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(Duration::from_secs(10)))
            .proxy(None)
            .build(),
    );
    let request = ureq::http::Request::builder()
        .method(method)
        .uri(url)
        .header("content-type", "application/json")
        .body(body.map(ToString::to_string).unwrap_or_default())
        .map_err(|e| e.to_string())?;
    let mut response = agent.run(request).map_err(|e| format!("{method} {url}: {e}"))?;
    let body = response.body_mut().read_to_string().map_err(|e| format!("{method} {url}: {e}"))?;
    Ok(Answer { status: response.status().as_u16(), body })
}
