//! Attention over latents: its widths, its matrices in both layouts, and where YaRN's correction goes.

use super::rope::magnitude;
use super::{Reader, Sizes, in_layer};
use crate::model::ModelError;
use crate::model::parts::{LatentAttention, LatentHeads, Pairing, Rope};
use crate::units::LayerId;

/// Widths of a latent attention, in the words of [`LatentAttention`].
#[derive(Clone, Copy, Debug)]
pub(in crate::model) struct LatentSizes {
    /// Of compressed queries; `None` where queries are not.
    n_rank_q: Option<usize>,
    n_rank: usize,
    n_nope: usize,
    n_rot: usize,
    n_value: usize,
    /// Whether the file holds the matrices of [`LatentHeads::Absorbed`].
    absorbed: bool,
}

impl Reader<'_> {
    /// The widths that the keys state, and that agree with each other.
    ///
    /// Files with absorbed matrices call the latents keys and values, and give the heads' own widths in keys of
    /// their own; older files know but these.
    pub fn latent_sizes(&self) -> Result<LatentSizes, ModelError> {
        const ROT: &str = "rope.dimension_count";
        const BY_POSITION: &str = "attention.temperature_scale";
        let absorbed = ["attention.key_length_mla", "attention.value_length_mla"];
        let plain = ["attention.key_length", "attention.value_length"];
        if let Some(found) = self.optional_f32(BY_POSITION)?.filter(|scale| *scale != 0.0) {
            let expected = "none: scores by position are not supported";
            return Err(self.setting(BY_POSITION, found, expected));
        }
        let is_absorbed = absorbed.iter().any(|key| self.metadata().get(&self.key(key)).is_some());
        let [key, value] = if is_absorbed { absorbed } else { plain };
        let (key_dim, n_value) = (self.count(key)?, self.count(value)?);
        let (n_rank, n_rot) = (self.count("attention.kv_lora_rank")?, self.count(ROT)?);
        if n_rot >= key_dim || !n_rot.is_multiple_of(2) {
            return Err(self.setting(ROT, n_rot, format!("an even number below {key_dim}")));
        }
        if is_absorbed {
            for (key, expected) in plain.into_iter().zip([n_rank + n_rot, n_rank]) {
                if let Some(found) = self.optional_count(key)?.filter(|found| *found != expected) {
                    return Err(self.setting(key, found, format!("{expected}, as the latents")));
                }
            }
        }
        let n_rank_q = Some(self.count_or_zero("attention.q_lora_rank")?).filter(|n| *n > 0);
        Ok(LatentSizes { n_rank_q, n_rank, n_nope: key_dim - n_rot, n_rot, n_value, absorbed: is_absorbed })
    }

    /// `attn_q`, or `attn_q_a`, `attn_q_a_norm` and `attn_q_b`; `attn_kv_a_mqa`, `attn_kv_a_norm`, `attn_output`;
    /// `attn_k_b` and `attn_v_b`, or `attn_kv_b`.
    pub fn latent_attention(
        &mut self,
        at: LayerId,
        sizes: &Sizes,
        widths: &LatentSizes,
    ) -> Result<LatentAttention, ModelError> {
        let (&Sizes { n_embd, n_head, eps, .. }, name) = (sizes, |part: &str| in_layer(at, part));
        let &LatentSizes { n_rank_q, n_rank, n_nope, n_rot, n_value, .. } = widths;
        let q_width = n_head * (n_nope + n_rot);
        let (q_a, q) = match n_rank_q {
            None => (None, self.matrix(&name("attn_q"), n_embd, q_width)?),
            Some(n_rank_q) => {
                let q_a = self.matrix(&name("attn_q_a"), n_embd, n_rank_q)?;
                let norm = self.norm(at, "attn_q_a_norm", n_rank_q, eps)?;
                (Some((q_a, norm)), self.matrix(&name("attn_q_b"), n_rank_q, q_width)?)
            }
        };
        let (rope, scale) = self.latent_rope(n_rot, n_nope + n_rot)?;
        Ok(LatentAttention {
            q_a,
            q,
            kv_a: self.matrix(&name("attn_kv_a_mqa"), n_embd, n_rank + n_rot)?,
            kv_norm: self.norm(at, "attn_kv_a_norm", n_rank, eps)?,
            kv_b: self.latent_heads(at, sizes, widths)?,
            output: self.matrix(&name("attn_output"), n_head * n_value, n_embd)?,
            n_head,
            n_rank,
            n_nope,
            n_rot,
            n_value,
            rope,
            scale,
        })
    }

    fn latent_heads(
        &mut self,
        at: LayerId,
        sizes: &Sizes,
        widths: &LatentSizes,
    ) -> Result<LatentHeads, ModelError> {
        let (n_head, n_head_kv) = (sizes.n_head, sizes.n_head_kv);
        let &LatentSizes { n_rank, n_nope, n_value, absorbed, .. } = widths;
        let expected = if absorbed { 1 } else { n_head };
        if n_head_kv != expected {
            return Err(self.setting("attention.head_count_kv", n_head_kv, expected));
        }
        if !absorbed {
            let name = in_layer(at, "attn_kv_b");
            return Ok(LatentHeads::Expanded(self.matrix(&name, n_rank, n_head * (n_nope + n_value))?));
        }
        let k = self.stack(&in_layer(at, "attn_k_b"), n_nope, n_rank, n_head)?;
        let v = self.stack(&in_layer(at, "attn_v_b"), n_rank, n_value, n_head)?;
        let [k, v] = [k, v].map(|heads| heads.into_iter().map(|head| self.weights.push(head)).collect());
        Ok(LatentHeads::Absorbed { k, v })
    }

    /// The rotation, and what scores of keys of `key_dim` values are multiplied by.
    ///
    /// YaRN's correction for longer contexts goes to the scores, squared, and heads keep their magnitude: what does
    /// not turn is corrected as well. Without a log multiplier it goes to what turns, as in other families.
    fn latent_rope(&mut self, n_rot: usize, key_dim: usize) -> Result<(Rope, f32), ModelError> {
        let rope = self.rope(Pairing::Neighbours, n_rot)?;
        let scale = 1.0 / (key_dim as f64).sqrt();
        let multiplier = self.yarn_log_multiplier()?;
        let is_yarn = self.metadata().optional_str(&self.key("rope.scaling.type"))? == Some("yarn");
        if !is_yarn || multiplier == 0.0 {
            return Ok((rope, scale as f32));
        }
        let stated = self.stated_magnitude()?;
        let correction = stated * magnitude(self.rope_scaling_factor()?, multiplier);
        Ok((Rope { magnitude: stated as f32, ..rope }, (scale * correction * correction) as f32))
    }
}
