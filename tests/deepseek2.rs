//! Attention over latents: both layouts of its matrices, compressed queries, where YaRN's correction goes, and what is
//! refused. The reference models are in `reference`.

use std::sync::Arc;

use orkpack::bytes::{Io, Limits};
use orkpack::executor::Executor;
use orkpack::executor::cpu::{CpuExecutor, KernelMode};
use orkpack::gguf::GgufFile;
use orkpack::model::{Model, State, Wanted, forward};
use orkpack::tensor::{Dtype, Place, TensorInfo, TensorSource, Value};
use orkpack::threads::Pool;

use crate::support::fixture;
use crate::support::memory_source::{MemorySource, Random};
use crate::support::naive_deepseek2::{self as naive, Rules};
use crate::support::naive_executor::NaiveExecutor;

fn tokens(n: usize) -> Vec<u32> {
    let mut random = Random(7);
    (0..n).map(|_| (random.bits() % naive::N_VOCAB as u64) as u32).collect()
}

fn logits_of(model: &Model, executor: &mut dyn Executor, tokens: &[u32], micro_batch: usize) -> Vec<f32> {
    let mut state = State::new(model, tokens.len());
    let (mut all, mut out) = (Vec::new(), Vec::new());
    for batch in tokens.chunks(micro_batch) {
        forward(model, executor, &mut state, batch, Wanted::All, &mut out).unwrap();
        all.extend_from_slice(&out);
    }
    all
}

fn naive_logits(source: &MemorySource, tokens: &[u32]) -> Vec<f32> {
    let model = Model::describe(source).unwrap();
    logits_of(&model, &mut NaiveExecutor::new(source, model.weights()), tokens, 64)
}

fn number(source: &MemorySource, key: &str) -> usize {
    source.metadata.u32(&format!("deepseek2.{key}")).unwrap() as usize
}

fn set(source: &mut MemorySource, key: &str, value: usize) {
    source.set(&format!("deepseek2.{key}"), Value::U32(value as u32));
}

/// The same model with the matrices of each layer in one, as older files have them.
fn expanded(source: &MemorySource) -> MemorySource {
    let mut twin = source.clone();
    let [key, value] = ["attention.key_length_mla", "attention.value_length_mla"].map(|key| {
        twin.metadata.0.remove(&format!("deepseek2.{key}"));
        number(source, key)
    });
    let (n_rank, n_head) = (number(source, "attention.kv_lora_rank"), number(source, "attention.head_count"));
    set(&mut twin, "attention.key_length", key);
    set(&mut twin, "attention.value_length", value);
    set(&mut twin, "attention.head_count_kv", n_head);
    let n_nope = key - number(source, "rope.dimension_count");
    for layer in 0..number(source, "block_count") {
        let [k, v] = ["attn_k_b", "attn_v_b"].map(|part| {
            let name = format!("blk.{layer}.{part}.weight");
            twin.remove(&name);
            floats(source, &name)
        });
        let mut both = Vec::new();
        for head in 0..n_head {
            for j in 0..n_nope {
                both.extend((0..n_rank).map(|i| k[(head * n_rank + i) * n_nope + j]));
            }
            both.extend_from_slice(&v[head * value * n_rank..(head + 1) * value * n_rank]);
        }
        let data: Vec<u8> = both.into_iter().flat_map(f32::to_le_bytes).collect();
        let dims = vec![n_rank as u64, (n_head * (n_nope + value)) as u64];
        let place = Place { file: 0, offset: 0, len: 0 };
        let name = format!("blk.{layer}.attn_kv_b.weight");
        twin.add(TensorInfo { name, dtype: Dtype::F32, dims, place }, data);
    }
    twin
}

fn floats(source: &MemorySource, name: &str) -> Vec<f32> {
    let bytes = source.bytes(source.find(name).unwrap().place).unwrap();
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// Of each position, how far apart the logits are.
fn distances(ours: &[f32], theirs: &[Vec<f64>]) -> Vec<f64> {
    let rows = ours.chunks_exact(ours.len() / theirs.len()).zip(theirs);
    rows.map(|(ours, theirs)| {
        ours.iter().zip(theirs).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max)
    })
    .collect()
}

fn furthest(distances: &[f64]) -> f64 {
    distances.iter().copied().fold(0.0, f64::max)
}

/// Every layout, with and without compressed queries.
fn every_form() -> Vec<(&'static str, MemorySource)> {
    let (compressed, direct) = (naive::random(true, 3), naive::random(false, 4));
    vec![
        ("expanded, compressed", expanded(&compressed)),
        ("expanded, direct", expanded(&direct)),
        ("absorbed, compressed", compressed),
        ("absorbed, direct", direct),
    ]
}

