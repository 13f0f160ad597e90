//! From router logits to experts and weights: ties, broken numbers, the styles of the families.

use std::sync::Arc;

use orkpack::executor::cpu::{CpuExecutor, KernelMode};
use orkpack::model::{ForwardError, Model, State, Wanted, forward};
use orkpack::tensor::{TensorSource, Value};
use orkpack::threads::Pool;
use orkpack::units::LayerId;

use crate::support::gguf_builder::{MoeSpec, tiny_moe_builder};
use crate::support::memory_source::{MemorySource, SMALL};
use crate::support::models::{folder, model_in};
use crate::support::recorder::Recorder;
use crate::support::reference::{bundled, executor, floats, ids};

const ROUTER: &str = "blk.0.ffn_gate_inp.weight";
const TOKENS: [u32; 12] = [1, 2, 3, 5, 8, 13, 21, 34, 55, 7, 11, 70];

/// What every position chose in layer 0, or why there is no choice.
fn choices(source: MemorySource, n_threads: usize) -> Result<Vec<Vec<u32>>, ForwardError> {
    let model = Model::describe(&source).unwrap();
    let (source, pool) = (Arc::new(source), Arc::new(Pool::new(n_threads)));
    let mut cpu = CpuExecutor::new(source, model.weights().clone(), pool, KernelMode::Fast).unwrap();
    let mut recorder = Recorder::new(&mut cpu);
    let (mut state, mut out) = (State::new(&model, TOKENS.len()), Vec::new());
    forward(&model, &mut recorder, &mut state, &TOKENS, Wanted::Last, &mut out)?;
    Ok(recorder.choices(0))
}

/// Puts a copy of one expert's router row in place of another's.
fn copy_row(source: &mut MemorySource, from: usize, to: usize) {
    let row = 4 * SMALL.n_embd;
    source.bytes_of(ROUTER).copy_within(from * row..(from + 1) * row, to * row);
}

#[test]
fn case_e1_ties_go_to_the_lower_expert_on_any_number_of_threads() {
    for family in ["qwen3moe", "olmoe"] {
        let mut twins = MemorySource::random(family, SMALL, 4);
        copy_row(&mut twins, 2, 5);
        let mut equal = MemorySource::random(family, SMALL, 4);
        (1..SMALL.n_expert).for_each(|expert| copy_row(&mut equal, 0, expert));
        for n_threads in [1, 8] {
            let chosen = choices(twins.clone(), n_threads).unwrap();
            assert!(chosen.iter().any(|row| row.contains(&2)), "{chosen:?}");
            // Where the other twin is chosen the lower one was chosen just before.
            for row in chosen {
                let five = row.iter().position(|expert| *expert == 5);
                assert!(five.is_none_or(|at| at > 0 && row[at - 1] == 2), "{row:?}");
            }
            assert!(choices(equal.clone(), n_threads).unwrap().iter().all(|row| row[..] == [0, 1]));
        }
    }
}

#[test]
fn case_e4_what_cannot_be_ranked_is_an_error_by_layer() {
    for (value, name) in [(f32::NAN, ROUTER), (f32::INFINITY, ROUTER), (f32::INFINITY, "token_embd.weight")] {
        let mut source = MemorySource::random("qwen3moe", SMALL, 4);
        // The third expert's row, or a token's.
        let at = if name == ROUTER { 2 } else { TOKENS[4] as usize };
        source.bytes_of(name)[4 * at * SMALL.n_embd..][..4].copy_from_slice(&value.to_le_bytes());
        match choices(source, 1) {
            Err(ForwardError::Router { layer: LayerId(0), position, .. }) => {
                assert_eq!(position, if name == ROUTER { 0 } else { 4 }, "{name} {value}");
            }
            other => panic!("{name} {value}: {other:?}"),
        }
    }
}

#[test]
fn case_e4_a_broken_router_ends_a_run_with_one_line() {
    let folder = folder();
    let mut builder = tiny_moe_builder(&MoeSpec::default());
    let router =
        builder.tensors.iter_mut().find(|tensor| tensor.name == b"blk.1.ffn_gate_inp.weight").unwrap();
    router.data[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    let model = model_in(folder.path(), &builder.build());
    let output = assert_cmd::Command::cargo_bin("ork-run")
        .unwrap()
        .args(["-p", "hello", "-n", "4", "--raw"])
        .arg(&model)
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("router produced NaN at layer 1 (position 0)"), "{error}");
}

/// Softmax over all or over the chosen, sigmoid, biases for the choice alone, normalised or not, scaled: what expert
/// outputs are multiplied by is what the reference multiplies them by.
#[test]
fn case_e5_weights_are_the_references_in_every_style() {
    let mut n_styles = 0;
    for reference in bundled().iter().filter(|reference| reference.is_f32()) {
        let (name, model, prompt) = (reference.name(), &reference.model, reference.prompt());
        let mut cpu = executor(&reference.file, model, KernelMode::Exact);
        let mut recorder = Recorder::new(&mut cpu);
        let (mut state, mut out) = (State::new(model, prompt.len()), Vec::new());
        forward(model, &mut recorder, &mut state, &prompt, Wanted::Last, &mut out).unwrap();
        for (layer, routing) in &recorder.seen {
            let expected = &reference.json["routing"][layer.to_string()];
            let rows =
                expected["topk"].as_array().unwrap().iter().zip(expected["weights"].as_array().unwrap());
            let ours = routing.experts.chunks(routing.n_used).zip(routing.weights.chunks(routing.n_used));
            assert_eq!(rows.len(), routing.n_rows(), "{name}");
            for (position, ((experts, weights), (topk, expected))) in ours.zip(rows).enumerate() {
                assert_eq!(
                    experts.iter().map(|expert| expert.0).collect::<Vec<_>>(),
                    ids(topk),
                    "{name} {layer}"
                );
                for (ours, theirs) in weights.iter().zip(floats(expected)) {
                    let far = (f64::from(*ours) - theirs).abs();
                    assert!(far < 1e-4 * theirs.max(1.0), "{name} {layer} {position}: {ours}, {theirs}");
                }
            }
        }
        n_styles += 1;
    }
    assert_eq!(n_styles, 10, "one F32 model of every family");
}

#[test]
fn case_e5_a_style_that_is_not_known_is_refused() {
    let references = bundled();
    let lfm = references.iter().find(|reference| reference.model.architecture() == "lfm2moe").unwrap();
    let mut source = MemorySource::copy(&*lfm.file);
    source.set("lfm2moe.expert_gating_func", Value::U32(4));
    let error = Model::describe(&source as &dyn TensorSource).unwrap_err().to_string();
    assert!(error.contains("`lfm2moe.expert_gating_func` holds 4, expected 1 (softmax)"), "{error}");
}
