//! Routing from an importance matrix: the per-expert counts that llama.cpp's imatrix files carry in their GGUF form.
//!
//! `blk.N.ffn_gate_exps.weight.counts` says how often each expert of layer N was chosen over its calibration text,
//! so a large model can be planned without being run. The file names no model: only shapes can be compared, it sets
//! no text aside, and it knows nothing of rows per batch.

use thiserror::Error;

use super::statistics::{RoutedLayer, Statistics, StatisticsError};
use crate::tensor::{Dtype, SourceError, TensorSource};

/// Why an imatrix gives no routing statistics.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ImatrixError {
    /// Another kind of GGUF.
    #[error("not an imatrix: metadata key `general.type` is not `imatrix`")]
    NotImatrix,
    /// A file from before the GGUF form: it has sums for whole tensors only.
    #[error(
        "not a GGUF: imatrix files of the old `.dat` form do not count experts; convert it with a newer llama-imatrix \
         or calibrate instead"
    )]
    OldFormat,
    /// The model asked about has no experts.
    #[error("the model has no experts, so an imatrix cannot say how they are used")]
    NoExperts,
    /// A layer's experts are not in the file.
    #[error("imatrix: tensor `{tensor}` is missing; it was made from another model or by another program")]
    Missing {
        /// The tensor.
        tensor: String,
    },
    /// Counts of another number of experts.
    #[error("imatrix: tensor `{tensor}` has {found} counts, expected one for each of {expected} experts")]
    Length {
        /// The tensor.
        tensor: String,
        /// Counts in it.
        found: u64,
        /// Experts of the layer.
        expected: u32,
    },
    /// A single count for all experts, or the same for each: nothing was counted by expert.
    #[error(
        "imatrix holds no routing: tensor `{tensor}` has {what}; calibrate instead, or make it with a newer llama-imatrix"
    )]
    NoRouting {
        /// The tensor.
        tensor: String,
        /// What was found.
        what: &'static str,
    },
    /// Something that is no count.
    #[error("imatrix: tensor `{tensor}`, expert {expert}: {found} is no count")]
    NotCount {
        /// The tensor.
        tensor: String,
        /// The expert.
        expert: usize,
        /// What was found.
        found: f32,
    },
    /// Counts that are no whole number of tokens.
    #[error(
        "imatrix: the counts of tensor `{tensor}` add up to {found}, which is not {n_used} times {tokens} tokens"
    )]
    Sum {
        /// The tensor.
        tensor: String,
        /// Their sum.
        found: u64,
        /// Experts per token.
        n_used: u32,
        /// Tokens of the first layer.
        tokens: u64,
    },
    /// The file could not be read.
    #[error("imatrix: {0}")]
    Source(#[from] SourceError),
    /// What was read is no statistics.
    #[error(transparent)]
    Statistics(#[from] StatisticsError),
}

/// Whether a GGUF is an importance matrix, by its content.
pub fn is_imatrix(source: &dyn TensorSource) -> bool {
    let kind = source.metadata().get("general.type");
    kind.and_then(|value| value.as_str()) == Some("imatrix")
}

/// Refuses what cannot be an imatrix by the first bytes of the file, before it is opened as a GGUF.
///
/// # Errors
///
/// [`ImatrixError::OldFormat`].
pub fn check_imatrix_magic(first_bytes: &[u8]) -> Result<(), ImatrixError> {
    if first_bytes.starts_with(b"GGUF") { Ok(()) } else { Err(ImatrixError::OldFormat) }
}

/// Routing statistics of a model with these layers from an imatrix file.
///
/// # Errors
///
/// [`ImatrixError`] naming the tensor when the file holds no routing, or that of another model.
pub fn read_imatrix(
    source: &dyn TensorSource,
    architecture: &str,
    layers: &[RoutedLayer],
) -> Result<Statistics, ImatrixError> {
    if !is_imatrix(source) {
        return Err(ImatrixError::NotImatrix);
    }
    if layers.is_empty() {
        return Err(ImatrixError::NoExperts);
    }
    let mut calls: Vec<Vec<u64>> = Vec::new();
    let mut tokens = None;
    for layer in layers {
        let (tensor, counts) = layer_counts(source, layer)?;
        let (sum, n_used) = (counts.iter().sum::<u64>(), u64::from(layer.n_used.max(1)));
        let tokens = *tokens.get_or_insert(sum / n_used);
        if sum != tokens.saturating_mul(n_used) {
            return Err(ImatrixError::Sum { tensor, found: sum, n_used: layer.n_used, tokens });
        }
        calls.push(counts);
    }
    // Where each layer's calls are equal, some old versions wrote the number of tokens for every expert.
    let equal = |counts: &Vec<u64>| counts.iter().all(|count| Some(count) == counts.first());
    let may_differ = layers.iter().any(|layer| layer.n_expert > 1 && layer.n_used < layer.n_expert);
    if may_differ && calls.iter().all(equal) {
        let what = "the same count for every expert";
        return Err(ImatrixError::NoRouting { tensor: name(layers[0].layer, "gate"), what });
    }
    let windows = source.metadata().optional_u32("imatrix.chunk_count").ok().flatten().unwrap_or(1);
    let tokens = tokens.unwrap_or(0);
    let windows = u64::from(windows).clamp(1, tokens.max(1));
    Ok(Statistics::from_counts(architecture.to_owned(), layers.to_vec(), calls, tokens, windows)?)
}

fn name(layer: u32, projection: &str) -> String {
    format!("blk.{layer}.ffn_{projection}_exps.weight.counts")
}

/// The counts of one layer and the tensor they are from: gate, or what else was collected of the layer's experts.
fn layer_counts(source: &dyn TensorSource, layer: &RoutedLayer) -> Result<(String, Vec<u64>), ImatrixError> {
    let info = ["gate", "gate_up", "up", "down"].iter().find_map(|p| source.find(&name(layer.layer, p)));
    let info = info.ok_or_else(|| ImatrixError::Missing { tensor: name(layer.layer, "gate") })?;
    let (tensor, found) = (info.name.clone(), info.place.len / 4);
    if found == 1 && layer.n_expert > 1 {
        return Err(ImatrixError::NoRouting { tensor, what: "a single count for all experts" });
    }
    if info.dtype != Dtype::F32 || found != u64::from(layer.n_expert) {
        return Err(ImatrixError::Length { tensor, found, expected: layer.n_expert });
    }
    let bytes = source.bytes(info.place)?;
    let mut counts = Vec::with_capacity(layer.n_expert as usize);
    for (expert, bytes) in bytes.chunks_exact(4).enumerate() {
        let count = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        // Counts are stored as f32: whole numbers, exact only up to 2^24.
        if !(0.0..1e15).contains(&count) || count.fract() != 0.0 {
            return Err(ImatrixError::NotCount { tensor, expert, found: count });
        }
        counts.push(count as u64);
    }
    Ok((tensor, counts))
}
