//! What an index holds, and its bytes: the one module that knows the encoding.
//!
//! The encoding is bincode 2 with fixed-width little-endian integers: numbers as they are, a list or string as
//! its u64 count and its elements, an option as a byte 0 or 1 and the value, an enum as its u32 code and the
//! fields of the variant, a digest as its 32 bytes, a record as its fields in order. Hence the length of an
//! index depends on its counts and names alone. Field order here is the format; `formats/orkpack-v1.json` says it again.

#![deny(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::as_conversions,
    clippy::arithmetic_side_effects
)]

use std::fmt;

use bincode::{Decode, Encode};
use serde::Serialize;

use super::layout::{INDEX_LIMIT, PAGE};
use super::{Digest, PackError, wide};
use crate::tensor::{Dtype, MatrixId, Projection};
use crate::tile;
use crate::units::{ExpertId, LayerId};

/// Everything about a pack but the content of its sections.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode, Serialize)]
pub struct Index {
    /// What was converted, and how.
    pub manifest: Manifest,
    /// The model's GGUF files, in order of their shards.
    pub files: Vec<SourceFile>,
    /// The model's tensors, in order of the files and their directories.
    pub tensors: Vec<SourceTensor>,
    /// The sections, in order of the file.
    pub sections: Vec<Section>,
    /// The NPU's chunks, in order of rank: any first few are a good choice for a smaller window.
    pub chunks: Vec<Chunk>,
    /// The matrices in the chunks, best first: the ranking.
    pub placements: Vec<Placement>,
    /// How far down the ranking each regime goes, by ascending `from_tokens`.
    pub cuts: Vec<Cut>,
}

/// What was converted, and how. Equal inputs give equal manifests: no times, hosts, paths or texts.
///
/// The digests of profile, plan and statistics are those of their sections.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode, Serialize)]
pub struct Manifest {
    /// Tool and version, as in `orkpack 0.1.0`.
    pub tool: String,
    /// `general.architecture` of the model.
    pub architecture: String,
    /// Its shape.
    pub dims: ModelDims,
    /// The quantisation contract of the NPU's copies, as in `w8a8-row-1`.
    pub contract: String,
    /// Name of the device profile.
    pub device: String,
    /// Digest of the tokenizer's metadata.
    pub tokenizer: Digest,
    /// Digest of the model's shapes and router tensors: what routing statistics are bound to.
    pub fingerprint: Digest,
}

/// The shape of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode, Serialize)]
pub struct ModelDims {
    /// Transformer blocks.
    pub n_layer: u32,
    /// Width of the residual stream.
    pub n_embd: u32,
    /// Width inside one expert.
    pub n_ff: u32,
    /// Experts per layer.
    pub n_expert: u32,
    /// Experts per token.
    pub n_expert_used: u32,
    /// Tokens of the vocabulary.
    pub n_vocab: u32,
}

/// One GGUF file of the model.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode, Serialize)]
pub struct SourceFile {
    /// Its name, without a folder.
    pub name: String,
    /// Its length in bytes.
    pub len: u64,
    /// Section with its first bytes, up to the tensor data.
    pub header: u32,
    /// Section with its bytes that are neither header nor tensor, one after the other; none: all are zero.
    pub residue: Option<u32>,
}

/// One tensor of the model.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode, Serialize)]
pub struct SourceTensor {
    /// Its GGUF name.
    pub name: String,
    /// Its GGUF element type.
    pub dtype: u32,
    /// Its dimensions, fastest first.
    pub dims: Vec<u64>,
    /// Which of [`Index::files`] holds it.
    pub file: u32,
    /// Where in that file it begins.
    pub offset: u64,
    /// Section with its bytes. A thin pack has none.
    pub section: Option<u32>,
    /// Digests of its bytes in the source: one per stacked matrix.
    pub digests: Vec<Digest>,
}

/// A run of bytes of the pack, in one or more equal parts with a digest each.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode, Serialize)]
pub struct Section {
    /// What it is.
    pub kind: Kind,
    /// Its name, once per kind.
    pub name: String,
    /// How its bytes are ordered.
    pub layout: LayoutId,
    /// First byte: a multiple of 4096.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
    /// Digests of its equal parts: one per expert of a stacked tensor, else one.
    pub digests: Vec<Digest>,
}

/// What a section is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Encode, Decode, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The first bytes of a GGUF file, up to the tensor data.
    Header,
    /// The bytes of a GGUF file that are neither header nor tensor.
    Residue,
    /// The device profile, JSON.
    Profile,
    /// The routing statistics, JSON.
    Statistics,
    /// The plan, JSON.
    Plan,
    /// One tensor of the model.
    Tensor,
    /// Int8 tiles for one device buffer.
    Chunk,
    /// The f32 scales of one chunk's matrices.
    Scales,
}

/// How a section's bytes are ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LayoutId {
    /// As they are: documents, headers.
    Plain,
    /// A tensor's rows, as in the GGUF.
    Rows,
    /// Reserved: rows interleaved for a CPU kernel. No version 1 pack holds it.
    Interleaved,
    /// Full-K tiles of 32 x 32 int8 codes.
    Tiles,
    /// Little-endian f32, one per output row.
    F32,
}

