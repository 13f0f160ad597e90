//! CPU arithmetic: every path against the naive one bit for bit, the naive one against dequantised weights, and
//! the executor against a composition of single products.

use std::sync::Arc;

use orkpack::blocks;
use orkpack::executor::cpu::{Call, CpuExecutor, KernelMode};
use orkpack::executor::{
    Executor, ExecutorError, ExpertBank, Product, Routing, Weight, WeightId, WeightTable,
};
use orkpack::kernel::{Activations, Form, Kernel, Path, exp};
use orkpack::tensor::{
    Dtype, MatrixView, Metadata, Place, SourceError, TensorInfo, TensorSource, WeightView,
};
use orkpack::threads::Pool;
use orkpack::units::{ExpertId, LayerId};

use crate::support::fixture;

/// Types with a path of their own, and the widths of a row in weights.
const TYPES: [(Dtype, &[usize]); 14] = [
    (Dtype::F32, &[1, 8, 15, 16, 17, 100]),
    (Dtype::F16, &[1, 8, 15, 16, 17, 100]),
    (Dtype::BF16, &[1, 8, 15, 16, 17, 100]),
    (Dtype::Q8_0, &[32, 64, 96, 256, 544]),
    (Dtype::Q4_0, &[32, 64, 96, 256, 544]),
    (Dtype::Q5_0, &[32, 64, 96, 256, 544]),
    (Dtype::IQ4_NL, &[32, 64, 96, 256, 544]),
    (Dtype::MXFP4, &[32, 64, 96, 256, 544]),
    (Dtype::Q2_K, &[256, 512, 768, 2048]),
    (Dtype::Q3_K, &[256, 512, 768, 2048]),
    (Dtype::IQ4_XS, &[256, 512, 768, 2048]),
    (Dtype::Q4_K, &[256, 512, 768, 2048]),
    (Dtype::Q5_K, &[256, 512, 768, 2048]),
    (Dtype::Q6_K, &[256, 512, 768, 2048]),
];

const ROWS: [usize; 7] = [1, 2, 3, 4, 5, 8, 17];

/// A small generator (splitmix64) so that every run sees the same numbers.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Between −1 and 1.
    fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }

    fn int8s(&mut self, n: usize) -> Vec<i8> {
        (0..n).map(|_| (self.next() % 255) as i8).map(|v| if v == -128 { 127 } else { v }).collect()
    }

    /// Random blocks with every code possible, and scales that keep weights near 1.
    fn weights(&mut self, dtype: Dtype, n_in: usize, n_out: usize) -> Vec<u8> {
        let mut bytes = vec![0; dtype.row_bytes(n_in as u64).unwrap() as usize * n_out];
        for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
            block.iter_mut().for_each(|byte| *byte = self.next() as u8);
            let mut scale = |at: usize, size: f32| {
                let d = half::f16::from_f32(self.float() * size);
                block[at..at + 2].copy_from_slice(&d.to_le_bytes());
            };
            match dtype {
                Dtype::F32 => block.copy_from_slice(&self.float().to_le_bytes()),
                Dtype::F16 => scale(0, 1.0),
                Dtype::BF16 => block[1] = block[1] & 0x80 | 0x3f,
                Dtype::Q6_K => scale(208, 1e-3),
                Dtype::Q3_K => scale(108, 1e-2),
                Dtype::Q2_K => {
                    scale(80, 1e-2);
                    scale(82, 1e-2);
                }
                Dtype::MXFP4 => block[0] = 120 + block[0] % 8,
                Dtype::Q4_K | Dtype::Q5_K => {
                    scale(0, 1e-3);
                    scale(2, 1e-2);
                }
                _ => scale(0, 1e-2),
            }
        }
        bytes
    }
}

fn fast_kernels() -> impl Iterator<Item = Kernel> {
    Path::ALL.into_iter().skip(1).filter_map(Kernel::with_path)
}

fn naive() -> Kernel {
    Kernel::with_path(Path::Naive).unwrap()
}

