//! The equations of two families written out once more, in f64 and one token at a time: the oracle of the
//! forward pass. Reads names and keys itself and shares no code with the library but the decoders.

use orkpack::blocks;
use orkpack::tensor::TensorSource;

/// Which values of a head turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairs {
    /// `(p, p + n/2)`: what both families do.
    Halves,
    /// `(2p, 2p + 1)`: what they must not do.
    Neighbours,
}

/// Logits of every position of `tokens`, for a `qwen3moe` or `olmoe` model.
pub fn logits(source: &dyn TensorSource, pairs: Pairs, tokens: &[u32]) -> Vec<Vec<f64>> {
    let model = Naive::new(source, pairs);
    let mut pasts = vec![Past::default(); model.n_layer];
    tokens.iter().enumerate().map(|(position, token)| model.step(&mut pasts, position, *token)).collect()
}

/// Keys and values of a layer, a row for each position.
#[derive(Clone, Default)]
struct Past {
    keys: Vec<Vec<f64>>,
    values: Vec<Vec<f64>>,
}

struct Naive<'a> {
    source: &'a dyn TensorSource,
    pairs: Pairs,
    n_layer: usize,
    n_head: usize,
    n_head_kv: usize,
    n_used: usize,
    eps: f64,
    base: f64,
    whole_norm: bool,
}

impl<'a> Naive<'a> {
    fn new(source: &'a dyn TensorSource, pairs: Pairs) -> Self {
        let metadata = source.metadata();
        let name = metadata.str("general.architecture").unwrap();
        let number = |key: &str| metadata.u32(&format!("{name}.{key}")).unwrap() as usize;
        let float = |key: &str| metadata.optional_f32(&format!("{name}.{key}")).unwrap().map(f64::from);
        Naive {
            source,
            pairs,
            n_layer: number("block_count"),
            n_head: number("attention.head_count"),
            n_head_kv: number("attention.head_count_kv"),
            n_used: number("expert_used_count"),
            eps: float("attention.layer_norm_rms_epsilon").unwrap(),
            base: float("rope.freq_base").unwrap_or(10_000.0),
            whole_norm: name == "olmoe",
        }
    }

    fn weights(&self, name: &str) -> Vec<f32> {
        let tensor = self.source.find(name).unwrap_or_else(|| panic!("{name}"));
        let mut weights = vec![0.0; tensor.n_elements() as usize];
        blocks::dequantize(tensor.dtype, self.source.bytes(tensor.place).unwrap(), &mut weights).unwrap();
        weights
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let weight = self.weights(name);
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        x.iter().zip(weight).map(|(x, w)| x / (mean + self.eps).sqrt() * f64::from(w)).collect()
    }

    fn turn(&self, position: usize, head: &mut [f64]) {
        let n = head.len();
        for p in 0..n / 2 {
            let (a, b) = if self.pairs == Pairs::Halves { (p, p + n / 2) } else { (2 * p, 2 * p + 1) };
            let angle = position as f64 * self.base.powf(-2.0 * p as f64 / n as f64);
            (head[a], head[b]) = (
                head[a] * angle.cos() - head[b] * angle.sin(),
                head[a] * angle.sin() + head[b] * angle.cos(),
            );
        }
    }

    /// Projected, normed and turned heads.
    fn heads(&self, layer: usize, part: &str, n: usize, position: usize, x: &[f64]) -> Vec<f64> {
        let mut heads = product(&self.weights(&format!("blk.{layer}.attn_{part}.weight")), x);
        let norm = format!("blk.{layer}.attn_{part}_norm.weight");
        let head_dim = heads.len() / n;
        if self.whole_norm {
            heads = self.norm(&norm, &heads);
        }
        for head in heads.chunks_exact_mut(head_dim) {
            if !self.whole_norm {
                head.copy_from_slice(&self.norm(&norm, head));
            }
            self.turn(position, head);
        }
        heads
    }

    fn attention(&self, layer: usize, past: &mut Past, position: usize, x: &[f64]) -> Vec<f64> {
        let q = self.heads(layer, "q", self.n_head, position, x);
        past.keys.push(self.heads(layer, "k", self.n_head_kv, position, x));
        past.values.push(product(&self.weights(&format!("blk.{layer}.attn_v.weight")), x));
        let d = q.len() / self.n_head;
        let mut mixed = Vec::new();
        for (h, q) in q.chunks_exact(d).enumerate() {
            let at = h / (self.n_head / self.n_head_kv) * d;
            let score = |key: &Vec<f64>| {
                q.iter().zip(&key[at..at + d]).map(|(q, k)| q * k).sum::<f64>() / (d as f64).sqrt()
            };
            let weights = softmax(past.keys.iter().map(score).collect());
            for i in at..at + d {
                mixed.push(past.values.iter().zip(&weights).map(|(value, w)| value[i] * w).sum());
            }
        }
        product(&self.weights(&format!("blk.{layer}.attn_output.weight")), &mixed)
    }

    fn experts(&self, layer: usize, x: &[f64]) -> Vec<f64> {
        let weights = |part: &str| self.weights(&format!("blk.{layer}.ffn_{part}.weight"));
        let scores = softmax(product(&weights("gate_inp"), x));
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
        order.truncate(self.n_used);
        let sum: f64 = if self.whole_norm { 1.0 } else { order.iter().map(|e| scores[*e]).sum() };
        let (gate, up, down) = (weights("gate_exps"), weights("up_exps"), weights("down_exps"));
        let mut out = vec![0.0; x.len()];
        for expert in order {
            let n = gate.len() / scores.len();
            let part = |stack: &[f32], x: &[f64]| product(&stack[expert * n..(expert + 1) * n], x);
            let (gate, up) = (part(&gate, x), part(&up, x));
            let inner: Vec<f64> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            let down = part(&down, &inner);
            out.iter_mut().zip(down).for_each(|(out, down)| *out += scores[expert] / sum * down);
        }
        out
    }

    fn step(&self, pasts: &mut [Past], position: usize, token: u32) -> Vec<f64> {
        let n_embd = self.source.find("token_embd.weight").unwrap().n_in() as usize;
        let embedding = self.weights("token_embd.weight");
        let mut x: Vec<f64> =
            embedding[token as usize * n_embd..][..n_embd].iter().map(|x| f64::from(*x)).collect();
        for (layer, past) in pasts.iter_mut().enumerate() {
            let normed = self.norm(&format!("blk.{layer}.attn_norm.weight"), &x);
            let mixed = self.attention(layer, past, position, &normed);
            x.iter_mut().zip(mixed).for_each(|(x, y)| *x += y);
            let normed = self.norm(&format!("blk.{layer}.ffn_norm.weight"), &x);
            let fed = self.experts(layer, &normed);
            x.iter_mut().zip(fed).for_each(|(x, y)| *x += y);
        }
        let head = if self.source.find("output.weight").is_some() { "output" } else { "token_embd" };
        product(&self.weights(&format!("{head}.weight")), &self.norm("output_norm.weight", &x))
    }
}

fn product(matrix: &[f32], x: &[f64]) -> Vec<f64> {
    let row = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
    matrix.chunks_exact(x.len()).map(row).collect()
}

fn softmax(scores: Vec<f64>) -> Vec<f64> {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
    scores.iter().map(|score| (score - max).exp() / sum).collect()
}
