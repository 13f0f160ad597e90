//! What a model is: metadata and a tensor table turned into a description that one forward pass interprets.
//!
//! A file under `arch/` builds the description of one family: which tensors, which options. [`forward`] runs
//! any description on any [`Executor`](crate::executor::Executor). Nothing here computes a matrix product or
//! knows where one is computed, and nothing is read from a file but norms and (for the fingerprint) routers.

mod arch;
pub mod evaluate;
mod forward;
mod outline;
mod parts;
mod reader;
mod shape;

use std::sync::Arc;

use thiserror::Error;

use crate::executor::{WeightId, WeightTable};
use crate::tensor::{Dtype, MetadataError, SourceError, TensorSource};
use parts::{Layer, RmsNorm, Scales};

pub use forward::{
    CacheType, ForwardError, Group, State, Wanted, forward, forward_tentative, forward_traced, keep_first,
};
pub use outline::Outline;
pub use shape::{MatrixShape, ModelShape, MoeLayerShape};

/// A model that can be run: its sizes, its layers, and where every matrix lies.
#[derive(Clone, Debug)]
pub struct Model {
    pub(crate) architecture: String,
    pub(crate) n_embd: usize,
    pub(crate) n_vocab: usize,
    pub(crate) n_ctx: usize,
    /// `[n_vocab, n_embd]`.
    pub(crate) embedding: WeightId,
    pub(crate) layers: Vec<Layer>,
    pub(crate) final_norm: RmsNorm,
    /// `[n_vocab, n_embd]`: the embedding again where the two are tied.
    pub(crate) head: WeightId,
    pub(crate) scales: Scales,
    pub(crate) weights: Arc<WeightTable>,
}

/// Why a model cannot be described.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A key is missing or of the wrong kind.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// A key holds a number that no such model can have.
    #[error("metadata key `{key}` holds {found}, expected {expected}")]
    Setting {
        /// The key.
        key: String,
        /// What it holds.
        found: String,
        /// What is possible.
        expected: String,
    },
    /// A family that this version cannot run.
    #[error("architecture `{found}` is not supported; supported are: {supported}")]
    Architecture {
        /// `general.architecture` of the file.
        found: String,
        /// The names that are.
        supported: String,
    },
    /// The same, and its experts are not where those of other families are.
    #[error(
        "architecture `{found}` is not supported and cannot be planned either: {problem}; supported are: {supported}"
    )]
    Unplannable {
        /// `general.architecture` of the file.
        found: String,
        /// What is missing or in the way.
        problem: Box<ModelError>,
        /// The names that are.
        supported: String,
    },
    /// There is nothing to partition.
    #[error("no expert tensors found; this is a dense model of architecture {0}")]
    Dense(String),
    /// A tensor that the family needs is not there.
    #[error("tensor `{0}` is missing")]
    MissingTensor(String),
    /// A tensor that the family's arithmetic has no place for, so that a run would ignore it.
    #[error("tensor `{tensor}` is not part of architecture {architecture}")]
    UnknownTensor {
        /// The tensor.
        tensor: String,
        /// The family.
        architecture: String,
    },
    /// A shape that disagrees with the metadata. Dimensions as GGUF lists them, fastest first.
    #[error("tensor `{tensor}` has shape {found:?}, expected {expected:?}")]
    Shape {
        /// The tensor.
        tensor: String,
        /// Its dimensions.
        found: Vec<u64>,
        /// What the metadata asks for.
        expected: Vec<u64>,
    },
    /// A type without a decoder.
    #[error("tensor `{tensor}` is of type {dtype}, which is not supported")]
    Unsupported {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: Dtype,
    },
    /// A norm in another type: these are never quantised.
    #[error("tensor `{tensor}` is of type {dtype}, expected F32")]
    NotF32 {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: Dtype,
    },
    /// Fewer or more bytes than the shape needs, or rows that are no whole blocks.
    #[error("tensor `{tensor}` of type {dtype} has {found} bytes, which its shape {dims:?} does not fill")]
    Length {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: Dtype,
        /// Its bytes.
        found: u64,
        /// Its dimensions.
        dims: Vec<u64>,
    },
    /// Two statements of the vocabulary's size that disagree.
    #[error("`{key}` says {found} tokens, but `token_embd.weight` has {rows} rows")]
    Vocabulary {
        /// The key that disagrees.
        key: String,
        /// Its number.
        found: u64,
        /// Rows of the embedding.
        rows: usize,
    },
    /// The bytes of a norm or router could not be read.
    #[error("tensor `{tensor}`: {error}")]
    Source {
        /// The tensor.
        tensor: String,
        /// Why.
        error: SourceError,
    },
}