fn multiply(kernel: Kernel, form: Form, weight: WeightView<'_>, rows: &[f32]) -> Vec<f32> {
    let rows = MatrixView::new(rows, rows.len() / weight.n_in(), weight.n_in()).unwrap();
    let mut acts = Activations::default();
    acts.quantize(kernel, form, rows);
    let all: Vec<u32> = (0..rows.n_rows() as u32).collect();
    let mut out = vec![f32::NAN; rows.n_rows() * weight.n_out()];
    kernel.multiply(weight, 0..weight.n_out(), &acts, &all, &mut out).unwrap();
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn the_fastest_path_is_the_one_that_the_processor_has() {
    #[cfg(target_arch = "aarch64")]
    let expected = match (
        std::arch::is_aarch64_feature_detected!("i8mm"),
        std::arch::is_aarch64_feature_detected!("dotprod"),
    ) {
        (true, true) => Path::NeonI8mm,
        (false, true) => Path::NeonDot,
        _ => Path::Neon,
    };
    #[cfg(target_arch = "x86_64")]
    let expected = match (
        std::arch::is_x86_feature_detected!("avx512vnni"),
        std::arch::is_x86_feature_detected!("avx2"),
    ) {
        (true, true) => Path::Avx512,
        (false, true) => Path::Avx2,
        _ => Path::Portable,
    };
    #[cfg(not(any(target_arch = "aarch64", target_arch = "x86_64")))]
    let expected = Path::Portable;
    assert_eq!(Kernel::detect().path(), expected);
}

#[test]
fn every_path_gives_the_bits_of_the_naive_one() {
    let mut random = Random(1);
    for (dtype, widths) in TYPES {
        for (&n_in, m) in widths.iter().flat_map(|n_in| ROWS.map(|m| (n_in, m))) {
            for n_out in [1, 19] {
                let bytes = random.weights(dtype, n_in, n_out);
                let weight = WeightView::new(dtype, n_in, n_out, &bytes).unwrap();
                let mut rows = random.floats(m * n_in);
                rows[n_in / 2] *= 1000.0;
                let expected = bits(&multiply(naive(), Form::for_weight(dtype), weight, &rows));
                for kernel in fast_kernels() {
                    let found = bits(&multiply(kernel, Form::for_weight(dtype), weight, &rows));
                    assert_eq!(found, expected, "{dtype} {:?} [{n_out}, {n_in}] × {m}", kernel.path());
                }
            }
        }
    }
}

#[test]
fn extreme_codes_do_not_saturate() {
    let mut random = Random(2);
    for (dtype, widths) in TYPES.into_iter().skip(3) {
        for fill in [0x00, 0x7f, 0x80, 0xff] {
            let n_in = widths[2];
            let mut bytes = random.weights(dtype, n_in, 1);
            // Scales are 0x1010, a small number, so that they are not what overflows.
            let scales = match dtype {
                Dtype::Q6_K => 208..210,
                Dtype::Q3_K => 108..110,
                Dtype::Q2_K => 80..84,
                Dtype::MXFP4 => 0..1,
                Dtype::Q4_K | Dtype::Q5_K => 0..4,
                _ => 0..2,
            };
            for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
                for (i, byte) in block.iter_mut().enumerate() {
                    *byte = if scales.contains(&i) { 0x10 } else { fill };
                }
            }
            let weight = WeightView::new(dtype, n_in, 1, &bytes).unwrap();
            for x in [1.0, -1.0] {
                let rows = vec![x; 4 * n_in];
                let expected = bits(&multiply(naive(), Form::for_weight(dtype), weight, &rows));
                for kernel in fast_kernels() {
                    let found = bits(&multiply(kernel, Form::for_weight(dtype), weight, &rows));
                    assert_eq!(found, expected, "{dtype} {:?} bytes {fill:#x} × {x}", kernel.path());
                }
            }
        }
    }
}

/// Dequantised weights times rows in f64, and the sum of the magnitudes, which rounding errors are measured by.
fn reference(weight: WeightView<'_>, rows: &[f32]) -> Vec<(f64, f64)> {
    let n_in = weight.n_in();
    let mut decoded = vec![0f32; n_in * weight.n_out()];
    blocks::dequantize(weight.dtype(), weight.bytes(), &mut decoded).unwrap();
    rows.chunks(n_in)
        .flat_map(|row| decoded.chunks(n_in).map(move |w| (w, row)))
        .map(|(w, row)| {
            let products = w.iter().zip(row).map(|(&w, &x)| f64::from(w) * f64::from(x));
            products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()))
        })
        .collect()
}

#[test]
fn the_naive_path_multiplies_what_the_blocks_mean() {
    let mut random = Random(3);
    for (dtype, widths) in TYPES {
        for &n_in in widths {
            let bytes = random.weights(dtype, n_in, 5);
            let weight = WeightView::new(dtype, n_in, 5, &bytes).unwrap();
            // Codes times a power of two, 127 in every block: quantising such rows loses nothing.
            let mut rows: Vec<f32> = random.int8s(3 * n_in).iter().map(|&q| f32::from(q) / 64.0).collect();
            rows.iter_mut().step_by(16).for_each(|x| *x = -127.0 / 64.0);
            let found = multiply(naive(), Form::for_weight(dtype), weight, &rows);
            for (found, (sum, size)) in found.iter().zip(reference(weight, &rows)) {
                assert!((f64::from(*found) - sum).abs() <= 1e-6 * size, "{dtype} {n_in}: {found} for {sum}");
            }
        }
    }
}

