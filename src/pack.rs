//! The `.orkpack` container: one file that holds a model and, beside it, the NPU's copies of chosen matrices.
//!
//! The law is `formats/orkpack-v1.md`; `formats/orkpack-v1.json` says the same for machines. A pack is a
//! 4096-byte header, an index, and sections on 4096-byte boundaries. The header's digest covers the index's,
//! the index's covers the sections', so the header's digest, the *root*, names every byte of the file.
//!
//! This module knows neither planning nor GGUF: it keeps bytes and says what and where they are. It trusts no
//! byte of a pack: digests first, decoding second, values third, and nothing is allocated from a claim alone.
//! It never changes a file in place.

mod check;
mod digest;
mod direct;
mod error;
mod export;
pub mod layout;
pub mod manifest;
mod partial;
mod reader;
mod share;
pub mod verify;
mod writer;

pub use digest::{Digest, DigestError, digest, digest_parts};
pub use error::PackError;
pub use layout::{ChunkContents, Contents, FileContents, Layout, MatrixContents};
pub use manifest::{
    Chunk, Cut, Index, Kind, LayoutId, Manifest, MatrixName, ModelDims, Part, Placement, ProjectionCode,
    Section, SourceFile, SourceTensor, SubMatrix, Tier,
};
pub use partial::{Existing, Partial, discard_partials};
pub use reader::Pack;
pub use share::Giver;
pub use writer::{Finished, Sink, Writer};

/// A length as the format counts it. A `usize` is never wider than 64 bits.
fn wide(n: usize) -> u64 {
    u64::try_from(n).unwrap_or(u64::MAX)
}

/// The entry that a table number of the index points at.
fn entry<T>(table: &[T], number: u32) -> Option<&T> {
    table.get(usize::try_from(number).ok()?)
}

/// `bytes[offset..offset + len]`; `None` when that is not inside.
fn slice(bytes: &[u8], offset: u64, len: u64) -> Option<&[u8]> {
    let end = usize::try_from(offset.checked_add(len)?).ok()?;
    bytes.get(usize::try_from(offset).ok()?..end)
}
