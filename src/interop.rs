//! The prior system's container, `ORKPK01`: read as a stranger's file, to say what it is and what it lacks.
//!
//! It has no header. Its last 24 or 32 bytes say where the index is; the index names blobs and scales before it:
//!
//! ```text
//! │ blob 0 │ scales 0 │ blob 1 │ [second layout 1] │ scales 1 │ … │ index │ footer │
//!
//! footer, versions 1, 2   u64 index offset · u32 entries · u32 version · magic
//!         versions 3, 4   u64 index offset · u32 entries · u32 version · u32 token · magic · 4 bytes of padding
//!         versions 5, 6   u64 index offset · u32 entries · u32 version · u32 token · u32 signature · magic
//! entry                   u32 length of the name · name · u32 K, N, type, scales · u64 blob offset, blob size,
//!                         scale offset · from version 4 on u64 size of the second layout
//! ```
//!
//! The entries of version 6 have more fields, which are not known here; of such a file the footer alone is read.
//! Nothing is allocated from a number that the file claims, and no number of it is believed before it is checked.

#![deny(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::as_conversions,
    clippy::arithmetic_side_effects
)]

use std::collections::BTreeSet;

use thiserror::Error;

use crate::bytes::{Cursor, OutOfBounds};

/// The magic, with the NUL that ends it.
const MAGIC: [u8; 8] = *b"ORKPK01\0";
/// The shortest entry: no name, up to version 3.
const LEAST_ENTRY: u64 = 44;

/// What cannot be read as such a container.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum PriorError {
    /// No magic at the end.
    #[error("not an `ORKPK01` container: its last bytes hold no magic")]
    NoMagic,
    /// A magic, but no footer that goes with it.
    #[error("the footer at byte {offset} has version {version}, expected {expected}")]
    Version {
        /// Where the footer begins.
        offset: u64,
        /// What it says.
        version: u32,
        /// What goes with the place of the magic.
        expected: &'static str,
    },
    /// An index that is not before the footer, or has more entries than there is room for.
    #[error(
        "the footer at byte {offset} names {entries} entries at byte {index}, which is no place for them"
    )]
    Index {
        /// Where the footer begins.
        offset: u64,
        /// Entries it claims.
        entries: u32,
        /// Where it says they are.
        index: u64,
    },
    /// An index that ends inside an entry.
    #[error("the index ends inside entry {entry}: {wanted} bytes wanted at byte {offset}, {left} left")]
    Cut {
        /// Which entry.
        entry: u32,
        /// Bytes wanted.
        wanted: u64,
        /// Where in the file.
        offset: u64,
        /// Bytes left before the footer.
        left: u64,
    },
    /// Bytes between index and footer.
    #[error("the index ends at byte {end}, but the footer begins at byte {footer}")]
    Loose {
        /// First byte after the last entry.
        end: u64,
        /// First byte of the footer.
        footer: u64,
    },
}

/// A container of the prior system: its index, and what in it cannot be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PriorPack {
    /// Its version, 1 to 6.
    pub version: u32,
    /// Matrices that the footer announces.
    pub n_entries: u32,
    /// Where the index begins.
    pub index_offset: u64,
    /// The matrices; empty for version 6, whose entries are not read.
    pub entries: Vec<PriorEntry>,
    /// What is wrong, a line each, in order of the entries.
    pub findings: Vec<String>,
}

/// One matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PriorEntry {
    /// The tensor, with `#` and its number for an expert.
    pub name: String,
    /// Inputs.
    pub n_in: u32,
    /// Outputs.
    pub n_out: u32,
    /// 1: int8 tiles; 4: compact int4; 5: int4 tiles.
    pub kind: u32,
    /// Scales beside the blob.
    pub n_scales: u32,
    /// First byte of its blob.
    pub blob: u64,
    /// Bytes of its blob.
    pub blob_len: u64,
    /// First byte of its scales.
    pub scales: u64,
    /// Bytes of the second layout, directly after the blob.
    pub second_len: u64,
}

/// The last bytes of the file.
struct Footer {
    offset: u64,
    index: u64,
    entries: u32,
    version: u32,
}

impl PriorPack {
    /// Reads footer and index of `file`, all bytes of a container; never a blob.
    ///
    /// # Errors
    ///
    /// [`PriorError`] when footer or index cannot be followed. What is wrong with an entry is a finding.
    pub fn read(file: &[u8]) -> Result<PriorPack, PriorError> {
        let footer = Footer::find(file)?;
        let before = footer.offset.checked_sub(footer.index);
        let room = before.filter(|room| u64::from(footer.entries).saturating_mul(LEAST_ENTRY) <= *room);
        let Footer { offset, index, entries: n_entries, version } = footer;
        let room = room.ok_or(PriorError::Index { offset, entries: n_entries, index })?;
        let mut pack =
            PriorPack { version, n_entries, index_offset: index, entries: Vec::new(), findings: Vec::new() };
        if version >= 6 {
            return Ok(pack);
        }
        let bytes = range(file, index, room).unwrap_or_default();
        let mut cursor = Cursor::new(bytes);
        for entry in 0..n_entries {
            let cut = |OutOfBounds { offset, needed, left }: OutOfBounds| PriorError::Cut {
                entry,
                wanted: needed,
                offset: index.saturating_add(offset),
                left,
            };
            pack.entries.push(PriorEntry::read(&mut cursor, version).map_err(cut)?);
        }
        if cursor.left() > 0 {
            return Err(PriorError::Loose { end: index.saturating_add(cursor.offset()), footer: offset });
        }
        pack.findings = findings(&pack);
        Ok(pack)
    }

