//! DeepSeek-V2 and V3, and what is stored like them: attention over latents, the first layers' feed-forward networks
//! dense, shared experts, and in the larger ones experts that are chosen by groups.
//!
//! Files hold the matrices between latents and heads in one of two layouts. Shared experts are stored as one network
//! of their widths together.

use crate::model::parts::{Ffn, Layer, Mixer, Routed, RoutingRule, Shared};
use crate::model::reader::{Head, LatentSizes, OUTPUT_NORM, Reader, Sizes};
use crate::model::{Model, ModelError};
use crate::units::LayerId;

/// What this family has besides.
struct Extent {
    latent: LatentSizes,
    n_dense_layers: usize,
    n_shared: usize,
}

pub(super) fn describe(mut file: Reader<'_>) -> Result<Model, ModelError> {
    let sizes = file.sizes_but_head_dim()?;
    let extent = Extent {
        latent: file.latent_sizes()?,
        n_dense_layers: file.count_or_zero("leading_dense_block_count")?,
        n_shared: file.count_or_zero("expert_shared_count")?,
    };
    let layers = file.layers(&sizes, |file, at, sizes| layer(file, at, sizes, &extent))?;
    file.finish(&sizes, layers, OUTPUT_NORM, Head::TiedIfAbsent)
}

fn layer(file: &mut Reader<'_>, at: LayerId, sizes: &Sizes, extent: &Extent) -> Result<Layer, ModelError> {
    Ok(Layer {
        mixer_norm: file.norm(at, "attn_norm", sizes.n_embd, sizes.eps)?,
        mixer: Mixer::Latent(file.latent_attention(at, sizes, &extent.latent)?),
        ffn_norm: file.norm(at, "ffn_norm", sizes.n_embd, sizes.eps)?,
        ffn: if at.index() < extent.n_dense_layers {
            let n_ff = file.count("feed_forward_length")?;
            Ffn::Dense(file.dense(at, "", sizes.n_embd, n_ff)?)
        } else {
            Ffn::Routed(routed(file, at, sizes, extent)?)
        },
    })
}

fn routed(file: &mut Reader<'_>, at: LayerId, sizes: &Sizes, extent: &Extent) -> Result<Routed, ModelError> {
    let rule = RoutingRule {
        // Files of the first models say nothing, and mean the softmax.
        gating: file.gating()?.unwrap_or_default(),
        n_used: sizes.n_used,
        normalise: file.optional_bool("expert_weights_norm")?.unwrap_or(false),
        scale: file.expert_weights_scale()?,
        selection_bias: file.optional_bias(at, "exp_probs_b", sizes.n_expert)?,
        groups: file.expert_groups(sizes)?,
        ..RoutingRule::default()
    };
    let expert_ff = file.count("expert_feed_forward_length")?;
    let routed = file.routed(at, sizes, expert_ff, rule)?;
    let shared = match extent.n_shared * expert_ff {
        0 => None,
        n_ff => Some(Shared { ffn: file.dense(at, "_shexp", sizes.n_embd, n_ff)?, gate: None }),
    };
    Ok(Routed { shared, ..routed })
}
