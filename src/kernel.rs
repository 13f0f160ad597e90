//! CPU arithmetic: rows of activations times weights as they are stored, and int8 tiles of the NPU's layout.
//!
//! It exists because a model's cold part is computed here: one row at a time at the speed of memory, many rows
//! with each piece of weights decoded once. It never starts threads, never reads files, and never looks at
//! anything but one weight row and one activation row to make one number.
//!
//! # The contract
//!
//! Every path computes **the same bits** (of a NaN only that it is one): `naive`, the oracle, written from the
//! definitions; `portable`; and the SIMD ones. So a result depends neither on the machine, nor on the number of
//! rows in a call, nor on how outputs are dealt to threads. To make that possible the order of the float
//! operations is fixed. A block is one exact integer sum, so that a path may take its weights in any order and
//! sixteen outputs side by side; what is rounded is rounded once a block. All lanes start at 0, and `fma` rounds
//! once:
//!
//! - **floats** (F32, F16, BF16 weights; [`Form::F32`]): both rows are padded with zeros to a multiple of 16;
//!   `lane[i % 16] = fma(w[i], x[i], lane[i % 16])`, in order of `i`.
//! - **blocks of 32** (Q4_0, Q5_0, Q8_0, IQ4_NL, MXFP4; [`Form::Q8x32`]): with signed codes w of block b and their scale dw,
//!   `dot = Σ w[i]·x[i]` in integers, and `lane[b % 8] = fma(dw·dx, dot, lane[b % 8])`, in order of b.
//! - **blocks of 256** (Q2_K to Q6_K, IQ4_XS; [`Form::Q8x256`]): with the 8-bit scale s of each 16 weights,
//!   `dot = Σ s[i/16]·w[i]·x[i]` in integers, and `high = fma(dw·dx, dot, high)`, in order of b; for types with
//!   minimums m, with the sums t of each 16 activations, `low = fma(dmin·dx, Σ m[g]·t[g], low)` as well. The
//!   result is `high − low`.
//!
//! Where there are lanes the result is their sum, halves folded onto each other: `lane[l] += lane[l + 8]` for
//! l < 8, then 4, 2, 1.

#[cfg(target_arch = "aarch64")]
mod aarch64;
mod activations;
mod naive;
mod portable;
mod tiles;
mod wide;
#[cfg(target_arch = "x86_64")]
mod x86_64;

use std::ops::Range;

use activations::Row;
pub use activations::{ActivationRows, Activations, Form};
pub use wide::{Loops, exp, half};

use crate::blocks::{self, BlockError};
use crate::tensor::{Dtype, MatrixView, WeightView};

/// Which implementation of the arithmetic runs. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Path {
    /// The definitions, word for word. Slow; it is what the others are held to.
    Naive,
    /// Plain loops that compilers vectorise, for every machine.
    Portable,
    /// AArch64 with NEON, as every such CPU.
    Neon,
    /// AArch64 with the byte dot product (Cortex-A55, A76 and later).
    NeonDot,
    /// AArch64 with byte matrix products (i8mm) as well.
    NeonI8mm,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 and its byte dot product (VNNI).
    Avx512,
}

impl Path {
    /// Every path, the plainest first.
    pub const ALL: [Path; 7] =
        [Path::Naive, Path::Portable, Path::Neon, Path::NeonDot, Path::NeonI8mm, Path::Avx2, Path::Avx512];
}

/// An implementation that this machine can run.
#[derive(Clone, Copy, Debug)]
pub struct Kernel(Chosen);

/// A path with the proof that the CPU has it.
#[derive(Clone, Copy, Debug)]
enum Chosen {
    Naive,
    Portable,
    #[cfg(target_arch = "aarch64")]
    Neon(aarch64::Cpu),
    #[cfg(target_arch = "x86_64")]
    Avx2(x86_64::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(x86_64::Avx512),
}

impl Kernel {
    /// The fastest path of this machine.
    pub fn detect() -> Kernel {
        let fastest = Path::ALL.into_iter().rev().find_map(Kernel::with_path);
        fastest.unwrap_or(Kernel(Chosen::Portable))
    }