#[test]
fn exact_mode_multiplies_dequantised_weights_in_f32() {
    let mut random = Random(4);
    for (dtype, widths) in TYPES {
        let (n_in, n_out) = (widths[2], 37);
        let bytes = random.weights(dtype, n_in, n_out);
        let weight = WeightView::new(dtype, n_in, n_out, &bytes).unwrap();
        let rows = random.floats(5 * n_in);
        let mut decoded = vec![0f32; n_in * n_out];
        blocks::dequantize(dtype, &bytes, &mut decoded).unwrap();
        let decoded: Vec<u8> = decoded.iter().flat_map(|w| w.to_le_bytes()).collect();
        let floats = WeightView::new(Dtype::F32, n_in, n_out, &decoded).unwrap();
        let expected = bits(&multiply(naive(), Form::F32, floats, &rows));
        for kernel in fast_kernels() {
            let found = multiply(kernel, Form::F32, weight, &rows);
            assert_eq!(bits(&found), expected, "{dtype} {:?}", kernel.path());
            for (found, (sum, size)) in found.iter().zip(reference(weight, &rows)) {
                assert!((f64::from(*found) - sum).abs() <= 1e-6 * size, "{dtype}: {found} for {sum}");
            }
        }
    }
}

#[test]
fn types_without_a_path_of_their_own_run_in_f32() {
    let mut random = Random(8);
    let others = |dtype: &&Dtype| blocks::is_supported(**dtype) && TYPES.iter().all(|(own, _)| own != *dtype);
    for &dtype in Dtype::ALL.iter().filter(others) {
        assert_eq!(Form::for_weight(dtype), Form::F32, "{dtype}");
        let bytes = std::fs::read(fixture(&format!("vectors/blocks/{dtype}.bin"))).unwrap();
        let n_blocks = bytes.len() / dtype.block_bytes();
        let (n_in, n_out) = (2 * dtype.block_len(), n_blocks / 2);
        let weight = WeightView::new(dtype, n_in, n_out, &bytes).unwrap();
        let mut decoded = vec![0f32; n_in * n_out];
        blocks::dequantize(dtype, &bytes, &mut decoded).unwrap();
        let floats = WeightView::new(Dtype::F32, n_in, n_out, bytemuck::cast_slice(&decoded)).unwrap();
        // Small, so that the largest weights of the vectors do not overflow.
        let rows: Vec<f32> = random.floats(3 * n_in).iter().map(|x| x / 1024.0).collect();
        let expected = multiply(naive(), Form::F32, floats, &rows);
        assert!(expected.iter().all(|x| x.is_finite()), "{dtype}");
        for kernel in [naive()].into_iter().chain(fast_kernels()) {
            let found = multiply(kernel, Form::F32, weight, &rows);
            assert_eq!(bits(&found), bits(&expected), "{dtype} {:?}", kernel.path());
        }
    }
}

#[test]
fn a_type_without_a_decoder_is_refused() {
    let bytes = [0; 64];
    let weight = WeightView::new(Dtype::I64, 8, 1, &bytes).unwrap();
    let mut acts = Activations::default();
    acts.quantize(naive(), Form::F32, MatrixView::new(&[0.0; 8], 1, 8).unwrap());
    let refused = Kernel::detect().multiply(weight, 0..1, &acts, &[0], &mut [0.0]);
    assert_eq!(refused, Err(blocks::BlockError::Unsupported(Dtype::I64)));
}

#[test]
fn a_result_depends_on_its_two_rows_alone() {
    let mut random = Random(5);
    for (dtype, widths) in TYPES {
        let (n_in, n_out, m) = (widths[2], 37, 9);
        let bytes = random.weights(dtype, n_in, n_out);
        let weight = WeightView::new(dtype, n_in, n_out, &bytes).unwrap();
        let rows = random.floats(m * n_in);
        for (form, kernel) in
            [Form::for_weight(dtype), Form::F32].into_iter().flat_map(|f| fast_kernels().map(move |k| (f, k)))
        {
            let whole = multiply(kernel, form, weight, &rows);
            let mut acts = Activations::default();
            acts.quantize(kernel, form, MatrixView::new(&rows, m, n_in).unwrap());
            for (o_range, some) in [
                (0..37, &[8u32][..]),
                (0..1, &[0, 1, 2]),
                (5..36, &[7, 2, 4, 1, 0, 3, 6]),
                (36..37, &[5]),
                (3..3, &[1]),
                (0..37, &[]),
            ] {
                let mut out = vec![f32::NAN; o_range.len() * some.len()];
                kernel.multiply(weight, o_range.clone(), &acts, some, &mut out).unwrap();
                let expected: Vec<f32> = some
                    .iter()
                    .flat_map(|&r| o_range.clone().map(move |o| (r as usize, o)))
                    .map(|(r, o)| whole[r * n_out + o])
                    .collect();
                assert_eq!(bits(&out), bits(&expected), "{dtype} {form:?} {o_range:?} {some:?}");
            }
        }
    }
}

