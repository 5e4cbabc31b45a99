//! What an examination finds, and how it is printed.

use std::fmt::Write as _;

use serde_json::json;

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// As it must be.
    Ok,
    /// The relay works; somebody should look.
    Warn,
    /// The relay cannot work.
    Fail,
}

impl Verdict {
    /// The word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }

    /// The terminal's code for its colour.
    fn colour(self) -> &'static str {
        match self {
            Self::Ok => "\x1b[32m",
            Self::Warn => "\x1b[33m",
            Self::Fail => "\x1b[31m",
        }
    }
}

/// One line of the doctor's report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What was examined, in one word.
    pub subject: &'static str,
    /// How bad it is.
    pub verdict: Verdict,
    /// What was found.
    pub message: String,
    /// The statement, or the action, that mends it.
    pub remedy: Option<String>,
}

impl Finding {
    /// As it must be.
    pub fn ok(subject: &'static str, message: impl Into<String>) -> Self {
        Self { subject, verdict: Verdict::Ok, message: message.into(), remedy: None }
    }

    /// Works, with a reservation.
    pub fn warn(subject: &'static str, message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { subject, verdict: Verdict::Warn, message: message.into(), remedy: Some(remedy.into()) }
    }

    /// Does not work.
    pub fn fail(subject: &'static str, message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { subject, verdict: Verdict::Fail, message: message.into(), remedy: Some(remedy.into()) }
    }
}

/// Whether the relay can work.
pub fn passed(findings: &[Finding]) -> bool {
    findings.iter().all(|finding| finding.verdict != Verdict::Fail)
}

/// The report for a person: a line each, its remedy below it.
pub fn human(findings: &[Finding], colour: bool) -> String {
    let mut text = String::new();
    let width = findings.iter().map(|finding| finding.subject.len()).max().unwrap_or_default();
    for Finding { subject, verdict, message, remedy } in findings {
        let word = match colour {
            true => format!("{}{:<4}\x1b[0m", verdict.colour(), verdict.as_str()),
            false => format!("{:<4}", verdict.as_str()),
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{word}  {subject:<width$}  {message}");
        if let Some(remedy) = remedy {
            let _ = writeln!(text, "      {:<width$}  -> {remedy}", "");
        }
    }
    let count = |verdict| findings.iter().filter(|finding| finding.verdict == verdict).count();
    let (ok, warn, fail) = (count(Verdict::Ok), count(Verdict::Warn), count(Verdict::Fail));
    let _ = writeln!(text, "{ok} ok, {warn} warned about, {fail} failed");
    text
}

/// The report for a program.
pub fn json(findings: &[Finding]) -> String {
    let checks: Vec<_> = findings
        .iter()
        .map(|finding| {
            json!({
                "subject": finding.subject,
                "verdict": finding.verdict.as_str(),
                "message": finding.message,
                "remedy": finding.remedy,
            })
        })
        .collect();
    format!("{:#}\n", json!({"passed": passed(findings), "checks": checks}))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings() -> Vec<Finding> {
        vec![Finding::ok("wal_level", "logical"), Finding::warn("index", "missing", "CREATE INDEX x;")]
    }

    #[test]
    fn a_remedy_stands_below_its_finding_and_warnings_pass() {
        let text = human(&findings(), false);
        let expected =
            "ok    wal_level  logical\nwarn  index      missing\n                 -> CREATE INDEX x;\n";
        assert!(text.starts_with(expected), "{text}");
        assert!(passed(&findings()));
    }

    #[test]
    fn a_failure_fails_the_whole_and_json_says_so() {
        let mut findings = findings();
        findings.push(Finding::fail("slot", "lost", "SELECT 1;"));
        let parsed: serde_json::Value = serde_json::from_str(&json(&findings)).unwrap();
        assert_eq!(parsed["passed"], false);
        assert_eq!(parsed["checks"][2]["verdict"], "fail");
    }

    #[test]
    fn plain_text_has_no_escape_codes() {
        assert!(!human(&findings(), false).contains('\x1b') && human(&findings(), true).contains('\x1b'));
    }
}
