//! Experts in every type that GGUF files use: read as the decoder reads them, packed, run; and types that are not.

use orkpack::executor::cpu::KernelMode;
use orkpack::pack::Pack;
use orkpack::pack::verify::{Mode, verify};
use orkpack::runtime::{DeviceChoice, Options, Runtime, Session};
use orkpack::tensor::Dtype;

use crate::support::fixture;
use crate::support::gguf_builder::{GgufBuilder, MoeSpec, tiny_moe_builder};
use crate::support::models::{calibrate_beside, convert, folder, hits, model_in, request};
use crate::support::naive_executor::{NaiveExecutor, hot_matrices, stepwise};

const TOKENS: [u32; 4] = [84, 104, 101, 32];

/// The blocks of the type's vectors again and again; those of MXFP4 have every exponent, of which only small ones leave
/// sums finite.
fn blocks_of(dtype: Dtype, n_weights: u64) -> Vec<u8> {
    let vector = std::fs::read(fixture(&format!("vectors/blocks/{dtype}.bin"))).unwrap();
    let len = n_weights / dtype.block_len() as u64 * dtype.block_bytes() as u64;
    let mut bytes: Vec<u8> = vector.iter().cycle().take(len as usize).copied().collect();
    if dtype == Dtype::MXFP4 {
        bytes.chunks_exact_mut(dtype.block_bytes()).for_each(|block| block[0] = 120 + block[0] % 8);
    }
    bytes
}

/// A small model whose experts are of this type.
fn model_of(dtype: Dtype) -> GgufBuilder {
    let spec = MoeSpec { n_layer: 1, n_expert: 3, n_used: 2, ..MoeSpec::default() };
    let mut builder = tiny_moe_builder(&spec);
    if matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
        return tiny_moe_builder(&MoeSpec { dtype, ..spec });
    }
    for tensor in &mut builder.tensors {
        if String::from_utf8_lossy(&tensor.name).contains("_exps") {
            tensor.type_id = dtype.gguf_id();
            tensor.data = blocks_of(dtype, tensor.dims.iter().product());
        }
    }
    builder
}

fn logits(pack: &std::path::Path, device: DeviceChoice) -> Vec<f32> {
    let options =
        Options { device, kernel: KernelMode::Exact, threads: Some(1), strict: true, ..Options::default() };
    let runtime = Runtime::open(pack, options).unwrap();
    let mut session = Session::new(&runtime, runtime.engine().unwrap(), 16, 1);
    TOKENS.iter().flat_map(|token| session.step(*token).unwrap().to_vec()).collect()
}

fn furthest(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn case_c17_experts_of_every_type_are_packed_and_run() {
    for &dtype in Dtype::ALL.iter().filter(|&&dtype| orkpack::blocks::is_supported(dtype)) {
        let folder = folder();
        let model = model_in(folder.path(), &model_of(dtype).build());
        calibrate_beside(&model, &TOKENS);
        let output = convert(request(&model, hits(1 << 30))).unwrap().1.output;
        let pack = Pack::open(&output, Default::default()).unwrap();
        assert!(verify(&pack, Mode::Full, &|_| {}).is_ok(), "{dtype}");
        let runtime = Runtime::open(&model, Options::default()).unwrap();
        let mut naive = NaiveExecutor::new(runtime.source(), runtime.model().weights());
        let exact = stepwise(runtime.model(), &mut naive, &TOKENS);
        // Sums in another order; of int8 also an activation that rounds the other way.
        let plain = logits_of_source(&model);
        assert!(furthest(&plain, &exact) < 1e-3, "{dtype}: {}", furthest(&plain, &exact));
        let sim = logits(&output, DeviceChoice::Sim);
        assert!(sim.iter().all(|logit| logit.is_finite()), "{dtype}");
        assert!(sim == logits(&output, DeviceChoice::Cpu), "{dtype}");
        naive.hot.extend(hot_matrices(&pack));
        let contract = stepwise(runtime.model(), &mut naive, &TOKENS);
        assert!(furthest(&sim, &contract) < 0.02, "{dtype}: {}", furthest(&sim, &contract));
        assert!(furthest(&sim, &exact) > 0.0, "{dtype}: int8 is another arithmetic");
    }
}

/// Of the GGUF itself, in f32.
fn logits_of_source(model: &std::path::Path) -> Vec<f32> {
    let options = Options { kernel: KernelMode::Exact, threads: Some(1), ..Options::default() };
    let runtime = Runtime::open(model, options).unwrap();
    let mut session = Session::new(&runtime, runtime.reference().unwrap(), 16, 1);
    TOKENS.iter().flat_map(|token| session.step(*token).unwrap().to_vec()).collect()
}

/// MXFP4 by its definition: a byte of exponent, then 16 bytes of two codes each, the low one of element `j`, the high
/// one of element `j + 16`.
#[test]
fn case_c18_blocks_of_17_bytes_are_read_as_defined() {
    const CODES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let code =
        |code: u8| if code & 8 == 0 { CODES[usize::from(code)] } else { -CODES[usize::from(code & 7)] };
    let reference = crate::support::reference::bundled();
    let reference = reference.iter().find(|reference| reference.dtype() == "MXFP4_MOE").unwrap();
    let source = &*reference.file;
    use orkpack::tensor::TensorSource;
    let tensors = source.tensors().iter().filter(|tensor| tensor.dtype == Dtype::MXFP4);
    let mut n_blocks = 0;
    for tensor in tensors {
        let bytes = source.bytes(tensor.place).unwrap();
        let mut decoded = vec![0.0; tensor.n_elements() as usize];
        orkpack::blocks::dequantize(Dtype::MXFP4, bytes, &mut decoded).unwrap();
        for (block, decoded) in bytes.chunks_exact(17).zip(decoded.chunks_exact(32)) {
            let scale = (f32::from(block[0]) - 127.0).exp2();
            let low = block[1..].iter().map(|byte| scale * code(byte & 15));
            let high = block[1..].iter().map(|byte| scale * code(byte >> 4));
            assert_eq!(low.chain(high).collect::<Vec<_>>(), decoded, "{} block {n_blocks}", tensor.name);
            n_blocks += 1;
        }
    }
    assert!(n_blocks > 1000, "{n_blocks} blocks");
}

#[test]
fn case_c17_a_type_that_nobody_knows_is_refused_by_tensor_before_any_work() {
    for (type_id, says) in [(200, "200"), (Dtype::I32.gguf_id(), "I32")] {
        let folder = folder();
        let mut builder = model_of(Dtype::Q8_0);
        let up =
            builder.tensors.iter_mut().find(|tensor| tensor.name == b"blk.0.ffn_up_exps.weight").unwrap();
        up.type_id = type_id;
        up.data.resize(up.dims.iter().product::<u64>() as usize * 4, 0);
        let model = model_in(folder.path(), &builder.build());
        for command in ["convert", "plan"] {
            let output = assert_cmd::Command::cargo_bin("orkpack").unwrap().arg(command).arg(&model).output();
            let output = output.unwrap();
            let error = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{error}");
            assert!(error.contains("blk.0.ffn_up_exps.weight") && error.contains(says), "{error}");
            assert!(!error.contains("calibrating"), "{error}");
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left behind");
    }
}