#[test]
fn odd_activations_quantise_alike_everywhere() {
    // Weights of 1: the output is the sum of the dequantised activations.
    let mut q8_0 = vec![1u8; 34];
    q8_0[..2].copy_from_slice(&half::f16::ONE.to_le_bytes());
    let weight = WeightView::new(Dtype::Q8_0, 32, 1, &q8_0).unwrap();
    let row = |f: &dyn Fn(usize) -> f32| (0..32).map(f).collect::<Vec<f32>>();
    // With 127 in the block a step is 1, and every tie goes to the even neighbour.
    let ties = row(&|i| if i == 0 { 127.0 } else { i as f32 + 0.5 });
    let ties_sum: f32 = 127.0 + (1..32).map(|i| if i % 2 == 0 { i } else { i + 1 } as f32).sum::<f32>();
    for kernel in [naive()].into_iter().chain(fast_kernels()) {
        let sum = |row: &[f32]| multiply(kernel, Form::Q8x32, weight, row)[0];
        assert_eq!(sum(&ties), ties_sum, "{:?}", kernel.path());
        assert_eq!(sum(&ties.iter().map(|x| -x).collect::<Vec<_>>()), -ties_sum);
        assert_eq!(sum(&[0.0; 32]), 0.0);
        assert_eq!(sum(&[1e-38; 32]), 0.0, "too small to have a step");
        assert_eq!(sum(&[f32::from_bits(1); 32]), 0.0);
        assert!((sum(&[1e-29; 32]) / 32e-29 - 1.0).abs() < 1e-6);
        assert!((sum(&[1e37; 32]) / 32e37 - 1.0).abs() < 1e-6);
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(sum(&row(&|i| if i == 17 { bad } else { 1.0 })).is_nan(), "{bad} must show");
        }
    }
}

#[test]
fn activations_can_be_filled_in_parts() {
    let mut random = Random(6);
    let (m, n_in) = (7, 512);
    let bytes = random.weights(Dtype::Q4_K, n_in, 3);
    let weight = WeightView::new(Dtype::Q4_K, n_in, 3, &bytes).unwrap();
    let rows = random.floats(m * n_in);
    let view = MatrixView::new(&rows, m, n_in).unwrap();
    let kernel = Kernel::detect();
    let expected = multiply(kernel, Form::Q8x256, weight, &rows);
    let mut acts = Activations::default();
    for rows_per_part in [1, 3, 7, 100] {
        // Leave other contents behind first, as a buffer in use does.
        acts.quantize(kernel, Form::Q8x32, MatrixView::new(&rows[..64], 2, 32).unwrap());
        let mut parts: Vec<_> = acts.parts(Form::Q8x256, m, n_in, rows_per_part).collect();
        parts.iter_mut().rev().for_each(|part| part.quantize(kernel, view));
        let mut out = vec![0.0; m * 3];
        kernel.multiply(weight, 0..3, &acts, &[0, 1, 2, 3, 4, 5, 6], &mut out).unwrap();
        assert_eq!(bits(&out), bits(&expected), "{rows_per_part}");
    }
}

#[test]
fn int8_tiles_are_exact() {
    let mut random = Random(7);
    for (k, n) in [(32, 32), (32, 64), (64, 32), (96, 96), (512, 64), (2048, 32), (65504, 32)] {
        for m in ROWS {
            let (codes, rows) = (random.int8s(n * k), random.int8s(m * k));
            check_tiles(&codes, &rows, k, n);
        }
        for (w, x) in [(127, 127), (-127, 127), (-127, -127), (127, -127), (-128, 127), (-128, -127)] {
            check_tiles(&vec![w; n * k], &vec![x; 5 * k], k, n);
        }
    }
    assert_eq!(tiles_product(Kernel::detect(), &[], &[], 0, 32, 1), vec![0; 32]);
}