    /// What no container of this kind has, whatever its version.
    pub fn lacks() -> [&'static str; 4] {
        [
            "no checksum of the file, its index, or any matrix: a flipped byte cannot be found",
            "no identity of the model: matrices go by name and shape, so those of another model load as well",
            "no source tensors: without the GGUF it cannot be run, and its codes cannot be derived again",
            "no chosen hot set, device profile or routing statistics: what is loaded is decided at run time",
        ]
    }
}

impl Footer {
    /// The footer that the place of the magic speaks for: 12 bytes before the end only where the compiler padded it.
    fn find(file: &[u8]) -> Result<Footer, PriorError> {
        let len = u64::try_from(file.len()).unwrap_or(u64::MAX);
        let at = |back: u64| range(file, len.checked_sub(back)?, 8);
        if at(8) == Some(&MAGIC) {
            // Both lengths have the magic last. The version tells, if the rest of the longer one is a footer too.
            let long = Footer::read(file, 32).filter(|footer| matches!(footer.version, 5 | 6));
            let short = Footer::read(file, 24);
            let footer =
                long.filter(|footer| footer.index <= footer.offset).or(short).ok_or(PriorError::NoMagic)?;
            return footer.of_version(&[1, 2, 5, 6], "1, 2, 5 or 6");
        }
        if at(12) == Some(&MAGIC) {
            return Footer::read(file, 32).ok_or(PriorError::NoMagic)?.of_version(&[3, 4], "3 or 4");
        }
        Err(PriorError::NoMagic)
    }

    /// The footer of this length, whatever it says.
    fn read(file: &[u8], len: u64) -> Option<Footer> {
        let offset = u64::try_from(file.len()).ok()?.checked_sub(len)?;
        let mut cursor = Cursor::new(range(file, offset, len)?);
        let (index, entries, version) = (cursor.u64().ok()?, cursor.u32().ok()?, cursor.u32().ok()?);
        Some(Footer { offset, index, entries, version })
    }

    fn of_version(self, known: &[u32], expected: &'static str) -> Result<Footer, PriorError> {
        if known.contains(&self.version) {
            return Ok(self);
        }
        Err(PriorError::Version { offset: self.offset, version: self.version, expected })
    }
}

impl PriorEntry {
    fn read(cursor: &mut Cursor<'_>, version: u32) -> Result<PriorEntry, OutOfBounds> {
        let len = cursor.u32()?;
        let name = String::from_utf8_lossy(cursor.take(len.into())?).into_owned();
        let (n_in, n_out, kind, n_scales) = (cursor.u32()?, cursor.u32()?, cursor.u32()?, cursor.u32()?);
        let (blob, blob_len, scales) = (cursor.u64()?, cursor.u64()?, cursor.u64()?);
        let second_len = if version >= 4 { cursor.u64()? } else { 0 };
        Ok(PriorEntry { name, n_in, n_out, kind, n_scales, blob, blob_len, scales, second_len })
    }

    /// What is wrong with it in a file whose index begins at `index`.
    fn findings(&self, index: u64) -> Vec<String> {
        let label = format!("`{}`", self.name.escape_debug());
        let mut findings = Vec::new();
        let ends = |start: u64, lengths: [u64; 2]| {
            let end = lengths.into_iter().try_fold(start, |end, len| end.checked_add(len));
            end.filter(|end| *end <= index).is_none()
        };
        if ends(self.blob, [self.blob_len, self.second_len]) {
            let (at, len) = (self.blob, self.blob_len.saturating_add(self.second_len));
            findings.push(format!("{label}: {len} bytes at byte {at} are not before the index at {index}"));
        }
        let scales_len = u64::from(self.n_scales).saturating_mul(4);
        if self.n_scales > 0 && ends(self.scales, [scales_len, 0]) {
            let at = self.scales;
            findings.push(format!(
                "{label}: {} scales at byte {at} are not before the index at {index}",
                self.n_scales
            ));
        }
        if !matches!(self.kind, 1 | 4 | 5) {
            findings.push(format!("{label}: type {}, expected 1, 4 or 5", self.kind));
        }
        let tiles = [self.n_in, self.n_out].map(|n| u64::from(n).next_multiple_of(32));
        let least = tiles.into_iter().fold(1u64, u64::saturating_mul);
        if self.kind == 1 && self.blob_len < least {
            let shape = format!("{} inputs and {} outputs", self.n_in, self.n_out);
            findings.push(format!("{label}: {} bytes, its {shape} need {least}", self.blob_len));
        }
        if self.kind == 1 && self.n_scales != self.n_out {
            findings.push(format!("{label}: {} scales for {} outputs", self.n_scales, self.n_out));
        }
        findings
    }
}

fn findings(pack: &PriorPack) -> Vec<String> {
    let mut names = BTreeSet::new();
    let of = |entry: &PriorEntry| entry.findings(pack.index_offset);
    let mut findings: Vec<String> = pack.entries.iter().flat_map(of).collect();
    for entry in &pack.entries {
        if !names.insert(&entry.name) {
            findings.push(format!("`{}` is there twice", entry.name.escape_debug()));
        }
    }
    findings
}

/// `bytes[offset..offset + len]`; `None` when that is not inside.
fn range(bytes: &[u8], offset: u64, len: u64) -> Option<&[u8]> {
    let mut cursor = Cursor::new(bytes);
    cursor.take(offset).ok()?;
    cursor.take(len).ok()
}
