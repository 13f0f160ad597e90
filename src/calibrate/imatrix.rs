//! Routing from an importance matrix: the per-expert counts that llama.cpp's imatrix files carry in their GGUF form.
//!
//! `blk.N.ffn_gate_exps.weight.counts` says how often each expert of layer N was chosen over its calibration text,
//! so a large model can be planned without being run; where experts are tensors of their own, so does
//! `blk.N.ffn_gate.E.weight.counts` for expert E, and an expert without one was never called. The file names no model: only shapes can be compared, it sets
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
    /// A file from before the GGUF form: it has one number of calls for all experts of a layer.
    #[error(
        "an imatrix of the old `.dat` form, which has one number of calls for all experts of a layer and so does not say \
         which were chosen; make it again with a llama-imatrix that writes GGUF (`-o imatrix.gguf`), or calibrate"
    )]
    OldFormat,
    /// Neither form.
    #[error("not an imatrix: neither a GGUF nor of the old `.dat` form")]
    NeitherForm,
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
/// [`ImatrixError::OldFormat`], [`ImatrixError::NeitherForm`].
pub fn check_imatrix_magic(first_bytes: &[u8]) -> Result<(), ImatrixError> {
    match first_bytes {
        [b'G', b'G', b'U', b'F', ..] => Ok(()),
        _ if is_old_form(first_bytes) => Err(ImatrixError::OldFormat),
        _ => Err(ImatrixError::NeitherForm),
    }
}

/// The old form begins with the number of its entries, then the length of the first one's name, then the name.
fn is_old_form(bytes: &[u8]) -> bool {
    let Some((&[a, b, c, d, e, f, g, h], rest)) = bytes.split_first_chunk() else { return false };
    let [n_entries, len] = [[a, b, c, d], [e, f, g, h]].map(u32::from_le_bytes);
    let name = rest.get(..rest.len().min(len as usize).min(4)).unwrap_or_default();
    (1..1 << 20).contains(&n_entries)
        && (1..=256).contains(&len)
        && !name.is_empty()
        && name.iter().all(|b| b.is_ascii_graphic())
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
        // So many experts as no model has could make the sum too large; it is then no multiple of anything.
        let sum = counts.iter().fold(0u64, |sum, &count| sum.saturating_add(count));
        let n_used = u64::from(layer.n_used.max(1));
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
    let stacked = ["gate", "gate_up", "up", "down"].iter().find_map(|p| source.find(&name(layer.layer, p)));
    let Some(info) = stacked else { return counts_by_expert(source, layer) };
    let (tensor, found) = (info.name.clone(), info.place.len / 4);
    if found == 1 && layer.n_expert > 1 {
        return Err(ImatrixError::NoRouting { tensor, what: "a single count for all experts" });
    }
    if info.dtype != Dtype::F32 || found != u64::from(layer.n_expert) {
        return Err(ImatrixError::Length { tensor, found, expected: layer.n_expert });
    }
    let (counts, _) = source.bytes(info.place)?.as_chunks::<4>();
    let count = |(expert, bytes): (usize, &[u8; 4])| count(&tensor, expert, f32::from_le_bytes(*bytes));
    let counts = counts.iter().enumerate().map(count).collect::<Result<_, _>>()?;
    Ok((tensor, counts))
}

/// The counts of a layer whose experts are tensors of their own.
fn counts_by_expert(
    source: &dyn TensorSource,
    layer: &RoutedLayer,
) -> Result<(String, Vec<u64>), ImatrixError> {
    let find = |projection: &str, expert: u32| {
        source.find(&format!("blk.{}.ffn_{projection}.{expert}.weight.counts", layer.layer))
    };
    let has = |projection: &&str| (0..layer.n_expert).any(|expert| find(projection, expert).is_some());
    let Some(projection) = ["gate", "up", "down"].into_iter().find(has) else {
        return Err(ImatrixError::Missing { tensor: name(layer.layer, "gate") });
    };
    let mut counts = Vec::with_capacity(layer.n_expert as usize);
    for expert in 0..layer.n_expert {
        let Some(info) = find(projection, expert) else {
            counts.push(0);
            continue;
        };
        match source.bytes(info.place)? {
            &[a, b, c, d] if info.dtype == Dtype::F32 => {
                counts.push(count(&info.name, expert as usize, f32::from_le_bytes([a, b, c, d]))?);
            }
            bytes => {
                let (tensor, found) = (info.name.clone(), bytes.len() as u64 / 4);
                return Err(ImatrixError::Length { tensor, found, expected: 1 });
            }
        }
    }
    Ok((format!("blk.{}.ffn_{projection}.*.weight.counts", layer.layer), counts))
}

/// A count as a whole number; more than 2^53 is none, as in a document.
fn count(tensor: &str, expert: usize, found: f32) -> Result<u64, ImatrixError> {
    if (0.0..=9_007_199_254_740_992.0).contains(&found) && found.fract() == 0.0 {
        return Ok(found as u64);
    }
    Err(ImatrixError::NotCount { tensor: tensor.to_owned(), expert, found })
}
