//! postrider: the program around the pipeline.

pub mod config;