/// A rotation of the wrong pairs would pass for a few positions, so the comparison goes past position 100.
#[test]
fn logits_are_what_the_equations_say_at_every_position() {
    let tokens = tokens(140);
    for (name, source) in every_form() {
        let ours = naive_logits(&source, &tokens);
        // Sums in f32, of some hundred terms, against sums in f64.
        let far = furthest(&distances(&ours, &naive::logits(&source, &Rules::plain(), &tokens)));
        assert!(far < 1e-4, "{name}: {far}");
        let halves = Rules { neighbours: false, ..Rules::plain() };
        let wrong = &distances(&ours, &naive::logits(&source, &halves, &tokens))[100..];
        assert!(wrong.iter().all(|far| *far > 0.02), "{name}: {wrong:?}");
    }
}

#[test]
fn the_reference_model_gives_the_same_logits_in_the_older_layout() {
    let path = fixture("models/reference/tiny-deepseek2-f32.gguf");
    let file = GgufFile::open(&path, Io::Map, &Limits::default()).unwrap();
    let source = MemorySource::copy(&file);
    let tokens = tokens(60);
    let [absorbed, expanded] =
        [source.clone(), expanded(&source)].map(|source| naive_logits(&source, &tokens));
    // The same products, summed in another order.
    let far = absorbed.iter().zip(&expanded).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(far > 0.0 && far < 1e-4, "{far}");
}

#[test]
fn neither_the_cut_into_calls_nor_the_threads_change_a_bit() {
    let tokens = tokens(40);
    for (name, source) in every_form() {
        let model = Model::describe(&source).unwrap();
        let source: Arc<dyn TensorSource> = Arc::new(source);
        for mode in [KernelMode::Exact, KernelMode::Fast] {
            let logits = |n_threads, micro_batch| {
                let pool = Arc::new(Pool::new(n_threads));
                let weights = model.weights().clone();
                let mut executor = CpuExecutor::new(source.clone(), weights, pool, mode).unwrap();
                let logits = logits_of(&model, &mut executor, &tokens, micro_batch);
                logits.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
            };
            let whole = logits(1, 40);
            for (n_threads, micro_batch) in [(1, 1), (1, 7), (3, 40), (3, 7), (3, 1)] {
                let same = logits(n_threads, micro_batch) == whole;
                assert!(same, "{name}: {n_threads} threads, {micro_batch} rows");
            }
        }
    }
}

/// Of the latents a position keeps each once, whatever the heads; of heads that are expanded, all.
#[test]
fn a_position_adds_what_the_layout_caches() {
    use naive::{N_HEAD, N_NOPE, N_RANK, N_ROT, N_VALUE};
    let absorbed = naive::random(true, 1);
    let expanded = expanded(&absorbed);
    let heads = N_HEAD * (N_NOPE + N_ROT + N_VALUE);
    for (source, per_layer) in [(absorbed, N_RANK + N_ROT), (expanded, heads)] {
        let shape = Model::describe(&source).unwrap().shape();
        assert_eq!(shape.kv_bytes_per_token, 2 * 3 * per_layer as u64);
        // Read by each token: everything but experts and the other rows of the embedding.
        let unread = |name: &str| name.contains("_exps") || name == "token_embd.weight";
        let tensors = source.tensors.iter().filter(|tensor| !unread(&tensor.name));
        let read: u64 = tensors.map(|tensor| tensor.place.len).sum();
        assert_eq!(shape.dense_bytes, read + 4 * naive::N_EMBD as u64);
    }
}

/// A factor of 40 over 4096 positions, by hand: with a base of 10,000 and eight values, pairs 0 and 1 turn more than
/// 32 times in these and keep their speed (8 · ln(4096 / 64π) / (2 ln 10000) = 1.31, rounded down), pair 3 turns less
/// than once (2.81, rounded up) and is slowed by 40, and pair 2 is half-way: (1 + 1/40) / 2.
const YARN_SPEEDS: [f64; 4] = [1.0, 0.1, 0.01 * 0.5125, 0.001 / 40.0];

