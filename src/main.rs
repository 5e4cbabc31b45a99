//! The postrider program.

use std::process::ExitCode;

use clap::Parser;
use postrider::cli::{Cli, dispatch};

fn main() -> ExitCode {
    match dispatch(Cli::parse()) {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("{failure}");
            failure.code()
        }
    }
}
