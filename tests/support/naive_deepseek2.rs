//! The equations of `deepseek2` written out once more, in f64 and one token at a time: the oracle of attention over
//! latents. Makes every head's keys and values from the latents, whatever the layout of the file, and shares no
//! code with the library but the decoders.

use orkpack::blocks;
use orkpack::tensor::{TensorSource, Value};

use super::memory_source::{MemorySource, Random};

/// Sizes of [`random`], each different from every other that it could be taken for.
pub const N_EMBD: usize = 40;
pub const N_HEAD: usize = 3;
pub const N_RANK: usize = 20;
pub const N_RANK_Q: usize = 28;
pub const N_NOPE: usize = 12;
pub const N_ROT: usize = 8;
pub const N_VALUE: usize = 10;
pub const N_EXPERT: usize = 12;
pub const N_VOCAB: usize = 80;
const N_FF: usize = 24;
const N_DENSE_FF: usize = 56;

/// A model with absorbed matrices, three layers of which the first is dense, the softmax, two shared experts, and
/// no groups.
pub fn random(compressed: bool, seed: u64) -> MemorySource {
    let mut source = MemorySource::default();
    source.set("general.architecture", Value::String("deepseek2".into()));
    for (key, value) in [
        ("block_count", 3),
        ("context_length", 512),
        ("embedding_length", N_EMBD),
        ("feed_forward_length", N_DENSE_FF),
        ("leading_dense_block_count", 1),
        ("attention.head_count", N_HEAD),
        ("attention.head_count_kv", 1),
        ("attention.kv_lora_rank", N_RANK),
        ("attention.key_length", N_RANK + N_ROT),
        ("attention.value_length", N_RANK),
        ("attention.key_length_mla", N_NOPE + N_ROT),
        ("attention.value_length_mla", N_VALUE),
        ("rope.dimension_count", N_ROT),
        ("expert_count", N_EXPERT),
        ("expert_used_count", 3),
        ("expert_feed_forward_length", N_FF),
        ("expert_shared_count", 2),
        ("vocab_size", N_VOCAB),
    ] {
        source.set(&format!("deepseek2.{key}"), Value::U32(value as u32));
    }
    source.set("deepseek2.attention.layer_norm_rms_epsilon", Value::F32(1e-6));
    if compressed {
        source.set("deepseek2.attention.q_lora_rank", Value::U32(N_RANK_Q as u32));
    }
    let mut random = Random(seed);
    source.push(&mut random, "token_embd.weight", &[N_EMBD, N_VOCAB]);
    source.push(&mut random, "output_norm.weight", &[N_EMBD]);
    source.push(&mut random, "output.weight", &[N_EMBD, N_VOCAB]);
    for layer in 0..3 {
        for (part, dims) in parts(compressed, layer == 0) {
            source.push(&mut random, &format!("blk.{layer}.{part}.weight"), &dims);
        }
    }
    source
}

fn parts(compressed: bool, dense: bool) -> Vec<(&'static str, Vec<usize>)> {
    let q = N_HEAD * (N_NOPE + N_ROT);
    let mut parts = vec![
        ("attn_norm", vec![N_EMBD]),
        ("attn_kv_a_mqa", vec![N_EMBD, N_RANK + N_ROT]),
        ("attn_kv_a_norm", vec![N_RANK]),
        ("attn_k_b", vec![N_NOPE, N_RANK, N_HEAD]),
        ("attn_v_b", vec![N_RANK, N_VALUE, N_HEAD]),
        ("attn_output", vec![N_HEAD * N_VALUE, N_EMBD]),
        ("ffn_norm", vec![N_EMBD]),
    ];
    if compressed {
        parts.push(("attn_q_a", vec![N_EMBD, N_RANK_Q]));
        parts.push(("attn_q_a_norm", vec![N_RANK_Q]));
        parts.push(("attn_q_b", vec![N_RANK_Q, q]));
    } else {
        parts.push(("attn_q", vec![N_EMBD, q]));
    }
    if dense {
        parts.push(("ffn_gate", vec![N_EMBD, N_DENSE_FF]));
        parts.push(("ffn_up", vec![N_EMBD, N_DENSE_FF]));
        parts.push(("ffn_down", vec![N_DENSE_FF, N_EMBD]));
    } else {
        parts.push(("ffn_gate_inp", vec![N_EMBD, N_EXPERT]));
        parts.push(("ffn_gate_exps", vec![N_EMBD, N_FF, N_EXPERT]));
        parts.push(("ffn_up_exps", vec![N_EMBD, N_FF, N_EXPERT]));
        parts.push(("ffn_down_exps", vec![N_FF, N_EMBD, N_EXPERT]));
        parts.push(("ffn_gate_shexp", vec![N_EMBD, 2 * N_FF]));
        parts.push(("ffn_up_shexp", vec![N_EMBD, 2 * N_FF]));
        parts.push(("ffn_down_shexp", vec![2 * N_FF, N_EMBD]));
    }
    parts
}

