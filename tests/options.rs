//! Every option of a family counts: a file in which it says something else no longer gives the reference's logits. That
//! it counts in the right way is what tests/reference.rs says; together no option can be read past or misread.

use std::collections::BTreeMap;
use std::sync::Arc;

use orkpack::executor::cpu::{CpuExecutor, KernelMode};
use orkpack::model::{Model, State, Wanted, forward};
use orkpack::tensor::Value;
use orkpack::threads::Pool;

use crate::support::memory_source::MemorySource;
use crate::support::reference::{Reference, bundled};

/// A change of a file.
enum Change {
    /// The key, without the family's name, holds this.
    Key(&'static str, Value),
    /// The first values of a tensor become these; the others repeat them.
    Tensor(&'static str, &'static [f32]),
    /// A tensor's values in reverse.
    Reverse(&'static str),
}
use Change::{Key, Reverse, Tensor};

const ZEROS: &[f32] = &[0.0];

/// Twice what two runs within the reference test's tolerance could be apart.
const MOVED: f32 = 4e-3;

fn options() -> Vec<(&'static str, Vec<Change>)> {
    let f32 = Value::F32;
    let everywhere = |family| {
        (family, vec![Key("rope.freq_base", f32(2000.0)), Key("attention.layer_norm_rms_epsilon", f32(0.1))])
    };
    vec![
        everywhere("qwen3moe"),
        everywhere("olmoe"),
        everywhere("llama"),
        everywhere("granitemoe"),
        everywhere("qwen2moe"),
        everywhere("lfm2moe"),
        everywhere("gpt-oss"),
        everywhere("qwen35moe"),
        everywhere("qwen3next"),
        ("qwen35moe", delta_net(&["blk.0.ssm_beta.weight", "blk.0.ssm_alpha.weight"])),
        ("qwen3next", delta_net(&["blk.0.ssm_ba.weight"])),
        everywhere("deepseek2"),
        (
            "qwen3moe",
            vec![
                Tensor("blk.0.attn_q_norm.weight", &[1.0, 3.0]),
                Tensor("blk.1.attn_k_norm.weight", &[1.0, 3.0]),
                Key("expert_used_count", Value::U32(1)),
                Key("expert_weights_scale", f32(2.0)),
                Key("rope.scaling.factor", f32(4.0)),
            ],
        ),
        (
            "olmoe",
            vec![
                Tensor("blk.0.attn_q_norm.weight", &[1.0, 3.0]),
                Tensor("blk.1.attn_k_norm.weight", &[1.0, 3.0]),
                Key("expert_weights_scale", f32(2.0)),
            ],
        ),
        (
            "llama",
            vec![
                Key("rope.scaling.factor", f32(4.0)),
                Key("rope.dimension_count", Value::U32(8)),
                Key("attention.scale", f32(0.5)),
            ],
        ),
        (
            "granitemoe",
            vec![
                Key("embedding_scale", f32(6.0)),
                Key("residual_scale", f32(0.4)),
                Key("attention.scale", f32(0.5)),
                Key("logit_scale", f32(3.0)),
                Key("rope.scaling.finetuned", Value::Bool(false)),
            ],
        ),
        (
            "qwen2moe",
            vec![
                Tensor("blk.0.attn_q.bias", ZEROS),
                Tensor("blk.0.attn_k.bias", ZEROS),
                Tensor("blk.0.attn_v.bias", ZEROS),
                Tensor("blk.0.ffn_gate_inp_shexp.weight", ZEROS),
                Tensor("blk.1.ffn_down_shexp.weight", ZEROS),
            ],
        ),
        (
            "lfm2moe",
            vec![
                Tensor("blk.1.exp_probs_b.bias", ZEROS),
                Key("expert_gating_func", Value::U32(1)),
                Key("expert_weights_scale", f32(2.0)),
                Reverse("blk.0.shortconv.conv.weight"),
            ],
        ),
        (
            "deepseek2",
            vec![
                Tensor("blk.0.attn_q_a_norm.weight", &[1.0, 3.0]),
                Tensor("blk.1.attn_kv_a_norm.weight", &[1.0, 3.0]),
                Reverse("blk.0.attn_k_b.weight"),
                Reverse("blk.2.attn_v_b.weight"),
                Tensor("blk.0.ffn_down.weight", ZEROS),
                Tensor("blk.1.ffn_down_shexp.weight", ZEROS),
                Tensor("blk.1.exp_probs_b.bias", ZEROS),
                Key("expert_gating_func", Value::U32(1)),
                Key("expert_group_count", Value::U32(1)),
                Key("expert_group_used_count", Value::U32(4)),
                Key("expert_weights_norm", Value::Bool(false)),
                Key("expert_weights_scale", f32(1.0)),
                Key("rope.scaling.factor", f32(4.0)),
            ],
        ),
        (
            "gpt-oss",
            vec![
                Tensor("blk.0.attn_q.bias", ZEROS),
                Tensor("blk.0.attn_k.bias", ZEROS),
                Tensor("blk.0.attn_v.bias", ZEROS),
                Tensor("blk.0.attn_output.bias", ZEROS),
                Tensor("blk.0.attn_sinks.weight", &[-100.0]),
                Tensor("blk.1.attn_sinks.weight", &[-100.0]),
                Tensor("blk.0.ffn_gate_inp.bias", ZEROS),
                Tensor("blk.0.ffn_gate_exps.bias", ZEROS),
                Tensor("blk.0.ffn_up_exps.bias", ZEROS),
                Tensor("blk.0.ffn_down_exps.bias", ZEROS),
                Reverse("blk.1.ffn_down_exps.bias"),
                Key("attention.sliding_window", Value::U32(17)),
                Key("attention.sliding_window_pattern", Value::U32(1)),
                Key(
                    "attention.sliding_window_pattern",
                    Value::Array(vec![Value::Bool(false), Value::Bool(true)]),
                ),
                Key("rope.scaling.type", Value::String(b"linear".to_vec())),
                Key("rope.scaling.factor", f32(8.0)),
                Key("rope.scaling.original_context_length", Value::U32(128)),
                Key("rope.scaling.yarn_beta_fast", f32(2.0)),
                Key("rope.scaling.yarn_beta_slow", f32(0.001)),
                Key("rope.scaling.yarn_ext_factor", f32(0.0)),
                Key("rope.scaling.yarn_attn_factor", f32(0.5)),
                Key("rope.scaling.attn_factor", f32(0.5)),
            ],
        ),
    ]
}

/// Of the two families whose recurrent layers differ in how their rates lie.
fn delta_net(rates: &[&'static str]) -> Vec<Change> {
    let rates = rates.iter().map(|name| Tensor(name, ZEROS));
    let others = [
        Reverse("blk.0.ssm_conv1d.weight"),
        Reverse("blk.0.ssm_a"),
        Reverse("blk.0.ssm_dt.bias"),
        Tensor("blk.1.ssm_norm.weight", &[1.0, 3.0]),
        Tensor("blk.2.attn_gate.weight", &[0.1]),
        Tensor("blk.3.attn_q_norm.weight", &[1.0, 3.0]),
        Tensor("blk.3.attn_k_norm.weight", &[1.0, 3.0]),
        Tensor("blk.0.ffn_gate_inp_shexp.weight", ZEROS),
        Tensor("blk.1.ffn_down_shexp.weight", ZEROS),
        Key("rope.dimension_count", Value::U32(4)),
        Key("expert_weights_scale", Value::F32(2.0)),
    ];
    rates.chain(others).collect()
}

impl Change {
    fn apply(&self, family: &str, source: &mut MemorySource) -> String {
        match self {
            Key(key, value) => {
                source.set(&format!("{family}.{key}"), value.clone());
                format!("{key} = {value:?}")
            }
            Tensor(name, values) => {
                let (numbers, _) = source.bytes_of(name).as_chunks_mut::<4>();
                let repeated = values.iter().cycle();
                numbers.iter_mut().zip(repeated).for_each(|(number, value)| *number = value.to_le_bytes());
                format!("{name} = {values:?} …")
            }
            Reverse(name) => {
                source.bytes_of(name).as_chunks_mut::<4>().0.reverse();
                format!("{name} reversed")
            }
        }
    }
}

/// Logits after the prompt, in f32.
fn logits(source: MemorySource, prompt: &[u32]) -> Vec<f32> {
    let model = Model::describe(&source).unwrap();
    let (source, pool) = (Arc::new(source), Arc::new(Pool::new(1)));
    let mut executor = CpuExecutor::new(source, model.weights().clone(), pool, KernelMode::Exact).unwrap();
    let (mut state, mut out) = (State::new(&model, prompt.len()), Vec::new());
    forward(&model, &mut executor, &mut state, prompt, Wanted::Last, &mut out).unwrap();
    out
}

fn furthest(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn a_file_that_says_otherwise_is_another_model() {
    let references: BTreeMap<String, Reference> = bundled()
        .into_iter()
        .filter(|reference| reference.is_f32())
        .map(|reference| (reference.model.architecture().to_owned(), reference))
        .collect();
    for (family, changes) in options() {
        let reference = &references[family];
        let (prompt, expected) = (reference.prompt(), reference.exact_logits());
        for change in changes {
            let mut source = MemorySource::copy(&*reference.file);
            let what = change.apply(family, &mut source);
            let moved = furthest(&logits(source, &prompt), &expected);
            assert!(moved > MOVED, "{family}: {what} moves logits by {moved} only");
        }
    }
}
