//! The parts that descriptions are made of: plain data, nothing computed.
//!
//! A family that needs another kind of mixer, FFN, gating or option adds it here and in `forward`.

use crate::executor::WeightId;

/// One transformer block: `x += mixer(mixer_norm(x)); x += ffn(ffn_norm(x))`.
#[derive(Clone, Debug)]
pub(crate) struct Layer {
    pub mixer_norm: RmsNorm,
    pub mixer: Mixer,
    pub ffn_norm: RmsNorm,
    pub ffn: Ffn,
}

/// Factors of the residual stream and the logits; most families have none.
#[derive(Clone, Debug)]
pub(crate) struct Scales {
    /// What a token's row of the embedding is multiplied by.
    pub embedding: f32,
    /// What mixer and FFN are multiplied by before they are added to the stream.
    pub residual: f32,
    /// What logits are divided by.
    pub logits: f32,
}

impl Scales {
    pub const NONE: Scales = Scales { embedding: 1.0, residual: 1.0, logits: 1.0 };
}

/// `x / sqrt(mean(x²) + eps) · weight`, over each run of `weight.len()` values.
///
/// So the width says what is normed: a weight of `head_dim` norms each head by itself, one of all heads
/// together the whole vector.
#[derive(Clone, Debug)]
pub(crate) struct RmsNorm {
    pub weight: Vec<f32>,
    pub eps: f32,
}

/// What mixes positions.
#[derive(Clone, Debug)]
pub(crate) enum Mixer {
    Attention(Attention),
    Latent(LatentAttention),
    ShortConv(ShortConv),
    DeltaNet(DeltaNet),
}

/// Causal attention with a key-value cache; query head `h` reads key head `h / (n_head / n_head_kv)`.
#[derive(Clone, Debug)]
pub(crate) struct Attention {
    /// `[n_head · head_dim, n_embd]`; twice as many rows where heads are gated.
    pub q: WeightId,
    /// `[n_head_kv · head_dim, n_embd]`.
    pub k: WeightId,
    /// `[n_head_kv · head_dim, n_embd]`.
    pub v: WeightId,
    /// `[n_embd, n_head · head_dim]`.
    pub output: WeightId,
    pub n_head: usize,
    /// Divides `n_head`.
    pub n_head_kv: usize,
    pub head_dim: usize,
    /// Whether `q` gives each head a gate after its query: its result is multiplied by `σ(gate)`.
    pub gated: bool,
    /// What is added to q, k and v.
    pub biases: Option<[Vec<f32>; 3]>,
    /// What is added to the output.
    pub output_bias: Option<Vec<f32>>,
    /// Before the rotation; a head or all heads wide.
    pub q_norm: Option<RmsNorm>,
    pub k_norm: Option<RmsNorm>,
    pub rope: Rope,
    /// What scores are multiplied by before the softmax.
    pub scale: f32,
    /// `[n_head]`: a score of each head that takes part in the softmax and carries no value.
    pub sinks: Option<Vec<f32>>,
    /// How many positions a query sees, its own among them; all without one.
    pub window: Option<usize>,
}

/// Causal attention whose keys and values all come from one short vector per position.
///
/// `kv_a·x` is the latent, `n_rank` values that are then normed, and a part of the key that all heads share, `n_rot`
/// values that turn. A head's query is `n_nope` values that do not turn and `n_rot` that do.
#[derive(Clone, Debug)]
pub(crate) struct LatentAttention {
    /// `[n_rank_q, n_embd]` and the norm of its outputs: what `q` reads instead of the rows.
    pub q_a: Option<(WeightId, RmsNorm)>,
    /// `[n_head · (n_nope + n_rot), n_embd or n_rank_q]`.
    pub q: WeightId,
    /// `[n_rank + n_rot, n_embd]`.
    pub kv_a: WeightId,
    /// `n_rank` wide.
    pub kv_norm: RmsNorm,
    pub kv_b: LatentHeads,
    /// `[n_embd, n_head · n_value]`.
    pub output: WeightId,
    pub n_head: usize,
    pub n_rank: usize,
    pub n_nope: usize,
    pub n_rot: usize,
    /// Values of a head.
    pub n_value: usize,
    /// Of `n_rot` values.
    pub rope: Rope,
    /// What scores are multiplied by before the softmax.
    pub scale: f32,
}

/// How latents become keys and values of a head.
#[derive(Clone, Debug)]
pub(crate) enum LatentHeads {
    /// The queries are brought to the latents instead, and what they find there to the values. The cache holds latents.
    Absorbed {
        /// Of each head, `[n_rank, n_nope]`.
        k: Vec<WeightId>,
        /// Of each head, `[n_value, n_rank]`.
        v: Vec<WeightId>,
    },
    /// `[n_head · (n_nope + n_value), n_rank]`, of each head key, then value. The cache holds these.
    Expanded(WeightId),
}

/// A gated convolution over the last few positions, channel by channel.
///
/// With `(b, c, u)` the thirds of `in_proj·x`: `out_proj(c ⊙ Σ_i taps[i] ⊙ (b ⊙ u)[t − (n_taps − 1) + i])`,
/// nothing before the start.
#[derive(Clone, Debug)]
pub(crate) struct ShortConv {
    /// `[3 · n_embd, n_embd]`.
    pub in_proj: WeightId,
    /// `[n_embd, n_taps]`: the last tap of a channel is for the position itself.
    pub taps: Vec<f32>,
    pub n_taps: usize,
    /// `[n_embd, n_embd]`.
    pub out_proj: WeightId,
}

