//! Whole small mixture-of-experts models with seeded random weights.

use half::{bf16, f16};
use orkpack::tensor::{Dtype, Value};

use super::{GgufBuilder, text};

/// Sizes of a model for [`tiny_moe`]. Head size is `n_embd / n_head`.
#[derive(Clone, Debug)]
pub struct MoeSpec {
    /// `qwen3moe` or `olmoe`.
    pub arch: &'static str,
    pub n_layer: u32,
    pub n_embd: u32,
    /// Width of an expert.
    pub n_ff: u32,
    pub n_expert: u32,
    pub n_used: u32,
    pub n_head: u32,
    pub n_head_kv: u32,
    /// At least 260: 256 byte tokens and four control tokens; fillers between them.
    pub n_vocab: u32,
    /// Type of the matrices: F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q5_K or Q6_K. Norms and routers are F32.
    pub dtype: Dtype,
    pub seed: u64,
}

impl Default for MoeSpec {
    fn default() -> Self {
        MoeSpec {
            arch: "qwen3moe",
            n_layer: 2,
            n_embd: 256,
            n_ff: 256,
            n_expert: 8,
            n_used: 2,
            n_head: 4,
            n_head_kv: 2,
            n_vocab: 320,
            dtype: Dtype::F32,
            seed: 1,
        }
    }
}

/// A complete model file: metadata, a byte-level tokenizer with a few merges, every tensor of the family.
/// Router rows have unequal norms, so that some experts are hot: expert 0 most, in every layer.
pub fn tiny_moe(spec: &MoeSpec) -> Vec<u8> {
    tiny_moe_builder(spec).build()
}

/// Writes a model of any size whose matrices are zeros, as a sparse file: for what depends on sizes alone. Returns its
/// length.
pub fn hollow_moe(spec: &MoeSpec, path: &std::path::Path) -> u64 {
    let mut builder = build(spec, true);
    let mut data = Vec::new();
    let mut next = 0u64;
    for tensor in &mut builder.tensors {
        tensor.offset = Some(next);
        let dtype = Dtype::from_gguf(tensor.type_id).unwrap();
        let n: u64 = tensor.dims.iter().product();
        let len = n / dtype.block_len() as u64 * dtype.block_bytes() as u64;
        data.push((next, std::mem::take(&mut tensor.data)));
        next += len.next_multiple_of(builder.alignment as u64);
    }
    let header = builder.header();
    let first = (header.len() as u64).next_multiple_of(builder.alignment as u64);
    let file = std::fs::File::create(path).unwrap();
    file.set_len(first + next).unwrap();
    let write = |bytes: &[u8], at| std::os::unix::fs::FileExt::write_all_at(&file, bytes, at).unwrap();
    write(&header, 0);
    data.iter().for_each(|(at, bytes)| write(bytes, first + at));
    first + next
}

/// The same before it is written, for tests that change something first.
pub fn tiny_moe_builder(spec: &MoeSpec) -> GgufBuilder {
    build(spec, false)
}

fn build(spec: &MoeSpec, hollow: bool) -> GgufBuilder {
    let mut model = Model { builder: hyper_parameters(spec), random: Random(spec.seed), spec, hollow };
    model.builder = tokenizer(model.builder, spec);
    let (embd, vocab) = (spec.n_embd, spec.n_vocab);
    model.matrix("token_embd.weight", &[embd, vocab]);
    model.norm("output_norm.weight", embd);
    model.matrix("output.weight", &[embd, vocab]);
    for layer in 0..spec.n_layer {
        model.layer(layer);
    }
    model.builder
}

fn hyper_parameters(spec: &MoeSpec) -> GgufBuilder {
    let arch = spec.arch;
    let mut builder = GgufBuilder::new().text("general.architecture", arch).text("general.name", "tiny");
    for (key, value) in [
        ("context_length", 512),
        ("embedding_length", spec.n_embd),
        ("block_count", spec.n_layer),
        ("feed_forward_length", spec.n_ff),
        ("vocab_size", spec.n_vocab),
        ("attention.head_count", spec.n_head),
        ("attention.head_count_kv", spec.n_head_kv),
        ("expert_count", spec.n_expert),
        ("expert_used_count", spec.n_used),
    ] {
        builder = builder.kv(&format!("{arch}.{key}"), Value::U32(value));
    }
    if arch == "qwen3moe" {
        let head = spec.n_embd / spec.n_head;
        for (key, value) in [
            ("attention.key_length", head),
            ("attention.value_length", head),
            ("expert_feed_forward_length", spec.n_ff),
        ] {
            builder = builder.kv(&format!("{arch}.{key}"), Value::U32(value));
        }
    }
    builder
        .kv(&format!("{arch}.attention.layer_norm_rms_epsilon"), Value::F32(1e-6))
        .kv(&format!("{arch}.rope.freq_base"), Value::F32(10_000.0))
}

