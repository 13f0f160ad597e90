//! The persistent thread pool: one dispatch, one join, and a way for its pieces to share an output matrix.
//!
//! A token of decode is some forty dispatches of a fraction of a millisecond each, so a dispatch has to cost
//! well under a microsecond: workers stay, and spin a short while before they sleep. Which thread computes a
//! piece is never fixed and must never matter.

mod cpus;
mod pool;

pub use pool::{Patch, Pool};
