//! Numbers that are no numbers, shapes that are hardly shapes: what a conversion refuses, and what it takes.

use std::fs;
use std::path::Path;

use orkpack::blocks::NotFinite;
use orkpack::bytes::{Io, Limits};
use orkpack::calibrate::{Block, Statistics};
use orkpack::convert::{Choice, StatisticsFrom};
use orkpack::executor::Routing;
use orkpack::model::Outline;
use orkpack::pack::verify::{Mode, verify};
use orkpack::pack::{Kind, LayoutId, Pack};
use orkpack::plan::routed_layers;
use orkpack::runtime::DeviceChoice;
use orkpack::tensor::{Dtype, Value};
use orkpack::units::ExpertId;

use crate::support::gguf_builder::{GgufBuilder, MoeSpec, TensorSpec, tiny_moe, tiny_moe_builder};
use crate::support::models::{TOKENS, calibrate_beside, convert, folder, hits, model_in, request, runtime};
use crate::support::packs::numbers;

/// More than all experts of a small model need.
const ALL: u64 = 1 << 28;

fn tensor<'b>(builder: &'b mut GgufBuilder, name: &str) -> &'b mut TensorSpec {
    builder.tensors.iter_mut().find(|tensor| tensor.name == name.as_bytes()).unwrap()
}

/// Even routing of a model that need not be run: every expert is called once a token in turn.
fn even_routing(model: &Path) -> Choice {
    let source = orkpack::source::open(model, Io::Map, &Limits::default()).unwrap().source();
    let outline = Outline::of(source.as_ref()).unwrap();
    let layers = routed_layers(outline.shape());
    let mut block = Block::empty(&layers);
    for moe in &outline.shape().moe_layers {
        let n_used = moe.n_used;
        let experts = (0..moe.n_expert() as u32 * n_used as u32).map(|i| ExpertId(i % moe.n_expert() as u32));
        let experts: Vec<ExpertId> = experts.collect();
        let routing = Routing { n_used, weights: vec![1.0 / n_used as f32; experts.len()], experts };
        block.record(moe.layer, &routing).unwrap();
    }
    let tokens = outline.shape().moe_layers[0].n_expert() as u64;
    block.end_window(tokens);
    let (fingerprint, architecture) =
        (outline.fingerprint().to_owned(), outline.shape().architecture.clone());
    let statistics = Statistics::new(fingerprint, architecture, "fast".into(), layers, block, None).unwrap();
    let file = model.with_extension("even.json");
    fs::write(&file, statistics.to_json().unwrap()).unwrap();
    Choice { statistics: StatisticsFrom::File(file), ..hits(ALL) }
}

/// Puts a half that is no number into a block of an expert: at byte `at` of the block.
fn break_block(tensor: &mut TensorSpec, dtype: Dtype, expert: u64, block: usize, at: usize, half: u16) {
    let n_expert = tensor.dims[2];
    let expert_len = tensor.data.len() / n_expert as usize;
    let byte = expert as usize * expert_len + block * dtype.block_bytes() + at;
    tensor.data[byte..byte + 2].copy_from_slice(&half.to_le_bytes());
}

#[test]
fn case_f1_a_scale_that_is_no_number_is_refused_by_tensor_expert_and_block() {
    let spec = MoeSpec { n_expert: 100, n_ff: 256, n_layer: 2, dtype: Dtype::Q4_K, ..MoeSpec::default() };
    let name = "blk.1.ffn_down_exps.weight";
    // The scale of expert 20, then the least value of expert 84 alone.
    for (expert, block, at, half) in [(20, 48, 0, 0x7e00), (84, 255, 2, 0x7c00)] {
        let mut builder = tiny_moe_builder(&spec);
        break_block(tensor(&mut builder, name), Dtype::Q4_K, expert, block, at, half);
        let folder = folder();
        let model = model_in(folder.path(), &builder.build());
        // Whether or not an expert is hot.
        for budget in [0, ALL] {
            let choice = Choice { budget: Some(orkpack::units::Bytes(budget)), ..even_routing(&model) };
            let error = convert(request(&model, choice.clone())).err().expect("refused");
            let line = error.to_string();
            assert!(
                line.ends_with(&format!(
                    "tensor `{name}`, expert {expert}: scale of block {block} is NaN or infinite"
                )),
                "{line}"
            );
            assert!(error.hint().unwrap().contains("--allow-nonfinite") && error.exit_code() == 2);
            assert!(
                !model.with_extension("orkpack").exists()
                    && !model.with_extension("orkpack.partial").exists()
            );
        }
        let mut allowed = request(&model, even_routing(&model));
        allowed.allow_nonfinite = true;
        let outcome = convert(allowed).unwrap().1;
        let expected = NotFinite {
            tensor: name.into(),
            expert: Some(expert),
            block: block as u64,
            n_blocks: 1,
            is_float: false,
        };
        assert_eq!(outcome.not_finite, [expected]);
        assert_eq!(outcome.n_clamped, 256, "the whole block");
        let pack = Pack::open(&outcome.output, Io::Map).unwrap();
        assert!(verify(&pack, Mode::Full, &|_| ()).is_ok());
        assert!(pack.placements().iter().all(|placement| pack.scales(placement).all(f32::is_finite)));
    }
}

