//! postrider: the program around the pipeline.

pub mod catalog;
pub mod config;
pub mod doctor;
pub mod failure;
pub mod migrate;
pub mod telemetry;
