//! postrider: the program around the pipeline.

pub mod admin;
pub mod bench;
pub mod catalog;
pub mod cli;
pub mod config;
pub mod doctor;
pub mod failure;
pub mod letters;
pub mod migrate;
pub mod run;
pub mod settings;
pub mod shutdown;
pub mod telemetry;