/// 256 byte tokens (ids are bytes), a few merges of small letters, fillers, four control tokens at the end.
fn tokenizer(builder: GgufBuilder, spec: &MoeSpec) -> GgufBuilder {
    let merges = ["Ġ t", "h e", "Ġt he", "i n", "e r", "a n", "Ġ a"];
    let n_vocab = spec.n_vocab as usize;
    assert!(n_vocab >= 260, "256 bytes and four control tokens");
    let n_text = n_vocab - 4;
    let merges = &merges[..merges.len().min(n_text - 256)];
    let mut tokens: Vec<String> = (0..=255u8).map(|byte| byte_char(byte).to_string()).collect();
    tokens.extend(merges.iter().map(|merge| merge.replace(' ', "")));
    tokens.extend((tokens.len()..n_text).map(|id| format!("<filler{id}>")));
    tokens.extend(["<|bos|>", "<|eos|>", "<|pad|>", "<|eot|>"].map(str::to_owned));
    let types = (0..n_vocab).map(|id| Value::I32(if id < n_text { 1 } else { 3 }));
    let id = |back: u32| Value::U32(spec.n_vocab - back);
    builder
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", if spec.arch == "olmoe" { "olmo" } else { "qwen2" })
        .kv("tokenizer.ggml.token_type", Value::Array(types.collect()))
        .kv("tokenizer.ggml.tokens", Value::Array(tokens.iter().map(|token| text(token)).collect()))
        .kv("tokenizer.ggml.merges", Value::Array(merges.iter().map(|merge| text(merge)).collect()))
        .kv("tokenizer.ggml.bos_token_id", id(4))
        .kv("tokenizer.ggml.eos_token_id", id(3))
        .kv("tokenizer.ggml.padding_token_id", id(2))
        .kv("tokenizer.ggml.eot_token_id", id(1))
        .kv("tokenizer.ggml.add_bos_token", Value::Bool(false))
}

/// The character that stands for a byte in byte-level vocabularies: itself where it can be printed, else the
/// next free one from U+0100 on.
fn byte_char(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&byte| !printable(byte)).count() as u32;
    char::from_u32(256 + before).unwrap()
}

struct Model<'a> {
    builder: GgufBuilder,
    random: Random,
    spec: &'a MoeSpec,
    /// Matrices have no data.
    hollow: bool,
}

