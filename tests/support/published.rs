//! The sizes of published models, without their weights: what one token reads, as their files describe it.

use orkpack::model::{MatrixShape, ModelShape, MoeLayerShape};
use orkpack::tensor::Dtype;
use orkpack::units::LayerId;

/// How a published file is quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    /// Q4_K; the head and the down projections of every second layer Q6_K.
    Q4KM,
    /// Q8_0 throughout.
    Q8,
}

impl Mix {
    pub const ALL: [Mix; 2] = [Mix::Q4KM, Mix::Q8];

    pub fn name(self) -> &'static str {
        match self {
            Mix::Q4KM => "Q4_K_M",
            Mix::Q8 => "Q8_0",
        }
    }

    /// The type of a matrix with rows of `n_in`; where blocks of 256 do not fit, quantisers take blocks of 32.
    fn dtype(self, n_in: usize, is_better: bool) -> Dtype {
        match (self, is_better, n_in.is_multiple_of(256)) {
            (Mix::Q8, ..) | (Mix::Q4KM, true, false) => Dtype::Q8_0,
            (Mix::Q4KM, true, true) => Dtype::Q6_K,
            (Mix::Q4KM, false, true) => Dtype::Q4_K,
            (Mix::Q4KM, false, false) => Dtype::Q5_0,
        }
    }
}

/// A published mixture of experts.
pub struct Published {
    pub name: &'static str,
    pub architecture: &'static str,
    pub n_layer: usize,
    /// Layers without experts, at the front.
    pub n_dense: usize,
    pub n_expert: usize,
    pub n_used: usize,
    pub n_embd: usize,
    pub n_ff: usize,
    pub n_vocab: usize,
    /// Weights outside experts, routers and head: attention and its like, dense and shared networks.
    pub body: u64,
    /// Values that one position adds to the caches of all layers.
    pub kv_values: u64,
    /// The experts are published in this type, whatever the file.
    pub experts: Option<Dtype>,
}

const fn m(n_in: u64, n_out: u64) -> u64 {
    n_in * n_out
}

pub const LFM: Published = Published {
    name: "LFM2.5-8B-A1B",
    architecture: "lfm2moe",
    n_layer: 24,
    n_dense: 2,
    n_expert: 32,
    n_used: 4,
    n_embd: 2048,
    n_ff: 1792,
    n_vocab: 65_536,
    // 18 convolutions, 6 attentions, 2 dense networks.
    body: 18 * (m(2048, 6144) + m(2048, 2048))
        + 6 * (2 * m(2048, 2048) + 2 * m(2048, 512))
        + 2 * 3 * m(2048, 7168),
    kv_values: 6 * 2 * 8 * 64,
    experts: None,
};

pub const QWEN36: Published = Published {
    name: "Qwen3.6-35B-A3B",
    architecture: "qwen35moe",
    n_layer: 40,
    n_dense: 0,
    n_expert: 256,
    n_used: 8,
    n_embd: 2048,
    n_ff: 512,
    n_vocab: 248_320,
    // 30 delta nets, 10 attentions, a shared expert per layer.
    body: 30 * (m(2048, 8192) + m(2048, 4096) + 2 * m(2048, 32) + m(4096, 2048))
        + 10 * (m(2048, 8192) + 2 * m(2048, 512) + m(4096, 2048))
        + 40 * 3 * m(2048, 512),
    kv_values: 10 * 2 * 2 * 256,
    experts: None,
};