fn yarn(multiplier: Option<f32>, attn_factor: Option<f32>) -> MemorySource {
    let mut source = naive::random(true, 11);
    source.set("deepseek2.rope.scaling.type", Value::String("yarn".into()));
    set(&mut source, "rope.scaling.original_context_length", 4096);
    let floats = [("factor", Some(40.0)), ("yarn_log_multiplier", multiplier), ("attn_factor", attn_factor)];
    for (key, value) in floats.into_iter().filter_map(|(key, value)| Some((key, value?))) {
        source.set(&format!("deepseek2.rope.scaling.{key}"), Value::F32(value));
    }
    source
}

#[test]
fn yarn_corrects_scores_and_leaves_heads_their_magnitude() {
    let tokens = tokens(140);
    let plain = Rules::plain();
    // 1 + 0.0707 ln 40, and 1 + 0.1 ln 40.
    let (corrected, whole) = (1.260_803_777, 1.368_887_945);
    let rules = |magnitude: f64, correction: f64| Rules {
        speeds: YARN_SPEEDS.to_vec(),
        magnitude,
        scale: correction * correction / 20f64.sqrt(),
        ..plain.clone()
    };
    for (multiplier, attn_factor, right) in [
        (Some(0.0707), None, rules(1.0, corrected)),
        (Some(0.1), None, rules(1.0, whole)),
        (Some(0.0707), Some(1.5), rules(1.5, 1.5 * corrected)),
        (None, None, rules(whole, 1.0)),
    ] {
        let ours = naive_logits(&yarn(multiplier, attn_factor), &tokens);
        let far = |rules: &Rules| {
            furthest(&distances(&ours, &naive::logits(&naive::random(true, 11), rules, &tokens)))
        };
        let name = format!("{multiplier:?} {attn_factor:?}");
        assert!(far(&right) < 1e-4, "{name}: {}", far(&right));
        for wrong in [
            Rules { speeds: plain.speeds.clone(), ..right.clone() },
            Rules { magnitude: right.magnitude * 1.1, ..right.clone() },
            Rules { scale: right.scale * 1.1, ..right.clone() },
        ] {
            assert!(far(&wrong) > 0.01, "{name}: {} of {wrong:?}", far(&wrong));
        }
    }
}

/// One thing wrong with a model, and what the error must say.
struct Refusal {
    spoil: fn(&mut MemorySource),
    says: &'static str,
}

