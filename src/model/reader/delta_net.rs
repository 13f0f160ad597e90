//! Gated delta nets, and what the families that have them share: which layers are which, blocks that only predict
//! further tokens, and the parts that both kinds of layers have.

use super::{MAX_SIZE, Reader, Sizes, in_layer};
use crate::model::ModelError;
use crate::model::parts::{
    Attention, DeltaNet, Ffn, KeyHeads, Layer, Mixer, Pair, Pairing, Routed, RoutingRule,
};
use crate::tensor::Value;
use crate::units::LayerId;

/// The sizes of a family's delta nets and of what its layers have besides.
pub(in crate::model) struct Nets {
    key_heads: KeyHeads,
    n_key_heads: usize,
    n_value_heads: usize,
    head_dim: usize,
    n_taps: usize,
    recurrent: Recurrent,
    expert_ff: usize,
    shared_ff: usize,
}

/// Which layers are delta nets.
enum Recurrent {
    /// Those that are marked.
    Marked(Vec<bool>),
    /// All but the last of every so many.
    ButLastOf(usize),
}

impl Recurrent {
    fn has(&self, at: LayerId) -> bool {
        match self {
            Recurrent::Marked(marks) => marks.get(at.index()) == Some(&true),
            Recurrent::ButLastOf(n) => at.index() % n != n - 1,
        }
    }
}

