//! The equations of `qwen35moe` and `qwen3next` written out once more, in f64 and one token at a time. Reads names
//! and keys itself and shares no code with the library but the decoders.

use std::collections::HashMap;

use orkpack::blocks;
use orkpack::tensor::TensorSource;

/// Where the two families differ, and what must not be got wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reading {
    /// Value head `h` goes with key head `h mod G`; otherwise with `h div (V / G)`.
    pub in_turn: bool,
    /// Values `(p, p + n_rot / 2)` turn together; otherwise `(2p, 2p + 1)`.
    pub halves: bool,
    /// What full attention gives is multiplied by `σ(gate)`.
    pub gated: bool,
}

impl Reading {
    /// What a file of this family means.
    pub fn of(architecture: &str) -> Reading {
        Reading { in_turn: architecture == "qwen35moe", halves: true, gated: true }
    }
}

/// Logits of every position of `tokens`.
pub fn logits(source: &dyn TensorSource, reading: Reading, tokens: &[u32]) -> Vec<Vec<f64>> {
    let model = Naive::new(source, reading);
    let mut pasts: Vec<Past> = (0..model.n_layer).map(|_| Past::default()).collect();
    tokens.iter().enumerate().map(|(position, token)| model.step(&mut pasts, position, *token)).collect()
}

/// What a layer has seen: of attention all keys and values, of a delta net all that went into its convolution, and
/// its states, `[value head][key][value]`.
#[derive(Default)]
struct Past {
    keys: Vec<Vec<f64>>,
    values: Vec<Vec<f64>>,
    mixed: Vec<Vec<f64>>,
    states: Vec<Vec<Vec<f64>>>,
}

struct Naive {
    weights: HashMap<String, Vec<f64>>,
    numbers: HashMap<&'static str, usize>,
    reading: Reading,
    n_layer: usize,
    eps: f64,
    base: f64,
}

const NUMBERS: [&str; 8] = [
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "rope.dimension_count",
    "expert_used_count",
    "ssm.state_size",
    "ssm.time_step_rank",
    "ssm.group_count",
];

impl Naive {
    fn new(source: &dyn TensorSource, reading: Reading) -> Naive {
        let metadata = source.metadata();
        let name = metadata.str("general.architecture").unwrap();
        let number = |key: &str| metadata.u32(&format!("{name}.{key}")).unwrap() as usize;
        let float = |key: &str| metadata.optional_f32(&format!("{name}.{key}")).unwrap().map(f64::from);
        let weights = source.tensors().iter().map(|tensor| {
            let mut weights = vec![0.0f32; tensor.n_elements() as usize];
            blocks::dequantize(tensor.dtype, source.bytes(tensor.place).unwrap(), &mut weights).unwrap();
            (tensor.name.clone(), weights.into_iter().map(f64::from).collect())
        });
        Naive {
            weights: weights.collect(),
            numbers: NUMBERS.map(|key| (key, number(key))).into(),
            reading,
            n_layer: number("block_count"),
            eps: float("attention.layer_norm_rms_epsilon").unwrap(),
            base: float("rope.freq_base").unwrap(),
        }
    }

    fn number(&self, key: &str) -> usize {
        self.numbers[key]
    }

    fn weight(&self, layer: usize, part: &str) -> &[f64] {
        &self.weights[&format!("blk.{layer}.{part}")]
    }

    fn product(&self, layer: usize, part: &str, x: &[f64]) -> Vec<f64> {
        product(self.weight(layer, &format!("{part}.weight")), x)
    }

    fn norm(&self, weight: &[f64], x: &[f64]) -> Vec<f64> {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        x.iter().zip(weight).map(|(x, w)| x / (mean + self.eps).sqrt() * w).collect()
    }