/// Row-major codes `[n, k]` into tiles, and every path against the plain product of the row-major matrices.
fn check_tiles(codes: &[i8], rows: &[i8], k: usize, n: usize) {
    let mut tiles = vec![0; n * k];
    for (i, &code) in codes.iter().enumerate() {
        let (o, c) = (i / k, i % k);
        tiles[(o / 32 * (k / 32) + c / 32) * 1024 + o % 32 * 32 + c % 32] = code;
    }
    let expected: Vec<i32> = rows
        .chunks(k)
        .flat_map(|row| codes.chunks(k).map(move |w| (w, row)))
        .map(|(w, row)| w.iter().zip(row).map(|(&w, &x)| i32::from(w) * i32::from(x)).sum())
        .collect();
    for kernel in [naive()].into_iter().chain(fast_kernels()) {
        let found = tiles_product(kernel, &tiles, rows, k, n, rows.len() / k);
        assert!(found == expected, "{:?} k {k} n {n} m {}", kernel.path(), rows.len() / k);
    }
}

fn tiles_product(kernel: Kernel, tiles: &[i8], rows: &[i8], k: usize, n: usize, m: usize) -> Vec<i32> {
    let mut out = vec![i32::MIN; m * n];
    kernel.int8_tiles(tiles, k, n, MatrixView::new(rows, m, k).unwrap(), &mut out);
    out
}

/// Weights in memory, one after the other.
#[derive(Default)]
struct Memory {
    bytes: Vec<u8>,
    metadata: Metadata,
}

impl Memory {
    fn push(&mut self, random: &mut Random, dtype: Dtype, n_in: usize, n_out: usize) -> Weight {
        let bytes = random.weights(dtype, n_in, n_out);
        let place = Place { file: 0, offset: self.bytes.len() as u64, len: bytes.len() as u64 };
        self.bytes.extend(bytes);
        Weight { place, dtype, n_in, n_out }
    }
}

impl TensorSource for Memory {
    fn header(&self) -> &[u8] {
        &[]
    }

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn tensors(&self) -> &[TensorInfo] {
        &[]
    }

    fn find(&self, _: &str) -> Option<&TensorInfo> {
        None
    }

    fn bytes(&self, place: Place) -> Result<&[u8], SourceError> {
        let Place { file, offset, len } = place;
        let range = offset as usize..(offset + len) as usize;
        self.bytes.get(range).ok_or(SourceError::OutOfFile { file, offset, len })
    }
}

/// A small model: four plain matrices, and one layer (number 2) of experts of every type.
struct Small {
    memory: Arc<Memory>,
    table: Arc<WeightTable>,
}

const LAYER: LayerId = LayerId(2);
const N_EMBD: usize = 256;
const N_FF: usize = 512;
const N_EXPERT: usize = 9;

impl Small {
    fn new() -> Small {
        let mut random = Random(8);
        let (mut memory, mut table) = (Memory::default(), WeightTable::default());
        for (dtype, n_out) in [(Dtype::Q4_K, 300), (Dtype::F32, 7), (Dtype::Q8_0, 65), (Dtype::Q6_K, 65)] {
            table.push(memory.push(&mut random, dtype, N_EMBD, n_out));
        }
        let mut list = |first: usize, n_in: usize, n_out: usize| -> Vec<Weight> {
            let types = TYPES.iter().cycle().skip(first).take(N_EXPERT);
            types.map(|&(dtype, _)| memory.push(&mut random, dtype, n_in, n_out)).collect()
        };
        let (gate, up, down) = (list(0, N_EMBD, N_FF), list(3, N_EMBD, N_FF), list(5, N_FF, N_EMBD));
        table.set_bank(LAYER, ExpertBank::new(gate, up, down));
        Small { memory: Arc::new(memory), table: Arc::new(table) }
    }

    fn executor(&self, n_threads: usize, mode: KernelMode) -> CpuExecutor {
        let (memory, table) = (Arc::clone(&self.memory), Arc::clone(&self.table));
        CpuExecutor::new(memory, table, Arc::new(Pool::new(n_threads)), mode).unwrap()
    }

    fn product(&self, weight: &Weight, mode: KernelMode, rows: &[f32]) -> Vec<f32> {
        let bytes = self.memory.bytes(weight.place).unwrap();
        let view = WeightView::new(weight.dtype, weight.n_in, weight.n_out, bytes).unwrap();
        let form = if mode == KernelMode::Exact { Form::F32 } else { Form::for_weight(weight.dtype) };
        multiply(naive(), form, view, rows)
    }