    /// This path; `None` where the machine lacks it.
    pub fn with_path(path: Path) -> Option<Kernel> {
        match path {
            Path::Naive => Some(Kernel(Chosen::Naive)),
            Path::Portable => Some(Kernel(Chosen::Portable)),
            #[cfg(target_arch = "aarch64")]
            Path::Neon | Path::NeonDot | Path::NeonI8mm => {
                Some(Kernel(Chosen::Neon(aarch64::Cpu::with_path(path)?)))
            }
            #[cfg(not(target_arch = "aarch64"))]
            Path::Neon | Path::NeonDot | Path::NeonI8mm => None,
            #[cfg(target_arch = "x86_64")]
            Path::Avx2 => Some(Kernel(Chosen::Avx2(x86_64::Avx2::detect()?))),
            #[cfg(target_arch = "x86_64")]
            Path::Avx512 => Some(Kernel(Chosen::Avx512(x86_64::Avx512::detect()?))),
            #[cfg(not(target_arch = "x86_64"))]
            Path::Avx2 | Path::Avx512 => None,
        }
    }

    /// The path that runs.
    pub fn path(self) -> Path {
        match self.0 {
            Chosen::Naive => Path::Naive,
            Chosen::Portable => Path::Portable,
            #[cfg(target_arch = "aarch64")]
            Chosen::Neon(cpu) => cpu.path(),
            #[cfg(target_arch = "x86_64")]
            Chosen::Avx2(_) => Path::Avx2,
            #[cfg(target_arch = "x86_64")]
            Chosen::Avx512(_) => Path::Avx512,
        }
    }

    /// Outputs `o_range` of `weight` for the activation rows `rows`: `out` is `[rows.len(), o_range.len()]`.
    ///
    /// Activations in the form of the weight's type ([`Form::for_weight`]) are multiplied as stored. With
    /// [`Form::F32`] any type will do: the weights are then dequantised, each once per call, and all
    /// arithmetic is in f32. That is the exact mode, and the way of types without an integer kernel.
    ///
    /// # Errors
    ///
    /// [`BlockError::Unsupported`] when the weights must be dequantised and cannot be.
    ///
    /// # Panics
    ///
    /// When the shapes disagree, a row or an output is not there, or the activations are in another integer
    /// form than the weight's: bugs of the caller.
    pub fn multiply(
        self,
        weight: WeightView<'_>,
        o_range: Range<usize>,
        acts: &Activations,
        rows: &[u32],
        out: &mut [f32],
    ) -> Result<(), BlockError> {
        assert_eq!(weight.n_in(), acts.n_in(), "activations of another width than the weight's");
        assert_eq!(out.len(), o_range.len() * rows.len(), "output of another shape");
        let stride = o_range.len();
        let to = Output { out, stride, first: 0 };
        if acts.form() == Form::F32 && !weight.dtype().is_float() {
            return self.multiply_dequantized(weight, o_range, acts, rows, to);
        }
        assert_eq!(acts.form(), Form::for_weight(weight.dtype()), "activations in another form");
        self.multiply_stored(weight, o_range, acts, rows, to);
        Ok(())
    }

    /// Types that the paths multiply without decoding them first.
    fn multiply_stored(
        self,
        weight: WeightView<'_>,
        o_range: Range<usize>,
        acts: &Activations,
        rows: &[u32],
        to: Output<'_>,
    ) {
        match self.0 {
            Chosen::Naive => drive(naive::Dot(weight.dtype()), weight, o_range, acts, rows, to),
            Chosen::Portable => portable::multiply(weight, o_range, acts, rows, to),
            #[cfg(target_arch = "aarch64")]
            Chosen::Neon(cpu) => cpu.multiply(weight, o_range, acts, rows, to),
            #[cfg(target_arch = "x86_64")]
            Chosen::Avx2(cpu) => cpu.multiply(weight, o_range, acts, rows, to),
            #[cfg(target_arch = "x86_64")]
            Chosen::Avx512(cpu) => cpu.multiply(weight, o_range, acts, rows, to),
        }
    }

    /// Decodes a few weight rows at a time to f32 and multiplies those.
    fn multiply_dequantized(
        self,
        weight: WeightView<'_>,
        o_range: Range<usize>,
        acts: &Activations,
        rows: &[u32],
        to: Output<'_>,
    ) -> Result<(), BlockError> {
        let mut decoded = vec![0f32; weight.n_in() * TILE_ROWS.min(o_range.len())];
        for first in o_range.clone().step_by(TILE_ROWS) {
            let n = TILE_ROWS.min(o_range.end - first);
            let tile = &mut decoded[..n * weight.n_in()];
            let bytes = first * weight.row_bytes()..(first + n) * weight.row_bytes();
            blocks::dequantize(weight.dtype(), &weight.bytes()[bytes], tile)?;
            // The lengths agree by construction.
            let Some(tile) = WeightView::new(Dtype::F32, weight.n_in(), n, bytemuck::cast_slice(tile)) else {
                continue;
            };
            let part = Output { out: &mut *to.out, stride: to.stride, first: first - o_range.start };
            self.multiply_stored(tile, 0..n, acts, rows, part);
        }
        Ok(())
    }