    fn step(&self, pasts: &mut [Past], position: usize, token: u32) -> Vec<f64> {
        let n_embd = self.weights["output_norm.weight"].len();
        let mut x = self.weights["token_embd.weight"][token as usize * n_embd..][..n_embd].to_vec();
        for (layer, past) in pasts.iter_mut().enumerate() {
            let normed = self.norm(self.weight(layer, "attn_norm.weight"), &x);
            let mixed = if (layer + 1).is_multiple_of(4) {
                self.attention(layer, past, position, &normed)
            } else {
                self.delta_net(layer, past, &normed)
            };
            x.iter_mut().zip(mixed).for_each(|(x, y)| *x += y);
            let normed = self.norm(self.weight(layer, "post_attention_norm.weight"), &x);
            let fed = self.experts(layer, &normed);
            x.iter_mut().zip(fed).for_each(|(x, y)| *x += y);
        }
        product(&self.weights["output.weight"], &self.norm(&self.weights["output_norm.weight"], &x))
    }

    fn attention(&self, layer: usize, past: &mut Past, position: usize, x: &[f64]) -> Vec<f64> {
        let [n_head, n_head_kv, d] =
            ["attention.head_count", "attention.head_count_kv", "attention.key_length"]
                .map(|key| self.number(key));
        let ready = |part: &str, head: &[f64]| {
            let mut head = self.norm(self.weight(layer, &format!("{part}_norm.weight")), head);
            self.turn(position, &mut head);
            head
        };
        let keys = self.product(layer, "attn_k", x);
        past.keys.push(keys.chunks(d).flat_map(|key| ready("attn_k", key)).collect());
        past.values.push(self.product(layer, "attn_v", x));
        let queries_and_gates = self.product(layer, "attn_q", x);
        let mut mixed = Vec::new();
        for h in 0..n_head {
            let query = ready("attn_q", &queries_and_gates[2 * h * d..][..d]);
            let gates = &queries_and_gates[(2 * h + 1) * d..][..d];
            let at = h / (n_head / n_head_kv) * d;
            let scores = past.keys.iter().map(|keys| dot(&query, &keys[at..at + d]) / (d as f64).sqrt());
            let weights = softmax(&scores.collect::<Vec<_>>());
            for (i, gate) in gates.iter().enumerate() {
                let sum: f64 = past.values.iter().zip(&weights).map(|(values, w)| w * values[at + i]).sum();
                mixed.push(if self.reading.gated { sum * sigmoid(*gate) } else { sum });
            }
        }
        self.product(layer, "attn_output", &mixed)
    }

    fn turn(&self, position: usize, head: &mut [f64]) {
        let n = self.number("rope.dimension_count");
        for p in 0..n / 2 {
            let (a, b) = if self.reading.halves { (p, p + n / 2) } else { (2 * p, 2 * p + 1) };
            let (sine, cosine) = (position as f64 * self.base.powf(-2.0 * p as f64 / n as f64)).sin_cos();
            (head[a], head[b]) = (head[a] * cosine - head[b] * sine, head[a] * sine + head[b] * cosine);
        }
    }

