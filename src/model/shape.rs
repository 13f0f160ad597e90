//! The sizes that a planner needs, and nothing of where anything lies.

use super::Model;
use super::forward::CacheType;
use super::parts::{Ffn, LatentHeads, Mixer};
use crate::executor::{ExpertBank, Weight, WeightTable};
use crate::tensor::Dtype;
use crate::units::LayerId;

/// A model as the planner sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    /// The family, as `general.architecture` names it.
    pub architecture: String,
    /// Layers, with and without experts.
    pub n_layer: usize,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Tokens in the vocabulary.
    pub n_vocab: usize,
    /// The layers that have experts, in order.
    pub moe_layers: Vec<MoeLayerShape>,
    /// Weights outside the experts that one token reads: attention, dense and shared
    /// networks, routers, norms, head, one embedding row.
    pub dense_weights: u64,
    /// The bytes of these in the source.
    pub dense_bytes: u64,
    /// Bytes that one more position adds to the key-value caches of all layers, in half precision.
    pub kv_bytes_per_token: u64,
    /// Bytes that the other layers remember, however many positions there were: tails and states, before a call and
    /// after it. 0 also where a family cannot be run.
    pub state_bytes: u64,
}

/// One layer of experts.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeLayerShape {
    /// Which layer.
    pub layer: LayerId,
    /// Experts that each token is sent to.
    pub n_used: usize,
    /// For each expert its gate, up and down matrix, in the order of [`crate::tensor::Projection::ALL`].
    pub experts: Vec<[MatrixShape; 3]>,
}

/// One matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixShape {
    /// Inputs: K.
    pub n_in: usize,
    /// Outputs: N.
    pub n_out: usize,
    /// Its type in the source.
    pub dtype: Dtype,
    /// Its bytes in the source.
    pub bytes: u64,
}

impl MoeLayerShape {
    /// Number of experts.
    pub fn n_expert(&self) -> usize {
        self.experts.len()
    }

    /// Whether each token is sent to every expert, so that none is called more often than another.
    pub fn uses_all(&self) -> bool {
        self.n_used >= self.n_expert()
    }
}

impl MatrixShape {
    /// The shape of a matrix in a weight table.
    fn of(weight: &Weight) -> MatrixShape {
        let &Weight { n_in, n_out, dtype, place } = weight;
        MatrixShape { n_in, n_out, dtype, bytes: place.len }
    }

    /// Number of weights: multiply-adds for one row.
    pub fn n_weights(&self) -> u64 {
        self.n_in as u64 * self.n_out as u64
    }
}

/// The layers with experts, in order; `n_used` says how many of a layer's each token is sent to.
pub(super) fn moe_layers(
    weights: &WeightTable,
    n_used: impl Fn(LayerId) -> Option<usize>,
) -> Vec<MoeLayerShape> {
    let shape = |(layer, bank): (LayerId, &ExpertBank)| {
        let matrices = bank.gate.iter().zip(&bank.up).zip(&bank.down);
        let experts = matrices.map(|((gate, up), down)| [gate, up, down].map(MatrixShape::of)).collect();
        Some(MoeLayerShape { layer, n_used: n_used(layer)?, experts })
    };
    weights.banks().filter_map(shape).collect()
}

/// What a token reads outside the experts.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Dense {
    pub weights: u64,
    pub bytes: u64,
}

impl Dense {
    /// Counts a tensor that is read whole.
    pub fn add(&mut self, weights: u64, bytes: u64) {
        self.weights += weights;
        self.bytes += bytes;
    }

    /// Of an embedding that is no head, counted as whole, only a row is read; a tied one is read whole, and a row
    /// again.
    pub fn with_embedding(self, embedding: &MatrixShape, is_head: bool) -> Dense {
        let (n, row) = (embedding.n_out as u64, embedding.n_in as u64);
        let row_bytes = embedding.bytes / n;
        let unread = if is_head { 0 } else { n };
        Dense {
            weights: self.weights + row - unread * row,
            bytes: self.bytes + row_bytes - unread * row_bytes,
        }
    }
}

