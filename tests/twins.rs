//! Options that no reference model has, each held to a twin: another file that must mean the same.

use std::path::Path;
use std::sync::Arc;

use orkpack::executor::cpu::{CpuExecutor, KernelMode};
use orkpack::model::{Model, State, Wanted, forward};
use orkpack::runtime::{DeviceChoice, Options, Runtime, Session};
use orkpack::tensor::{Dtype, Value};
use orkpack::threads::Pool;

use crate::families::{add, reference};
use crate::support::memory_source::{MemorySource, Random, SMALL};
use crate::support::models::{calibrate_beside, convert, folder, hits, model_in, request};
use crate::support::naive_forward;

const TOKENS: [u32; 24] =
    [9, 81, 3, 200, 44, 44, 17, 301, 5, 91, 250, 8, 33, 71, 12, 402, 66, 19, 150, 7, 230, 58, 61, 99];

/// Logits after the last of these tokens, in f32.
fn logits_of(source: &MemorySource, tokens: &[u32]) -> Vec<f32> {
    let model = Model::describe(source).unwrap();
    let (source, pool) = (Arc::new(source.clone()), Arc::new(Pool::new(1)));
    let mut cpu = CpuExecutor::new(source, model.weights().clone(), pool, KernelMode::Exact).unwrap();
    let (mut state, mut out) = (State::new(&model, tokens.len()), Vec::new());
    forward(&model, &mut cpu, &mut state, tokens, Wanted::Last, &mut out).unwrap();
    out
}

