//! What several test modules share: paths, small models, packs in memory.
#![allow(dead_code)]

pub mod gguf_builder;

use std::path::PathBuf;

/// A file under `fixtures/`.
pub fn fixture(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(path)
}
