//! Strips of int8 tiles in the NPU's layout: a register holds 16 consecutive weights of one output.
//!
//! Sixteen registers of sums take half a block for one row, a quarter for two, an eighth for four; the strip, which
//! stays in the second cache, passes once for each part.

use std::arch::aarch64::{int32x4_t, vst1q_s32};

use super::level::Level;
use super::neon::*;
use super::vectors::{load, prefetch, totals};

/// Registers of sums.
const SUMS: usize = 16;

/// `out[a][n] = Σ_k strip(n, k) · rows[a][k]`, for 1, 2 or 4 rows.
///
/// # Panics
///
/// When a row is shorter than the strip: a bug of the caller.
pub(super) fn dot<L: Level, const A: usize>(cpu: L, strip: &[i8], rows: [&[i8]; A]) -> [[i32; 32]; A] {
    const { assert!(A == 1 || A == 2 || A == 4, "sums are dealt to the rows by fours") };
    let blocks = strip.as_chunks::<1024>().0;
    assert!(rows.iter().all(|row| row.len() >= 32 * blocks.len()), "a row shorter than the strip");
    let (mut out, outputs) = ([[0; 32]; A], SUMS / A);
    for first in (0..32).step_by(outputs) {
        let sums = part::<L, A>(cpu, blocks, first, rows);
        for (out, sums) in out.iter_mut().zip(sums.chunks_exact(outputs / 4)) {
            for (out, sums) in out[first..].chunks_exact_mut(4).zip(sums) {
                // SAFETY: the chunk has room for four numbers.
                unsafe { vst1q_s32(out.as_mut_ptr(), *sums) };
            }
        }
    }
    out
}

/// Outputs `first` and on, `16 / A` of them, times every row: `[A, 16 / A]`.
#[inline(always)]
fn part<L: Level, const A: usize>(
    cpu: L,
    blocks: &[[i8; 1024]],
    first: usize,
    rows: [&[i8]; A],
) -> [int32x4_t; SUMS / 4] {
    let (mut sums, outputs) = ([vdupq_n_s32(0); SUMS], SUMS / A);
    for (kb, block) in blocks.iter().enumerate() {
        // SAFETY: every row has 32 numbers for each block.
        let x = rows.map(|row| unsafe {
            let at = row.as_ptr().add(32 * kb);
            [load(at), load(at.add(16))]
        });
        if A == 1 {
            // The same part of the blocks that come.
            prefetch(block.as_ptr().wrapping_add(AHEAD + 32 * first).cast(), 32 * outputs);
        }
        for n in 0..outputs {
            let column = &block[32 * (first + n)..][..32];
            // SAFETY: the column is 32 bytes long.
            let w = unsafe { [load(column.as_ptr()), load(column.as_ptr().add(16))] };
            for a in 0..A {
                sums[a * outputs + n] = cpu.dot(sums[a * outputs + n], w, x[a], false);
            }
        }
    }
    std::array::from_fn(|i| totals(&[sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]]))
}

/// How many bytes ahead memory is asked for, a few blocks.
const AHEAD: usize = 4 << 10;