fn furthest(a: &MemorySource, b: &MemorySource) -> f32 {
    let (a, b) = (logits_of(a, &TOKENS), logits_of(b, &TOKENS));
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn same(a: &MemorySource, b: &MemorySource) -> bool {
    logits_of(a, &TOKENS) == logits_of(b, &TOKENS)
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn add_f32(source: &mut MemorySource, name: &str, dims: &[u64], values: &[f32]) {
    assert_eq!(dims.iter().product::<u64>(), values.len() as u64);
    add(source, name, Dtype::F32, dims, f32s(values));
}

fn random(seed: u64, n: usize) -> Vec<f32> {
    let mut random = Random(seed);
    (0..n).map(|_| 0.2 * random.next()).collect()
}

#[test]
fn llama_biases_are_added_to_q_k_v_and_the_output() {
    let plain = reference("tiny-llama-f32");
    for (part, width) in [("q", 64), ("k", 32), ("v", 32), ("output", 64)] {
        let with = |bias: Vec<f32>| {
            let mut source = plain.clone();
            let zeros = |part: &str, width: usize| if part == "q" { vec![0.0; 64] } else { vec![0.0; width] };
            for (other, width) in [("q", 64), ("k", 32), ("v", 32)] {
                let values = if other == part { bias.clone() } else { zeros(other, width) };
                add_f32(&mut source, &format!("blk.0.attn_{other}.bias"), &[width as u64], &values);
            }
            if part == "output" {
                add_f32(&mut source, "blk.0.attn_output.bias", &[64], &bias);
            }
            source
        };
        assert!(same(&plain, &with(vec![0.0; width])), "{part}: a bias of zeros");
        assert!(furthest(&plain, &with(random(3, width))) > 1e-2, "{part}");
    }
    // What every position adds to its value, every head's mean of values has too: a bias of v is one of the output.
    let bias = random(5, 32);
    let mut of_v = plain.clone();
    for (part, values) in [("q", vec![0.0; 64]), ("k", vec![0.0; 32]), ("v", bias.clone())] {
        add_f32(&mut of_v, &format!("blk.0.attn_{part}.bias"), &[values.len() as u64], &values);
    }
    let mut of_output = plain.clone();
    // Four query heads of 16 values share two key heads.
    let heads: Vec<f32> = (0..64).map(|i| bias[i / 32 * 16 + i % 16]).collect();
    let output: Vec<f32> = of_output
        .bytes_of("blk.0.attn_output.weight")
        .as_chunks::<4>()
        .0
        .iter()
        .map(|weight| f32::from_le_bytes(*weight))
        .collect();
    let moved: Vec<f32> =
        output.chunks_exact(64).map(|row| row.iter().zip(&heads).map(|(w, x)| w * x).sum()).collect();
    add_f32(&mut of_output, "blk.0.attn_output.bias", &[64], &moved);
    assert!(furthest(&of_v, &of_output) < 1e-4);
    assert!(furthest(&plain, &of_v) > 1e-2);
}

#[test]
fn llama_frequency_factors_divide_each_pairs_speed() {
    let plain = reference("tiny-llama-f32");
    let with = |factors: &[f32]| {
        let mut source = plain.clone();
        add_f32(&mut source, "rope_freqs.weight", &[8], factors);
        source
    };
    assert!(same(&plain, &with(&[1.0; 8])));
    // All of them two is what linear scaling by two is.
    let mut scaled = plain.clone();
    scaled.set("llama.rope.scaling.factor", Value::F32(2.0));
    assert!(furthest(&scaled, &with(&[2.0; 8])) < 1e-4);
    // A pair is turned by its own factor.
    let mut last = [1.0; 8];
    last[7] = 8.0;
    let mut first = [1.0; 8];
    first[0] = 8.0;
    assert!(furthest(&plain, &with(&first)) > 1e-2);
    assert!(furthest(&with(&last), &with(&first)) > 1e-2);
    let error = Model::describe(&with(&[1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0])).unwrap_err().to_string();
    assert!(error.contains("rope_freqs.weight") && error.contains("other than 0"), "{error}");
}

#[test]
fn llama_files_may_hold_shared_experts_that_are_not_used() {
    let plain = reference("tiny-llama-f32");
    let mut with = plain.clone();
    for (part, dims) in [("gate", [64, 32]), ("up", [64, 32]), ("down", [32, 64])] {
        add_f32(&mut with, &format!("blk.0.ffn_{part}_shexp.weight"), &dims, &random(7, 2048));
    }
    assert!(same(&plain, &with));
    add_f32(&mut with, "blk.0.ffn_other.weight", &[64], &random(7, 64));
    let error = Model::describe(&with).unwrap_err().to_string();
    assert!(error.contains("blk.0.ffn_other.weight"), "{error}");
}

/// Makes the routed experts of every layer yield nothing.
fn silence_experts(source: &mut MemorySource) {
    for layer in 0..2 {
        source.bytes_of(&format!("blk.{layer}.ffn_down_exps.weight")).fill(0);
    }
}

/// With the others silent, a shared expert is what a single routed one is.
#[test]
fn granites_shared_expert_is_an_expert_of_every_token() {
    let plain = reference("tiny-granitemoe-f32");
    let weights = |layer: usize, part: u64| random(11 + 3 * layer as u64 + part, 64 * 48);
    let mut shared = plain.clone();
    silence_experts(&mut shared);
    shared.set("granitemoe.expert_shared_feed_forward_length", Value::U32(48));
    let mut single = plain.clone();
    for (key, value) in [("expert_count", 1), ("expert_used_count", 1), ("feed_forward_length", 48)] {
        single.set(&format!("granitemoe.{key}"), Value::U32(value));
    }
    for layer in 0..2 {
        for (part, (name, dims)) in
            [("gate", [64, 48]), ("up", [64, 48]), ("down", [48, 64])].iter().enumerate()
        {
            let values = weights(layer, part as u64);
            add_f32(&mut shared, &format!("blk.{layer}.ffn_{name}_shexp.weight"), dims, &values);
            let stack = format!("blk.{layer}.ffn_{name}_exps.weight");
            single.remove(&stack);
            add_f32(&mut single, &stack, &[dims[0], dims[1], 1], &values);
        }
        let router = format!("blk.{layer}.ffn_gate_inp.weight");
        single.remove(&router);
        add_f32(&mut single, &router, &[64, 1], &random(2, 64));
    }
    assert!(furthest(&shared, &single) < 1e-5);
    silence_experts(&mut single);
    assert!(furthest(&shared, &single) > 1e-2, "the shared expert says something");
}

/// Without rotation a single layer's last position sees the others as a set.
#[test]
fn granite_without_rotation_sees_no_order() {
    let mut one_layer = reference("tiny-granitemoe-f32");
    one_layer.set("granitemoe.block_count", Value::U32(1));
    one_layer.tensors.retain(|tensor| !tensor.name.starts_with("blk.1."));
    let mut turned = TOKENS;
    turned[..23].rotate_left(9);
    let moved = |source: &MemorySource| {
        let (a, b) = (logits_of(source, &TOKENS), logits_of(source, &turned));
        a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    };
    assert!(moved(&one_layer) > 1e-3, "rotated heads see the order");
    one_layer.set("granitemoe.rope.scaling.finetuned", Value::Bool(false));
    assert!(moved(&one_layer) < 1e-5);
    one_layer.set("granitemoe.rope.scaling.finetuned", Value::Bool(true));
    assert!(moved(&one_layer) > 1e-3);
}

/// Puts expert `order[e]` where expert `e` was, in the tensors of one layer whose name has one of these words.
fn reorder(source: &mut MemorySource, words: &[&str]) {
    const ORDER: [usize; 8] = [3, 0, 7, 1, 6, 2, 5, 4];
    let names: Vec<String> = source.tensors.iter().map(|tensor| tensor.name.clone()).collect();
    for name in names.iter().filter(|name| words.iter().any(|word| name.contains(word))) {
        let bytes = source.bytes_of(name);
        let len = bytes.len() / ORDER.len();
        let parts: Vec<Vec<u8>> = bytes.chunks_exact(len).map(<[u8]>::to_vec).collect();
        for (e, from) in ORDER.iter().enumerate() {
            bytes[e * len..(e + 1) * len].copy_from_slice(&parts[*from]);
        }
    }
}

/// Every token's logits of a pack with all experts hot on the software NPU.
fn hot_logits(folder: &Path, source: &MemorySource) -> Vec<f32> {
    let model = model_in(folder, &source.to_gguf());
    calibrate_beside(&model, &TOKENS);
    let mut request = request(&model, hits(1 << 30));
    request.existing = orkpack::pack::Existing::Replace;
    let pack = convert(request).unwrap().1.output;
    let options = Options { device: DeviceChoice::Sim, threads: Some(1), strict: true, ..Options::default() };
    let runtime = Runtime::open(&pack, options).unwrap();
    let mut session = Session::new(&runtime, runtime.engine().unwrap(), TOKENS.len(), 1);
    let logits = TOKENS.iter().flat_map(|token| session.step(*token).unwrap().to_vec()).collect();
    let counters = session.engine().counters().unwrap();
    assert_eq!((counters.decode.hot_down, counters.fallbacks), (counters.decode.all, 0));
    logits
}

/// Experts under other numbers are the same experts, if their biases go with them; from source rows and on the NPU.
#[test]
fn case_c6_biases_travel_with_their_experts() {
    let plain = reference("tiny-gpt-oss-f32");
    let mut renamed = plain.clone();
    reorder(&mut renamed, &["ffn_gate_inp", "_exps"]);
    let mut left_behind = plain.clone();
    reorder(&mut left_behind, &["ffn_gate_inp", "_exps.weight"]);
    assert!(same(&plain, &renamed));
    assert!(furthest(&plain, &left_behind) > 1e-2);
    let [plain, renamed, left_behind] =
        [plain, renamed, left_behind].map(|source| hot_logits(folder().path(), &source));
    assert!(plain == renamed);
    assert!(plain != left_behind);
}

/// Keeps the first `keep` bytes of every row of `row` bytes.
fn narrow(source: &mut MemorySource, name: &str, row: usize, keep: usize, dims: &[u64]) {
    let kept: Vec<u8> =
        source.bytes_of(name).chunks_exact(row).flat_map(|row| row[..keep].to_vec()).collect();
    source.remove(name);
    add(source, name, Dtype::F32, dims, kept);
}

fn list(values: [u32; 2]) -> Value {
    Value::Array(values.map(Value::U32).to_vec())
}

/// A layer with half the heads is one whose other heads nobody listens to.
#[test]
fn head_counts_may_differ_from_layer_to_layer() {
    let sizes = SMALL;
    let whole = MemorySource::random("qwen3moe", sizes, 9);
    let (head, n_embd) = (sizes.head_dim, sizes.n_embd);
    let mut unheard = whole.clone();
    let output = "blk.1.attn_output.weight";
    for row in unheard.bytes_of(output).chunks_exact_mut(4 * 4 * head) {
        row[4 * 2 * head..].fill(0);
    }
    let mut halved = unheard.clone();
    for (part, heads) in [("attn_q", 2), ("attn_k", 1), ("attn_v", 1)] {
        let bytes = 4 * n_embd * heads * head;
        let dims = [n_embd as u64, (heads * head) as u64];
        narrow(&mut halved, &format!("blk.1.{part}.weight"), 2 * bytes, bytes, &dims);
    }
    narrow(&mut halved, output, 4 * 4 * head, 4 * 2 * head, &[2 * head as u64, n_embd as u64]);
    halved.set("qwen3moe.attention.head_count", list([4, 2]));
    halved.set("qwen3moe.attention.head_count_kv", list([2, 1]));
    let logits = |source: &MemorySource| logits_of(source, &TOKENS.map(|token| token % 80));
    let far = |a: Vec<f32>, b: Vec<f32>| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(far(logits(&unheard), logits(&halved)) < 1e-5);
    assert!(far(logits(&whole), logits(&halved)) > 1e-2);

    for (key, value, says) in [
        ("attention.head_count", Value::Array(vec![Value::U32(4)]), "holds 1 values"),
        ("attention.head_count", Value::Array(vec![Value::I32(-1); 2]), "holds other values"),
        ("attention.head_count", list([4, 0]), "holds 0"),
        ("expert_count", list([6, 0]), "the experts of layer 1, which has some"),
        ("expert_used_count", list([2, 7]), "holds 7, expected 1 to 6"),
    ] {
        let mut wrong = whole.clone();
        wrong.set(&format!("qwen3moe.{key}"), value);
        let error = Model::describe(&wrong).unwrap_err().to_string();
        assert!(error.contains(&format!("qwen3moe.{key}")) && error.contains(says), "{error}");
    }
}

/// The oracle takes a layer's experts from its router: it needs no count.
#[test]
fn expert_counts_and_widths_may_differ_from_layer_to_layer() {
    let mut source = MemorySource::random("qwen3moe", SMALL, 12);
    let (n_embd, n_ff) = (SMALL.n_embd as u64, 40);
    for (part, dims) in [
        ("gate_inp", vec![n_embd, 4]),
        ("gate_exps", vec![n_embd, n_ff, 4]),
        ("up_exps", vec![n_embd, n_ff, 4]),
        ("down_exps", vec![n_ff, n_embd, 4]),
    ] {
        let name = format!("blk.1.ffn_{part}.weight");
        source.remove(&name);
        let n = dims.iter().product::<u64>() as usize;
        add_f32(&mut source, &name, &dims, &random(n as u64, n));
    }
    source.set("qwen3moe.expert_count", list([6, 4]));
    source.set("qwen3moe.expert_feed_forward_length", list([SMALL.n_ff as u32, n_ff as u32]));
    let tokens = TOKENS.map(|token| token % 80);
    let ours = logits_of(&source, &tokens);
    let oracle = naive_forward::logits(&source, naive_forward::Pairs::Halves, &tokens);
    let far = ours.iter().zip(oracle.last().unwrap());
    let far = far.map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
    assert!(far < 1e-3, "{far}");
    let shape = Model::describe(&source).unwrap().shape();
    assert_eq!(shape.moe_layers.iter().map(|layer| layer.n_expert()).collect::<Vec<_>>(), [6, 4]);
    assert_eq!(shape.moe_layers[1].experts[0][2].n_in, 40);
}

/// Layers without experts may say so in the list.
#[test]
fn a_list_of_experts_has_zeros_where_layers_are_dense() {
    let mut source = MemorySource::random("qwen3moe", SMALL, 12);
    source.set("qwen3moe.expert_count", list([6, 6]));
    source.set("qwen3moe.expert_used_count", list([2, 2]));
    let tokens = TOKENS.map(|token| token % 80);
    let plain = MemorySource::random("qwen3moe", SMALL, 12);
    assert_eq!(logits_of(&source, &tokens), logits_of(&plain, &tokens));

    let mut dense = reference("tiny-llama-f32");
    for part in ["gate_inp", "gate_exps", "up_exps", "down_exps"] {
        dense.remove(&format!("blk.0.ffn_{part}.weight"));
    }
    for (part, dims) in [("gate", [64, 48]), ("up", [64, 48]), ("down", [48, 64])] {
        add_f32(&mut dense, &format!("blk.0.ffn_{part}.weight"), &dims, &random(7, 64 * 48));
    }
    dense.set("llama.expert_count", list([0, 8]));
    dense.set("llama.expert_used_count", list([0, 2]));
    dense.set("llama.feed_forward_length", list([48, 32]));
    let shape = Model::describe(&dense).unwrap().shape();
    let layers: Vec<(u32, usize)> =
        shape.moe_layers.iter().map(|layer| (layer.layer.0, layer.n_expert())).collect();
    assert_eq!(layers, [(1, 8)]);
    assert!(logits_of(&dense, &TOKENS).iter().all(|logit| logit.is_finite()));
}
