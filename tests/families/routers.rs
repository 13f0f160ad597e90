//! Routers and gates of shared experts in other types than F32: dequantised, never multiplied in 8 bits.

use orkpack::executor::cpu::KernelMode;
use orkpack::pack::Pack;
use orkpack::runtime::DeviceChoice;
use orkpack::tensor::{Dtype, TensorSource};

use super::{add, bits, logits, pack, reference, small, take};
use crate::support::gguf_builder::{MoeSpec, encode};
use crate::support::memory_source::MemorySource;
use crate::support::models::folder;

const TYPES: [Dtype; 4] = [Dtype::F16, Dtype::BF16, Dtype::Q8_0, Dtype::Q4_0];

/// The model with every tensor of this name in another type, and the same with that type's values in F32.
fn in_type(model: &MemorySource, part: &str, dtype: Dtype) -> (MemorySource, MemorySource) {
    let (mut stored, mut rounded) = (model.clone(), model.clone());
    let names = model.tensors.iter().map(|tensor| tensor.name.clone());
    let names: Vec<String> = names.filter(|name| name.ends_with(&format!(".{part}.weight"))).collect();
    assert!(!names.is_empty(), "{part}");
    for name in names {
        let (info, data) = take(&mut stored, &name);
        let values: Vec<f32> =
            data.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let encoded = encode(dtype, &values);
        let mut back = vec![0.0; values.len()];
        orkpack::blocks::dequantize(dtype, &encoded, &mut back).unwrap();
        add(&mut stored, &name, dtype, &info.dims, encoded);
        *rounded.bytes_of(&name) = encode(Dtype::F32, &back);
    }
    (stored, rounded)
}

#[test]
fn e6_a_router_in_another_type_routes_as_its_dequantised_values_do() {
    // Experts in 8 bits: the modes differ, but not for routers.
    let quantised = small(MoeSpec { dtype: Dtype::Q8_0, ..MoeSpec::default() });
    let shared = reference("tiny-qwen2moe-q8_0");
    for (model, part) in
        [(&quantised, "ffn_gate_inp"), (&shared, "ffn_gate_inp"), (&shared, "ffn_gate_inp_shexp")]
    {
        assert!(logits(model, KernelMode::Fast) != logits(model, KernelMode::Exact), "the modes differ");
        for dtype in TYPES {
            let (stored, rounded) = in_type(model, part, dtype);
            for mode in [KernelMode::Fast, KernelMode::Exact] {
                assert!(logits(&stored, mode) == logits(&rounded, mode), "{part} {dtype} {mode:?}");
            }
        }
    }
}

#[test]
fn e6_a_pack_keeps_a_router_as_it_was_and_has_no_int8_copy() {
    for dtype in TYPES {
        let folder = folder();
        let (stored, _) = in_type(&small(MoeSpec::default()), "ffn_gate_inp", dtype);
        let made = pack(folder.path(), &stored, None);
        let pack = Pack::open(&made.path, Default::default()).unwrap();
        let name = "blk.1.ffn_gate_inp.weight";
        let router = pack.tensor(name).unwrap();
        assert_eq!(router.dtype(), Some(dtype));
        assert!(
            pack.tensor_bytes(router).unwrap() == stored.bytes(stored.find(name).unwrap().place).unwrap()
        );
        assert!(!pack.placements().is_empty());
        assert!(pack.placements().iter().all(|placed| placed.matrix.expert().is_some()));
        assert!(bits(&made.path, DeviceChoice::Sim) == bits(&made.path, DeviceChoice::Cpu), "{dtype}");
    }
}
