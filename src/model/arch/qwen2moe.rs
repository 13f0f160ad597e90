//! Qwen2-MoE: biases on q, k and v, an expert that every token goes to through a gate of its own, weights of the
//! chosen experts left as the softmax gave them.

use crate::model::parts::{Attention, Ffn, Layer, Mixer, Pairing, Routed, RoutingRule};
use crate::model::reader::{Head, OUTPUT_NORM, Reader, Sizes};
use crate::model::{Model, ModelError};
use crate::units::LayerId;

pub(super) fn describe(mut file: Reader<'_>) -> Result<Model, ModelError> {
    let sizes = file.sizes()?;
    let layers = file.layers(&sizes, layer)?;
    file.finish(&sizes, layers, OUTPUT_NORM, Head::TiedIfAbsent)
}

fn layer(file: &mut Reader<'_>, at: LayerId, sizes: &Sizes) -> Result<Layer, ModelError> {
    let expert_ff = match file.optional_count("expert_feed_forward_length")? {
        Some(n_ff) => n_ff,
        None => file.count("feed_forward_length")? / sizes.n_used.max(1),
    };
    let shared_ff = match file.count_or_zero("expert_shared_feed_forward_length")? {
        0 => file.count("feed_forward_length")?,
        n_ff => n_ff,
    };
    let rule =
        RoutingRule { n_used: sizes.n_used, scale: file.expert_weights_scale()?, ..RoutingRule::default() };
    let shared = Some(file.gated_shared(at, sizes.n_embd, shared_ff)?);
    Ok(Layer {
        mixer_norm: file.norm(at, "attn_norm", sizes.n_embd, sizes.eps)?,
        mixer: Mixer::Attention(Attention {
            biases: file.qkv_biases(at, sizes)?,
            ..file.attention(at, sizes, Pairing::Halves)?
        }),
        ffn_norm: file.norm(at, "ffn_norm", sizes.n_embd, sizes.eps)?,
        ffn: Ffn::Routed(Routed { shared, ..file.routed(at, sizes, expert_ff, rule)? }),
    })
}