/// When a chunk is in device memory. A matrix of tier `cpu` has no copy and so no chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// From the start.
    Resident,
    /// Brought in chunk by chunk, in execution order.
    Streamed,
}

/// One device buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode, Serialize)]
pub struct Chunk {
    /// Section with its tiles.
    pub section: u32,
    /// Section with the scales of the matrices that begin in it; empty when none does.
    pub scales: u32,
    /// When it is in device memory.
    pub tier: Tier,
    /// Which IOMMU domain it is for.
    pub domain: u32,
    /// Its turn in one pass through the model; chunks of equal turn go by their number.
    pub order: u32,
}

/// One matrix in one or more chunks of a domain.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode, Serialize)]
pub struct Placement {
    /// Which matrix.
    pub matrix: MatrixName,
    /// Inputs.
    pub n_in: u32,
    /// Outputs that have a copy: the first of the matrix, all or a share of them.
    pub n_out: u32,
    /// Where its `n_out` scales begin, in bytes, in the scales of the chunk that holds its first part.
    pub scales: u64,
    /// The parts that cover `[n_out, n_in]`: by `n0`, then by `k0`.
    pub parts: Vec<Part>,
}

/// One program's weights in a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode, Serialize)]
pub struct Part {
    /// Which weights.
    pub sub: SubMatrix,
    /// Which of [`Index::chunks`] holds them.
    pub chunk: u32,
    /// Where in that chunk they begin: a multiple of 4096.
    pub offset: u64,
}

/// The name of a matrix with a copy for the NPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MatrixName {
    /// One projection of one routed expert.
    Expert {
        /// The layer.
        layer: u32,
        /// The expert in that layer.
        expert: u32,
        /// Which of its matrices.
        projection: ProjectionCode,
    },
    /// A plain matrix: a number in [`Index::tensors`].
    Dense {
        /// The tensor.
        tensor: u32,
    },
}

/// [`Projection`] as a code of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum ProjectionCode {
    Gate,
    Up,
    Down,
}

/// One tiling, one program's weights: inputs `k0..k0 + k_len` of outputs `n0..n0 + n_len`.
///
/// With k and n counted from `k0` and `n0`, code (k, n) is at byte `n/32 · 32·k_padded + k/32 · 1024 +
/// n%32 · 32 + k%32`; codes past `k_len` or `n_len` are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode, Serialize)]
pub struct SubMatrix {
    /// First input.
    pub k0: u32,
    /// Inputs that are weights.
    pub k_len: u32,
    /// Inputs of the program: a multiple of 32, at most 4096.
    pub k_padded: u32,
    /// First output.
    pub n0: u32,
    /// Outputs that are weights.
    pub n_len: u32,
    /// Outputs of the program: a multiple of 32, at most 8192.
    pub n_padded: u32,
}

/// What one regime keeps on the NPU: the first entries of the ranking.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode, Serialize)]
pub struct Cut {
    /// Batches of this many tokens and more, up to the next cut.
    pub from_tokens: u32,
    /// Per layer: how many of that layer's expert matrices, in the order of the placements.
    pub experts: Vec<u32>,
    /// How many of the plain matrices, in the order of the placements.
    pub dense: u32,
}

impl Index {
    /// The index as bytes.
    ///
    /// # Errors
    ///
    /// [`PackError::Index`] when it is larger than [`INDEX_LIMIT`].
    pub fn encode(&self) -> Result<Vec<u8>, PackError> {
        let bytes = bincode::encode_to_vec(self, format()).map_err(refused)?;
        if bytes.len() > INDEX_LIMIT {
            return Err(PackError::value("index", "length", bytes.len(), format!("at most {INDEX_LIMIT}")));
        }
        Ok(bytes)
    }

    /// The index in `bytes`. Its values are not checked yet, so nothing in it may be relied on.
    ///
    /// # Errors
    ///
    /// [`PackError::Index`] when the bytes are no index, or more than one.
    pub fn decode(bytes: &[u8]) -> Result<Index, PackError> {
        // A list is allocated when its count is read, so what a count may claim goes by how many bytes there are: no
        // entry takes four times as much memory as it has bytes.
        let decoded = match bytes.len() {
            ..=0x4000 => bincode::decode_from_slice(bytes, within::<0x1_0000>()),
            0x4001..=0x4_0000 => bincode::decode_from_slice(bytes, within::<0x10_0000>()),
            0x4_0001..=0x40_0000 => bincode::decode_from_slice(bytes, within::<0x100_0000>()),
            _ => bincode::decode_from_slice(bytes, within::<INDEX_LIMIT>()),
        };
        let (index, used): (Index, usize) = decoded.map_err(refused)?;
        if used == bytes.len() {
            return Ok(index);
        }
        let problem = format!("ends after {used} of its {} bytes", bytes.len());
        Err(PackError::Index { offset: PAGE, problem })
    }
}

/// The encoding, to be written.
fn format() -> impl bincode::config::Config {
    within::<INDEX_LIMIT>()
}

