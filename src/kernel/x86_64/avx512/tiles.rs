//! Strips of int8 tiles in the NPU's layout: a register holds 32 consecutive weights of two outputs.
//!
//! Weights are read as numbers that are not negative, 128 too large. Sixteen registers of sums take a whole block for
//! one row, half a block for two, a quarter for four; the strip, which stays in the second cache, passes once for each.

use std::arch::x86_64::*;

use super::{AHEAD, load64, quarters, twice32};

/// Registers of one block.
const PER_BLOCK: usize = 16;

/// `out[a][n] = Σ_k strip(n, k) · rows[a][k]`, for 1, 2 or 4 rows; `sums[a]` is the sum of row `a`.
///
/// # Panics
///
/// When a row is shorter than the strip: a bug of the caller.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
pub(super) fn dot<const A: usize>(strip: &[i8], rows: [&[i8]; A], sums: [i32; A]) -> [[i32; 32]; A] {
    const { assert!(A == 1 || A == 2 || A == 4, "the groups of four registers are dealt to the rows evenly") };
    let blocks = strip.as_chunks::<1024>().0;
    assert!(rows.iter().all(|row| row.len() >= 32 * blocks.len()), "a row shorter than the strip");
    let mut out = [[0; 32]; A];
    for pass in 0..A {
        let outputs = 32 / A;
        let totals = part::<A>(blocks, pass * PER_BLOCK / A, rows);
        for (a, totals) in totals.as_flattened().chunks_exact(outputs).enumerate() {
            for (out, total) in out[a][pass * outputs..][..outputs].iter_mut().zip(totals) {
                *out = total.wrapping_sub(sums[a].wrapping_mul(128));
            }
        }
    }
    out
}

/// The `16 / A` registers of every block from `first` on times every row: `[A, 32 / A]`.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
fn part<const A: usize>(blocks: &[[i8; 1024]], first: usize, rows: [&[i8]; A]) -> [[i32; 16]; 2] {
    let (mut lanes, n) = ([_mm512_setzero_si512(); PER_BLOCK], PER_BLOCK / A);
    let sign = _mm512_set1_epi8(-128);
    for (kb, block) in blocks.iter().enumerate() {
        // SAFETY: every row has 32 numbers for each block.
        let x = rows.map(|row| unsafe { row.as_ptr().add(32 * kb) });
        for i in 0..n {
            let at = block.as_ptr().wrapping_add(64 * (first + i));
            if A == 1 {
                _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD).cast());
            }
            // SAFETY: `first + i` is one of the block's sixteen registers.
            let weights = _mm512_xor_si512(unsafe { load64(at) }, sign);
            for a in 0..A {
                // SAFETY: 32 numbers are there, as above.
                let x = unsafe { twice32(x[a].cast()) };
                lanes[a * n + i] = _mm512_dpbusd_epi32(lanes[a * n + i], weights, x);
            }
        }
    }
    let (fours, _) = lanes.as_chunks::<4>();
    [outputs(quarters(fours[0]), quarters(fours[1])), outputs(quarters(fours[2]), quarters(fours[3]))]
}

/// Sums by quarters of two times four registers, of which each half is an output, as the outputs in order.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
fn outputs(x: __m512i, y: __m512i) -> [i32; 16] {
    let even = _mm512_shuffle_i32x4::<0b10_00_10_00>(x, y);
    let odd = _mm512_shuffle_i32x4::<0b11_01_11_01>(x, y);
    // Four outputs with even numbers, four with odd ones; then the same of `y`.
    let order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    let mut out = [0; 16];
    let sums = _mm512_permutexvar_epi32(order, _mm512_add_epi32(even, odd));
    // SAFETY: the array is 64 bytes long and the store needs no alignment.
    unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), sums) };
    out
}
