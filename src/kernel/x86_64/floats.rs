//! Weights that are plain numbers: 16 at a time, in two accumulators.

use std::arch::x86_64::*;

use super::{Row, load16, prefetch, sum};

/// A plain type, `BYTES` wide.
pub(super) trait Float {
    const BYTES: usize;

    /// Eight weights.
    ///
    /// # Safety
    ///
    /// Eight weights can be read at `bytes`; the CPU has the features.
    unsafe fn load(bytes: *const u8) -> __m256;
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct Bf16;

impl Float for F32 {
    const BYTES: usize = 4;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(bytes: *const u8) -> __m256 {
        // SAFETY: the caller vouches for 32 bytes; no alignment is needed.
        unsafe { _mm256_loadu_ps(bytes.cast()) }
    }
}

impl Float for F16 {
    const BYTES: usize = 2;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(bytes: *const u8) -> __m256 {
        // SAFETY: the caller vouches for 16 bytes.
        _mm256_cvtph_ps(load16(unsafe { &*bytes.cast() }))
    }
}

impl Float for Bf16 {
    const BYTES: usize = 2;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(bytes: *const u8) -> __m256 {
        // SAFETY: the caller vouches for 16 bytes.
        let upper_halves = _mm256_cvtepu16_epi32(load16(unsafe { &*bytes.cast() }));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(upper_halves))
    }
}

/// See [`crate::kernel`], "floats".
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn dot<T: Float, const A: usize>(weights: &[u8], acts: [Row<'_>; A]) -> [f32; A] {
    let sixteens = weights.chunks_exact(16 * T::BYTES);
    let rest = sixteens.remainder();
    // Zeros behind the last weights; the widest type needs 64 bytes.
    let mut padded = [0; 64];
    padded[..rest.len()].copy_from_slice(rest);
    let last = (!rest.is_empty()).then_some(&padded[..]);
    let mut lanes = [[_mm256_setzero_ps(); 2]; A];
    for (b, weights) in sixteens.chain(last).enumerate() {
        if A == 1 {
            prefetch(weights.as_ptr());
        }
        // SAFETY: the chunk holds 16 weights.
        let (low, high) = unsafe { (T::load(weights.as_ptr()), T::load(weights.as_ptr().add(8 * T::BYTES))) };
        for (lanes, act) in lanes.iter_mut().zip(acts) {
            let x = act.values[16 * b..16 * b + 16].as_ptr();
            // SAFETY: the slice above is 16 activations long.
            let (x_low, x_high) = unsafe { (_mm256_loadu_ps(x), _mm256_loadu_ps(x.add(8))) };
            lanes[0] = _mm256_fmadd_ps(low, x_low, lanes[0]);
            lanes[1] = _mm256_fmadd_ps(high, x_high, lanes[1]);
        }
    }
    let mut out = [0.0; A];
    for (out, lanes) in out.iter_mut().zip(lanes) {
        *out = sum(lanes);
    }
    out
}
