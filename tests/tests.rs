//! The one test binary: a module per concern.

mod blocks;
mod support;
