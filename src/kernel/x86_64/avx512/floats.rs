//! Weights that are plain numbers: sixteen at a time, four weight rows by up to four activation rows.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::{Fours, prefetch};
use crate::kernel::activations::Row;

/// A plain type, `BYTES` wide.
pub(super) trait Float {
    const BYTES: usize;

    /// The weights that `there` says, in order; zero for the others, which are not read.
    ///
    /// # Safety
    ///
    /// Those can be read at `bytes`; the CPU has the features.
    unsafe fn load(bytes: *const u8, there: u16) -> __m512;
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct Bf16;

impl Float for F32 {
    const BYTES: usize = 4;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn load(bytes: *const u8, there: u16) -> __m512 {
        // SAFETY: the caller vouches for the weights.
        unsafe { _mm512_maskz_loadu_ps(there, bytes.cast()) }
    }
}

impl Float for F16 {
    const BYTES: usize = 2;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn load(bytes: *const u8, there: u16) -> __m512 {
        // SAFETY: the caller vouches for the weights.
        _mm512_cvtph_ps(unsafe { _mm256_maskz_loadu_epi16(there, bytes.cast()) })
    }
}

impl Float for Bf16 {
    const BYTES: usize = 2;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn load(bytes: *const u8, there: u16) -> __m512 {
        // SAFETY: the caller vouches for the weights.
        let upper_halves = _mm512_cvtepu16_epi32(unsafe { _mm256_maskz_loadu_epi16(there, bytes.cast()) });
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(upper_halves))
    }
}

/// `A` activation rows, for weight rows of `n_in`: see [`crate::kernel`], "floats".
pub(super) struct Plain<'a, T, const A: usize> {
    n_in: usize,
    acts: [Row<'a>; A],
    of: PhantomData<T>,
}

impl<'a, T, const A: usize> Plain<'a, T, A> {
    /// # Panics
    ///
    /// When a row is shorter: a bug of the caller.
    pub(super) fn of(n_in: usize, acts: [Row<'a>; A]) -> Self {
        for act in &acts {
            assert!(act.values.len() >= n_in.next_multiple_of(16), "too few activations");
        }
        Plain { n_in, acts, of: PhantomData }
    }
}

impl<T: Float, const A: usize> Fours<A> for Plain<'_, T, A> {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn times(&self, rows: &[*const u8; 4]) -> [[f32; 4]; A] {
        // SAFETY: the caller vouches for the weight rows.
        unsafe { few::<T, A>(rows, self.n_in, &self.acts) }
    }
}

/// Four weight rows of `n_in` times `A` activation rows.
///
/// # Safety
///
/// All rows are that long; the CPU has the features.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
unsafe fn few<T: Float, const A: usize>(
    rows: &[*const u8; 4],
    n_in: usize,
    acts: &[Row<'_>; A],
) -> [[f32; 4]; A] {
    let mut lanes = [[_mm512_setzero_ps(); 4]; A];
    for at in (0..n_in).step_by(16) {
        let there = if n_in - at < 16 { u16::MAX >> (16 - (n_in - at)) } else { u16::MAX };
        if A == 1 && (at * T::BYTES).is_multiple_of(64) {
            prefetch(rows, at * T::BYTES, 64);
        }
        let mut w = [_mm512_setzero_ps(); 4];
        for r in 0..4 {
            // SAFETY: the caller vouches for `n_in` weights.
            let bytes = unsafe { rows[r].add(at * T::BYTES) };
            // SAFETY: as above.
            w[r] = unsafe { T::load(bytes, there) };
        }
        for a in 0..A {
            // SAFETY: the length has been checked; rows are padded.
            let x = unsafe { _mm512_loadu_ps(acts[a].values.as_ptr().add(at)) };
            for r in 0..4 {
                lanes[a][r] = _mm512_fmadd_ps(w[r], x, lanes[a][r]);
            }
        }
    }
    let mut out = [[0.0; 4]; A];
    for a in 0..A {
        // SAFETY: four floats are written to an array of four.
        unsafe { _mm_storeu_ps(out[a].as_mut_ptr(), fold(lanes[a])) };
    }
    out
}

/// The sum of the 16 lanes of each register, halves folded onto each other.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
fn fold(lanes: [__m512; 4]) -> __m128 {
    let mut four = [_mm_setzero_ps(); 4];
    for r in 0..4 {
        let eight = _mm256_add_ps(_mm512_castps512_ps256(lanes[r]), _mm512_extractf32x8_ps::<1>(lanes[r]));
        four[r] = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    }
    // Lanes 0 and 1 of two rows, and then 2 and 3, side by side.
    let pair = |a: __m128, b: __m128| _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
    let (first, second) = (pair(four[0], four[1]), pair(four[2], four[3]));
    _mm_add_ps(_mm_movelh_ps(first, second), _mm_movehl_ps(second, first))
}
