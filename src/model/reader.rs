//! What families are built with: reads keys, finds tensors, checks both, and collects the weight table.
//!
//! Nothing is allocated from a number that the metadata claims: a list grows only as fast as tensors are
//! found, and a norm is read only when its bytes are there.

mod attention;
mod delta_net;
mod experts;
mod keys;
mod latent;
mod outline;
mod rope;

use std::collections::BTreeSet;
use std::sync::Arc;

pub(super) use latent::LatentSizes;

use super::parts::{Layer, RmsNorm, Scales};
use super::{Model, ModelError};
use crate::blocks;
use crate::executor::{Weight, WeightId, WeightTable};
use crate::tensor::{Dtype, TensorInfo, TensorSource, Value};
use crate::units::LayerId;

/// No width, count or length of a model may exceed this; products of two of them then fit easily.
const MAX_SIZE: usize = 1 << 24;

/// Whether the source holds experts at all, in any naming.
pub(super) fn has_experts(source: &dyn TensorSource) -> bool {
    // Very old files hold one tensor per expert: `blk.0.ffn_gate.7.weight`.
    let stacked = |name: &str| name.contains("_exps.") || name.contains(".ffn_gate.0.");
    source.tensors().iter().any(|tensor| stacked(&tensor.name))
}

/// The sizes that every family has: of the layer that is being read where the file lists them layer by layer, of the
/// whole model the largest.
#[derive(Clone, Debug)]
pub(super) struct Sizes {
    pub n_layer: usize,
    pub n_ctx: usize,
    pub n_embd: usize,
    pub n_head: usize,
    /// 0 in a layer without attention.
    pub n_head_kv: usize,
    pub head_dim: usize,
    pub n_expert: usize,
    pub n_used: usize,
    /// Of every norm.
    pub eps: f32,
}

/// Whether a file may leave out `output.weight`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Head {
    /// It must be there.
    Required,
    /// Without it the embedding is the head.
    TiedIfAbsent,
}

/// A source on its way to a [`Model`].
pub(super) struct Reader<'a> {
    source: &'a dyn TensorSource,
    architecture: &'a str,
    weights: WeightTable,
    /// Tensors that the description uses.
    used: BTreeSet<&'a str>,
    /// The layer that is being read: which number of a list counts.
    layer: Option<usize>,
}

/// Tensors.
impl<'a> Reader<'a> {
    pub fn new(source: &'a dyn TensorSource, architecture: &'a str) -> Self {
        Reader { source, architecture, weights: WeightTable::default(), used: BTreeSet::new(), layer: None }
    }

    /// Whether there is a tensor of this name.
    fn has(&self, name: &str) -> bool {
        self.source.find(name).is_some()
    }

    /// Takes tensors as known that the family's files may hold and its arithmetic has no use for.
    pub fn skip(&mut self, is_skipped: impl Fn(&str) -> bool) {
        let names = self.source.tensors().iter().map(|tensor| tensor.name.as_str());
        self.used.extend(names.filter(|name| is_skipped(name)));
    }