impl ModelError {
    fn unsupported(architecture: &str) -> ModelError {
        ModelError::Architecture { found: architecture.to_owned(), supported: arch::names() }
    }
}

impl Model {
    /// Describes the model that `source` holds.
    ///
    /// Every tensor's shape and type is checked against the metadata; matrices stay where they are.
    ///
    /// # Errors
    ///
    /// [`ModelError`], naming the key or tensor, what was found and what was expected.
    pub fn describe(source: &dyn TensorSource) -> Result<Model, ModelError> {
        let name = source.metadata().str("general.architecture")?;
        match arch::find(name) {
            _ if !reader::has_experts(source) => Err(ModelError::Dense(name.to_owned())),
            Some(family) => (family.describe)(reader::Reader::new(source, family.name)),
            None => Err(ModelError::unsupported(name)),
        }
    }

    /// The names of the families that can be run, as `general.architecture` has them.
    pub fn supported() -> String {
        arch::names()
    }

    /// The family, as `general.architecture` names it.
    pub fn architecture(&self) -> &str {
        &self.architecture
    }

    /// Number of layers.
    pub fn n_layer(&self) -> usize {
        self.layers.len()
    }

    /// Width of the residual stream.
    pub fn n_embd(&self) -> usize {
        self.n_embd
    }

    /// Number of tokens in the vocabulary: rows of the embedding and of the head.
    pub fn n_vocab(&self) -> usize {
        self.n_vocab
    }

    /// Number of positions that the model was trained for.
    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    /// Every matrix, for executors.
    pub fn weights(&self) -> &Arc<WeightTable> {
        &self.weights
    }

    /// Names the model whatever its quantisation: 64 hexadecimal digits over its sizes and its routers.
    ///
    /// A fine-tune has other routers and so another name; a quantiser leaves routers alone.
    ///
    /// # Errors
    ///
    /// [`ModelError::Source`] when a router cannot be read.
    pub fn fingerprint(&self, source: &dyn TensorSource) -> Result<String, ModelError> {
        fingerprint(&self.shape(), source)
    }
}

fn fingerprint(shape: &ModelShape, source: &dyn TensorSource) -> Result<String, ModelError> {
    let mut hasher = blake3::Hasher::new();
    let sizes = [shape.n_layer, shape.n_embd, shape.n_vocab];
    hasher.update(format!("orkpack model 1 {} {sizes:?}\n", shape.architecture).as_bytes());
    for layer in &shape.moe_layers {
        let name = format!("blk.{}.ffn_gate_inp.weight", layer.layer);
        let Some(router) = source.find(&name) else { return Err(ModelError::MissingTensor(name)) };
        let n_ff = layer.experts.first().map_or(0, |[gate, ..]| gate.n_out);
        let sizes = [layer.layer.index(), layer.n_expert(), layer.n_used, n_ff];
        hasher.update(format!("router {sizes:?}\n").as_bytes());
        let bytes = source.bytes(router.place);
        hasher.update(bytes.map_err(|error| ModelError::Source { tensor: name, error })?);
    }
    Ok(hasher.finalize().to_hex().to_string())
}