#[test]
fn case_f2_infinite_halves_are_refused_and_zeros_are_welcome() {
    let spec = MoeSpec { dtype: Dtype::Q8_0, ..MoeSpec::default() };
    for half in [0x7c00, 0xfe00, 0xfc00] {
        let mut builder = tiny_moe_builder(&spec);
        break_block(tensor(&mut builder, "blk.0.ffn_gate_exps.weight"), Dtype::Q8_0, 3, 7, 0, half);
        let folder = folder();
        let model = model_in(folder.path(), &builder.build());
        let line = convert(request(&model, even_routing(&model))).err().unwrap().to_string();
        assert!(
            line.ends_with(
                "tensor `blk.0.ffn_gate_exps.weight`, expert 3: scale of block 7 is NaN or infinite"
            ),
            "{line}"
        );
    }
    // Every bit of an expert zero, and every scale of another: rows of scale 0, no 0/0 anywhere.
    let mut builder = tiny_moe_builder(&spec);
    for name in ["blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight", "blk.0.ffn_down_exps.weight"] {
        let tensor = tensor(&mut builder, name);
        let len = tensor.data.len() / 8;
        tensor.data[..len].fill(0);
        tensor.data[len..2 * len].chunks_exact_mut(34).for_each(|block| block[..2].fill(0));
    }
    let folder = folder();
    let model = model_in(folder.path(), &builder.build());
    calibrate_beside(&model, &TOKENS);
    let outcome = convert(request(&model, hits(ALL))).unwrap().1;
    let pack = Pack::open(&outcome.output, Io::Map).unwrap();
    assert!(verify(&pack, Mode::Full, &|_| ()).is_ok());
    let zeros = pack.placements().iter().filter(|placement| pack.scales(placement).all(|scale| scale == 0.0));
    assert_eq!(zeros.count(), 6);
    let runtime = runtime(&outcome.output, DeviceChoice::Sim, 1);
    let mut session = orkpack::runtime::Session::new(&runtime, runtime.engine().unwrap(), 128, 64);
    assert!(session.prompt(&TOKENS).unwrap().iter().all(|logit| logit.is_finite()));
}

#[test]
fn case_a8_tensors_without_weights_are_carried_unless_they_are_experts() {
    let spec = MoeSpec::default();
    let empty = |name: &str, dims: &[u64]| TensorSpec::new(name, Dtype::F32, dims, Vec::new());
    let mut builder = tiny_moe_builder(&spec);
    let exps = tensor(&mut builder, "blk.1.ffn_up_exps.weight");
    (exps.dims, exps.data) = (vec![256, 0, 8], Vec::new());
    let folder = folder();
    let model = model_in(folder.path(), &builder.build());
    let line = convert(request(&model, hits(0))).err().unwrap().to_string();
    assert!(line.contains("blk.1.ffn_up_exps.weight") && line.contains("[256, 0, 8]"), "{line}");

    let mut outlined = outline_model(&[0]);
    outlined = outlined.raw_tensor(empty("a.none", &[0, 64])).raw_tensor(empty("b.none", &[0]));
    outlined = outlined.raw_tensor(empty("c.none", &[64, 0, 8]));
    let model = model_in(folder.path(), &outlined.build());
    let outcome = convert(request(&model, even_routing(&model))).unwrap().1;
    let pack = Pack::open(&outcome.output, Io::Map).unwrap();
    assert!(verify(&pack, Mode::Full, &|_| ()).is_ok());
    assert_eq!(pack.tensor("c.none").unwrap().dims, [64, 0, 8]);
    let inspect = assert_cmd::Command::new(env!("CARGO_BIN_EXE_orkpack"))
        .args(["inspect", "--tensors"])
        .arg(&model)
        .output()
        .unwrap();
    let text = String::from_utf8(inspect.stdout).unwrap();
    let line = text.lines().find(|line| line.contains("a.none")).unwrap();
    assert!(inspect.status.success() && line.contains('0') && line.contains("64"), "{line}");
}

