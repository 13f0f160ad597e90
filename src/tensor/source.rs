//! Where weights come from: one trait for a GGUF, a pack, and whatever else holds a model.

use thiserror::Error;

use super::{Dtype, Metadata};

/// A run of bytes in one of a source's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// Which of the source's files (0 for a single file).
    pub file: u32,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

impl Place {
    /// The part of this place that begins `offset` bytes in and is `len` long; `None` when it leaves the place.
    pub fn part(self, offset: u64, len: u64) -> Option<Place> {
        let end = offset.checked_add(len)?;
        (end <= self.len).then_some(Place { file: self.file, offset: self.offset.checked_add(offset)?, len })
    }
}

/// One tensor of a model: its name, type, shape and place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The GGUF name, as in `blk.3.ffn_up_exps.weight`.
    pub name: String,
    /// The element type.
    pub dtype: Dtype,
    /// Dimensions as GGUF lists them, fastest first: `{n_in, n_out, n_expert}`. One to four of them.
    pub dims: Vec<u64>,
    /// Where its bytes are.
    pub place: Place,
}

impl TensorInfo {
    /// Width of a row: the fastest dimension.
    pub fn n_in(&self) -> u64 {
        self.dims.first().copied().unwrap_or(1)
    }

    /// Number of rows in one matrix: the second dimension, 1 for a vector.
    pub fn n_out(&self) -> u64 {
        self.dims.get(1).copied().unwrap_or(1)
    }

    /// Number of stacked matrices: the third dimension, 1 for a plain matrix.
    pub fn n_stack(&self) -> u64 {
        self.dims.get(2).copied().unwrap_or(1)
    }

    /// Number of weights.
    pub fn n_elements(&self) -> u64 {
        self.dims.iter().product()
    }
}

/// Bytes that a source could not give.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SourceError {
    /// A place outside the files: a bug of ours or a file that changed under us.
    #[error("bytes {offset}..{offset}+{len} are not in file {file} of the model")]
    OutOfFile {
        /// File number.
        file: u32,
        /// First byte wanted.
        offset: u64,
        /// Bytes wanted.
        len: u64,
    },
    /// A tensor that is not the one a thin pack was made from.
    #[error(
        "tensor `{}`{} is not the one that the pack was made from",
        .tensor.escape_debug(), .part.map(|part| format!(", expert {part},")).unwrap_or_default()
    )]
    Differs {
        /// Its name.
        tensor: String,
        /// Which of its stacked matrices, where there are several.
        part: Option<u64>,
    },
    /// A model whose tensors are elsewhere.
    #[error("the pack is thin: its tensors are not here")]
    Absent,
    /// The system could not read.
    #[error("cannot read the model: {0}")]
    Io(#[from] std::io::Error),
}

/// A model's metadata and tensors, whichever files hold them. `gguf` and `source` implement it.
pub trait TensorSource: Send + Sync {
    /// The GGUF header, byte for byte: magic, metadata and tensor directory up to the data.
    fn header(&self) -> &[u8];

    /// The metadata, typed.
    fn metadata(&self) -> &Metadata;

    /// Every tensor, in the order of the directory.
    fn tensors(&self) -> &[TensorInfo];

    /// The tensor with this name.
    fn find(&self, name: &str) -> Option<&TensorInfo>;

    /// The bytes at a place.
    ///
    /// # Errors
    ///
    /// [`SourceError`] when the place is not inside the source's files.
    fn bytes(&self, place: Place) -> Result<&[u8], SourceError>;
}