impl Model {
    /// The sizes that the planner needs.
    pub fn shape(&self) -> ModelShape {
        let dense = self.dense();
        let n_used = |layer: LayerId| match &self.layers.get(layer.index())?.ffn {
            Ffn::Routed(routed) => Some(routed.rule.n_used),
            Ffn::Dense(_) => None,
        };
        ModelShape {
            architecture: self.architecture.clone(),
            n_layer: self.n_layer(),
            n_embd: self.n_embd,
            n_vocab: self.n_vocab,
            moe_layers: moe_layers(&self.weights, n_used),
            dense_weights: dense.weights,
            dense_bytes: dense.bytes,
            kv_bytes_per_token: self.layers.iter().map(|layer| layer.mixer.bytes_per_token()).sum(),
            state_bytes: self.layers.iter().map(|layer| layer.mixer.state_bytes()).sum(),
        }
    }

    /// Weights and bytes that a token reads outside the experts.
    fn dense(&self) -> Dense {
        let mut dense = Dense::default();
        self.vectors().for_each(|vector| dense.add(vector.len() as u64, 4 * vector.len() as u64));
        let matrices = self.weights.linears().iter().map(MatrixShape::of);
        matrices.for_each(|matrix| dense.add(matrix.n_weights(), matrix.bytes));
        match self.weights.linear(self.embedding).map(MatrixShape::of) {
            Some(embedding) => dense.with_embedding(&embedding, self.head == self.embedding),
            None => dense,
        }
    }

    /// What is read besides matrices, all of it F32: norms, biases, taps.
    fn vectors(&self) -> impl Iterator<Item = &Vec<f32>> {
        let layers = self.layers.iter().flat_map(|layer| {
            let norms = [&layer.mixer_norm.weight, &layer.ffn_norm.weight];
            norms.into_iter().chain(layer.mixer.vectors()).chain(layer.ffn.vectors())
        });
        layers.chain([&self.final_norm.weight])
    }
}

impl Mixer {
    fn vectors(&self) -> Vec<&Vec<f32>> {
        match self {
            Mixer::Attention(attention) => {
                let norms = [&attention.q_norm, &attention.k_norm].into_iter().flatten();
                let biases = attention.biases.iter().flatten();
                let vectors = norms.map(|norm| &norm.weight).chain(biases);
                vectors.chain(&attention.output_bias).chain(&attention.sinks).collect()
            }
            Mixer::Latent(latent) => {
                let norms = latent.q_a.iter().map(|(_, norm)| norm).chain([&latent.kv_norm]);
                norms.map(|norm| &norm.weight).collect()
            }
            Mixer::ShortConv(conv) => vec![&conv.taps],
            Mixer::DeltaNet(net) => vec![&net.taps, &net.decay, &net.time_bias, &net.norm.weight],
        }
    }

    /// Bytes that one position adds to this layer's memory of the past.
    fn bytes_per_token(&self) -> u64 {
        let n_values = match self {
            Mixer::Attention(attention) => 2 * attention.n_head_kv * attention.head_dim,
            Mixer::Latent(latent) => match latent.kv_b {
                LatentHeads::Absorbed { .. } => latent.n_rank + latent.n_rot,
                LatentHeads::Expanded(_) => latent.n_head * (latent.n_nope + latent.n_rot + latent.n_value),
            },
            // The last few positions, or one state, however many there were.
            Mixer::ShortConv(_) | Mixer::DeltaNet(_) => 0,
        };
        CacheType::F16.bytes() * n_values as u64
    }

    /// Bytes of this layer's memory of the past that do not grow, before a call and after it.
    fn state_bytes(&self) -> u64 {
        let n_values = match self {
            Mixer::Attention(_) | Mixer::Latent(_) => 0,
            Mixer::ShortConv(conv) => conv.taps.len() - conv.taps.len() / conv.n_taps,
            Mixer::DeltaNet(net) => net.n_remembered().iter().sum(),
        };
        (2 * size_of::<f32>() * n_values) as u64
    }
}

impl Ffn {
    /// Besides those of the experts.
    fn vectors(&self) -> impl Iterator<Item = &Vec<f32>> {
        let rule = if let Ffn::Routed(routed) = self { Some(&routed.rule) } else { None };
        rule.into_iter().flat_map(|rule| rule.selection_bias.iter().chain(&rule.bias))
    }
}
