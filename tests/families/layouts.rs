//! Three ways to store the same experts: stacked, gate and up fused, one tensor per expert.

use orkpack::executor::cpu::KernelMode;
use orkpack::model::Model;
use orkpack::tensor::{Dtype, Projection, TensorSource};
use orkpack::units::{ExpertId, LayerId};

use super::{add, logits, pack, reference, small, take};
use crate::support::gguf_builder::{MoeSpec, encode};
use crate::support::memory_source::{MemorySource, SMALL};
use crate::support::models::folder;

/// The layers that have stacked experts.
fn layers(model: &MemorySource) -> Vec<usize> {
    (0..16).filter(|at| model.find(&format!("blk.{at}.ffn_up_exps.weight")).is_some()).collect()
}

/// The same model with gate and up of each expert side by side, `first` first.
pub fn fused(mut model: MemorySource, first: &str, second: &str) -> MemorySource {
    for at in layers(&model) {
        let name = |projection: &str| format!("blk.{at}.ffn_{projection}_exps.weight");
        let ((info, first), (_, second)) = (take(&mut model, &name(first)), take(&mut model, &name(second)));
        let [n_embd, n_ff, n] = info.dims[..] else { panic!("{:?}", info.dims) };
        let len = first.len() / n as usize;
        let pairs = first.chunks(len).zip(second.chunks(len));
        let data = pairs.flat_map(|(a, b)| [a, b].concat()).collect();
        add(&mut model, &name("gate_up"), info.dtype, &[n_embd, 2 * n_ff, n], data);
    }
    model
}

/// The same model with a tensor for each expert, the last expert first.
pub fn one_each(mut model: MemorySource) -> MemorySource {
    for at in layers(&model) {
        for projection in ["gate", "up", "down"] {
            let (info, data) = take(&mut model, &format!("blk.{at}.ffn_{projection}_exps.weight"));
            let [n_in, n_out, n] = info.dims[..] else { panic!("{:?}", info.dims) };
            for (expert, data) in data.chunks(data.len() / n as usize).enumerate().rev() {
                let name = format!("blk.{at}.ffn_{projection}.{expert}.weight");
                add(&mut model, &name, info.dtype, &[n_in, n_out], data.to_vec());
            }
        }
    }
    model
}

fn fingerprint(model: &MemorySource) -> String {
    Model::describe(model).unwrap().fingerprint(model).unwrap()
}

/// Models of all families, and of types of whole and of partial rows.
fn models() -> Vec<(&'static str, MemorySource)> {
    let references = [
        "granitemoe-f32",
        "gpt-oss-f32",
        "lfm2moe-q8_0",
        "llama-f32",
        "olmoe-bf16",
        "qwen2moe-f32",
        "qwen3moe-q4_0",
    ];
    let references = references.map(|name| (name, reference(&format!("tiny-{name}"))));
    references.into_iter().chain([("random", MemorySource::random("qwen3moe", SMALL, 3))]).collect()
}

fn is_the_same_model(twin: fn(MemorySource) -> MemorySource) {
    for (name, stacked) in models() {
        let twin = twin(stacked.clone());
        assert!(layers(&twin).is_empty() && !layers(&stacked).is_empty(), "{name}");
        for mode in [KernelMode::Fast, KernelMode::Exact] {
            assert!(logits(&twin, mode) == logits(&stacked, mode), "{name} {mode:?}: other logits");
        }
        assert_eq!(fingerprint(&twin), fingerprint(&stacked), "{name}");
        let shape = |model| Model::describe(model).unwrap().shape();
        assert_eq!(shape(&twin), shape(&stacked), "{name}");
    }
}

#[test]
fn c1_one_tensor_per_expert_is_the_same_model() {
    is_the_same_model(one_each);
}

#[test]
fn c4_fused_gate_and_up_is_the_same_model() {
    is_the_same_model(|model| fused(model, "gate", "up"));
}

#[test]
fn c1_c2_c4_every_layout_gives_the_same_statistics_plan_and_npu_area() {
    for dtype in [Dtype::F32, Dtype::Q8_0] {
        let stacked = small(MoeSpec { dtype, ..MoeSpec::default() });
        let made = |model: &MemorySource| pack(folder().path(), model, None);
        let expected = made(&stacked);
        assert!(!expected.area.is_empty() && !expected.scales.is_empty());
        for (name, twin) in [("fused", fused(stacked.clone(), "gate", "up")), ("one each", one_each(stacked))]
        {
            let found = made(&twin);
            assert!(found.statistics == expected.statistics, "{name} {dtype}: statistics");
            assert!(found.plan == expected.plan, "{name} {dtype}: plan");
            assert!(found.area == expected.area, "{name} {dtype}: NPU area");
            assert!(found.scales == expected.scales, "{name} {dtype}: scales");
        }
    }
}

