//! gpt-oss: biases everywhere, a sink in every head, a sliding window in every second layer, a softmax over the
//! chosen experts alone and a clamped activation between their projections.

use crate::executor::Activation;
use crate::model::parts::{Attention, Ffn, Gating, Layer, Mixer, Pairing, RoutingRule};
use crate::model::reader::{Head, OUTPUT_NORM, Reader, Sizes};
use crate::model::{Model, ModelError};
use crate::units::LayerId;

/// Source: the reference implementation; no key states them.
const ACTIVATION: Activation = Activation::ClampedSwiGlu { slope: 1.702, limit: 7.0 };

/// Of so many layers the last sees everything, where the file does not say otherwise.
const WINDOW_PERIOD: usize = 2;

pub(super) fn describe(mut file: Reader<'_>) -> Result<Model, ModelError> {
    let sizes = file.sizes()?;
    let layers = file.layers(&sizes, layer)?;
    file.finish(&sizes, layers, OUTPUT_NORM, Head::Required)
}

fn layer(file: &mut Reader<'_>, at: LayerId, sizes: &Sizes) -> Result<Layer, ModelError> {
    let n_ff = file.count("expert_feed_forward_length")?;
    let rule = RoutingRule {
        gating: Gating::SoftmaxOfChosen,
        n_used: sizes.n_used,
        scale: file.expert_weights_scale()?,
        bias: Some(file.bias(at, "ffn_gate_inp", sizes.n_expert)?),
        ..RoutingRule::default()
    };
    let routed = file.routed(at, sizes, n_ff, rule)?;
    file.set_activation(at, ACTIVATION);
    file.read_expert_biases(at, sizes, n_ff)?;
    Ok(Layer {
        mixer_norm: file.norm(at, "attn_norm", sizes.n_embd, sizes.eps)?,
        mixer: Mixer::Attention(Attention {
            biases: file.qkv_biases(at, sizes)?,
            output_bias: Some(file.bias(at, "attn_output", sizes.n_embd)?),
            sinks: Some(file.sinks(at, sizes.n_head)?),
            window: file.window(at, sizes.n_layer, WINDOW_PERIOD)?,
            ..file.attention(at, sizes, Pairing::Halves)?
        }),
        ffn_norm: file.norm(at, "post_attention_norm", sizes.n_embd, sizes.eps)?,
        ffn: Ffn::Routed(routed),
    })
}