pub const ALL: [&Published; 7] = [
    &LFM,
    &QWEN36,
    &Published {
        name: "Qwen3-30B-A3B",
        architecture: "qwen3moe",
        n_layer: 48,
        n_dense: 0,
        n_expert: 128,
        n_used: 8,
        n_embd: 2048,
        n_ff: 768,
        n_vocab: 151_936,
        body: 48 * (2 * m(2048, 4096) + 2 * m(2048, 512)),
        kv_values: 48 * 2 * 4 * 128,
        experts: None,
    },
    &Published {
        name: "OLMoE-1B-7B",
        architecture: "olmoe",
        n_layer: 16,
        n_dense: 0,
        n_expert: 64,
        n_used: 8,
        n_embd: 2048,
        n_ff: 1024,
        n_vocab: 50_304,
        body: 16 * 4 * m(2048, 2048),
        kv_values: 16 * 2 * 16 * 128,
        experts: None,
    },
    &Published {
        name: "gpt-oss-20b",
        architecture: "gpt-oss",
        n_layer: 24,
        n_dense: 0,
        n_expert: 32,
        n_used: 4,
        n_embd: 2880,
        n_ff: 2880,
        n_vocab: 201_088,
        body: 24 * (2 * m(2880, 4096) + 2 * m(2880, 512)),
        kv_values: 24 * 2 * 8 * 64,
        experts: Some(Dtype::MXFP4),
    },
    &Published {
        name: "DeepSeek-V2-Lite",
        architecture: "deepseek2",
        n_layer: 27,
        n_dense: 1,
        n_expert: 64,
        n_used: 6,
        n_embd: 2048,
        n_ff: 1408,
        n_vocab: 102_400,
        // Latent attention, one dense network, two shared experts per further layer.
        body: 27 * (m(2048, 3072) + m(2048, 576) + m(512, 4096) + m(2048, 2048))
            + 3 * m(2048, 10_944)
            + 26 * 3 * m(2048, 2816),
        kv_values: 27 * 576,
        experts: None,
    },
    &Published {
        name: "Mixtral-8x7B",
        architecture: "llama",
        n_layer: 32,
        n_dense: 0,
        n_expert: 8,
        n_used: 2,
        n_embd: 4096,
        n_ff: 14_336,
        n_vocab: 32_000,
        body: 32 * (2 * m(4096, 4096) + 2 * m(4096, 1024)),
        kv_values: 32 * 2 * 8 * 128,
        experts: None,
    },
];

impl Published {
    /// Layers with experts.
    pub fn n_moe(&self) -> usize {
        self.n_layer - self.n_dense
    }

    /// The sizes that a file of this mix has.
    pub fn shape(&self, mix: Mix) -> ModelShape {
        let matrix = |n_in: usize, n_out: usize, is_better: bool| {
            let dtype = self.experts.unwrap_or(mix.dtype(n_in, is_better));
            MatrixShape { n_in, n_out, dtype, bytes: bytes(dtype, n_in) * n_out as u64 }
        };
        let (d, f) = (self.n_embd, self.n_ff);
        let layer = |i: usize| {
            let expert = [matrix(d, f, false), matrix(d, f, false), matrix(f, d, i.is_multiple_of(2))];
            MoeLayerShape {
                layer: LayerId((self.n_dense + i) as u32),
                n_used: self.n_used,
                experts: vec![expert; self.n_expert],
            }
        };
        let routers = (self.n_moe() * self.n_expert * d) as u64;
        // Rows of the body are multiples of the width.
        let body_bytes = self.body / d as u64 * bytes(mix.dtype(d, false), d);
        let head_bytes = self.n_vocab as u64 * bytes(mix.dtype(d, true), d);
        ModelShape {
            architecture: self.architecture.to_owned(),
            n_layer: self.n_layer,
            n_embd: d,
            n_vocab: self.n_vocab,
            moe_layers: (0..self.n_moe()).map(layer).collect(),
            dense_weights: self.body + routers + (self.n_vocab * d) as u64,
            dense_bytes: body_bytes + 4 * routers + head_bytes,
            kv_bytes_per_token: 2 * self.kv_values,
            state_bytes: 0,
        }
    }
}

fn bytes(dtype: Dtype, n_in: usize) -> u64 {
    dtype.row_bytes(n_in as u64).unwrap()
}

#[test]
fn sizes_are_those_of_the_published_models() {
    // Billions of weights: all, and those that one token reads.
    let expected = [(8.3, 1.6), (35.0, 3.0), (30.5, 3.4), (6.9, 1.3), (20.9, 3.6), (15.7, 2.7), (46.7, 12.9)];
    for (model, (all, active)) in ALL.iter().zip(expected) {
        let shape = model.shape(Mix::Q8);
        let expert = 3 * (model.n_embd * model.n_ff * model.n_moe()) as u64;
        let embedding = (model.n_vocab * model.n_embd) as u64;
        // An embedding that is no head is stored beside it, and read by the row.
        let tied = if model.name == LFM.name { 0 } else { embedding };
        let total = (shape.dense_weights + tied + expert * model.n_expert as u64) as f64 / 1e9;
        let read = (shape.dense_weights + expert * model.n_used as u64) as f64 / 1e9;
        assert!((total / all - 1.0).abs() < 0.04, "{}: {total} G weights", model.name);
        assert!((read / active - 1.0).abs() < 0.12, "{}: {read} G a token", model.name);
    }
}
