//! Llama with experts, as Mixtral is stored: neighbours turn together, weights of the chosen experts sum to one.
//!
//! The converter has already permuted the rows of q and k for this rotation. A layer without a router is dense. Shared
//! experts may be in such files; the reference implementation loads and never uses them.

use crate::model::parts::{Attention, Ffn, Layer, Mixer, Pairing, RoutingRule};
use crate::model::reader::{Head, OUTPUT_NORM, Reader, Sizes};
use crate::model::{Model, ModelError};
use crate::units::LayerId;

pub(super) fn describe(mut file: Reader<'_>) -> Result<Model, ModelError> {
    let sizes = file.sizes()?;
    file.skip(|name| name.ends_with("_shexp.weight"));
    let layers = file.layers(&sizes, layer)?;
    file.finish(&sizes, layers, OUTPUT_NORM, Head::TiedIfAbsent)
}

fn layer(file: &mut Reader<'_>, at: LayerId, sizes: &Sizes) -> Result<Layer, ModelError> {
    let n_ff = file.count("feed_forward_length")?;
    let rule = RoutingRule {
        n_used: sizes.n_used,
        normalise: true,
        scale: file.expert_weights_scale()?,
        ..RoutingRule::default()
    };
    Ok(Layer {
        mixer_norm: file.norm(at, "attn_norm", sizes.n_embd, sizes.eps)?,
        mixer: Mixer::Attention(Attention {
            scale: file.attention_scale(sizes.head_dim)?,
            biases: file.qkv_biases(at, sizes)?,
            output_bias: file.optional_bias(at, "attn_output", sizes.n_embd)?,
            ..file.attention(at, sizes, Pairing::Neighbours)?
        }),
        ffn_norm: file.norm(at, "ffn_norm", sizes.n_embd, sizes.eps)?,
        ffn: match file.has_experts(at) {
            true => Ffn::Routed(file.routed(at, sizes, n_ff, rule)?),
            false => Ffn::Dense(file.dense(at, "", sizes.n_embd, n_ff)?),
        },
    })
}
