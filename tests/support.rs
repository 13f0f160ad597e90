//! What several test modules share: paths, small models, packs in memory.
#![allow(dead_code)]

pub mod docs;
pub mod gguf_builder;
pub mod hits;
pub mod memory_source;
pub mod models;
pub mod naive_deepseek2;
pub mod naive_delta_net;
pub mod naive_executor;
pub mod naive_forward;
pub mod packs;
pub mod program;
pub mod published;
pub mod recorder;
pub mod reference;
pub mod routed;
pub mod schema;
pub mod typist;
pub mod watch;

use std::path::PathBuf;

/// A file under `fixtures/`.
pub fn fixture(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(path)
}
