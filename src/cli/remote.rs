//! Commands that ask the running relay, over its admin HTTP.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
    thread::sleep,
    time::Duration,
};

use serde_json::Value;

use super::output;
use crate::{config::Config, failure::Failure};

/// An admin server answers from memory; one that takes longer is not well.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Pause between looks while a drain is under way: what a person perceives as prompt.
const DRAIN_POLL: Duration = Duration::from_millis(250);

/// `postrider status`
pub(super) fn status(config: &Config, json: bool) -> Result<(), Failure> {
    let status = Relay::of(config, true)?.get("/api/status")?;
    output::print(&if json { pretty(&status) } else { human(&status) })
}

/// `postrider pause`, `resume`, and `drain --no-wait`
pub(super) fn ask(config: &Config, what: &str, json: bool) -> Result<(), Failure> {
    let answer = Relay::of(config, false)?.post(&format!("/api/{what}"))?;
    output::print(&if json { pretty(&answer) } else { format!("{what}: accepted\n") })
}

/// `postrider drain`
pub(super) fn drain(config: &Config, json: bool) -> Result<(), Failure> {
    let relay = Relay::of(config, false)?;
    relay.post("/api/drain")?;
    loop {
        let status = relay.get("/api/status")?;
        let state = status["state"].as_str().unwrap_or_default();
        match state {
            "drained" => {
                output::progress("");
                return output::print(&if json { pretty(&status) } else { human(&status) });
            }
            "failed" => {
                output::progress("");
                let remedy = status["remedy"].as_str().unwrap_or("ask `postrider status`");
                return Err(Failure::new("the relay failed before it was drained").with_hint(remedy));
            }
            // Somebody else decided otherwise meanwhile.
            "running" | "paused" if status["desired"].as_str().is_some_and(|desired| desired != "drain") => {
                output::progress("");
                return Err(Failure::new(format!(
                    "the drain was ended by somebody else: the relay is {state}"
                )));
            }
            _ => output::progress(&line(&status)),
        }
        sleep(DRAIN_POLL);
    }
}

/// One line about a relay that is not drained yet.
fn line(status: &Value) -> String {
    let mut line = status["state"].as_str().unwrap_or("?").to_owned();
    for key in ["reason", "in_flight", "lag_bytes", "waiting"] {
        match &status[key] {
            Value::Null => {}
            Value::String(text) => line.push_str(&format!(", {key} {text}")),
            value => line.push_str(&format!(", {key} {value}")),
        }
    }
    line
}

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

/// A status as indented `key: value` lines, those that say how things stand first.
fn human(status: &Value) -> String {
    let mut text = String::new();
    let first = ["mode", "state", "reason", "since", "remedy"];
    if let Value::Object(fields) = status {
        for key in first {
            if let Some(value) = fields.get(key) {
                field(&mut text, 0, key, value);
            }
        }
        for (key, value) in fields.iter().filter(|(key, _)| !first.contains(&key.as_str())) {
            field(&mut text, 0, key, value);
        }
    }
    text
}

fn field(text: &mut String, depth: usize, key: &str, value: &Value) {
    let indent = "  ".repeat(depth);
    let key = key.replace('_', " ");
    match value {
        Value::Null => {}
        Value::Object(fields) => {
            text.push_str(&format!("{indent}{key}:\n"));
            for (key, value) in fields {
                field(text, depth + 1, key, value);
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                field(text, depth, &format!("{key} {}", index + 1), item);
            }
        }
        Value::String(plain) => text.push_str(&format!("{indent}{key}: {plain}\n")),
        plain => text.push_str(&format!("{indent}{key}: {plain}\n")),
    }
}

/// The running relay.
struct Relay {
    base: String,
    token: Option<String>,
    agent: ureq::Agent,
}

impl Relay {
    /// Reads the address and, where tokens are configured, one that may do what is asked.
    fn of(config: &Config, only_look: bool) -> Result<Self, Failure> {
        let admin = &config.admin;
        let file = if only_look {
            admin.read_token_file.as_ref().or(admin.token_file.as_ref())
        } else {
            admin.token_file.as_ref()
        };
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(TIMEOUT))
            .http_status_as_error(false)
            // The relay is here; a proxy configured for the outside world is not asked.
            .proxy(None)
            .build();
        Ok(Self {
            base: format!("http://{}", reachable(admin.listen)),
            token: file.map(|path| token(path)).transpose()?,
            agent: agent.into(),
        })
    }

    fn get(&self, path: &str) -> Result<Value, Failure> {
        let mut request = self.agent.get(format!("{}{path}", self.base));
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        self.answer(request.call())
    }

    fn post(&self, path: &str) -> Result<Value, Failure> {
        let mut request = self.agent.post(format!("{}{path}", self.base));
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        self.answer(request.send_empty())
    }

    fn answer(
        &self,
        response: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
    ) -> Result<Value, Failure> {
        let mut response = response.map_err(|error| {
            Failure::new(format!("no relay answers at {}: {error}", self.base))
                .with_hint("is it running, with the same admin.listen? `postrider check` examines the rest")
        })?;
        let status = response.status();
        let body = response.body_mut().read_to_string().unwrap_or_default();
        if status.is_success() {
            // An empty answer is a plain yes.
            return Ok(serde_json::from_str(&body).unwrap_or(Value::Null));
        }
        // Problems come as RFC 9457 tells.
        let said = serde_json::from_str::<Value>(&body)
            .ok()
            .and_then(|body| body["detail"].as_str().map(str::to_owned))
            .unwrap_or_else(|| body.lines().next().unwrap_or_default().to_owned());
        let failure = Failure::new(format!("the relay at {} answers {status}: {said}", self.base));
        Err(match status.as_u16() {
            401 | 403 => failure.with_hint("name the file with its token in admin.token_file"),
            _ => failure,
        })
    }
}

/// Where to reach a server that listens on `listen`: one that listens everywhere is here too.
fn reachable(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, listen.port())
}

/// The first token of a file.
fn token(path: &Path) -> Result<String, Failure> {
    let text = fs::read_to_string(path)
        .map_err(|error| Failure::usage(format!("admin token file {}: {error}", path.display())))?;
    text.lines()
        .map(str::trim)
        .find(|line| !line.is_empty())
        .map(str::to_owned)
        .ok_or_else(|| Failure::usage(format!("admin token file {}: holds no token", path.display())))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_status_reads_from_how_things_stand_to_the_details() {
        let status = json!({
            "credits": {"messages": 5}, "mode": "wal", "state": "blocked", "reason": "broker_down",
            "remedy": "start it", "lag_bytes": null
        });
        assert_eq!(
            human(&status),
            "mode: wal\nstate: blocked\nreason: broker_down\nremedy: start it\ncredits:\n  messages: 5\n"
        );
    }

    #[test]
    fn a_relay_that_listens_everywhere_is_asked_on_this_machine() {
        assert_eq!(reachable("0.0.0.0:1".parse().unwrap()).to_string(), "127.0.0.1:1");
        assert_eq!(reachable("[::]:1".parse().unwrap()).to_string(), "[::1]:1");
        assert_eq!(reachable("10.1.2.3:1".parse().unwrap()).to_string(), "10.1.2.3:1");
    }
}
