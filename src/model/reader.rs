//! What families are built with: reads keys, finds tensors, checks both, and collects the weight table.
//!
//! Nothing is allocated from a number that the metadata claims: a list grows only as fast as tensors are
//! found, and a norm is read only when its bytes are there.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::parts::{
    Attention, Dense, Gating, Layer, Pairing, RmsNorm, Rope, Routed, RoutingRule, Scales, Shared, ShortConv,
};
use super::{Model, ModelError};
use crate::blocks;
use crate::executor::{ExpertBank, Weight, WeightId, WeightTable};
use crate::tensor::{Dtype, Metadata, MetadataError, TensorInfo, TensorSource, Value};
use crate::units::LayerId;

/// No width, count or length of a model may exceed this; products of two of them then fit easily.
const MAX_SIZE: usize = 1 << 24;

/// As many experts per layer as the reference implementation takes.
const MAX_EXPERTS: usize = 512;

/// Whether the source holds experts at all, in any naming.
pub(super) fn has_experts(source: &dyn TensorSource) -> bool {
    // Very old files hold one tensor per expert: `blk.0.ffn_gate.7.weight`.
    let stacked = |name: &str| name.contains("_exps.") || name.contains(".ffn_gate.0.");
    source.tensors().iter().any(|tensor| stacked(&tensor.name))
}

/// The sizes that every family has.
#[derive(Clone, Debug)]
pub(super) struct Sizes {
    pub n_layer: usize,
    pub n_ctx: usize,
    pub n_embd: usize,
    pub n_head: usize,
    /// Of every layer, or one number for all; 0 where a layer has no attention.
    n_head_kv: Vec<usize>,
    pub head_dim: usize,
    pub n_expert: usize,
    pub n_used: usize,
    /// Of every norm.
    pub eps: f32,
}

impl Sizes {
    /// Key heads of a layer; 0 in a layer without attention.
    pub fn n_head_kv(&self, at: LayerId) -> usize {
        match self.n_head_kv[..] {
            [all] => all,
            ref each => each.get(at.index()).copied().unwrap_or(0),
        }
    }
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
    architecture: &'static str,
    weights: WeightTable,
    /// Tensors that the description uses.
    used: BTreeSet<&'a str>,
}

/// Keys.
impl<'a> Reader<'a> {
    pub fn new(source: &'a dyn TensorSource, architecture: &'static str) -> Self {
        Reader { source, architecture, weights: WeightTable::default(), used: BTreeSet::new() }
    }