/// Every gate weight 1, every up weight 2: what the description calls gate must be the ones.
#[test]
fn c4_gate_comes_first_in_a_fused_tensor() {
    for (first, second, gate) in [("gate", "up", 1.0f32), ("up", "gate", 2.0)] {
        let mut model = MemorySource::random("qwen3moe", SMALL, 3);
        for at in layers(&model) {
            for (projection, value) in [("gate", 1.0f32), ("up", 2.0)] {
                let bytes = model.bytes_of(&format!("blk.{at}.ffn_{projection}_exps.weight"));
                bytes.chunks_exact_mut(4).for_each(|weight| weight.copy_from_slice(&value.to_le_bytes()));
            }
        }
        let model = fused(model, first, second);
        let table = Model::describe(&model).unwrap();
        let bank = table.weights().bank(LayerId(1)).unwrap();
        let holds = |weight: &orkpack::executor::Weight, value: f32| {
            assert_eq!((weight.n_in, weight.n_out), (SMALL.n_embd, SMALL.n_ff));
            let bytes = model.bytes(weight.place).unwrap();
            assert!(bytes.chunks_exact(4).all(|weight| weight == value.to_le_bytes()));
        };
        bank.gate.iter().for_each(|weight| holds(weight, gate));
        bank.up.iter().for_each(|weight| holds(weight, 3.0 - gate));
    }
}

/// Each expert's projections in types of their own give what their dequantised values give.
#[test]
fn c1_types_may_differ_from_expert_to_expert_and_projection_to_projection() {
    let types = [Dtype::F32, Dtype::F16, Dtype::Q8_0, Dtype::Q4_0, Dtype::BF16];
    let plain = one_each(small(MoeSpec::default()));
    let (mut mixed, mut rounded) = (plain.clone(), plain);
    let names: Vec<String> = mixed.tensors.iter().map(|tensor| tensor.name.clone()).collect();
    let is_expert = |name: &&String| name.matches('.').count() == 4;
    for (i, name) in names.iter().filter(is_expert).enumerate() {
        let dtype = types[(i + i / 8) % types.len()];
        let (info, data) = take(&mut mixed, name);
        let values: Vec<f32> =
            data.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let encoded = encode(dtype, &values);
        let mut back = vec![0.0; values.len()];
        orkpack::blocks::dequantize(dtype, &encoded, &mut back).unwrap();
        add(&mut mixed, name, dtype, &info.dims, encoded);
        *rounded.bytes_of(name) = encode(Dtype::F32, &back);
    }
    let model = Model::describe(&mixed).unwrap();
    let bank = model.weights().bank(LayerId(0)).unwrap();
    for projection in Projection::ALL {
        let of = |expert| bank.weight(ExpertId(expert), projection).unwrap().dtype;
        assert!((1..8).any(|expert| of(expert) != of(0)), "{projection:?}");
    }
    assert!(logits(&mixed, KernelMode::Exact) == logits(&rounded, KernelMode::Exact));
    logits(&mixed, KernelMode::Fast);
    // With the same statistics the same experts are chosen; their codes come from the same numbers.
    let mixed = pack(folder().path(), &mixed, None);
    let rounded = pack(folder().path(), &rounded, Some(&mixed.statistics));
    assert!(!mixed.area.is_empty());
    assert!(mixed.area == rounded.area && mixed.scales == rounded.scales);
}

#[test]
fn c1_a_missing_or_surplus_expert_is_named() {
    let model = one_each(MemorySource::random("qwen3moe", SMALL, 3));
    let refused = |spoil: fn(&mut MemorySource)| {
        let mut model = model.clone();
        spoil(&mut model);
        Model::describe(&model).unwrap_err().to_string()
    };
    for (spoil, says) in [
        (
            (|model| model.remove("blk.0.ffn_up.3.weight")) as fn(&mut MemorySource),
            "tensor `blk.0.ffn_up.3.weight` is missing",
        ),
        (|model| model.remove("blk.1.ffn_down.0.weight"), "tensor `blk.1.ffn_down.0.weight` is missing"),
        (|model| model.remove("blk.0.ffn_gate.5.weight"), "tensor `blk.0.ffn_gate.5.weight` is missing"),
        (
            |model| model.tensors.retain(|tensor| !tensor.name.starts_with("blk.0.ffn_up.")),
            "tensor `blk.0.ffn_up_exps.weight` is missing",
        ),
        (
            |model| model.tensor("blk.0.ffn_up.3.weight").name = "blk.0.ffn_up.6.weight".to_owned(),
            "tensor `blk.0.ffn_up.3.weight` is missing",
        ),
        (
            |model| add(model, "blk.0.ffn_up.6.weight", Dtype::F32, &[1], vec![0; 4]),
            "tensor `blk.0.ffn_up.6.weight` is not part of architecture qwen3moe",
        ),
        (
            |model| model.tensor("blk.0.ffn_up.3.weight").dims = vec![24, 48],
            "tensor `blk.0.ffn_up.3.weight` has shape [24, 48], expected [48, 24]",
        ),
    ] {
        assert_eq!(refused(spoil), says);
    }
}

#[test]
fn c4_a_fused_tensor_of_another_shape_is_refused() {
    let mut model = fused(MemorySource::random("qwen3moe", SMALL, 3), "gate", "up");
    model.tensor("blk.0.ffn_gate_up_exps.weight").dims = vec![48, 24, 12];
    let says = "tensor `blk.0.ffn_gate_up_exps.weight` has shape [48, 24, 12], expected [48, 48, 6]";
    assert_eq!(Model::describe(&model).unwrap_err().to_string(), says);
    let mut model = fused(MemorySource::random("qwen3moe", SMALL, 3), "gate", "up");
    add(&mut model, "blk.1.ffn_up_exps.weight", Dtype::F32, &[1], vec![0; 4]);
    let says = "tensor `blk.1.ffn_up_exps.weight` is not part of architecture qwen3moe";
    assert_eq!(Model::describe(&model).unwrap_err().to_string(), says);
}
