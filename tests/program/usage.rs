//! What goes wrong before anything starts: one line, its remedy, and the exit code.

use std::collections::BTreeMap;

use crate::database::{Database, postrider, text};

fn refused(arguments: &[&str], variables: &[(&str, &str)]) -> (Option<i32>, String) {
    let output = postrider(arguments, &variables.iter().copied().collect::<BTreeMap<_, _>>());
    (output.status.code(), text(&output.stderr))
}

#[test]
fn an_unknown_key_is_bad_configuration_and_said_in_one_line() {
    let (code, said) = refused(&["check"], &[("POSTRIDER_PUBLISH__WINDW", "1")]);
    assert_eq!(code, Some(2));
    assert_eq!(
        said,
        "error: POSTRIDER_PUBLISH__WINDW: unknown key publish.windw; did you mean POSTRIDER_PUBLISH__WINDOW_MESSAGES?\n"
    );
}

#[test]
fn a_missing_configuration_file_is_bad_configuration() {
    let (code, said) = refused(&["--config", "/nowhere.toml", "check"], &[]);
    assert_eq!(code, Some(2));
    assert!(said.starts_with("error: /nowhere.toml: cannot read the file"), "{said}");
}

#[test]
fn an_unknown_command_is_bad_usage() {
    assert_eq!(refused(&["fly"], &[]).0, Some(2));
}

#[test]
fn an_unreachable_database_is_one_line_and_exit_code_1() {
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("postgres://user:geheim@{closed}/x");
    let (code, said) = refused(&["migrate"], &[("POSTRIDER_DATABASE__URL", &url)]);
    assert_eq!(code, Some(1));
    assert!(said.starts_with("error: connect directly to the database: database unreachable"), "{said}");
    assert!(!said.contains("geheim") && !said.contains("backtrace"), "{said}");
}

#[tokio::test]
async fn a_database_that_does_not_exist_is_refused_with_its_remedy() {
    let database = Database::fresh().await;
    let url = database.url().replace(&database.name, "no_such_database");
    let (code, said) = refused(&["migrate"], &[("POSTRIDER_DATABASE__URL", &url)]);
    assert_eq!(code, Some(1));
    assert!(said.contains("hint: create the database, or correct its name in database.url"), "{said}");
}

#[test]
fn no_running_relay_is_one_line_with_its_remedy() {
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    for command in ["status", "pause", "resume", "drain"] {
        let (code, said) = refused(&[command], &[("POSTRIDER_ADMIN__LISTEN", &closed)]);
        assert_eq!(code, Some(1), "{command}");
        assert!(
            said.contains("no relay answers at http://127.0.0.1:") && said.contains("\nhint: "),
            "{said}"
        );
    }
}

#[test]
fn completions_need_no_configuration() {
    let (code, said) = refused(&["completions", "bash"], &[("POSTRIDER_NO__SUCH_KEY", "1")]);
    assert_eq!((code, said.as_str()), (Some(0), ""));
}