#[test]
fn case_a15_a_model_without_experts_is_never_an_empty_pack() {
    // Every name as the files that models are trained in have it.
    let trained = {
        let mut builder = tiny_moe_builder(&MoeSpec::default());
        for tensor in &mut builder.tensors {
            let name = String::from_utf8(tensor.name.clone()).unwrap();
            tensor.name = format!("model.layers.{}", name.replace("blk.", "")).into_bytes();
        }
        builder.build()
    };
    let dense = {
        let mut builder = tiny_moe_builder(&MoeSpec::default());
        builder.tensors.retain(|tensor| !String::from_utf8_lossy(&tensor.name).contains("_exps"));
        builder.build()
    };
    for (bytes, says) in [
        (trained, "tensor `blk.0.attn_norm.weight` is missing"),
        (dense, "no expert tensors found; this is a dense model of architecture qwen3moe"),
    ] {
        let folder = folder();
        let model = model_in(folder.path(), &bytes);
        let error = convert(request(&model, hits(ALL))).err().unwrap();
        let line = error.to_string();
        assert!(line.ends_with(says), "{line}");
        assert_eq!(error.exit_code(), 2);
        assert!(!model.with_extension("orkpack").exists());
    }
}

#[test]
fn case_c8_any_number_of_experts_is_packed_under_its_number() {
    for (n_expert, n_used) in [(1, 1), (2, 1), (255, 2), (256, 2), (257, 2), (512, 2), (896, 2), (1024, 8)] {
        let spec = MoeSpec {
            n_layer: 1,
            n_embd: 32,
            n_ff: 32,
            n_expert,
            n_used,
            n_head: 2,
            n_head_kv: 1,
            dtype: Dtype::Q8_0,
            ..MoeSpec::default()
        };
        let folder = folder();
        let model = model_in(folder.path(), &tiny_moe(&spec));
        let outcome = convert(request(&model, even_routing(&model))).unwrap().1;
        let pack = Pack::open(&outcome.output, Io::Map).unwrap();
        assert!(verify(&pack, Mode::Full, &|_| ()).is_ok());
        let mut experts: Vec<u32> =
            pack.placements().iter().map(|placement| placement.matrix.expert().unwrap().expert.0).collect();
        experts.sort_unstable();
        experts.dedup();
        assert_eq!(experts, (0..n_expert).collect::<Vec<_>>(), "{n_expert} experts");
        let gate = pack.tensor("blk.0.ffn_gate_exps.weight").unwrap();
        assert_eq!(gate.digests.len(), n_expert as usize);
    }
}

/// A model of a family that is planned for and not run, three layers of which those named have experts.
fn outline_model(routed: &[u32]) -> GgufBuilder {
    let n_layer = routed.iter().max().unwrap().max(&2) + 1;
    let mut builder = GgufBuilder::new().text("general.architecture", "some");
    for (key, value) in
        [("block_count", n_layer), ("embedding_length", 32), ("expert_count", 4), ("expert_used_count", 2)]
    {
        builder = builder.kv(&format!("some.{key}"), Value::U32(value));
    }
    builder = builder.tensor(
        "token_embd.weight",
        Dtype::F32,
        &[32, 8],
        numbers(32 * 8 * 4, 1).iter().map(|b| b & 0x3f).collect(),
    );
    for layer in 0..n_layer {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        let tensor = |dims: &[u64]| -> Vec<u8> {
            let n: u64 = dims.iter().product();
            (0..n)
                .flat_map(|i| (((i * 37 + u64::from(layer)) % 101) as f32 / 50.0 - 1.0).to_le_bytes())
                .collect()
        };
        if routed.contains(&layer) {
            builder = builder.tensor(&name("ffn_gate_inp"), Dtype::F32, &[32, 4], tensor(&[32, 4]));
            for part in ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"] {
                builder = builder.tensor(&name(part), Dtype::F32, &[32, 32, 4], tensor(&[32, 32, 4]));
            }
        } else {
            for part in ["ffn_gate", "ffn_up", "ffn_down"] {
                builder = builder.tensor(&name(part), Dtype::F32, &[32, 32], tensor(&[32, 32]));
            }
        }
    }
    builder
}

