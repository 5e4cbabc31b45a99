//! What PostgreSQL's catalog says about the objects the relay relies on. Read by `migrate`, which creates what is
//! missing, and by `check`, which says what is wrong.

mod index;
mod publication;
mod table;

pub use index::{Index, claim_index, indexes, waiting_index_name};
pub use publication::{Publication, publication};
pub use table::{Column, Table, table};