    /// The tensor `name`, of exactly these dimensions and a type that can be computed. Counts as used.
    fn tensor(&mut self, name: &str, dims: &[usize]) -> Result<&'a TensorInfo, ModelError> {
        let tensor = self.source.find(name).ok_or_else(|| ModelError::MissingTensor(name.to_owned()))?;
        let expected: Vec<u64> = dims.iter().map(|dim| *dim as u64).collect();
        if without_trailing_ones(&tensor.dims) != without_trailing_ones(&expected) {
            return Err(ModelError::Shape { tensor: name.to_owned(), found: tensor.dims.clone(), expected });
        }
        if !blocks::is_supported(tensor.dtype) {
            return Err(ModelError::Unsupported { tensor: name.to_owned(), dtype: tensor.dtype });
        }
        if tensor_bytes(tensor) != Some(tensor.place.len) {
            return Err(ModelError::Length {
                tensor: name.to_owned(),
                dtype: tensor.dtype,
                found: tensor.place.len,
                dims: tensor.dims.clone(),
            });
        }
        self.used.insert(&tensor.name);
        Ok(tensor)
    }

    fn matrix(&mut self, name: &str, n_in: usize, n_out: usize) -> Result<WeightId, ModelError> {
        let tensor = self.tensor(name, &[n_in, n_out])?;
        Ok(self.weights.push(Weight { place: tensor.place, dtype: tensor.dtype, n_in, n_out }))
    }

    /// A matrix whose activations are never rounded, whatever type it is stored in: a router or a gate.
    fn exact_matrix(&mut self, name: &str, n_in: usize, n_out: usize) -> Result<WeightId, ModelError> {
        let tensor = self.tensor(name, &[n_in, n_out])?;
        Ok(self.weights.push_exact(Weight { place: tensor.place, dtype: tensor.dtype, n_in, n_out }))
    }

    /// The numbers of an F32 tensor.
    fn f32_values(&mut self, name: &str, dims: &[usize]) -> Result<Vec<f32>, ModelError> {
        let tensor = self.tensor(name, dims)?;
        require_f32(tensor)?;
        let bytes = self
            .source
            .bytes(tensor.place)
            .map_err(|error| ModelError::Source { tensor: name.to_owned(), error })?;
        let (numbers, _) = bytes.as_chunks::<4>();
        Ok(numbers.iter().map(|number| f32::from_le_bytes(*number)).collect())
    }

    /// The norm `blk.<layer>.<part>.weight`.
    pub fn norm(&mut self, at: LayerId, part: &str, width: usize, eps: f32) -> Result<RmsNorm, ModelError> {
        Ok(RmsNorm { weight: self.f32_values(&in_layer(at, part), &[width])?, eps })
    }

    /// Builds the model's layers, as long as their tensors are there. Each gets its own sizes, and keys read for it may
    /// be lists of a number for each layer.
    pub fn layers(
        &mut self,
        model: &Sizes,
        mut layer: impl FnMut(&mut Self, LayerId, &Sizes) -> Result<Layer, ModelError>,
    ) -> Result<Vec<Layer>, ModelError> {
        let mut layers = Vec::new();
        for at in 0..model.n_layer {
            self.layer = Some(at);
            let &Sizes { n_layer, head_dim, .. } = model;
            let sizes = Sizes { n_layer, head_dim, ..self.sizes_but_head_dim()? };
            layers.push(layer(self, LayerId(at as u32), &sizes)?);
        }
        self.layer = None;
        Ok(layers)
    }

    /// Adds embedding, final norm and head, and makes sure that no tensor was left unused.
    pub fn finish(
        mut self,
        sizes: &Sizes,
        layers: Vec<Layer>,
        final_norm: &str,
        head: Head,
    ) -> Result<Model, ModelError> {
        let n_vocab = self.n_vocab()?;
        let embedding = self.matrix(EMBEDDING, sizes.n_embd, n_vocab)?;
        let head = match head {
            Head::TiedIfAbsent if self.source.find(HEAD).is_none() => embedding,
            _ => self.matrix(HEAD, sizes.n_embd, n_vocab)?,
        };
        let final_norm = RmsNorm { weight: self.f32_values(final_norm, &[sizes.n_embd])?, eps: sizes.eps };
        if let Some(left) = self.source.tensors().iter().find(|t| !self.used.contains(t.name.as_str())) {
            let tensor = left.name.clone();
            return Err(ModelError::UnknownTensor { tensor, architecture: self.architecture.to_owned() });
        }
        Ok(Model {
            architecture: self.architecture.to_owned(),
            n_embd: sizes.n_embd,
            n_vocab,
            n_ctx: sizes.n_ctx,
            embedding,
            layers,
            final_norm,
            head,
            scales: Scales::NONE,
            weights: Arc::new(self.weights),
        })
    }

    /// Rows of the embedding, with which the token list and `vocab_size` must agree where they are there.
    fn n_vocab(&self) -> Result<usize, ModelError> {
        let missing = || ModelError::MissingTensor(EMBEDDING.to_owned());
        let rows = self.source.find(EMBEDDING).ok_or_else(missing)?.n_out();
        let rows = usize::try_from(rows)
            .ok()
            .filter(|rows| (1..=MAX_SIZE).contains(rows))
            .ok_or_else(|| self.setting("vocab_size", rows, format!("1 to {MAX_SIZE}")))?;
        let tokens = match self.metadata().get(TOKENS) {
            Some(Value::Array(tokens)) => Some(tokens.len() as u64),
            _ => None,
        };
        let stated = self.metadata().optional_u32(&self.key("vocab_size"))?.map(u64::from);
        for (key, found) in [(TOKENS.to_owned(), tokens), (self.key("vocab_size"), stated)] {
            if let Some(found) = found.filter(|found| *found != rows as u64) {
                return Err(ModelError::Vocabulary { key, found, rows });
            }
        }
        Ok(rows)
    }
}

/// The final norm, in most families.
pub(super) const OUTPUT_NORM: &str = "output_norm.weight";

const EMBEDDING: &str = "token_embd.weight";
const HEAD: &str = "output.weight";
const TOKENS: &str = "tokenizer.ggml.tokens";

fn in_layer(at: LayerId, part: &str) -> String {
    format!("blk.{at}.{part}.weight")
}

fn require_f32(tensor: &TensorInfo) -> Result<(), ModelError> {
    match tensor.dtype {
        Dtype::F32 => Ok(()),
        dtype => Err(ModelError::NotF32 { tensor: tensor.name.clone(), dtype }),
    }
}

/// Some writers drop dimensions of 1 at the end, others keep them.
fn without_trailing_ones(dims: &[u64]) -> &[u64] {
    let n = dims.iter().rposition(|dim| *dim != 1).map_or(0, |last| last + 1);
    &dims[..n]
}

/// Bytes that the dimensions need; `None` when rows are no whole blocks or the product overflows.
fn tensor_bytes(tensor: &TensorInfo) -> Option<u64> {
    let row = tensor.dtype.row_bytes(tensor.n_in())?;
    tensor.dims.iter().skip(1).try_fold(row, |bytes, dim| bytes.checked_mul(*dim))
}