#[test]
fn case_c12_layers_keep_their_numbers_whichever_of_them_are_dense() {
    for routed in [&[1, 2][..], &[2], &[0, 2], &[1, 3]] {
        let folder = folder();
        let model = model_in(folder.path(), &outline_model(routed).build());
        let (prepared, outcome) = convert(request(&model, even_routing(&model))).unwrap();
        let planned: Vec<u32> = prepared.plan.layers.iter().map(|layer| layer.layer).collect();
        assert_eq!(planned, routed);
        let pack = Pack::open(&outcome.output, Io::Map).unwrap();
        let mut placed: Vec<u32> = pack.placements().iter().map(|p| p.matrix.layer().unwrap().0).collect();
        placed.sort_unstable();
        placed.dedup();
        assert_eq!(placed, routed);
        // What was packed for a layer is that layer's own tensor.
        let opened = orkpack::source::open(&model, Io::Map, &Limits::default()).unwrap();
        let same = orkpack::check::against(&pack, opened.source().as_ref(), &|_| ()).unwrap();
        assert_eq!((same.findings, same.n_matrices), (Vec::new(), 12 * routed.len() as u64));
    }
}

#[test]
fn case_c13_a_tied_head_is_counted_once() {
    let sizes = |tied: bool| {
        let mut builder = tiny_moe_builder(&MoeSpec::default());
        builder.tensors.retain(|tensor| !tied || tensor.name != b"output.weight");
        let folder = folder();
        let model = model_in(folder.path(), &builder.build());
        calibrate_beside(&model, &TOKENS);
        let outcome = convert(request(&model, hits(0))).unwrap().1;
        let runtime = runtime(&outcome.output, DeviceChoice::Cpu, 1);
        let shape = runtime.model().shape();
        (shape.dense_weights, shape.dense_bytes)
    };
    // The head is read whole, and of the embedding a row, in both: the same matrix twice is no more than two matrices.
    assert_eq!(sizes(true), sizes(false));
}

#[test]
fn case_e6_a_router_stays_as_it_is_whatever_its_type() {
    let spec = MoeSpec { dtype: Dtype::Q8_0, ..MoeSpec::default() };
    let mut builder = tiny_moe_builder(&spec);
    let router = tensor(&mut builder, "blk.0.ffn_gate_inp.weight");
    // Blocks of 32: a scale and 16 bytes of codes.
    router.type_id = Dtype::Q4_0.gguf_id();
    let n_blocks = router.dims.iter().product::<u64>() as usize / 32;
    router.data =
        (0..n_blocks).flat_map(|i| [&0x2c00u16.to_le_bytes()[..], &numbers(16, i)].concat()).collect();
    let stored = router.data.clone();
    let folder = folder();
    let model = model_in(folder.path(), &builder.build());
    match convert(request(&model, even_routing(&model))) {
        Ok((_, outcome)) => {
            let pack = Pack::open(&outcome.output, Io::Map).unwrap();
            let entry = pack.tensor("blk.0.ffn_gate_inp.weight").unwrap();
            assert_eq!(entry.dtype(), Some(Dtype::Q4_0));
            assert_eq!(pack.tensor_bytes(entry).unwrap(), stored);
            assert_eq!(pack.section(entry.section.unwrap()).unwrap().layout, LayoutId::Rows);
            // Nothing but the experts has an int8 copy.
            assert!(pack.placements().iter().all(|placement| placement.matrix.expert().is_some()));
            assert!(pack.sections().iter().filter(|s| s.kind == Kind::Chunk).count() == pack.chunks().len());
        }
        Err(error) => panic!("{error}"),
    }
}
