//! Model shapes without models, and routing without a router: what planning needs, from a seed.

use orkpack::calibrate::{Block, RoutedLayer, Statistics};
use orkpack::executor::Routing;
use orkpack::model::{MatrixShape, ModelShape, MoeLayerShape};
use orkpack::tensor::Dtype;
use orkpack::units::{ExpertId, LayerId};

/// A small generator (xorshift), the same on every machine.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 11) % n
    }

    /// From 0 to 1.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// `n_layer` equal layers of experts `[n_ff, n_embd]`, all in one type.
pub fn shape(
    n_layer: usize,
    n_expert: usize,
    n_used: usize,
    n_embd: usize,
    n_ff: usize,
    dtype: Dtype,
) -> ModelShape {
    let matrix = |n_in: usize, n_out: usize| {
        // A type of larger blocks falls back to bytes, as quantisers do.
        let row = dtype.row_bytes(n_in as u64).unwrap_or(n_in as u64);
        MatrixShape { n_in, n_out, dtype, bytes: row * n_out as u64 }
    };
    let expert = [matrix(n_embd, n_ff), matrix(n_embd, n_ff), matrix(n_ff, n_embd)];
    let layer = |i| MoeLayerShape { layer: LayerId(i as u32), n_used, experts: vec![expert; n_expert] };
    ModelShape {
        architecture: "test".to_owned(),
        n_layer,
        n_embd,
        n_vocab: 1000,
        moe_layers: (0..n_layer).map(layer).collect(),
        dense_weights: (n_layer * n_embd * n_embd * 4 + 1000 * n_embd) as u64,
        dense_bytes: (n_layer * n_embd * n_embd * 4 + 1000 * n_embd) as u64,
        kv_bytes_per_token: (n_layer * n_embd) as u64,
        state_bytes: 0,
    }
}

/// LFM2.5-8B-A1B in Q4_K_M: 22 layers of 32 experts, 4 used, down wider on average (half of it Q6_K).
pub fn lfm() -> ModelShape {
    let mut shape = shape(24, 32, 4, 2048, 1792, Dtype::Q4_K);
    shape.architecture = "lfm2moe".to_owned();
    shape.moe_layers.drain(..2);
    for (i, layer) in shape.moe_layers.iter_mut().enumerate() {
        if i % 2 == 0 {
            for expert in &mut layer.experts {
                expert[2] = MatrixShape { dtype: Dtype::Q6_K, bytes: 1792 / 256 * 210 * 2048, ..expert[2] };
            }
        }
    }
    (shape.n_vocab, shape.dense_weights, shape.dense_bytes) = (65_536, 588_000_000, 371_000_000);
    shape.kv_bytes_per_token = 6 * 2 * 4 * 512;
    shape
}

/// The layers as statistics name them.
pub fn layers(shape: &ModelShape) -> Vec<RoutedLayer> {
    orkpack::plan::routed_layers(shape)
}

/// `n_used` different experts per token, each drawn by its share among those left.
pub fn draw(rng: &mut Rng, shares: &[f64], tokens: usize, n_used: usize) -> Routing {
    let mut routing = Routing { n_used, ..Routing::default() };
    for _ in 0..tokens {
        let mut left = shares.to_vec();
        for _ in 0..n_used {
            let sum: f64 = left.iter().sum();
            let mut at = rng.unit() * sum;
            let pick = left.iter().position(|share| {
                at -= share;
                *share > 0.0 && at < 0.0
            });
            let pick = pick.unwrap_or_else(|| left.iter().rposition(|&share| share > 0.0).unwrap());
            left[pick] = 0.0;
            routing.experts.push(ExpertId(pick as u32));
            routing.weights.push(1.0 / n_used as f32);
        }
    }
    routing
}

/// Shares that fall off exponentially with the expert's number, turned by a step per layer.
pub fn shares(n_expert: usize, rate: f64, turn: usize) -> Vec<f64> {
    (0..n_expert).map(|e| (-rate * ((e + turn) % n_expert) as f64 / n_expert as f64).exp()).collect()
}

/// A block of windows, routed by the shares that `of` gives for a layer.
pub fn block(
    shape: &ModelShape,
    tokens: usize,
    rng: &mut Rng,
    of: &dyn Fn(usize, &MoeLayerShape) -> Vec<f64>,
) -> Block {
    let mut block = Block::empty(&layers(shape));
    for window in 0..tokens.div_ceil(512) {
        let tokens = 512.min(tokens - window * 512);
        for (i, layer) in shape.moe_layers.iter().enumerate() {
            let routing = draw(rng, &of(i, layer), tokens, layer.n_used);
            block.record(layer.layer, &routing).unwrap();
        }
        block.end_window(tokens as u64);
    }
    block
}

/// Statistics of `tokens` tokens and a fifth as many held out, with exponential shares of this rate.
pub fn statistics(shape: &ModelShape, tokens: usize, rate: f64, seed: u64) -> Statistics {
    let of = |i: usize, layer: &MoeLayerShape| shares(layer.n_expert(), rate, 3 * i);
    let mut rng = Rng::new(seed);
    let calibration = block(shape, tokens, &mut rng, &of);
    let held_out = block(shape, tokens / 5, &mut rng, &of);
    document(shape, calibration, Some(held_out))
}

/// A document of these blocks.
pub fn document(shape: &ModelShape, calibration: Block, held_out: Option<Block>) -> Statistics {
    let (architecture, kernel) = (shape.architecture.clone(), "test".to_owned());
    Statistics::new("ab".repeat(32), architecture, kernel, layers(shape), calibration, held_out).unwrap()
}