impl Model<'_> {
    fn layer(&mut self, layer: u32) {
        let MoeSpec { n_embd, n_ff, n_expert, n_head, n_head_kv, .. } = *self.spec;
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        let n_kv = n_embd / n_head * n_head_kv;
        let (q_norm, k_norm) =
            if self.spec.arch == "olmoe" { (n_embd, n_kv) } else { (n_embd / n_head, n_embd / n_head) };
        self.norm(&name("attn_norm"), n_embd);
        self.matrix(&name("attn_q"), &[n_embd, n_embd]);
        self.matrix(&name("attn_k"), &[n_embd, n_kv]);
        self.matrix(&name("attn_v"), &[n_embd, n_kv]);
        self.norm(&name("attn_q_norm"), q_norm);
        self.norm(&name("attn_k_norm"), k_norm);
        self.matrix(&name("attn_output"), &[n_embd, n_embd]);
        self.norm(&name("ffn_norm"), n_embd);
        self.router(&name("ffn_gate_inp"));
        self.matrix(&name("ffn_gate_exps"), &[n_embd, n_ff, n_expert]);
        self.matrix(&name("ffn_up_exps"), &[n_embd, n_ff, n_expert]);
        self.matrix(&name("ffn_down_exps"), &[n_ff, n_embd, n_expert]);
    }

    fn norm(&mut self, name: &str, n: u32) {
        let weights: Vec<f32> = (0..n).map(|_| 1.0 + 0.1 * self.random.uniform()).collect();
        self.push(name, Dtype::F32, &[n], encode(Dtype::F32, &weights));
    }

    fn router(&mut self, name: &str) {
        let MoeSpec { n_embd, n_expert, .. } = *self.spec;
        let fan_in = (3.0 / n_embd as f32).sqrt();
        let weights: Vec<f32> = (0..n_expert)
            .flat_map(|expert| (0..n_embd).map(move |_| 2.0 * fan_in / (1.0 + 0.5 * expert as f32)))
            .map(|scale| scale * self.random.uniform())
            .collect();
        self.push(name, Dtype::F32, &[n_embd, n_expert], encode(Dtype::F32, &weights));
    }

    fn matrix(&mut self, name: &str, dims: &[u32]) {
        let dtype = self.spec.dtype;
        let n: usize = dims.iter().map(|&dim| dim as usize).product();
        let bound = (3.0 / dims[0] as f32).sqrt();
        let data = match dtype {
            _ if self.hollow => Vec::new(),
            Dtype::Q4_K | Dtype::Q5_K | Dtype::Q6_K => self.random.k_blocks(dtype, n, bound),
            _ => {
                let weights: Vec<f32> = (0..n).map(|_| bound * self.random.uniform()).collect();
                encode(dtype, &weights)
            }
        };
        self.push(name, dtype, dims, data);
    }

    fn push(&mut self, name: &str, dtype: Dtype, dims: &[u32], data: Vec<u8>) {
        let dims: Vec<u64> = dims.iter().map(|&dim| dim.into()).collect();
        self.builder = std::mem::take(&mut self.builder).tensor(name, dtype, &dims, data);
    }
}

/// Weights in a plain or 32-weight type, each block's scale from its largest weight.
pub fn encode(dtype: Dtype, weights: &[f32]) -> Vec<u8> {
    let blocks = weights.chunks_exact(dtype.block_len());
    assert!(blocks.remainder().is_empty(), "whole blocks");
    match dtype {
        Dtype::F32 => weights.iter().flat_map(|w| w.to_le_bytes()).collect(),
        Dtype::F16 => weights.iter().flat_map(|&w| f16::from_f32(w).to_le_bytes()).collect(),
        Dtype::BF16 => weights.iter().flat_map(|&w| bf16::from_f32(w).to_le_bytes()).collect(),
        Dtype::Q8_0 => blocks.flat_map(q8_0).collect(),
        Dtype::Q4_0 => blocks.flat_map(q4_0).collect(),
        other => panic!("no encoder for {other}"),
    }
}

fn scale(block: &[f32], largest_code: f32) -> f16 {
    f16::from_f32(block.iter().fold(0.0f32, |max, w| max.max(w.abs())) / largest_code)
}

fn code(weight: f32, scale: f16) -> i8 {
    if scale == f16::ZERO { 0 } else { (weight / scale.to_f32()).round() as i8 }
}

fn q8_0(block: &[f32]) -> Vec<u8> {
    let d = scale(block, 127.0);
    d.to_le_bytes().into_iter().chain(block.iter().map(|&w| code(w, d) as u8)).collect()
}

fn q4_0(block: &[f32]) -> Vec<u8> {
    let d = scale(block, 7.0);
    let nibble = |i: usize| (code(block[i], d).clamp(-8, 7) + 8) as u8;
    d.to_le_bytes().into_iter().chain((0..16).map(|i| nibble(i) | nibble(i + 16) << 4)).collect()
}

/// splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From −1 to 1.
    fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Random blocks of a K type whose weights stay about within ± `bound`.
    fn k_blocks(&mut self, dtype: Dtype, n: usize, bound: f32) -> Vec<u8> {
        let mut out = Vec::new();
        for _ in 0..n / 256 {
            let start = out.len();
            out.extend((0..dtype.block_bytes()).map(|_| self.next() as u8));
            let block = &mut out[start..];
            let mut half = |at: usize, value: f32| {
                block[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
            };
            match dtype {
                // 6-bit scales and mins; the mean of d * scale * q is that of dmin * min.
                Dtype::Q4_K => (half(0, bound / (63.0 * 8.0)), half(2, bound / 63.0)),
                Dtype::Q5_K => (half(0, bound / (63.0 * 16.0)), half(2, bound / 63.0)),
                Dtype::Q6_K => (half(208, bound / (128.0 * 32.0)), ()),
                other => panic!("{other} is no K type that is made here"),
            };
        }
        out
    }
}