/// How what turns is turned, and what becomes of scores.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Whether neighbours turn together, as they do, or halves.
    pub neighbours: bool,
    /// Of each pair, in radians per position.
    pub speeds: Vec<f64>,
    /// What the values that turn are multiplied by.
    pub magnitude: f64,
    /// What scores are multiplied by.
    pub scale: f64,
}

impl Rules {
    /// Those of a file without scaling, with a base of 10,000.
    pub fn plain() -> Rules {
        // 10000^(-2p/8): 1, 1/10, 1/100, 1/1000.
        let speeds = vec![1.0, 0.1, 0.01, 0.001];
        Rules { neighbours: true, speeds, magnitude: 1.0, scale: 1.0 / ((N_NOPE + N_ROT) as f64).sqrt() }
    }
}

/// Logits of every position of `tokens`, for a model of the sizes above.
pub fn logits(source: &dyn TensorSource, rules: &Rules, tokens: &[u32]) -> Vec<Vec<f64>> {
    let naive = Naive { source, rules };
    let mut pasts = [const { Vec::new() }; 3];
    tokens.iter().enumerate().map(|(position, token)| naive.step(&mut pasts, position, *token)).collect()
}

/// Of each position and head, key and value.
type Past = Vec<Vec<(Vec<f64>, Vec<f64>)>>;

struct Naive<'a> {
    source: &'a dyn TensorSource,
    rules: &'a Rules,
}