const REFUSALS: &[Refusal] = &[
    Refusal {
        spoil: |s| drop(s.metadata.0.remove("deepseek2.attention.kv_lora_rank")),
        says: "metadata key `deepseek2.attention.kv_lora_rank` is missing",
    },
    Refusal {
        spoil: |s| set(s, "attention.kv_lora_rank", 0),
        says: "metadata key `deepseek2.attention.kv_lora_rank` holds 0, expected 1 to 16777216",
    },
    Refusal {
        spoil: |s| set(s, "attention.kv_lora_rank", 21),
        says: "metadata key `deepseek2.attention.key_length` holds 28, expected 29, as the latents",
    },
    Refusal {
        spoil: |s| set(s, "attention.value_length", 19),
        says: "metadata key `deepseek2.attention.value_length` holds 19, expected 20, as the latents",
    },
    Refusal {
        spoil: |s| drop(s.metadata.0.remove("deepseek2.attention.key_length_mla")),
        says: "metadata key `deepseek2.attention.key_length_mla` is missing",
    },
    Refusal {
        spoil: |s| drop(s.metadata.0.remove("deepseek2.attention.value_length_mla")),
        says: "metadata key `deepseek2.attention.value_length_mla` is missing",
    },
    Refusal {
        spoil: |s| set(s, "attention.value_length_mla", 0),
        says: "metadata key `deepseek2.attention.value_length_mla` holds 0, expected 1 to 16777216",
    },
    Refusal {
        spoil: |s| drop(s.metadata.0.remove("deepseek2.rope.dimension_count")),
        says: "metadata key `deepseek2.rope.dimension_count` is missing",
    },
    Refusal {
        spoil: |s| set(s, "rope.dimension_count", 20),
        says: "metadata key `deepseek2.rope.dimension_count` holds 20, expected an even number below 20",
    },
    Refusal {
        spoil: |s| set(s, "rope.dimension_count", 7),
        says: "metadata key `deepseek2.rope.dimension_count` holds 7, expected an even number below 20",
    },
    Refusal {
        spoil: |s| set(s, "attention.head_count_kv", 3),
        says: "metadata key `deepseek2.attention.head_count_kv` holds 3, expected 1",
    },
    Refusal {
        spoil: |s| s.set("deepseek2.attention.temperature_scale", Value::F32(0.1)),
        says: "metadata key `deepseek2.attention.temperature_scale` holds 0.1, expected none: scores by position are not supported",
    },
    Refusal {
        spoil: |s| *s = yarn(Some(f32::NAN), None),
        says: "metadata key `deepseek2.rope.scaling.yarn_log_multiplier` holds NaN, expected a finite float",
    },
    Refusal {
        spoil: |s| set(s, "expert_group_count", 5),
        says: "metadata key `deepseek2.expert_group_count` holds 5, expected a divisor of 12",
    },
    Refusal {
        spoil: |s| set(s, "expert_group_count", 24),
        says: "metadata key `deepseek2.expert_group_count` holds 24, expected a divisor of 12",
    },
    Refusal {
        spoil: |s| set(s, "expert_group_count", 4),
        says: "metadata key `deepseek2.expert_group_used_count` is missing",
    },
    Refusal {
        spoil: |s| {
            set(s, "expert_group_count", 6);
            set(s, "expert_group_used_count", 1);
        },
        says: "metadata key `deepseek2.expert_group_used_count` holds 1, expected 2 to 6",
    },
    Refusal {
        spoil: |s| {
            set(s, "expert_group_count", 4);
            set(s, "expert_group_used_count", 5);
        },
        says: "metadata key `deepseek2.expert_group_used_count` holds 5, expected 1 to 4",
    },
    Refusal {
        spoil: |s| set(s, "expert_gating_func", 4),
        says: "metadata key `deepseek2.expert_gating_func` holds 4, expected 1 (softmax), 2 (sigmoid) or 3 (softmax of the chosen)",
    },
    Refusal {
        spoil: |s| set(s, "expert_shared_count", 1),
        says: "tensor `blk.1.ffn_gate_shexp.weight` has shape [40, 48], expected [40, 24]",
    },
    Refusal {
        spoil: |s| set(s, "expert_shared_count", 0),
        says: "tensor `blk.1.ffn_gate_shexp.weight` is not part of architecture deepseek2",
    },
    Refusal {
        spoil: |s| set(s, "leading_dense_block_count", 2),
        says: "tensor `blk.1.ffn_gate.weight` is missing",
    },
    Refusal {
        spoil: |s| drop(s.metadata.0.remove("deepseek2.leading_dense_block_count")),
        says: "tensor `blk.0.ffn_gate_exps.weight` is missing",
    },
    Refusal {
        spoil: |s| drop(s.metadata.0.remove("deepseek2.attention.q_lora_rank")),
        says: "tensor `blk.0.attn_q.weight` is missing",
    },
    Refusal {
        spoil: |s| s.remove("blk.2.attn_v_b.weight"),
        says: "tensor `blk.2.attn_v_b.weight` is missing",
    },
    Refusal {
        spoil: |s| s.tensor("blk.1.attn_k_b.weight").dims = vec![20, 12, 3],
        says: "tensor `blk.1.attn_k_b.weight` has shape [20, 12, 3], expected [12, 20, 3]",
    },
    Refusal {
        spoil: |s| *s.tensor("blk.0.attn_kv_a_norm.weight") = s.tensor("blk.0.attn_q_a_norm.weight").clone(),
        says: "tensor `blk.0.attn_kv_a_norm.weight` is missing",
    },
    Refusal {
        spoil: |s| s.push(&mut Random(1), "blk.2.exp_probs_b.bias", &[11]),
        says: "tensor `blk.2.exp_probs_b.bias` has shape [11], expected [12]",
    },
    Refusal {
        spoil: |s| {
            *s = expanded(s);
            s.remove("blk.1.attn_kv_b.weight");
        },
        says: "tensor `blk.1.attn_kv_b.weight` is missing",
    },
    Refusal {
        spoil: |s| {
            *s = expanded(s);
            set(s, "attention.head_count_kv", 1);
        },
        says: "metadata key `deepseek2.attention.head_count_kv` holds 1, expected 3",
    },
    Refusal {
        spoil: |s| {
            *s = expanded(s);
            set(s, "attention.value_length", 9);
        },
        says: "tensor `blk.0.attn_kv_b.weight` has shape [20, 66], expected [20, 63]",
    },
];

#[test]
fn a_model_with_one_thing_wrong_is_refused_by_name() {
    for Refusal { spoil, says } in REFUSALS {
        let mut source = naive::random(true, 1);
        spoil(&mut source);
        match Model::describe(&source) {
            Ok(_) => panic!("accepted: {says}"),
            Err(error) => assert_eq!(error.to_string(), *says),
        }
    }
}
