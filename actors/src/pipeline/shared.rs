//! What every stage of a generation is given.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::{
    control::Controls,
    credit::Credits,
    settings::Settings,
    status::{Board, figures::Figures},
};

/// Handles shared by the stages of one generation. Cloning shares them.
#[derive(Debug, Clone)]
pub struct Shared {
    /// What the relay was told to do.
    pub settings: Arc<Settings>,
    /// SQL connections, through `database.url`. Outlives the generation.
    pub pool: deadpool_postgres::Pool,
    /// Where conditions are put up. Outlives the generation.
    pub board: Board,
    /// Levels and totals. Outlives the generation.
    pub figures: Arc<Figures>,
    /// Bounds what is held.
    pub credits: Credits,
    /// Bounds what was sent and is not recorded.
    pub exposure: Credits,
    /// Intake and the durable LSN.
    pub controls: Controls,
    /// Cancelled when the generation ends: every loop returns at its next await.
    pub stop: CancellationToken,
}
