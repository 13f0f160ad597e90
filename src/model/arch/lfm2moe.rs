//! LFM2-MoE: short convolutions in most layers and attention in the others, the first layers' feed-forward
//! networks dense; experts are chosen with a bias that their weights do not see.

use crate::model::parts::{Attention, Ffn, Layer, Mixer, Pairing, RoutingRule};
use crate::model::reader::{Head, Reader, Sizes};
use crate::model::{Model, ModelError};
use crate::units::LayerId;

/// The final norm: the name is a slip of the first converter that all files keep.
const FINAL_NORM: &str = "token_embd_norm.weight";

/// What this family has besides.
struct Extent {
    n_taps: usize,
    n_dense_layers: usize,
}

pub(super) fn describe(mut file: Reader<'_>) -> Result<Model, ModelError> {
    let sizes = file.sizes()?;
    let extent = Extent {
        n_taps: file.count("shortconv.l_cache")?,
        n_dense_layers: file.count_or_zero("leading_dense_block_count")?,
    };
    let layers = file.layers(&sizes, |file, at, sizes| layer(file, at, sizes, &extent))?;
    file.finish(&sizes, layers, FINAL_NORM, Head::TiedIfAbsent)
}

fn layer(file: &mut Reader<'_>, at: LayerId, sizes: &Sizes, extent: &Extent) -> Result<Layer, ModelError> {
    Ok(Layer {
        mixer_norm: file.norm(at, "attn_norm", sizes.n_embd, sizes.eps)?,
        mixer: match sizes.n_head_kv {
            0 => Mixer::ShortConv(file.short_conv(at, sizes.n_embd, extent.n_taps)?),
            _ => Mixer::Attention(Attention {
                q_norm: Some(file.norm(at, "attn_q_norm", sizes.head_dim, sizes.eps)?),
                k_norm: Some(file.norm(at, "attn_k_norm", sizes.head_dim, sizes.eps)?),
                ..file.attention(at, sizes, Pairing::Halves)?
            }),
        },
        ffn_norm: file.norm(at, "ffn_norm", sizes.n_embd, sizes.eps)?,
        ffn: if at.index() < extent.n_dense_layers {
            let n_ff = file.count("feed_forward_length")?;
            Ffn::Dense(file.dense(at, "", sizes.n_embd, n_ff)?)
        } else {
            let rule = RoutingRule {
                gating: file.required_gating()?,
                n_used: sizes.n_used,
                normalise: true,
                scale: file.expert_weights_scale()?,
                selection_bias: Some(file.bias(at, "exp_probs_b", sizes.n_expert)?),
                ..RoutingRule::default()
            };
            let n_ff = file.count("expert_feed_forward_length")?;
            Ffn::Routed(file.routed(at, sizes, n_ff, rule)?)
        },
    })
}
