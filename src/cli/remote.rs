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
    for (name, pointer) in [
        ("reason", "/reason"),
        ("detail", "/detail"),
        ("held messages", "/credits/messages/now"),
        ("rows to go", "/drain/remaining_rows"),
        ("bytes of WAL to go", "/slot/lag_bytes"),
    ] {
        match status.pointer(pointer) {
            None | Some(Value::Null) => {}
            Some(Value::String(text)) => line.push_str(&format!(", {name} {text}")),
            Some(value) => line.push_str(&format!(", {name} {value}")),
        }
    }
    line
}

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

/// A status as `key: value` lines, those that say how things stand first.
fn human(status: &Value) -> String {
    const FIRST: [&str; 6] = ["mode", "state", "reason", "detail", "since", "remedy"];
    let Value::Object(fields) = status else { return String::new() };
    let first = FIRST.iter().filter_map(|key| fields.get_key_value(*key));
    let others = fields.iter().filter(|(key, _)| !FIRST.contains(&key.as_str()));
    let mut text = String::new();
    for (key, value) in first.chain(others) {
        // An empty list says nothing either.
        if let Some(value) = inline(value).filter(|value| !value.is_empty()) {
            text.push_str(&format!("{}: {value}\n", key.replace('_', " ")));
        }
    }
    text
}

/// A value on one line; none for what is absent.
fn inline(value: &Value) -> Option<String> {
    match value {
        Value::Null => None,
        Value::String(plain) => Some(plain.clone()),
        Value::Array(items) => Some(items.iter().filter_map(inline).collect::<Vec<_>>().join("; ")),
        Value::Object(fields) => match (fields.get("now"), fields.get("limit")) {
            (Some(now), Some(limit)) => Some(format!("{now} of {limit}")),
            _ => {
                let pair = |(key, value): (&String, &Value)| {
                    // One level deeper needs its bounds shown.
                    let shown = inline(value)?;
                    let nested = value.is_object() && value.get("now").is_none();
                    let key = key.replace('_', " ");
                    Some(if nested { format!("{key} ({shown})") } else { format!("{key} {shown}") })
                };
                Some(fields.iter().filter_map(pair).collect::<Vec<_>>().join(", "))
            }
        },
        plain => Some(plain.to_string()),
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
            "credits": {"messages": {"now": 5, "limit": 8192}}, "mode": "wal", "state": "blocked",
            "reason": "broker_down", "remedy": "start it", "slot": null, "conditions": [],
            "stages": {"ack": {"capacity": 4, "mailbox": 1}}
        });
        assert_eq!(
            human(&status),
            "mode: wal\nstate: blocked\nreason: broker_down\nremedy: start it\n\
             credits: messages 5 of 8192\nstages: ack (capacity 4, mailbox 1)\n"
        );
    }

    #[test]
    fn a_drain_s_progress_says_what_is_left_and_what_holds_it() {
        let status = json!({
            "state": "draining", "reason": null, "credits": {"messages": {"now": 7, "limit": 9}},
            "drain": {"target": "0/1", "remaining_rows": 12}
        });
        assert_eq!(line(&status), "draining, held messages 7, rows to go 12");
    }

    #[test]
    fn a_relay_that_listens_everywhere_is_asked_on_this_machine() {
        assert_eq!(reachable("0.0.0.0:1".parse().unwrap()).to_string(), "127.0.0.1:1");
        assert_eq!(reachable("[::]:1".parse().unwrap()).to_string(), "[::1]:1");
        assert_eq!(reachable("10.1.2.3:1".parse().unwrap()).to_string(), "10.1.2.3:1");
    }
}