    fn metadata(&self) -> &'a Metadata {
        self.source.metadata()
    }

    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn setting(&self, key: &str, found: impl ToString, expected: impl ToString) -> ModelError {
        ModelError::Setting { key: self.key(key), found: found.to_string(), expected: expected.to_string() }
    }

    /// A size that must be there, from 1 to [`MAX_SIZE`].
    pub fn count(&self, key: &str) -> Result<usize, ModelError> {
        self.optional_count(key)?.ok_or_else(|| MetadataError::Missing(self.key(key)).into())
    }

    /// A size that may be missing.
    pub fn optional_count(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let Some(found) = self.metadata().optional_u32(&self.key(key))? else { return Ok(None) };
        match usize::try_from(found) {
            Ok(count) if (1..=MAX_SIZE).contains(&count) => Ok(Some(count)),
            _ => Err(self.setting(key, found, format!("1 to {MAX_SIZE}"))),
        }
    }

    /// A size that may be 0, which is also what a missing one means.
    pub fn count_or_zero(&self, key: &str) -> Result<usize, ModelError> {
        match self.metadata().optional_u32(&self.key(key))? {
            None | Some(0) => Ok(0),
            Some(_) => self.count(key),
        }
    }

    /// A factor, where GGUF may write none as 0 or leave the key out.
    pub fn factor(&self, key: &str) -> Result<f32, ModelError> {
        Ok(self.optional_f32(key)?.filter(|factor| *factor != 0.0).unwrap_or(1.0))
    }

    /// A yes or no that may be missing.
    pub fn optional_bool(&self, key: &str) -> Result<Option<bool>, ModelError> {
        Ok(self.metadata().optional_bool(&self.key(key))?)
    }

    fn optional_f32(&self, key: &str) -> Result<Option<f32>, ModelError> {
        Ok(self.metadata().optional_f32(&self.key(key))?)
    }

    /// The factor of all expert weights.
    pub fn expert_weights_scale(&self) -> Result<f32, ModelError> {
        self.factor("expert_weights_scale")
    }

    /// The function that turns router logits into scores, which must be stated.
    pub fn gating(&self) -> Result<Gating, ModelError> {
        let key = "expert_gating_func";
        match self.metadata().u32(&self.key(key))? {
            1 => Ok(Gating::Softmax),
            2 => Ok(Gating::Sigmoid),
            other => Err(self.setting(key, other, "1 (softmax) or 2 (sigmoid)")),
        }
    }

    /// What logits are divided by, which must be there.
    pub fn logit_scale(&self) -> Result<f32, ModelError> {
        let key = "logit_scale";
        let scale = self.optional_f32(key)?.ok_or_else(|| MetadataError::Missing(self.key(key)))?;
        if scale != 0.0 { Ok(scale) } else { Err(self.setting(key, scale, "a number other than 0")) }
    }

    /// What scores are multiplied by: the key, or `1 / √head_dim` where it is missing or 0.
    pub fn attention_scale(&self, head_dim: usize) -> Result<f32, ModelError> {
        let stated = self.optional_f32("attention.scale")?.filter(|scale| *scale != 0.0);
        Ok(stated.unwrap_or(1.0 / (head_dim as f32).sqrt()))
    }

    /// The sizes that every family has, each possible by itself and with the others.
    pub fn sizes(&self) -> Result<Sizes, ModelError> {
        let (n_embd, n_head) = (self.count("embedding_length")?, self.count("attention.head_count")?);
        let (n_expert, n_used) = (self.count("expert_count")?, self.count("expert_used_count")?);
        if n_expert > MAX_EXPERTS {
            return Err(self.setting("expert_count", n_expert, format!("1 to {MAX_EXPERTS}")));
        }
        if n_used > n_expert {
            return Err(self.setting("expert_used_count", n_used, format!("1 to {n_expert}")));
        }
        let n_layer = self.count("block_count")?;
        Ok(Sizes {
            n_layer,
            n_ctx: self.count("context_length")?,
            n_embd,
            n_head,
            n_head_kv: self.kv_heads(n_layer, n_head)?,
            head_dim: self.head_dim(n_embd, n_head)?,
            n_expert,
            n_used,
            eps: self.eps()?,
        })
    }

    /// The number of key heads, or a list of one for each layer.
    fn kv_heads(&self, n_layer: usize, n_head: usize) -> Result<Vec<usize>, ModelError> {
        let key = "attention.head_count_kv";
        let Some(Value::Array(each)) = self.metadata().get(&self.key(key)) else {
            return Ok(vec![self.optional_count(key)?.unwrap_or(n_head)]);
        };
        let expected = || format!("{n_layer} numbers, each 0 or a divisor of {n_head}");
        if each.len() != n_layer {
            return Err(self.setting(key, format!("{} values", each.len()), expected()));
        }
        let heads = each.iter().map(|value| value.as_u64().and_then(|n| usize::try_from(n).ok()));
        heads.collect::<Option<_>>().ok_or_else(|| self.setting(key, "other values", expected()))
    }

    fn head_dim(&self, n_embd: usize, n_head: usize) -> Result<usize, ModelError> {
        let Some(head_dim) = self.optional_count("attention.key_length")? else {
            let whole = n_embd.is_multiple_of(n_head);
            let expected = || format!("a divisor of {n_embd}, or `{}`", self.key("attention.key_length"));
            return if whole {
                Ok(n_embd / n_head)
            } else {
                Err(self.setting("attention.head_count", n_head, expected()))
            };
        };
        match self.optional_count("attention.value_length")? {
            Some(found) if found != head_dim => {
                Err(self.setting("attention.value_length", found, format!("{head_dim}, as the keys")))
            }
            _ => Ok(head_dim),
        }
    }

    fn eps(&self) -> Result<f32, ModelError> {
        let key = "attention.layer_norm_rms_epsilon";
        let eps = self.optional_f32(key)?.ok_or_else(|| MetadataError::Missing(self.key(key)))?;
        if eps > 0.0 && eps < 1.0 { Ok(eps) } else { Err(self.setting(key, eps, "between 0 and 1")) }
    }

    fn rope(&self, pairing: Pairing, head_dim: usize) -> Result<Rope, ModelError> {
        let n_rot = self.optional_count("rope.dimension_count")?.unwrap_or(head_dim);
        if n_rot > head_dim || !n_rot.is_multiple_of(2) {
            let expected = format!("an even number up to {head_dim}");
            return Err(self.setting("rope.dimension_count", n_rot, expected));
        }
        let base = self.optional_f32("rope.freq_base")?.unwrap_or(10_000.0);
        if base <= 0.0 {
            return Err(self.setting("rope.freq_base", base, "a positive number"));
        }
        Ok(Rope { pairing, n_rot, base, position_scale: self.position_scale()? })
    }

    /// 1 / factor under linear scaling, 1 under none. Other kinds would be ignored silently, so they are refused.
    fn position_scale(&self) -> Result<f32, ModelError> {
        let kind = self.metadata().optional_str(&self.key("rope.scaling.type"))?.unwrap_or("linear");
        let factor = match self.optional_f32("rope.scaling.factor")? {
            Some(factor) => factor,
            None => self.optional_f32("rope.scale_linear")?.unwrap_or(1.0),
        };
        match kind {
            "none" => Ok(1.0),
            "linear" if factor == 0.0 => Ok(1.0),
            "linear" if factor > 0.0 => Ok(1.0 / factor),
            "linear" => Err(self.setting("rope.scaling.factor", factor, "a positive number")),
            other => Err(self.setting("rope.scaling.type", other, "none or linear")),
        }
    }
}