    /// `silu(gate · x) ⊙ up · x`, and down of that, for one row.
    fn expert(&self, expert: ExpertId, mode: KernelMode, row: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let bank = self.table.bank(LAYER).unwrap();
        let gate = self.product(&bank.gate[expert.index()], mode, row);
        let up = self.product(&bank.up[expert.index()], mode, row);
        let hidden: Vec<f32> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + exp(-g)) * u).collect();
        let out = self.product(&bank.down[expert.index()], mode, &hidden);
        (hidden, out)
    }
}

/// Two different experts for every row, the first of them often the same.
fn routing(random: &mut Random, m: usize) -> Routing {
    let mut routing = Routing { n_used: 2, ..Routing::default() };
    for _ in 0..m {
        let first = (random.next() % N_EXPERT as u64 * (random.next() % 2)) as u32;
        let second = (first + 1 + (random.next() % (N_EXPERT as u64 - 1)) as u32) % N_EXPERT as u32;
        routing.experts.extend([ExpertId(first), ExpertId(second)]);
        routing.weights.extend(random.floats(2));
    }
    routing
}

#[test]
fn experts_are_their_single_products_combined_in_slot_order() {
    let small = Small::new();
    let mut random = Random(9);
    for mode in [KernelMode::Fast, KernelMode::Exact] {
        for m in [0, 1, 2, 17, 40] {
            let rows = random.floats(m * N_EMBD);
            let view = MatrixView::new(&rows, m, N_EMBD).unwrap();
            let routing = routing(&mut random, m);
            let expected: Vec<f32> = (0..m)
                .flat_map(|r| {
                    let mut sum = vec![0f32; N_EMBD];
                    for slot in 2 * r..2 * r + 2 {
                        let row = &rows[r * N_EMBD..(r + 1) * N_EMBD];
                        let out = small.expert(routing.experts[slot], mode, row).1;
                        sum.iter_mut().zip(out).for_each(|(sum, y)| *sum += routing.weights[slot] * y);
                    }
                    sum
                })
                .collect();
            for n_threads in [1, 2, 8] {
                let mut executor = small.executor(n_threads, mode);
                // Twice, for buffers that have been used before.
                for _ in 0..2 {
                    let mut out = vec![f32::NAN; m * N_EMBD];
                    executor.experts(LAYER, view, &routing, &mut out).unwrap();
                    assert!(bits(&out) == bits(&expected), "{mode:?} m {m}, {n_threads} threads");
                }
            }
        }
    }
}

#[test]
fn calls_in_any_order_and_in_halves_are_the_same_calls() {
    let small = Small::new();
    let mut random = Random(10);
    let rows = random.floats(6 * N_EMBD);
    let view = MatrixView::new(&rows, 6, N_EMBD).unwrap();
    let calls: Vec<Call> = [(5, 8), (0, 3), (5, 3), (1, 0), (0, 8), (4, 3), (2, 1), (5, 3)]
        .map(|(row, expert)| Call { row, slot: 0, expert: ExpertId(expert) })
        .to_vec();
    let expected: Vec<_> = calls
        .iter()
        .map(|call| small.expert(call.expert, KernelMode::Fast, view.row(call.row as usize)))
        .collect();
    let (expected_hidden, expected_out): (Vec<_>, Vec<_>) = expected.into_iter().unzip();
    for n_threads in [1, 2, 8] {
        let mut executor = small.executor(n_threads, KernelMode::Fast);
        let mut out = vec![f32::NAN; calls.len() * N_EMBD];
        executor.expert_calls(LAYER, view, &calls, &mut out).unwrap();
        assert!(bits(&out) == bits(&expected_out.concat()), "{n_threads} threads");
        let mut hidden = vec![f32::NAN; calls.len() * N_FF];
        executor.gate_up_calls(LAYER, view, &calls, 0..N_FF, &mut hidden).unwrap();
        assert!(bits(&hidden) == bits(&expected_hidden.concat()), "{n_threads} threads");
        // Any outputs alone are those of the whole.
        for cols in [0..1, 32..N_FF, 17..40, N_FF - 1..N_FF] {
            let mut some = vec![f32::NAN; calls.len() * cols.len()];
            executor.gate_up_calls(LAYER, view, &calls, cols.clone(), &mut some).unwrap();
            let expected: Vec<f32> =
                hidden.chunks(N_FF).flat_map(|row| &row[cols.clone()]).copied().collect();
            assert!(bits(&some) == bits(&expected), "{n_threads} threads, outputs {cols:?} of gate and up");
        }
        out.fill(f32::NAN);
        let hidden = MatrixView::new(&hidden, calls.len(), N_FF).unwrap();
        executor.down_calls(LAYER, hidden, &calls, 0..N_EMBD, &mut out).unwrap();
        assert!(bits(&out) == bits(&expected_out.concat()), "{n_threads} threads");
        for cols in [0..1, 32..N_EMBD, 17..40, N_EMBD - 1..N_EMBD] {
            let mut some = vec![f32::NAN; calls.len() * cols.len()];
            executor.down_calls(LAYER, hidden, &calls, cols.clone(), &mut some).unwrap();
            let expected: Vec<f32> = out.chunks(N_EMBD).flat_map(|row| &row[cols.clone()]).copied().collect();
            assert!(bits(&some) == bits(&expected), "{n_threads} threads, outputs {cols:?} of down");
        }
        for cols in [0..0, 0..N_EMBD + 1] {
            let error = executor.down_calls(LAYER, hidden, &calls, cols, &mut []).unwrap_err();
            assert!(matches!(error, ExecutorError::Shape { .. }), "{error}");
        }
    }
}