    /// `out[m][o] = Σ_k rows[m][k] · w[o][k]` in exact i32, for weights in the NPU's tiles.
    ///
    /// `tiles` is `[n/32][k/32][32 n][32 k]` int8, `n·k` bytes; `rows` is `[m, k]`, none of them −128; `out`
    /// is `[m, n]`. Both k and n are multiples of 32, and k is below 2^16, so that no sum leaves 32 bits.
    ///
    /// # Panics
    ///
    /// When the shapes disagree or are not multiples of 32: a bug of the caller.
    pub fn int8_tiles(self, tiles: &[i8], k: usize, n: usize, rows: MatrixView<'_, i8>, out: &mut [i32]) {
        assert!(k.is_multiple_of(32) && n.is_multiple_of(32) && k < 1 << 16, "{k} × {n} is not in tiles");
        assert_eq!(tiles.len(), n * k, "tiles of another shape");
        assert_eq!(rows.n_cols(), k, "rows of another width");
        assert_eq!(out.len(), rows.n_rows() * n, "output of another shape");
        if k == 0 {
            out.fill(0);
            return;
        }
        match self.0 {
            Chosen::Naive => naive::int8_tiles(tiles, k, n, rows, out),
            Chosen::Portable => tiles::drive(portable::Strips, tiles, rows, out),
            #[cfg(target_arch = "aarch64")]
            Chosen::Neon(cpu) => tiles::drive(cpu, tiles, rows, out),
            #[cfg(target_arch = "x86_64")]
            Chosen::Avx2(cpu) => tiles::drive(cpu, tiles, rows, out),
            #[cfg(target_arch = "x86_64")]
            Chosen::Avx512(cpu) => tiles::drive(cpu, tiles, rows, out),
        }
    }
}

/// Weight rows that are worked on together: a few tens of KiB, which stay in the first cache while all
/// activation rows pass by.
const TILE_ROWS: usize = 16;

/// Part of an output matrix: columns from `first` of rows that are `stride` long.
struct Output<'a> {
    out: &'a mut [f32],
    stride: usize,
    first: usize,
}

/// One weight row times `A` activation rows: the whole of what a path implements for a type.
trait RowDot: Copy {
    /// `weights` are the bytes of one row; the activation rows are in the type's form and as wide.
    fn dot<const A: usize>(self, weights: &[u8], acts: [Row<'_>; A]) -> [f32; A];
}

/// Loops over outputs and activation rows so that weights come from memory once and activations from the
/// second cache once per [`TILE_ROWS`] outputs.
fn drive(
    kernel: impl RowDot,
    weight: WeightView<'_>,
    o_range: Range<usize>,
    acts: &Activations,
    rows: &[u32],
    mut to: Output<'_>,
) {
    for first in o_range.clone().step_by(TILE_ROWS) {
        let tile = first..o_range.end.min(first + TILE_ROWS);
        let at = to.first + (first - o_range.start);
        let (fours, rest) = rows.as_chunks::<4>();
        let (twos, one) = rest.as_chunks::<2>();
        let mut m = 0;
        for four in fours {
            dot_tile(kernel, weight, tile.clone(), four.map(|r| acts.row(r)), &mut to, m, at);
            m += 4;
        }
        for two in twos {
            dot_tile(kernel, weight, tile.clone(), two.map(|r| acts.row(r)), &mut to, m, at);
            m += 2;
        }
        for &r in one {
            dot_tile(kernel, weight, tile.clone(), [acts.row(r)], &mut to, m, at);
        }
    }
}

/// `A` activation rows, the `m`-th of the output and on, against a tile of weight rows.
fn dot_tile<const A: usize>(
    kernel: impl RowDot,
    weight: WeightView<'_>,
    tile: Range<usize>,
    acts: [Row<'_>; A],
    to: &mut Output<'_>,
    m: usize,
    at: usize,
) {
    for (i, o) in tile.enumerate() {
        let sums = kernel.dot(weight.row(o), acts);
        for (a, sum) in sums.into_iter().enumerate() {
            to.out[(m + a) * to.stride + at + i] = sum;
        }
    }
}
