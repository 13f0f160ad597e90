//! Granite with experts: embedding, both branches, attention scores and logits each have a factor of their own.
//!
//! Files may add an expert that every token goes to, and may say that heads are not rotated.

use crate::model::parts::{Attention, Ffn, Layer, Mixer, Pairing, Rope, Routed, RoutingRule, Scales, Shared};
use crate::model::reader::{Head, OUTPUT_NORM, Reader, Sizes};
use crate::model::{Model, ModelError};
use crate::units::LayerId;

pub(super) fn describe(mut file: Reader<'_>) -> Result<Model, ModelError> {
    let sizes = file.sizes()?;
    let scales = Scales {
        embedding: file.factor("embedding_scale")?,
        residual: file.factor("residual_scale")?,
        logits: file.logit_scale()?,
    };
    let layers = file.layers(&sizes, layer)?;
    Ok(Model { scales, ..file.finish(&sizes, layers, OUTPUT_NORM, Head::TiedIfAbsent)? })
}

fn layer(file: &mut Reader<'_>, at: LayerId, sizes: &Sizes) -> Result<Layer, ModelError> {
    let n_ff = file.count("feed_forward_length")?;
    let rule = RoutingRule {
        n_used: sizes.n_used,
        normalise: true,
        scale: file.expert_weights_scale()?,
        ..RoutingRule::default()
    };
    let shared = match file.count_or_zero("expert_shared_feed_forward_length")? {
        0 => None,
        n_ff => Some(Shared { ffn: file.dense(at, "_shexp", sizes.n_embd, n_ff)?, gate: None }),
    };
    Ok(Layer {
        mixer_norm: file.norm(at, "attn_norm", sizes.n_embd, sizes.eps)?,
        mixer: Mixer::Attention(attention(file, at, sizes)?),
        ffn_norm: file.norm(at, "ffn_norm", sizes.n_embd, sizes.eps)?,
        ffn: Ffn::Routed(Routed { shared, ..file.routed(at, sizes, n_ff, rule)? }),
    })
}

fn attention(file: &mut Reader<'_>, at: LayerId, sizes: &Sizes) -> Result<Attention, ModelError> {
    let scale = file.attention_scale(sizes.head_dim)?;
    let attention = Attention { scale, ..file.attention(at, sizes, Pairing::Neighbours)? };
    Ok(match file.optional_bool("rope.scaling.finetuned")? {
        Some(false) => Attention { rope: Rope { speeds: Vec::new(), ..attention.rope }, ..attention },
        _ => attention,
    })
}
