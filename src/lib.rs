//! postrider: the program around the pipeline.

pub mod catalog;
pub mod cli;
pub mod config;
pub mod doctor;
pub mod failure;
pub mod migrate;
pub mod telemetry;
