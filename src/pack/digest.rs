//! The 32-byte digests of a pack: blake3 with a derived key per use, so that no digest passes for another.

use std::fmt;
use std::str::FromStr;

use bincode::{Decode, Encode};
use serde::{Serialize, Serializer};
use thiserror::Error;

/// Context of the header's digest, the root of a pack.
pub const HEADER_CONTEXT: &str = "orkpack format 1: header";
/// Context of the index's digest.
pub const INDEX_CONTEXT: &str = "orkpack format 1: index";
/// Context of the digests of sections and source tensors.
pub const SECTION_CONTEXT: &str = "orkpack format 1: section";

/// Below this many bytes one thread hashes faster than several. Source: blake3's documentation.
const WORTH_THREADS: usize = 128 << 10;

/// A blake3 digest. Prints and parses as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
pub struct Digest(pub [u8; 32]);

/// A text that is no digest.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("`{0}` is not a digest: expected 64 hexadecimal digits")]
pub struct DigestError(String);

impl Digest {
    /// Stands where a digest is not known yet.
    pub(super) const UNKNOWN: Digest = Digest([0; 32]);
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, DigestError> {
        blake3::Hash::from_hex(text)
            .map(|hash| Digest(*hash.as_bytes()))
            .map_err(|_| DigestError(text.to_owned()))
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The digest of a section, of a document in one, or of one of a tensor's stacked matrices.
pub fn digest(bytes: &[u8]) -> Digest {
    keyed(SECTION_CONTEXT, bytes)
}

/// The digests of `n_parts` equal parts of `bytes`, as an index holds them for a stacked tensor; `None` when
/// the parts would not be equal.
pub fn digest_parts(bytes: &[u8], n_parts: usize) -> Option<Vec<Digest>> {
    Some(parts(bytes, n_parts)?.map(digest).collect())
}

/// `n_parts` equal parts of `bytes`, in order; `None` when there are none or they would not be equal.
pub(super) fn parts(bytes: &[u8], n_parts: usize) -> Option<impl Iterator<Item = &[u8]>> {
    if bytes.len().checked_rem(n_parts)? != 0 {
        return None;
    }
    let len = bytes.len().checked_div(n_parts)?;
    Some((0..n_parts).map(move |i| {
        let start = i.saturating_mul(len);
        bytes.get(start..start.saturating_add(len)).unwrap_or_default()
    }))
}

/// The digest of `bytes` under one of the contexts.
pub(super) fn keyed(context: &str, bytes: &[u8]) -> Digest {
    let mut hasher = blake3::Hasher::new_derive_key(context);
    update(&mut hasher, bytes);
    finish(&hasher)
}

/// Begins what [`digest`] gives, for bytes that come in pieces.
pub(super) fn hasher() -> blake3::Hasher {
    blake3::Hasher::new_derive_key(SECTION_CONTEXT)
}

/// Adds `bytes`, on several threads where that is faster. The digest does not depend on it.
pub(super) fn update(hasher: &mut blake3::Hasher, bytes: &[u8]) {
    if bytes.len() < WORTH_THREADS {
        hasher.update(bytes)
    } else {
        hasher.update_rayon(bytes)
    };
}

/// The digest of what was added.
pub(super) fn finish(hasher: &blake3::Hasher) -> Digest {
    Digest(*hasher.finalize().as_bytes())
}