/// Tensors.
impl<'a> Reader<'a> {
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

    /// A matrix that is never quantised: a router or a gate.
    fn f32_matrix(&mut self, name: &str, n_in: usize, n_out: usize) -> Result<WeightId, ModelError> {
        let id = self.matrix(name, n_in, n_out)?;
        self.source.find(name).map_or(Ok(()), require_f32)?;
        Ok(id)
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

    /// Plain attention without norms: `attn_q`, `attn_k`, `attn_v`, `attn_output`, scores over `√head_dim`.
    pub fn attention(
        &mut self,
        at: LayerId,
        sizes: &Sizes,
        pairing: Pairing,
    ) -> Result<Attention, ModelError> {
        let &Sizes { n_embd, n_head, head_dim, .. } = sizes;
        let n_head_kv = sizes.n_head_kv(at);
        if n_head_kv == 0 || !n_head.is_multiple_of(n_head_kv) {
            return Err(self.setting("attention.head_count_kv", n_head_kv, format!("a divisor of {n_head}")));
        }
        let (q_width, kv_width) = (n_head * head_dim, n_head_kv * head_dim);
        Ok(Attention {
            q: self.matrix(&in_layer(at, "attn_q"), n_embd, q_width)?,
            k: self.matrix(&in_layer(at, "attn_k"), n_embd, kv_width)?,
            v: self.matrix(&in_layer(at, "attn_v"), n_embd, kv_width)?,
            output: self.matrix(&in_layer(at, "attn_output"), q_width, n_embd)?,
            n_head,
            n_head_kv,
            head_dim,
            biases: None,
            q_norm: None,
            k_norm: None,
            rope: self.rope(pairing, head_dim)?,
            scale: 1.0 / (head_dim as f32).sqrt(),
        })
    }

    /// `attn_q.bias`, `attn_k.bias` and `attn_v.bias`; none where the first is missing.
    pub fn qkv_biases(&mut self, at: LayerId, sizes: &Sizes) -> Result<Option<[Vec<f32>; 3]>, ModelError> {
        let name = |part: &str| format!("blk.{at}.attn_{part}.bias");
        if self.source.find(&name("q")).is_none() {
            return Ok(None);
        }
        let (q_width, kv_width) = (sizes.n_head * sizes.head_dim, sizes.n_head_kv(at) * sizes.head_dim);
        Ok(Some([
            self.f32_values(&name("q"), &[q_width])?,
            self.f32_values(&name("k"), &[kv_width])?,
            self.f32_values(&name("v"), &[kv_width])?,
        ]))
    }

    /// A short convolution: `shortconv.in_proj`, `shortconv.conv`, `shortconv.out_proj`.
    pub fn short_conv(&mut self, at: LayerId, n_embd: usize, n_taps: usize) -> Result<ShortConv, ModelError> {
        Ok(ShortConv {
            in_proj: self.matrix(&in_layer(at, "shortconv.in_proj"), n_embd, 3 * n_embd)?,
            taps: self.f32_values(&in_layer(at, "shortconv.conv"), &[n_taps, n_embd])?,
            n_taps,
            out_proj: self.matrix(&in_layer(at, "shortconv.out_proj"), n_embd, n_embd)?,
        })
    }

    /// `exp_probs_b.bias`: what is added to the experts' scores to choose among them.
    pub fn selection_bias(&mut self, at: LayerId, n_expert: usize) -> Result<Vec<f32>, ModelError> {
        self.f32_values(&format!("blk.{at}.exp_probs_b.bias"), &[n_expert])
    }

    /// The router and the stacked experts of a layer.
    pub fn routed(
        &mut self,
        at: LayerId,
        sizes: &Sizes,
        n_ff: usize,
        rule: RoutingRule,
    ) -> Result<Routed, ModelError> {
        let &Sizes { n_embd, n_expert, .. } = sizes;
        let router = self.f32_matrix(&in_layer(at, "ffn_gate_inp"), n_embd, n_expert)?;
        let bank = ExpertBank {
            gate: self.stack(&in_layer(at, "ffn_gate_exps"), n_embd, n_ff, n_expert)?,
            up: self.stack(&in_layer(at, "ffn_up_exps"), n_embd, n_ff, n_expert)?,
            down: self.stack(&in_layer(at, "ffn_down_exps"), n_ff, n_embd, n_expert)?,
        };
        self.weights.set_bank(at, bank);
        Ok(Routed { router, n_expert, n_ff, rule, shared: None })
    }

    /// The dense FFN whose tensors are named `ffn_<projection><suffix>`.
    pub fn dense(
        &mut self,
        at: LayerId,
        suffix: &str,
        n_embd: usize,
        n_ff: usize,
    ) -> Result<Dense, ModelError> {
        let name = |projection: &str| in_layer(at, &format!("ffn_{projection}{suffix}"));
        Ok(Dense {
            gate: self.matrix(&name("gate"), n_embd, n_ff)?,
            up: self.matrix(&name("up"), n_embd, n_ff)?,
            down: self.matrix(&name("down"), n_ff, n_embd)?,
            n_ff,
        })
    }

    /// The shared expert with a gate of its own.
    pub fn gated_shared(&mut self, at: LayerId, n_embd: usize, n_ff: usize) -> Result<Shared, ModelError> {
        let gate = self.f32_matrix(&in_layer(at, "ffn_gate_inp_shexp"), n_embd, 1)?;
        Ok(Shared { ffn: self.dense(at, "_shexp", n_embd, n_ff)?, gate: Some(gate) })
    }

    /// The matrices of a stacked tensor, one after the other.
    fn stack(&mut self, name: &str, n_in: usize, n_out: usize, n: usize) -> Result<Vec<Weight>, ModelError> {
        let tensor = self.tensor(name, &[n_in, n_out, n])?;
        let len = tensor.place.len / n as u64;
        (0..n as u64)
            .map(|expert| {
                // The parts of a place end where it ends.
                let place = tensor.place.part(expert * len, len)?;
                Some(Weight { place, dtype: tensor.dtype, n_in, n_out })
            })
            .collect::<Option<_>>()
            .ok_or_else(|| ModelError::MissingTensor(name.to_owned()))
    }

    /// Builds `n_layer` layers, as long as their tensors are there.
    pub fn layers(
        &mut self,
        sizes: &Sizes,
        mut layer: impl FnMut(&mut Self, LayerId) -> Result<Layer, ModelError>,
    ) -> Result<Vec<Layer>, ModelError> {
        let mut layers = Vec::new();
        for at in 0..sizes.n_layer {
            layers.push(layer(self, LayerId(at as u32))?);
        }
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
            return Err(ModelError::UnknownTensor { tensor, architecture: self.architecture });
        }
        Ok(Model {
            architecture: self.architecture,
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
