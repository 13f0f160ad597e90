//! One matrix times one row and times many, for each type, from memory: beside a plain read of the same bytes.

use orkpack::kernel::{Activations, Form, Kernel, Path};
use orkpack::tensor::{Dtype, MatrixView, WeightView};
use orkpack::threads::{Patch, Pool};
use std::sync::Mutex;

use crate::median;

/// Far more than any cache.
const BYTES: usize = 256 << 20;
const N_IN: usize = 2048;
const RUNS: usize = 7;
/// Within the second cache of a core, and how often it is read there.
const CACHED: usize = 200 << 10;
const ROUNDS: usize = 50;
/// Rows of the matrix–matrix product, and the outputs that it has.
const MANY: usize = 64;
const N_OUT_MANY: usize = 2048;

const TYPES: [Dtype; 14] = [
    Dtype::Q8_0,
    Dtype::Q4_0,
    Dtype::Q4_K,
    Dtype::Q6_K,
    Dtype::Q5_K,
    Dtype::Q5_0,
    Dtype::IQ4_NL,
    Dtype::MXFP4,
    Dtype::Q2_K,
    Dtype::Q3_K,
    Dtype::IQ4_XS,
    Dtype::F16,
    Dtype::BF16,
    Dtype::F32,
];

/// The fastest kernels of this machine.
pub fn bench() {
    run(Kernel::detect());
}

/// Those of an x86-64 CPU without AVX-512.
pub fn bench_avx2() {
    match Kernel::with_path(Path::Avx2) {
        Some(kernel) => run(kernel),
        None => println!("kernels: this CPU has no AVX2"),
    }
}

fn run(kernel: Kernel) {
    println!("kernels: {:?}; rows of {N_IN}, measured here", kernel.path());
    println!("  type      threads   GB/s   plain read   share   from the cache   GMAC/s at {MANY} rows");
    // The bytes of small half-precision numbers in any type, so that nothing overflows.
    let mut bytes: Vec<u8> = (0..BYTES).map(|i| if i % 2 == 1 { 0x14 } else { i as u8 }).collect();
    for n_threads in [1, 2] {
        let pool = Pool::new(n_threads);
        for dtype in TYPES {
            let row_bytes = dtype.row_bytes(N_IN as u64).expect("whole blocks") as usize;
            let n_out = BYTES / row_bytes / 16 * 16;
            if dtype == Dtype::MXFP4 {
                // Its scales are powers of two: usual ones, as denormals take long.
                bytes.iter_mut().step_by(17).for_each(|scale| *scale = *scale % 8 + 112);
            }
            let bytes = &bytes[..n_out * row_bytes];
            let weight = WeightView::new(dtype, N_IN, n_out, bytes).expect("whole rows");
            let (mut product, mut plain) = (Vec::new(), Vec::new());
            for _ in 0..RUNS {
                product.push(gigabytes(bytes.len(), multiply(kernel, &pool, weight, 1)));
                plain.push(gigabytes(bytes.len(), read(&pool, bytes)));
            }
            let n_cached = CACHED / row_bytes / 16 * 16;
            let cached =
                WeightView::new(dtype, N_IN, n_cached, &bytes[..n_cached * row_bytes]).expect("whole rows");
            let cached = median((0..RUNS).map(|_| from_cache(kernel, cached)).collect());
            let few = WeightView::new(dtype, N_IN, N_OUT_MANY, &bytes[..N_OUT_MANY * row_bytes]);
            let few = few.expect("whole rows");
            let work = (N_IN * N_OUT_MANY * MANY) as f64;
            let rates = (0..RUNS).map(|_| work / multiply(kernel, &pool, few, MANY) / 1e9).collect();
            let (product, plain) = (median(product), median(plain));
            println!(
                "  {:<9} {n_threads:>7} {product:>6.1} {plain:>12.1} {:>6.0}% {cached:>15.1} {:>13.0}",
                dtype.to_string(),
                100.0 * product / plain,
                median(rates)
            );
        }
    }
}

/// GB/s of one row times a matrix that stays in the cache, on this thread alone.
fn from_cache(kernel: Kernel, weight: WeightView<'_>) -> f64 {
    let row: Vec<f32> = (0..N_IN).map(|i| (i % 251) as f32 / 125.0 - 1.0).collect();
    let mut acts = Activations::default();
    let rows = MatrixView::new(&row, 1, N_IN).expect("a row");
    acts.quantize(kernel, Form::for_weight(weight.dtype()), rows);
    let mut out = vec![0.0; weight.n_out()];
    let seconds = wall(|| {
        for _ in 0..ROUNDS {
            kernel.multiply(weight, 0..weight.n_out(), &acts, &[0], &mut out).expect("a type with a decoder");
        }
    });
    gigabytes(ROUNDS * weight.bytes().len(), seconds)
}

/// Seconds on the clock: processor time, which `--busy` takes elsewhere, is told in steps longer than these products.
fn wall(of: impl FnOnce()) -> f64 {
    let began = std::time::Instant::now();
    of();
    began.elapsed().as_secs_f64()
}

fn gigabytes(bytes: usize, seconds: f64) -> f64 {
    bytes as f64 / seconds / 1e9
}

/// Seconds of `m` rows times all of `weight`.
fn multiply(kernel: Kernel, pool: &Pool, weight: WeightView<'_>, m: usize) -> f64 {
    let rows: Vec<f32> = (0..m * N_IN).map(|i| (i % 251) as f32 / 125.0 - 1.0).collect();
    let mut acts = Activations::default();
    let rows = MatrixView::new(&rows, m, N_IN).expect("whole rows");
    acts.quantize(kernel, Form::for_weight(weight.dtype()), rows);
    let every: Vec<u32> = (0..m as u32).collect();
    let mut out = vec![0.0; m * weight.n_out()];
    let width = (weight.n_out() / (8 * pool.n_threads())).next_multiple_of(16);
    let patches = Patch::cut(&mut out, weight.n_out(), &[(&every, width)]).expect("an output");
    let pieces: Vec<_> = patches.into_iter().map(|patch| Mutex::new((patch, Vec::new()))).collect();
    wall(|| {
        pool.run(pieces.len(), &|i| {
            let (patch, tile) = &mut *pieces[i].lock().expect("no panic");
            tile.resize(m * patch.cols().len(), 0.0);
            kernel.multiply(weight, patch.cols(), &acts, &every, tile).expect("a type with a decoder");
            for (r, row) in tile.chunks_exact(patch.cols().len()).enumerate() {
                patch.row(r).copy_from_slice(row);
            }
        });
    })
}

/// GB/s of a plain read from memory.
pub fn plain_read(n_threads: usize) -> f64 {
    let (pool, bytes) = (Pool::new(n_threads), vec![1; BYTES]);
    median((0..RUNS).map(|_| gigabytes(BYTES, read(&pool, &bytes))).collect())
}

/// Seconds of reading every byte once, and doing as little as possible with it.
fn read(pool: &Pool, bytes: &[u8]) -> f64 {
    let pieces: Vec<&[u8]> =
        bytes.chunks((bytes.len() / (8 * pool.n_threads())).next_multiple_of(4096)).collect();
    wall(|| {
        pool.run(pieces.len(), &|i| {
            let mut lanes = [0u64; 16];
            for line in pieces[i].as_chunks::<128>().0 {
                let words = line.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
                lanes.iter_mut().zip(words).for_each(|(lane, word)| *lane ^= word);
            }
            std::hint::black_box(lanes);
        });
    })
}