/// A gated delta net: attention whose past is one matrix for each value head, made smaller and corrected at every
/// position. Heads are `head_dim` wide, all three kinds.
///
/// A causal convolution and `silu` make queries, keys and values of the first input; queries and keys then get
/// length 1. With `β = σ(beta)`, `g = decay · softplus(alpha + time_bias)` and the state `S`, `[key, value]`:
/// `S ← e^g S; S ← S + k (β (v − Sᵀk))ᵀ; o = Sᵀq / √head_dim`, and out goes `output · (norm(o) ⊙ silu(z))`.
#[derive(Clone, Debug)]
pub(crate) struct DeltaNet {
    pub n_key_heads: usize,
    /// A multiple of `n_key_heads`.
    pub n_value_heads: usize,
    pub head_dim: usize,
    pub key_heads: KeyHeads,
    /// What is convolved, all queries, all keys and all values, and z, `n_value_heads` wide.
    pub inputs: Pair,
    /// Beta and alpha, one of each for a value head.
    pub rates: Pair,
    /// `[n_taps, (2 · n_key_heads + n_value_heads) · head_dim]`: the last row is for the position itself.
    pub taps: Vec<f32>,
    pub n_taps: usize,
    /// `[n_value_heads]`, none above 0 in a sound file.
    pub decay: Vec<f32>,
    /// `[n_value_heads]`.
    pub time_bias: Vec<f32>,
    /// The least length that queries and keys are divided by.
    pub least_length: f32,
    /// `[head_dim]`.
    pub norm: RmsNorm,
    /// `[n_embd, n_value_heads · head_dim]`.
    pub output: WeightId,
}

/// Which key head a value head goes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyHeads {
    /// `h mod n_key_heads`.
    InTurn,
    /// `h div (n_value_heads / n_key_heads)`.
    InRuns,
}

/// Two products of the same rows.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Pair {
    /// A matrix each.
    Apart([WeightId; 2]),
    /// One matrix whose rows go key head by key head: what the first has of it, then what the second has.
    PerKeyHead(WeightId),
}

/// Rotary position embedding of the first values of a head, two for each speed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rope {
    pub pairing: Pairing,
    /// Of each pair, in radians per position; none where heads do not turn.
    pub speeds: Vec<f64>,
    /// What the values that turn are multiplied by.
    pub magnitude: f32,
}

/// Which values of a head turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pairing {
    /// Pair `p` is `(p, p + n_pairs)`; GGUF's NEOX.
    Halves,
    /// Pair `p` is `(2p, 2p + 1)`; GGUF's NORM.
    Neighbours,
}

/// The feed-forward half of a layer.
#[derive(Clone, Debug)]
pub(crate) enum Ffn {
    Dense(Dense),
    Routed(Routed),
}

/// `down(silu(gate·x) ⊙ up·x)` for every row.
#[derive(Clone, Debug)]
pub(crate) struct Dense {
    /// `[n_ff, n_embd]`.
    pub gate: WeightId,
    /// `[n_ff, n_embd]`.
    pub up: WeightId,
    /// `[n_embd, n_ff]`.
    pub down: WeightId,
    pub n_ff: usize,
}

/// A mixture of experts, whose matrices are the layer's bank in the weight table.
#[derive(Clone, Debug)]
pub(crate) struct Routed {
    /// `[n_expert, n_embd]`, multiplied in f32.
    pub router: WeightId,
    pub n_expert: usize,
    pub rule: RoutingRule,
    /// An expert that every row goes to besides; its output is added to that of the chosen.
    pub shared: Option<Shared>,
}

/// A shared expert.
#[derive(Clone, Debug)]
pub(crate) struct Shared {
    pub ffn: Dense,
    /// `[1, n_embd]`, multiplied in f32: each row's output is multiplied by `σ(gate·x)`.
    pub gate: Option<WeightId>,
}

/// How router logits become experts and weights; the default is the softmax and nothing else.
#[derive(Clone, Debug, Default)]
pub(crate) struct RoutingRule {
    pub gating: Gating,
    /// Experts per token, at most `n_expert`.
    pub n_used: usize,
    /// Whether the weights of the chosen are divided by their sum.
    pub normalise: bool,
    /// What the weights are then multiplied by, if by anything.
    pub scale: Option<f32>,
    /// `[n_expert]`: added to the logits.
    pub bias: Option<Vec<f32>>,
    /// `[n_expert]`: added to the scores for the choice alone, not for the weights.
    pub selection_bias: Option<Vec<f32>>,
    /// Where the choice is among the experts of the best groups.
    pub groups: Option<Groups>,
}

/// Experts in groups of neighbours, all of one size; a group is ranked by the sum of its two best scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Groups {
    /// Divides `n_expert`.
    pub n: usize,
    /// Groups that are chosen from, at most `n`; they hold at least the experts that a token needs.
    pub n_used: usize,
}

/// The function that turns logits into the scores that are ranked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Gating {
    /// Softmax over all experts.
    #[default]
    Softmax,
    /// `σ` of each logit by itself.
    Sigmoid,
    /// The logits themselves, and of those chosen the softmax.
    SoftmaxOfChosen,
}
