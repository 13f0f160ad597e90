//! Dense layers among those with experts, and an embedding that is the head as well.

use orkpack::calibrate::Statistics;
use orkpack::error::Error;
use orkpack::executor::cpu::KernelMode;
use orkpack::model::Model;
use orkpack::pack::Pack;
use orkpack::plan::Plan;
use orkpack::progress::Silent;
use orkpack::runtime::DeviceChoice;
use orkpack::tensor::{Dtype, TensorSource};
use orkpack::units::{ExpertId, LayerId};

use super::{add, bits, logits, pack, reference, rename, small, take};
use crate::support::gguf_builder::MoeSpec;
use crate::support::memory_source::MemorySource;
use crate::support::models::{folder, hits, model_in, request};

const PROJECTIONS: [&str; 3] = ["gate", "up", "down"];

/// A llama of four layers with experts.
fn llama() -> MemorySource {
    let mut model = rename(small(MoeSpec { n_layer: 4, ..MoeSpec::default() }), "qwen3moe", "llama");
    model.tensors.retain(|tensor| !tensor.name.contains("_norm.weight") || !tensor.name.contains("attn_q"));
    model.tensors.retain(|tensor| !tensor.name.contains("attn_k_norm"));
    model
}

/// Expert 0 becomes the whole network of these layers.
fn with_dense(mut model: MemorySource, layers: &[u32]) -> MemorySource {
    for at in layers {
        model.remove(&format!("blk.{at}.ffn_gate_inp.weight"));
        for projection in PROJECTIONS {
            let (info, data) = take(&mut model, &format!("blk.{at}.ffn_{projection}_exps.weight"));
            let first = data[..data.len() / info.dims[2] as usize].to_vec();
            add(&mut model, &format!("blk.{at}.ffn_{projection}.weight"), info.dtype, &info.dims[..2], first);
        }
    }
    model
}

/// Every expert of these layers becomes expert 0, so that the choice makes no difference.
fn with_equals(mut model: MemorySource, layers: &[u32]) -> MemorySource {
    for at in layers {
        for projection in PROJECTIONS {
            let bytes = model.bytes_of(&format!("blk.{at}.ffn_{projection}_exps.weight"));
            let len = bytes.len() / 8;
            let first = bytes[..len].to_vec();
            bytes.chunks_exact_mut(len).for_each(|expert| expert.copy_from_slice(&first));
        }
    }
    model
}

/// Which of the four layers are dense, and which are not.
const CASES: [(&[u32], &[u32]); 4] =
    [(&[0], &[1, 2, 3]), (&[0, 1, 2], &[3]), (&[0, 2], &[1, 3]), (&[1, 3], &[0, 2])];

#[test]
fn c12_a_dense_layer_is_a_layer_of_equal_experts() {
    for (dense, _) in CASES {
        let floats = |bits: Vec<u32>| bits.into_iter().map(f32::from_bits);
        let found = floats(logits(&with_dense(llama(), dense), KernelMode::Exact));
        let expected = floats(logits(&with_equals(llama(), dense), KernelMode::Exact));
        // Two equal experts whose weights add up to one, but for rounding.
        let furthest = found.zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(furthest < 1e-4, "{dense:?}: {furthest}");
    }
}

#[test]
fn c12_layers_are_named_by_their_block_numbers() {
    for (dense, routed) in CASES {
        let folder = folder();
        let model = with_dense(llama(), dense);
        let made = pack(folder.path(), &model, None);
        let statistics = Statistics::from_json(&made.statistics).unwrap();
        assert!(statistics.layers.iter().map(|layer| layer.layer).eq(routed.iter().copied()));
        let plan = Plan::from_json(&made.plan).unwrap();
        assert!(plan.layers.iter().map(|layer| layer.layer).eq(routed.iter().copied()));
        let pack = Pack::open(&made.path, Default::default()).unwrap();
        let placed = pack.placements().iter().filter_map(|placed| placed.matrix.layer());
        let mut placed: Vec<u32> = placed.map(|layer| layer.0).collect();
        placed.sort();
        placed.dedup();
        assert_eq!(placed, routed);
        for cut in pack.cuts() {
            assert_eq!(cut.experts.len(), 4);
            assert!(dense.iter().all(|&at| cut.experts[at as usize] == 0));
            assert!(routed.iter().all(|&at| cut.experts[at as usize] == 3 * 8));
        }
        assert!(bits(&made.path, DeviceChoice::Sim) == bits(&made.path, DeviceChoice::Cpu), "{dense:?}");
        let forced = |layer: u32| -> Result<(), Error> {
            let path = model_in(folder.path(), &model.to_gguf());
            let mut choice = hits(1 << 20);
            choice.statistics =
                orkpack::convert::StatisticsFrom::File(folder.path().join("model.routing.json"));
            choice.force_hot = vec![(LayerId(layer), ExpertId(7))];
            let mut request = request(&path, choice);
            request.output = folder.path().join("forced.orkpack");
            orkpack::convert::prepare(request, &mut Silent).map(drop)
        };
        forced(routed[0]).unwrap();
        let refused = forced(dense[0]).unwrap_err().to_string();
        assert!(refused.contains("this layer has no experts"), "{refused}");
    }
}

#[test]
fn c12_layers_before_the_experts_count_too() {
    let model = reference("tiny-lfm2moe-f32");
    let shape = Model::describe(&model).unwrap().shape();
    let first = (0..).find(|at| model.find(&format!("blk.{at}.ffn_gate_inp.weight")).is_some()).unwrap();
    assert!(first > 0);
    assert!(shape.moe_layers.iter().map(|layer| layer.layer.0).eq(first..shape.n_layer as u32));
}

#[test]
fn c12_experts_without_a_router_are_no_dense_layer() {
    let mut model = llama();
    model.remove("blk.2.ffn_gate_inp.weight");
    let refused = Model::describe(&model).unwrap_err().to_string();
    assert_eq!(refused, "tensor `blk.2.ffn_gate_inp.weight` is missing");
}

#[test]
fn c13_a_tied_embedding_is_counted_once() {
    let source_bytes = |model: &MemorySource| {
        let folder = folder();
        Plan::from_json(&pack(folder.path(), model, None).plan).unwrap().memory.source_bytes
    };
    let untied = small(MoeSpec::default());
    let mut tied = untied.clone();
    tied.remove("output.weight");
    let all: u64 = tied.tensors.iter().map(|tensor| tensor.place.len).sum();
    let row = tied.find("token_embd.weight").unwrap().dtype.row_bytes(64).unwrap();
    assert_eq!(tied.find("token_embd.weight").unwrap().dtype, Dtype::F32);
    // The head is read whole; for the token itself a row is read besides.
    assert_eq!(source_bytes(&tied), all + row);
    assert_eq!(
        source_bytes(&untied),
        source_bytes(&tied),
        "the embedding of an untied model is not read whole"
    );
}