    fn delta_net(&self, layer: usize, past: &mut Past, x: &[f64]) -> Vec<f64> {
        let [s, n_value, n_key] =
            ["ssm.state_size", "ssm.time_step_rank", "ssm.group_count"].map(|key| self.number(key));
        past.mixed.push(self.product(layer, "attn_qkv", x));
        let taps = self.weight(layer, "ssm_conv1d.weight");
        let n_taps = taps.len() / past.mixed[0].len();
        let convolved = (0..past.mixed[0].len()).map(|channel| {
            // The newest position meets the last tap.
            let newest = past.mixed.iter().rev();
            let taps = taps[channel * n_taps..][..n_taps].iter().rev();
            silu(newest.zip(taps).map(|(mixed, tap)| mixed[channel] * tap).sum())
        });
        let convolved: Vec<f64> = convolved.collect();
        let heads: Vec<&[f64]> = convolved.chunks(s).collect();
        let z = self.product(layer, "attn_gate", x);
        let (beta, alpha) = self.rates(layer, x);
        let (a, dt) = (self.weight(layer, "ssm_a"), self.weight(layer, "ssm_dt.bias"));
        past.states.resize(n_value, vec![vec![0.0; s]; s]);
        let mut out = Vec::new();
        for h in 0..n_value {
            let key_head = if self.reading.in_turn { h % n_key } else { h / (n_value / n_key) };
            let (q, k) = (self.unit(heads[key_head]), self.unit(heads[n_key + key_head]));
            let v = heads[2 * n_key + h];
            let state = &mut past.states[h];
            let decay = ((alpha[h] + dt[h]).exp().ln_1p() * a[h]).exp();
            state.iter_mut().flatten().for_each(|value| *value *= decay);
            let known: Vec<f64> = (0..s).map(|j| (0..s).map(|i| state[i][j] * k[i]).sum()).collect();
            for i in 0..s {
                for j in 0..s {
                    state[i][j] += k[i] * sigmoid(beta[h]) * (v[j] - known[j]);
                }
            }
            let read: Vec<f64> =
                (0..s).map(|j| (0..s).map(|i| state[i][j] * q[i] / (s as f64).sqrt()).sum()).collect();
            let normed = self.norm(self.weight(layer, "ssm_norm.weight"), &read);
            out.extend(normed.iter().zip(&z[h * s..]).map(|(o, z)| o * silu(*z)));
        }
        self.product(layer, "ssm_out", &out)
    }

    /// Beta and alpha of every value head.
    fn rates(&self, layer: usize, x: &[f64]) -> (Vec<f64>, Vec<f64>) {
        if self.weights.contains_key(&format!("blk.{layer}.ssm_beta.weight")) {
            return (self.product(layer, "ssm_beta", x), self.product(layer, "ssm_alpha", x));
        }
        let group = self.number("ssm.time_step_rank") / self.number("ssm.group_count");
        let both = self.product(layer, "ssm_ba", x);
        let half = |first: usize| {
            both.chunks(2 * group).flat_map(|head| head[first..first + group].to_vec()).collect()
        };
        (half(0), half(group))
    }

    fn unit(&self, x: &[f64]) -> Vec<f64> {
        let length = dot(x, x).sqrt().max(self.eps);
        x.iter().map(|x| x / length).collect()
    }

    fn experts(&self, layer: usize, x: &[f64]) -> Vec<f64> {
        let scores = softmax(&self.product(layer, "ffn_gate_inp", x));
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
        order.truncate(self.number("expert_used_count"));
        let sum: f64 = order.iter().map(|expert| scores[*expert]).sum();
        let share = sigmoid(self.product(layer, "ffn_gate_inp_shexp", x)[0]);
        let mut out: Vec<f64> = self.swiglu(layer, "shexp", 0, 1, x).iter().map(|y| share * y).collect();
        for expert in order {
            let y = self.swiglu(layer, "exps", expert, scores.len(), x);
            out.iter_mut().zip(y).for_each(|(out, y)| *out += scores[expert] / sum * y);
        }
        out
    }

    /// Expert `expert` of `n` that lie in one tensor for each projection.
    fn swiglu(&self, layer: usize, suffix: &str, expert: usize, n: usize, x: &[f64]) -> Vec<f64> {
        let part = |projection: &str| {
            let stack = self.weight(layer, &format!("ffn_{projection}_{suffix}.weight"));
            &stack[expert * stack.len() / n..(expert + 1) * stack.len() / n]
        };
        let (gate, up) = (product(part("gate"), x), product(part("up"), x));
        let inner: Vec<f64> = gate.iter().zip(up).map(|(gate, up)| silu(*gate) * up).collect();
        product(part("down"), &inner)
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn product(matrix: &[f64], x: &[f64]) -> Vec<f64> {
    matrix.chunks_exact(x.len()).map(|row| dot(row, x)).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

fn softmax(scores: &[f64]) -> Vec<f64> {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
    scores.iter().map(|score| (score - max).exp() / sum).collect()
}
