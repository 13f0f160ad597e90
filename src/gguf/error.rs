//! What can be wrong with a GGUF file, in words that name the field, the byte and what was expected.

use thiserror::Error;

use crate::tensor::Dtype;

/// A GGUF file that was refused. The file's name is added by whoever reports it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The system could not read.
    #[error("cannot be read: {0}")]
    Io(#[from] std::io::Error),
    /// No bytes at all.
    #[error("the file is empty")]
    Empty,
    /// Something else than GGUF.
    #[error("is not a GGUF file: it begins with `{}`, expected `GGUF`", found.escape_ascii())]
    NotGguf {
        /// The first four bytes.
        found: [u8; 4],
    },
    /// Numbers stored most significant byte first.
    #[error("big-endian GGUF is not supported")]
    BigEndian,
    /// A layout that is too old or unknown.
    #[error("GGUF version {found} is not supported, expected 2 or 3")]
    Version {
        /// The version found.
        found: u32,
    },
    /// The bytes end before the header does.
    #[error("the header ends inside {what}: {needed} bytes wanted at byte {offset}, {left} left")]
    Truncated {
        /// What was being read.
        what: String,
        /// Where it begins.
        offset: u64,
        /// Bytes that it needs, at least.
        needed: u64,
        /// Bytes that there are.
        left: u64,
    },
    /// The header does not end within the limit on headers.
    #[error("the header is longer than {limit} bytes")]
    HeaderTooLong {
        /// The limit, in bytes.
        limit: u64,
    },
    /// A count beyond what any model has.
    #[error("{what} is {found}, but at most {limit} are read")]
    Count {
        /// What is counted.
        what: String,
        /// The count found.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// A key or tensor name that cannot be one.
    #[error("{what} {problem}")]
    Name {
        /// Which name.
        what: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A value of a kind that GGUF does not have.
    #[error("metadata key `{key}` has value type {found}, expected 0 to 12")]
    ValueType {
        /// The key.
        key: String,
        /// The type id found.
        found: u32,
    },
    /// An array of arrays.
    #[error("metadata key `{key}` holds an array of arrays, which is not supported")]
    NestedArray {
        /// The key.
        key: String,
    },
    /// A bool that is neither.
    #[error("metadata key `{key}` holds a bool of {found}, expected 0 or 1")]
    Bool {
        /// The key.
        key: String,
        /// The byte found.
        found: u8,
    },
    /// One key, two values.
    #[error("metadata key `{key}` is there twice with different values")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// An alignment that no file can have.
    #[error("general.alignment must be a u32 and a power of two from 8 to 65536, found {found}")]
    Alignment {
        /// What the key holds, in words.
        found: String,
    },
    /// Two tensors of one name.
    #[error("tensor `{name}` is there twice")]
    DuplicateTensor {
        /// The name.
        name: String,
    },
    /// Too many dimensions, or none.
    #[error("tensor `{name}` has {found} dimensions, expected 1 to 4")]
    Dimensions {
        /// The tensor.
        name: String,
        /// How many it has.
        found: u32,
    },
    /// An element type that is not in our table.
    #[error("tensor `{name}` has element type {found}{}, which is not supported", known(*found))]
    ElementType {
        /// The tensor.
        name: String,
        /// The type id found.
        found: u32,
    },
    /// Rows that are no whole number of blocks.
    #[error("tensor `{name}` has rows of {n_in} weights, expected whole {dtype} blocks of {}", dtype.block_len())]
    Row {
        /// The tensor.
        name: String,
        /// Its element type.
        dtype: Dtype,
        /// Its row length.
        n_in: u64,
    },
    /// More bytes than can be counted.
    #[error(
        "tensor `{name}`: size overflow: {dims:?} weights of type {dtype} are more than 64 bits can count"
    )]
    SizeOverflow {
        /// The tensor.
        name: String,
        /// Its dimensions.
        dims: Vec<u64>,
        /// Its element type.
        dtype: Dtype,
    },
    /// An end beyond what can be counted.
    #[error("tensor `{name}`: offset + size overflow: {len} bytes at {offset} of the data")]
    OffsetOverflow {
        /// The tensor.
        name: String,
        /// Its offset in the data.
        offset: u64,
        /// Its length in bytes.
        len: u64,
    },
    /// An offset that breaks the file's own alignment.
    #[error("tensor `{name}` begins at {offset} of the data, expected a multiple of {alignment}")]
    Misaligned {
        /// The tensor.
        name: String,
        /// Its offset in the data.
        offset: u64,
        /// The alignment.
        alignment: u64,
    },
    /// Bytes that are not there.
    #[error("tensor `{name}` ends at byte {end}, past the end of the file: {file_len}")]
    PastEnd {
        /// The tensor.
        name: String,
        /// Where it ends.
        end: u64,
        /// The length of the file.
        file_len: u64,
    },
    /// Two tensors share bytes.
    #[error("tensors `{first}` and `{second}` overlap at byte {offset}")]
    Overlap {
        /// The one that begins first.
        first: String,
        /// The one that begins inside it.
        second: String,
        /// Where that one begins.
        offset: u64,
    },
    /// The independent second reading of the header came to another result.
    #[error("a second reading of the header differs: {difference}")]
    SecondReading {
        /// Where, and how.
        difference: String,
    },
}

impl GgufError {
    /// What the user may do about it, where that is more than "get another file".
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            GgufError::Empty | GgufError::Truncated { .. } | GgufError::PastEnd { .. } => {
                Some("the download may be incomplete; compare its size with the published one")
            }
            GgufError::BigEndian => {
                Some("convert it with `gguf-convert-endian FILE little` of the Python package gguf")
            }
            GgufError::Version { found: 0 | 1 } => {
                Some("this layout is from before 2024; convert the model again with a current converter")
            }
            GgufError::Version { .. } => Some("the file may need a newer orkpack"),
            GgufError::ElementType { .. } => {
                Some("take the model in another quantisation, such as Q4_K_M or Q8_0")
            }
            GgufError::SecondReading { .. } => {
                Some("two readers disagree about this file, so it is not safe to use; please report it")
            }
            _ => None,
        }
    }
}

/// The names of type ids that exist elsewhere but are not read here.
fn known(id: u32) -> &'static str {
    match id {
        4 | 5 => " (Q4_2 or Q4_3, removed from GGUF)",
        9 => " (Q8_1)",
        31..=33 => " (Q4_0 interleaved, removed from GGUF)",
        36..=38 => " (IQ4_NL interleaved, removed from GGUF)",
        40 => " (NVFP4)",
        _ => "",
    }
}

/// A name for a message: whole if short, else its beginning.
pub(super) fn shown(name: &str) -> String {
    const CHARS: usize = 100;
    match name.char_indices().nth(CHARS) {
        Some((end, _)) => format!("{}…", name.get(..end).unwrap_or_default()),
        None => name.to_owned(),
    }
}
