//! Qwen3-MoE: every head of q and k normed by itself, weights of the chosen experts sum to one.
//!
//! Files whose configuration said `norm_topk_prob: false` are normalised as well: the metadata does not keep
//! that flag, and the reference implementation does the same.

use crate::model::parts::{Attention, Ffn, Layer, Mixer, Pairing, RoutingRule};
use crate::model::reader::{Head, OUTPUT_NORM, Reader, Sizes};
use crate::model::{Model, ModelError};
use crate::units::LayerId;

pub(super) fn describe(mut file: Reader<'_>) -> Result<Model, ModelError> {
    let sizes = file.sizes()?;
    let layers = file.layers(&sizes, layer)?;
    file.finish(&sizes, layers, OUTPUT_NORM, Head::TiedIfAbsent)
}

fn layer(file: &mut Reader<'_>, at: LayerId, sizes: &Sizes) -> Result<Layer, ModelError> {
    let n_ff = match file.optional_count("expert_feed_forward_length")? {
        Some(n_ff) => n_ff,
        None => file.count("feed_forward_length")? / sizes.n_used.max(1),
    };
    let rule = RoutingRule {
        n_used: sizes.n_used,
        normalise: true,
        scale: file.expert_weights_scale()?,
        ..RoutingRule::default()
    };
    Ok(Layer {
        mixer_norm: file.norm(at, "attn_norm", sizes.n_embd, sizes.eps)?,
        mixer: Mixer::Attention(Attention {
            q_norm: Some(file.norm(at, "attn_q_norm", sizes.head_dim, sizes.eps)?),
            k_norm: Some(file.norm(at, "attn_k_norm", sizes.head_dim, sizes.eps)?),
            ..file.attention(at, sizes, Pairing::Halves)?
        }),
        ffn_norm: file.norm(at, "ffn_norm", sizes.n_embd, sizes.eps)?,
        ffn: Ffn::Routed(file.routed(at, sizes, n_ff, rule)?),
    })
}
