//! What tests of the publisher need: a virtual host of their own, and the actor between a fake decoder and a fake acker.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part of it")]

pub mod broker;
pub mod fake;
pub mod stage;
