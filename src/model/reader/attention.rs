//! What mixes positions: attention and its kin.

use super::{Reader, Sizes, in_layer};
use crate::model::ModelError;
use crate::model::parts::{Attention, Pairing, ShortConv};
use crate::tensor::Value;
use crate::units::LayerId;

impl Reader<'_> {
    /// Plain attention without norms: `attn_q`, `attn_k`, `attn_v`, `attn_output`, scores over `√head_dim`.
    pub fn attention(
        &mut self,
        at: LayerId,
        sizes: &Sizes,
        pairing: Pairing,
    ) -> Result<Attention, ModelError> {
        self.attention_of(at, sizes, pairing, false)
    }

    /// The same, where `attn_q` holds a gate behind each query.
    pub fn gated_attention(
        &mut self,
        at: LayerId,
        sizes: &Sizes,
        pairing: Pairing,
    ) -> Result<Attention, ModelError> {
        self.attention_of(at, sizes, pairing, true)
    }

    fn attention_of(
        &mut self,
        at: LayerId,
        sizes: &Sizes,
        pairing: Pairing,
        gated: bool,
    ) -> Result<Attention, ModelError> {
        let &Sizes { n_embd, n_head, head_dim, .. } = sizes;
        let n_head_kv = sizes.n_head_kv;
        if n_head_kv == 0 || !n_head.is_multiple_of(n_head_kv) {
            return Err(self.setting("attention.head_count_kv", n_head_kv, format!("a divisor of {n_head}")));
        }
        let (q_width, kv_width) = (n_head * head_dim, n_head_kv * head_dim);
        Ok(Attention {
            q: self.matrix(&in_layer(at, "attn_q"), n_embd, if gated { 2 * q_width } else { q_width })?,
            k: self.matrix(&in_layer(at, "attn_k"), n_embd, kv_width)?,
            v: self.matrix(&in_layer(at, "attn_v"), n_embd, kv_width)?,
            output: self.matrix(&in_layer(at, "attn_output"), q_width, n_embd)?,
            n_head,
            n_head_kv,
            head_dim,
            gated,
            biases: None,
            output_bias: None,
            q_norm: None,
            k_norm: None,
            rope: self.rope(pairing, head_dim)?,
            scale: 1.0 / (head_dim as f32).sqrt(),
            sinks: None,
            window: None,
        })
    }

    /// `attn_q.bias`, `attn_k.bias` and `attn_v.bias`; none where the first is missing.
    pub fn qkv_biases(&mut self, at: LayerId, sizes: &Sizes) -> Result<Option<[Vec<f32>; 3]>, ModelError> {
        let name = |part: &str| format!("blk.{at}.attn_{part}.bias");
        if self.source.find(&name("q")).is_none() {
            return Ok(None);
        }
        let (q_width, kv_width) = (sizes.n_head * sizes.head_dim, sizes.n_head_kv * sizes.head_dim);
        Ok(Some([
            self.f32_values(&name("q"), &[q_width])?,
            self.f32_values(&name("k"), &[kv_width])?,
            self.f32_values(&name("v"), &[kv_width])?,
        ]))
    }

    /// `blk.<layer>.<part>.bias`, which must be there.
    pub fn bias(&mut self, at: LayerId, part: &str, n_out: usize) -> Result<Vec<f32>, ModelError> {
        self.f32_values(&format!("blk.{at}.{part}.bias"), &[n_out])
    }

    /// The same where the file has one.
    pub fn optional_bias(
        &mut self,
        at: LayerId,
        part: &str,
        n_out: usize,
    ) -> Result<Option<Vec<f32>>, ModelError> {
        let there = self.has(&format!("blk.{at}.{part}.bias"));
        there.then(|| self.bias(at, part, n_out)).transpose()
    }

    /// `attn_sinks`: a score of each head that belongs to no position.
    pub fn sinks(&mut self, at: LayerId, n_head: usize) -> Result<Vec<f32>, ModelError> {
        self.f32_values(&in_layer(at, "attn_sinks"), &[n_head])
    }

    /// How far a layer sees: `attention.sliding_window` positions in all but the last of every `period` layers, unless
    /// the file states the pattern, as a period or as a yes or no for each layer.
    pub fn window(&self, at: LayerId, n_layer: usize, period: usize) -> Result<Option<usize>, ModelError> {
        const PATTERN: &str = "attention.sliding_window_pattern";
        let window = self.count_or_zero("attention.sliding_window")?;
        let is_windowed = match self.metadata().get(&self.key(PATTERN)) {
            Some(Value::Array(each)) => match each.get(at.index()) {
                Some(Value::Bool(is_windowed)) if each.len() == n_layer => *is_windowed,
                _ => {
                    let found = format!("{} values", each.len());
                    return Err(self.setting(PATTERN, found, format!("{n_layer}, each true or false")));
                }
            },
            _ => {
                let period = self.optional_count(PATTERN)?.unwrap_or(period);
                !(at.index() + 1).is_multiple_of(period)
            }
        };
        Ok((is_windowed && window > 0).then_some(window))
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
}