impl Reader<'_> {
    /// Takes the blocks at the end that predict further tokens out of `sizes`: their tensors are known, but unused.
    pub fn skip_next_token_blocks(&mut self, sizes: &mut Sizes) -> Result<(), ModelError> {
        let key = "nextn_predict_layers";
        let n_block = sizes.n_layer;
        let n_skipped = self.count_or_zero(key)?;
        if n_skipped >= n_block {
            return Err(self.setting(key, n_skipped, format!("0 to {}", n_block - 1)));
        }
        sizes.n_layer = n_block - n_skipped;
        self.skip(|name| {
            let block = name.strip_prefix("blk.").and_then(|rest| rest.split('.').next());
            let block = block.and_then(|number| number.parse().ok());
            block.is_some_and(|block: usize| (sizes.n_layer..n_block).contains(&block))
        });
        Ok(())
    }

    /// The sizes of the delta nets, each possible with the others.
    pub fn nets(&self, sizes: &Sizes, key_heads: KeyHeads) -> Result<Nets, ModelError> {
        let (n_key_heads, n_value_heads) =
            (self.count("ssm.group_count")?, self.count("ssm.time_step_rank")?);
        if !n_value_heads.is_multiple_of(n_key_heads) {
            let expected = format!("a multiple of {n_key_heads}");
            return Err(self.setting("ssm.time_step_rank", n_value_heads, expected));
        }
        let (head_dim, inner) = (self.count("ssm.state_size")?, self.count("ssm.inner_size")?);
        if n_value_heads * head_dim != inner {
            let expected = format!("{}: {n_value_heads} heads of {head_dim}", n_value_heads * head_dim);
            return Err(self.setting("ssm.inner_size", inner, expected));
        }
        // A state is larger than any tensor that vouches for its sizes.
        if head_dim > MAX_SIZE / inner {
            let expected = format!("1 to {}", MAX_SIZE / inner);
            return Err(self.setting("ssm.state_size", head_dim, expected));
        }
        let expert_ff = self.count("expert_feed_forward_length")?;
        let shared_ff = match self.count_or_zero("expert_shared_feed_forward_length")? {
            0 => expert_ff,
            n_ff => n_ff,
        };
        let (n_taps, recurrent) = (self.count("ssm.conv_kernel")?, self.recurrent_layers(sizes.n_layer)?);
        Ok(Nets { key_heads, n_key_heads, n_value_heads, head_dim, n_taps, recurrent, expert_ff, shared_ff })
    }

    /// As the file marks them, all blocks or those that run; else by its interval.
    fn recurrent_layers(&self, n_layer: usize) -> Result<Recurrent, ModelError> {
        let (key, n_block) = ("attention.recurrent_layers", self.count("block_count")?);
        let Some(marks) = self.metadata().get(&self.key(key)) else {
            let interval = self.optional_count("full_attention_interval")?;
            return Ok(Recurrent::ButLastOf(interval.unwrap_or(4)));
        };
        let refused = |found: String| self.setting(key, found, format!("{n_block} times yes or no"));
        let Value::Array(marks) = marks else { return Err(refused("no list".to_owned())) };
        if ![n_layer, n_block].contains(&marks.len()) {
            return Err(refused(format!("{} values", marks.len())));
        }
        let yes = |mark: &Value| match (mark, mark.as_u64()) {
            (Value::Bool(yes), _) => Some(*yes),
            (_, Some(number @ (0 | 1))) => Some(number == 1),
            _ => None,
        };
        let marks = marks.iter().map(yes).collect::<Option<_>>();
        marks.map(Recurrent::Marked).ok_or_else(|| refused("other values".to_owned()))
    }

    /// A whole layer: a delta net or gated attention, then routed experts and a shared one.
    pub fn net_layer(&mut self, at: LayerId, sizes: &Sizes, nets: &Nets) -> Result<Layer, ModelError> {
        let &Sizes { n_embd, head_dim, n_used, eps, .. } = sizes;
        let rule = RoutingRule {
            n_used,
            normalise: true,
            scale: self.expert_weights_scale()?,
            ..RoutingRule::default()
        };
        Ok(Layer {
            mixer_norm: self.norm(at, "attn_norm", n_embd, eps)?,
            mixer: if nets.recurrent.has(at) {
                Mixer::DeltaNet(self.delta_net(at, sizes, nets)?)
            } else {
                Mixer::Attention(Attention {
                    q_norm: Some(self.norm(at, "attn_q_norm", head_dim, eps)?),
                    k_norm: Some(self.norm(at, "attn_k_norm", head_dim, eps)?),
                    ..self.gated_attention(at, sizes, Pairing::Halves)?
                })
            },
            ffn_norm: self.norm(at, "post_attention_norm", n_embd, eps)?,
            ffn: Ffn::Routed(Routed {
                shared: Some(self.gated_shared(at, n_embd, nets.shared_ff)?),
                ..self.routed(at, sizes, nets.expert_ff, rule)?
            }),
        })
    }

    fn delta_net(&mut self, at: LayerId, sizes: &Sizes, nets: &Nets) -> Result<DeltaNet, ModelError> {
        let &Nets { key_heads, n_key_heads, n_value_heads, head_dim, n_taps, .. } = nets;
        let (n_embd, inner) = (sizes.n_embd, n_value_heads * head_dim);
        let n_convolved = 2 * n_key_heads * head_dim + inner;
        let taps = self.f32_values(&in_layer(at, "ssm_conv1d"), &[n_taps, n_convolved])?;
        Ok(DeltaNet {
            n_key_heads,
            n_value_heads,
            head_dim,
            key_heads,
            inputs: self.pair(at, ["attn_qkv", "attn_gate"], "ssm_in", n_embd, [n_convolved, inner])?,
            rates: self.pair(at, ["ssm_beta", "ssm_alpha"], "ssm_ba", n_embd, [n_value_heads; 2])?,
            taps: (0..n_taps).flat_map(|tap| taps[tap..].iter().step_by(n_taps)).copied().collect(),
            n_taps,
            decay: self.f32_values(&format!("blk.{at}.ssm_a"), &[n_value_heads])?,
            time_bias: self.f32_values(&format!("blk.{at}.ssm_dt.bias"), &[n_value_heads])?,
            least_length: sizes.eps,
            norm: self.norm(at, "ssm_norm", head_dim, sizes.eps)?,
            output: self.matrix(&in_layer(at, "ssm_out"), inner, n_embd)?,
        })
    }

    /// Two matrices, or the one in their place where the file has that.
    fn pair(
        &mut self,
        at: LayerId,
        apart: [&str; 2],
        together: &str,
        n_in: usize,
        n_out: [usize; 2],
    ) -> Result<Pair, ModelError> {
        let name = in_layer(at, together);
        if self.source.find(&name).is_some() {
            return Ok(Pair::PerKeyHead(self.matrix(&name, n_in, n_out[0] + n_out[1])?));
        }
        let [first, second] = apart.map(|part| in_layer(at, part));
        Ok(Pair::Apart([self.matrix(&first, n_in, n_out[0])?, self.matrix(&second, n_in, n_out[1])?]))
    }
}