/// The encoding. The limit bounds what a wrong count can make the decoder allocate.
fn within<const LIMIT: usize>() -> impl bincode::config::Config {
    bincode::config::standard().with_little_endian().with_fixed_int_encoding().with_limit::<LIMIT>()
}

fn refused(problem: impl fmt::Display) -> PackError {
    PackError::Index { offset: PAGE, problem: problem.to_string() }
}

impl Section {
    /// Kind and name for messages, control characters escaped.
    pub fn label(&self) -> String {
        format!("{} `{}`", self.kind, self.name.escape_debug())
    }

    /// First byte after it; saturates where no file reaches.
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.len)
    }

    /// Length of one of its equal parts.
    pub fn part_len(&self) -> u64 {
        self.len.checked_div(wide(self.digests.len())).unwrap_or(0)
    }

    /// The number of a part for messages: none where there is only one.
    pub(super) fn part_number(&self, part: usize) -> Option<u32> {
        if self.digests.len() > 1 { u32::try_from(part).ok() } else { None }
    }
}

impl SourceTensor {
    /// Its element type; `None` for one that we do not know.
    pub fn dtype(&self) -> Option<Dtype> {
        Dtype::from_gguf(self.dtype)
    }

    /// Its bytes in the source by type and shape; `None` when the type is unknown, rows are no whole blocks,
    /// or the product leaves 64 bits.
    pub fn source_len(&self) -> Option<u64> {
        let (n_in, rest) = self.dims.split_first()?;
        let row = self.dtype()?.row_bytes(*n_in)?;
        rest.iter().try_fold(row, |len, dim| len.checked_mul(*dim))
    }

    /// Its name for messages, control characters escaped.
    pub fn label(&self) -> String {
        format!("tensor `{}`", self.name.escape_debug())
    }
}

impl Placement {
    /// Bytes of its scales.
    pub fn scales_len(&self) -> u64 {
        u64::from(self.n_out).saturating_mul(4)
    }
}

impl Part {
    /// These weights at this place.
    pub fn new(sub: impl Into<SubMatrix>, chunk: u32, offset: u64) -> Part {
        Part { sub: sub.into(), chunk, offset }
    }

    /// First byte after it in its chunk; saturates where no chunk reaches.
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.sub.len())
    }
}

impl SubMatrix {
    /// Bytes of its tiles.
    pub fn len(&self) -> u64 {
        u64::from(self.k_padded).saturating_mul(u64::from(self.n_padded))
    }

    /// Whether it holds nothing; no pack that opens has such a sub-matrix.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl From<tile::SubMatrix> for SubMatrix {
    fn from(sub: tile::SubMatrix) -> Self {
        let tile::SubMatrix { k0, k_len, k_padded, n0, n_len, n_padded } = sub;
        SubMatrix { k0, k_len, k_padded, n0, n_len, n_padded }
    }
}

impl From<SubMatrix> for tile::SubMatrix {
    fn from(sub: SubMatrix) -> Self {
        let SubMatrix { k0, k_len, k_padded, n0, n_len, n_padded } = sub;
        tile::SubMatrix { k0, k_len, k_padded, n0, n_len, n_padded }
    }
}

impl MatrixName {
    /// The layer of an expert's matrix.
    pub fn layer(self) -> Option<LayerId> {
        self.expert().map(|id| id.layer)
    }

    /// The expert's matrix; `None` for a plain one.
    pub fn expert(self) -> Option<MatrixId> {
        let MatrixName::Expert { layer, expert, projection } = self else { return None };
        Some(MatrixId { layer: LayerId(layer), expert: ExpertId(expert), projection: projection.into() })
    }
}

impl From<MatrixId> for MatrixName {
    fn from(id: MatrixId) -> Self {
        MatrixName::Expert { layer: id.layer.0, expert: id.expert.0, projection: id.projection.into() }
    }
}

impl From<Projection> for ProjectionCode {
    fn from(projection: Projection) -> Self {
        match projection {
            Projection::Gate => ProjectionCode::Gate,
            Projection::Up => ProjectionCode::Up,
            Projection::Down => ProjectionCode::Down,
        }
    }
}

impl From<ProjectionCode> for Projection {
    fn from(code: ProjectionCode) -> Self {
        match code {
            ProjectionCode::Gate => Projection::Gate,
            ProjectionCode::Up => Projection::Up,
            ProjectionCode::Down => Projection::Down,
        }
    }
}

impl fmt::Display for MatrixName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            MatrixName::Expert { layer, expert, projection } => {
                let projection = Projection::from(projection).name();
                write!(f, "blk.{layer}.ffn_{projection}_exps expert {expert}")
            }
            MatrixName::Dense { tensor } => write!(f, "dense tensor {tensor}"),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Header => "header",
            Kind::Residue => "residue",
            Kind::Profile => "profile",
            Kind::Statistics => "statistics",
            Kind::Plan => "plan",
            Kind::Tensor => "tensor",
            Kind::Chunk => "chunk",
            Kind::Scales => "scales",
        })
    }
}
