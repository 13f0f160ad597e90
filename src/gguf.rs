//! GGUF, version 2 and 3, little-endian: the door through which models come in.
//!
//! A stranger's file is read twice. First by our own walk over the header bytes, which checks every length,
//! count, sum and extent before it allocates or believes; then by the crate gguf-rs over the same bytes, and any
//! difference is an error. Nothing here reads weights: a tensor is a place in the file.
//!
//! What is accepted is stricter than what some readers accept, so that no two readers of one file see
//! different things: names are UTF-8 without control characters and occur once, an alignment is a u32 power of
//! two, extents are aligned, inside the file and disjoint, arrays do not nest. String values may hold any bytes;
//! keys may hold capitals; bytes between and after tensors may hold anything. A tensor may be empty.

#![deny(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::as_conversions,
    clippy::arithmetic_side_effects
)]

mod error;
mod header;
mod second;
mod set;
mod walk;

use std::path::Path;

pub use error::GgufError;
pub use header::Header;
pub use set::{GgufSet, SetError, ShardName};

use crate::bytes::{FileBytes, Io, Limits};
use crate::tensor::{Metadata, Place, SourceError, TensorInfo, TensorSource};

/// Whether these bytes begin as a GGUF file does.
pub fn is_gguf(bytes: &[u8]) -> bool {
    bytes.starts_with(&header::MAGIC)
}

/// One GGUF file: its bytes and its checked header. A shard of a set is a file like any other here.
#[derive(Debug)]
pub struct GgufFile {
    file: FileBytes,
    header: Header,
}

impl GgufFile {
    /// Opens and checks the file at `path`.
    ///
    /// # Errors
    ///
    /// [`GgufError`], without the file's name.
    pub fn open(path: &Path, io: Io, limits: &Limits) -> Result<GgufFile, GgufError> {
        GgufFile::new(FileBytes::open(path, io)?, limits)
    }

    /// A file held in memory under a name for messages: for tests and bundled models.
    ///
    /// # Errors
    ///
    /// [`GgufError`], without the name.
    pub fn from_bytes(name: &str, bytes: Vec<u8>) -> Result<GgufFile, GgufError> {
        GgufFile::new(FileBytes::from_vec(name, bytes), &Limits::default())
    }

    fn new(file: FileBytes, limits: &Limits) -> Result<GgufFile, GgufError> {
        let file_len = u64::try_from(file.len()).unwrap_or(u64::MAX);
        let header = Header::parse(&file, file_len, limits)?;
        Ok(GgufFile { file, header })
    }

    /// The whole file.
    pub fn file(&self) -> &FileBytes {
        &self.file
    }

    /// The header, parsed.
    pub fn parsed(&self) -> &Header {
        &self.header
    }

    fn range(&self, offset: u64, len: u64) -> Option<&[u8]> {
        let begin = usize::try_from(offset).ok()?;
        let end = usize::try_from(offset.checked_add(len)?).ok()?;
        self.file.get(begin..end)
    }
}

impl TensorSource for GgufFile {
    fn header(&self) -> &[u8] {
        // A file without tensor data may end before the padding that would come next.
        self.range(0, self.header.data_offset).unwrap_or(&self.file)
    }

    fn metadata(&self) -> &Metadata {
        &self.header.metadata
    }

    fn tensors(&self) -> &[TensorInfo] {
        &self.header.tensors
    }

    fn find(&self, name: &str) -> Option<&TensorInfo> {
        self.header.find(name)
    }

    fn bytes(&self, place: Place) -> Result<&[u8], SourceError> {
        let Place { file, offset, len } = place;
        let bytes = if file == 0 { self.range(offset, len) } else { None };
        bytes.ok_or(SourceError::OutOfFile { file, offset, len })
    }
}
