//! What can be wrong with a pack, or with writing one.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::Digest;
use crate::units::Bytes;

/// Why a pack could not be read, or not be written. The caller adds the pack's path where none is given.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PackError {
    /// The system could not do it.
    #[error("cannot {what} {}: {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On which file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file of no bytes.
    #[error("file is empty")]
    Empty,
    /// A file that does not begin like a pack.
    #[error("not a pack: begins with {found}, expected the magic {expected}")]
    NotAPack {
        /// The first bytes.
        found: String,
        /// The magic.
        expected: String,
    },
    /// A header whose digest is right but for the magic.
    #[error("header at byte 0: magic is {found}, expected {expected}")]
    Magic {
        /// The first bytes.
        found: String,
        /// The magic.
        expected: String,
    },
    /// The ggml backend's own container, which bears the same extension and ends in `ORKPK01`.
    #[error("not a pack of this tool: it ends with `ORKPK01`, the container of the ggml backend")]
    Foreign,
    /// Fewer bytes than the header says, or than a header needs.
    #[error("file is {found} bytes, needs {expected}: it was cut")]
    Truncated {
        /// Bytes there.
        found: u64,
        /// Bytes needed.
        expected: u64,
    },
    /// More bytes than the header says.
    #[error("file is {found} bytes, but the pack ends at byte {expected}: {} foreign bytes follow", .found.saturating_sub(*.expected))]
    Trailing {
        /// Bytes there.
        found: u64,
        /// Bytes of the pack.
        expected: u64,
    },
    /// The header's bytes are not those that were written.
    #[error("header at byte 0: digest is {found}, expected {expected}")]
    HeaderDigest {
        /// Computed now.
        found: Digest,
        /// Stored.
        expected: Digest,
    },
    /// A later format.
    #[error("pack version {found}, this orkpack reads version {expected}")]
    Version {
        /// The pack's.
        found: u32,
        /// Ours.
        expected: u32,
    },
    /// A feature that this version does not know and without which the pack cannot be read.
    #[error("needs a newer orkpack for feature bit {bit}")]
    Feature {
        /// The lowest unknown bit.
        bit: u32,
    },
    /// The index's bytes are not those that were written.
    #[error("index at byte {offset}: digest is {found}, expected {expected}")]
    IndexDigest {
        /// Where the index is.
        offset: u64,
        /// Computed now.
        found: Digest,
        /// Stored in the header.
        expected: Digest,
    },
    /// An index that cannot be decoded, although its digest is right.
    #[error("index at byte {offset}: {problem}")]
    Index {
        /// Where the index is.
        offset: u64,
        /// What the decoder said.
        problem: String,
    },
    /// A value in the header or index that cannot be.
    #[error("{item}: {field} is {found}, expected {expected}")]
    Value {
        /// Which section, tensor, matrix or table.
        item: String,
        /// Which of its values.
        field: &'static str,
        /// What it holds.
        found: String,
        /// What it may hold.
        expected: String,
    },
    /// A section whose bytes are not those that were written.
    #[error("{section}{} at byte {offset}: digest is {found}, expected {expected}", in_part(*.part))]
    SectionDigest {
        /// The section.
        section: String,
        /// Which of its parts, for a tensor of stacked experts.
        part: Option<u32>,
        /// Where the section, or that part, begins.
        offset: u64,
        /// Computed now.
        found: Digest,
        /// Stored in the index.
        expected: Digest,
    },
    /// Bytes that were read and do not have the digest of the index, although the mapped file does.
    #[error("{section}: the bytes read are not those of the file: it changed while it was read")]
    Changed {
        /// The section.
        section: String,
    },
    /// The output is there and may not be replaced.
    #[error("{} exists already", path.display())]
    Exists {
        /// The output.
        path: PathBuf,
    },
    /// Another conversion holds the partial file.
    #[error("another conversion is writing {}", path.display())]
    Busy {
        /// The partial file.
        path: PathBuf,
    },
    /// The file system, a quota or a limit has no room for the whole pack.
    #[error("no space: needs {needed} ({} bytes), free {free} ({} bytes){}", .needed.0, .free.0, or_thin(*.thin))]
    NoSpace {
        /// The pack's exact length.
        needed: Bytes,
        /// What is free.
        free: Bytes,
        /// Length of a thin pack of the same plan, where that would fit.
        thin: Option<Bytes>,
    },
    /// Pushed bytes that do not fit what was announced: a bug of the caller.
    #[error("{section}: got {found} bytes, announced were {expected}")]
    Pushed {
        /// What was due, or what was pushed too much.
        section: String,
        /// Bytes given.
        found: u64,
        /// Bytes announced.
        expected: u64,
    },
}

impl PackError {
    /// Whether a pack's content is wrong (and not the system, the request, or the file no pack at all).
    pub fn is_damage(&self) -> bool {
        !matches!(
            self,
            PackError::Io { .. }
                | PackError::Exists { .. }
                | PackError::Busy { .. }
                | PackError::NoSpace { .. }
                | PackError::Pushed { .. }
                | PackError::Changed { .. }
                | PackError::Version { .. }
                | PackError::Feature { .. }
                | PackError::Foreign
                | PackError::NotAPack { .. }
                | PackError::Empty
        )
    }

    /// What to do about it, where there is something to do.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            PackError::Empty | PackError::Truncated { .. } => {
                Some("the copy may be incomplete; copy the pack again or convert again")
            }
            PackError::NotAPack { .. } => {
                Some("a pack is made from a GGUF by `orkpack convert MODEL`; the GGUF itself can be run too")
            }
            PackError::Foreign => Some("convert the GGUF again with `orkpack convert MODEL`"),
            PackError::Trailing { .. }
            | PackError::Magic { .. }
            | PackError::HeaderDigest { .. }
            | PackError::IndexDigest { .. }
            | PackError::SectionDigest { .. } => {
                Some("the file was damaged after it was written; copy it again or convert again")
            }
            PackError::Changed { .. } => Some("let no other program write to the pack, then try again"),
            PackError::Version { .. } | PackError::Feature { .. } => Some("update orkpack"),
            PackError::Exists { .. } => Some("name another output with -o, or replace it with --force"),
            PackError::Busy { .. } => Some("wait until it ends, or name another output with -o"),
            PackError::NoSpace { thin: Some(_), .. } => {
                Some("leave the source tensors out with --thin, free some space, or write elsewhere with -o")
            }
            PackError::NoSpace { thin: None, .. } => Some("free some space, or write elsewhere with -o"),
            PackError::Value { .. } | PackError::Index { .. } => {
                Some("its digests are right, so it was written like this; convert the GGUF again")
            }
            PackError::Io { .. } | PackError::Pushed { .. } => None,
        }
    }

    /// A value that cannot be, with what it may be.
    pub(super) fn value(
        item: impl Into<String>,
        field: &'static str,
        found: impl ToString,
        expected: impl ToString,
    ) -> PackError {
        PackError::Value {
            item: item.into(),
            field,
            found: found.to_string(),
            expected: expected.to_string(),
        }
    }
}

/// What else would fit.
fn or_thin(thin: Option<Bytes>) -> String {
    thin.map(|thin| format!("; a thin pack needs {thin} ({} bytes) and would fit", thin.0))
        .unwrap_or_default()
}

/// `, expert 3` for a part of a stack.
fn in_part(part: Option<u32>) -> String {
    part.map(|n| format!(", expert {n},")).unwrap_or_default()
}