impl Naive<'_> {
    fn has(&self, name: &str) -> bool {
        self.source.find(&format!("{name}.weight")).is_some()
    }

    fn weights(&self, name: &str) -> Vec<f64> {
        let tensor = self.source.find(&format!("{name}.weight")).unwrap_or_else(|| panic!("{name}"));
        let mut weights = vec![0.0; tensor.n_elements() as usize];
        blocks::dequantize(tensor.dtype, self.source.bytes(tensor.place).unwrap(), &mut weights).unwrap();
        weights.into_iter().map(f64::from).collect()
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        x.iter().zip(self.weights(name)).map(|(x, w)| x / (mean + 1e-6f64).sqrt() * w).collect()
    }

    fn turned(&self, position: usize, values: &[f64]) -> Vec<f64> {
        let mut turned = values.to_vec();
        for (p, speed) in self.rules.speeds.iter().enumerate() {
            let half = values.len() / 2;
            let (a, b) = if self.rules.neighbours { (2 * p, 2 * p + 1) } else { (p, p + half) };
            let (sine, cosine) = (position as f64 * speed).sin_cos();
            turned[a] = (values[a] * cosine - values[b] * sine) * self.rules.magnitude;
            turned[b] = (values[a] * sine + values[b] * cosine) * self.rules.magnitude;
        }
        turned
    }

    /// A head's part of the key that does not turn, and its value.
    fn head(&self, layer: usize, head: usize, latent: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let name = |part: &str| format!("blk.{layer}.{part}");
        if self.has(&name("attn_kv_b")) {
            let n = (N_NOPE + N_VALUE) * N_RANK;
            let both = product(&self.weights(&name("attn_kv_b"))[head * n..(head + 1) * n], latent);
            return (both[..N_NOPE].to_vec(), both[N_NOPE..].to_vec());
        }
        let (k, v) = (self.weights(&name("attn_k_b")), self.weights(&name("attn_v_b")));
        let k = &k[head * N_NOPE * N_RANK..][..N_NOPE * N_RANK];
        // Row `i` of `k` is what value `i` of the latent gives to each value of the key.
        let key = |j: usize| (0..N_RANK).map(|i| latent[i] * k[i * N_NOPE + j]).sum();
        let v = &v[head * N_VALUE * N_RANK..][..N_VALUE * N_RANK];
        ((0..N_NOPE).map(key).collect(), product(v, latent))
    }

    fn attention(&self, layer: usize, past: &mut Past, position: usize, x: &[f64]) -> Vec<f64> {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let q = if self.has(&name("attn_q_a")) {
            let short = self.norm(&name("attn_q_a_norm"), &product(&self.weights(&name("attn_q_a")), x));
            product(&self.weights(&name("attn_q_b")), &short)
        } else {
            product(&self.weights(&name("attn_q")), x)
        };
        let kv = product(&self.weights(&name("attn_kv_a_mqa")), x);
        let latent = self.norm(&name("attn_kv_a_norm"), &kv[..N_RANK]);
        let shared = self.turned(position, &kv[N_RANK..]);
        let heads = (0..N_HEAD).map(|head| {
            let (key, value) = self.head(layer, head, &latent);
            ([key, shared.clone()].concat(), value)
        });
        past.push(heads.collect());
        let mut mixed = Vec::new();
        for (h, q) in q.chunks_exact(N_NOPE + N_ROT).enumerate() {
            let q = [q[..N_NOPE].to_vec(), self.turned(position, &q[N_NOPE..])].concat();
            let dot = |key: &[f64]| q.iter().zip(key).map(|(q, k)| q * k).sum::<f64>();
            let weights = softmax(past.iter().map(|heads| dot(&heads[h].0) * self.rules.scale).collect());
            for i in 0..N_VALUE {
                mixed.push(past.iter().zip(&weights).map(|(heads, w)| heads[h].1[i] * w).sum());
            }
        }
        product(&self.weights(&name("attn_output")), &mixed)
    }

    fn network(&self, [gate, up, down]: [&[f64]; 3], x: &[f64]) -> Vec<f64> {
        let (gate, up) = (product(gate, x), product(up, x));
        let inner: Vec<f64> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
        product(down, &inner)
    }

    fn feed_forward(&self, layer: usize, x: &[f64]) -> Vec<f64> {
        let weights = |part: &str| self.weights(&format!("blk.{layer}.ffn_{part}"));
        let all = |suffix: &str| ["gate", "up", "down"].map(|part| weights(&format!("{part}{suffix}")));
        if layer == 0 {
            return self.network(all("").each_ref().map(Vec::as_slice), x);
        }
        let scores = softmax(product(&weights("gate_inp"), x));
        let mut order: Vec<usize> = (0..N_EXPERT).collect();
        order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
        let mut out = self.network(all("_shexp").each_ref().map(Vec::as_slice), x);
        let (stacks, n) = (all("_exps"), N_FF * N_EMBD);
        for expert in &order[..3] {
            let own = stacks.each_ref().map(|stack| &stack[expert * n..(expert + 1) * n]);
            let y = self.network(own, x);
            out.iter_mut().zip(y).for_each(|(out, y)| *out += scores[*expert] * y);
        }
        out
    }

    fn step(&self, pasts: &mut [Past; 3], position: usize, token: u32) -> Vec<f64> {
        let mut x = self.weights("token_embd")[token as usize * N_EMBD..][..N_EMBD].to_vec();
        for (layer, past) in pasts.iter_mut().enumerate() {
            let normed = self.norm(&format!("blk.{layer}.attn_norm"), &x);
            let mixed = self.attention(layer, past, position, &normed);
            x.iter_mut().zip(mixed).for_each(|(x, y)| *x += y);
            let normed = self.norm(&format!("blk.{layer}.ffn_norm"), &x);
            let fed = self.feed_forward(layer, &normed);
            x.iter_mut().zip(fed).for_each(|(x, y)| *x += y);
        }
        product(&self.weights("output"), &self.norm("output_norm", &x))
    }
}

fn product(matrix: &[f64], x: &[f64]) -> Vec<f64> {
    matrix.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

fn softmax(scores: Vec<f64>) -> Vec<f64> {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
    scores.iter().map(|score| (score - max).exp() / sum).collect()
}