#[test]
fn more_calls_than_fit_the_scratch_are_dealt_with_in_turns() {
    let mut random = Random(11);
    let (mut memory, mut table) = (Memory::default(), WeightTable::default());
    let mut list = || (0..2).map(|_| memory.push(&mut random, Dtype::Q8_0, 32, 32)).collect();
    table.set_bank(LayerId(0), ExpertBank::new(list(), list(), list()));
    let pool = Arc::new(Pool::new(2));
    let mut executor = CpuExecutor::new(Arc::new(memory), Arc::new(table), pool, KernelMode::Fast).unwrap();
    // 64 MiB are 174,762 hidden rows of 32 with their gate and up values.
    let rows = random.floats(32 * 5);
    let view = MatrixView::new(&rows, 5, 32).unwrap();
    let calls: Vec<Call> = (0..180_000)
        .map(|i| Call { row: i % 5, slot: 0, expert: ExpertId(u32::from(i % 60 == 59)) })
        .collect();
    let mut out = vec![f32::NAN; calls.len() * 32];
    executor.expert_calls(LayerId(0), view, &calls, &mut out).unwrap();
    let mut expected = vec![0.0; 60 * 32];
    executor.expert_calls(LayerId(0), view, &calls[..60], &mut expected).unwrap();
    assert!(out.chunks(60 * 32).all(|chunk| bits(chunk) == bits(&expected)));
}

#[test]
fn linear_multiplies_several_matrices_of_any_form() {
    let small = Small::new();
    let mut random = Random(12);
    for mode in [KernelMode::Fast, KernelMode::Exact] {
        for m in [0, 1, 4, 33] {
            let rows = random.floats(m * N_EMBD);
            let view = MatrixView::new(&rows, m, N_EMBD).unwrap();
            for n_threads in [1, 2, 8] {
                let mut executor = small.executor(n_threads, mode);
                let mut outs: Vec<_> =
                    small.table.linears().iter().map(|w| vec![f32::NAN; m * w.n_out]).collect();
                let mut products: Vec<_> =
                    outs.iter_mut().zip(0..).map(|(out, id)| Product { weight: WeightId(id), out }).collect();
                executor.linear(view, &mut products).unwrap();
                for (out, weight) in outs.iter().zip(small.table.linears()) {
                    let expected = small.product(weight, mode, &rows);
                    assert!(bits(out) == bits(&expected), "{mode:?} {} m {m}", weight.dtype);
                }
            }
        }
    }
}

#[test]
fn each_of_several_matrices_has_rows_of_its_own() {
    let (small, mut random) = (Small::new(), Random(77));
    // Two of one shape and of types that want their activations in different forms, one of them twice.
    let weights = [WeightId(2), WeightId(3), WeightId(2)];
    for mode in [KernelMode::Fast, KernelMode::Exact] {
        for m in [1, 3, 20] {
            let rows = random.floats(weights.len() * m * N_EMBD);
            let parts = rows.chunks_exact(m * N_EMBD).zip(weights);
            let expected: Vec<f32> = parts
                .flat_map(|(rows, id)| small.product(small.table.linear(id).unwrap(), mode, rows))
                .collect();
            let view = MatrixView::new(&rows, weights.len() * m, N_EMBD).unwrap();
            for n_threads in [1, 8] {
                let mut out = vec![f32::NAN; expected.len()];
                small.executor(n_threads, mode).each(view, &weights, &mut out).unwrap();
                assert!(bits(&out) == bits(&expected), "{mode:?} m {m}");
            }
        }
    }
}

#[test]
fn gather_dequantises_the_rows_asked_for() {
    let small = Small::new();
    let mut executor = small.executor(1, KernelMode::Fast);
    let weight = small.table.linears()[0];
    let mut all = vec![0.0; weight.n_in * weight.n_out];
    blocks::dequantize(weight.dtype, small.memory.bytes(weight.place).unwrap(), &mut all).unwrap();
    let ids = [299, 0, 7, 7];
    let mut out = vec![f32::NAN; ids.len() * N_EMBD];
    executor.gather(WeightId(0), &ids, &mut out).unwrap();
    for (id, row) in ids.iter().zip(out.chunks(N_EMBD)) {
        assert_eq!(row, &all[*id as usize * N_EMBD..][..N_EMBD]);
    }
}

#[test]
fn wrong_shapes_and_numbers_are_refused() {
    let small = Small::new();
    let executor = || small.executor(2, KernelMode::Fast);
    let (row, wide, mut out) = ([0.0; N_EMBD], [0.0; 2 * N_EMBD], [0.0; N_EMBD]);
    let view = MatrixView::new(&row, 1, N_EMBD).unwrap();
    let wide = MatrixView::new(&wide, 1, 2 * N_EMBD).unwrap();
    let what = |result: Result<(), ExecutorError>| match result {
        Err(ExecutorError::Shape { what, .. }) => what,
        other => panic!("{other:?}"),
    };
    let call = |row, expert| [Call { row, slot: 0, expert: ExpertId(expert) }];
    let mut linear = |rows, id| {
        let mut products = [Product { weight: WeightId(id), out: &mut out[..7] }];
        what(executor().linear(rows, &mut products))
    };
    assert_eq!(linear(view, 0), "outputs of a product");
    assert_eq!(linear(wide, 1), "columns of the activations");
    assert_eq!(linear(view, 4), "number of a matrix");
    let mut each = |ids: &[WeightId], n: usize| what(executor().each(view, ids, &mut out[..n]));
    assert_eq!(each(&[WeightId(2); 2], 130), "rows of several matrices");
    assert_eq!(each(&[WeightId(2)], 64), "outputs of a product");
    let mut calls =
        |layer, rows, calls: [Call; 1]| what(executor().expert_calls(LayerId(layer), rows, &calls, &mut out));
    assert_eq!(calls(1, view, call(0, 0)), "number of a layer with experts");
    assert_eq!(calls(2, wide, call(0, 0)), "columns of the activations");
    assert_eq!(calls(2, view, call(1, 0)), "row of a call");
    assert_eq!(calls(2, view, call(0, 9)), "number of an expert");
    let routing = Routing { n_used: 1, experts: vec![ExpertId(0); 2], weights: vec![1.0; 2] };
    assert_eq!(what(executor().experts(LAYER, view, &routing, &mut out)), "rows of the routing");
    assert_eq!(what(executor().gather(WeightId(0), &[300], &mut out)), "row of the gathered matrix");
    assert_eq!(what(executor().gather(WeightId(0), &[], &mut out)), "outputs of the gather");
}

#[test]
fn matrices_that_cannot_be_computed_are_refused_at_once() {
    let place = |len| Place { file: 0, offset: 0, len };
    let good = Weight { place: place(34), dtype: Dtype::Q8_0, n_in: 32, n_out: 1 };
    let open = |weight: Weight, bank: Option<ExpertBank>| {
        let mut table = WeightTable::default();
        table.push(weight);
        if let Some(bank) = bank {
            table.set_bank(LayerId(0), bank);
        }
        let memory = Memory { bytes: vec![0; 66], ..Memory::default() };
        CpuExecutor::new(Arc::new(memory), Arc::new(table), Arc::new(Pool::new(1)), KernelMode::Fast)
            .map(|_| ())
            .map_err(|error| error.to_string())
    };
    assert_eq!(open(good, None), Ok(()));
    let error = |weight| open(weight, None).unwrap_err();
    assert_eq!(
        error(Weight { place: place(64), dtype: Dtype::I64, n_in: 8, n_out: 1 }),
        "element type I64 is not supported"
    );
    assert_eq!(error(Weight { place: place(33), ..good }), "bytes of a matrix: got 33, expected 34");
    assert!(error(Weight { place: place(340), ..good }).contains("not in file"));
    assert!(error(Weight { n_out: 0, place: place(0), ..good }).contains("outputs of a matrix"));
    let bank = |up| ExpertBank::new(vec![good], up, vec![good]);
    assert!(open(good, Some(bank(vec![]))).unwrap_err().contains("experts of a projection"));
    assert!(open(good, Some(bank(vec![good]))).unwrap_err().contains("inputs of a down projection"));
}
