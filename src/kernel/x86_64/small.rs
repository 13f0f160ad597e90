//! Weights in blocks of 32 with one scale.

use std::arch::x86_64::*;

use super::{Codes, Row, add, half, halves, load16, load32, look_up, pair_sums, prefetch, sum};
use crate::blocks::iq4_nl::STEPS;
use crate::blocks::mxfp4::{DOUBLED, half_scale};

/// A format of 32 weights in `BYTES` bytes. The layouts are drawn in [`crate::blocks`].
pub(super) trait Block {
    const BYTES: usize;

    /// Scale, in every lane, and signed codes, in order.
    ///
    /// # Safety
    ///
    /// `block` is `BYTES` long; the CPU has the features.
    unsafe fn decode(block: &[u8]) -> (__m256, __m256i);
}

pub(super) struct Q8_0;
pub(super) struct Q4_0;
pub(super) struct Q5_0;
pub(super) struct Iq4Nl;
pub(super) struct Mxfp4;

impl Block for Q8_0 {
    const BYTES: usize = 34;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn decode(block: &[u8]) -> (__m256, __m256i) {
        // SAFETY: the caller vouches for 34 bytes.
        let codes = unsafe { &*block.as_ptr().add(2).cast() };
        (half([block[0], block[1]]), load32(codes))
    }
}

impl Block for Q4_0 {
    const BYTES: usize = 18;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn decode(block: &[u8]) -> (__m256, __m256i) {
        // SAFETY: the caller vouches for 18 bytes.
        let bytes = load16(unsafe { &*block.as_ptr().add(2).cast() });
        (half([block[0], block[1]]), _mm256_sub_epi8(halves(bytes), _mm256_set1_epi8(8)))
    }
}

impl Block for Q5_0 {
    const BYTES: usize = 22;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn decode(block: &[u8]) -> (__m256, __m256i) {
        // SAFETY: the caller vouches for 22 bytes.
        let bytes = load16(unsafe { &*block.as_ptr().add(6).cast() });
        let fifths = i32::from_le_bytes([block[2], block[3], block[4], block[5]]);
        // Byte i / 8 of the fifth bits for weight i, of which bit i % 8 is its own.
        let index =
            _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
        let own = _mm256_set1_epi64x(0x8040_2010_0804_0201u64.cast_signed());
        let bits = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(fifths), index), own);
        // −16 where the bit is not set.
        let unset = _mm256_andnot_si256(_mm256_cmpeq_epi8(bits, own), _mm256_set1_epi8(-16));
        (half([block[0], block[1]]), _mm256_or_si256(halves(bytes), unset))
    }
}

impl Block for Iq4Nl {
    const BYTES: usize = 18;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn decode(block: &[u8]) -> (__m256, __m256i) {
        // SAFETY: the caller vouches for 18 bytes.
        let bytes = load16(unsafe { &*block.as_ptr().add(2).cast() });
        (half([block[0], block[1]]), look_up(&STEPS, halves(bytes)))
    }
}

impl Block for Mxfp4 {
    const BYTES: usize = 17;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn decode(block: &[u8]) -> (__m256, __m256i) {
        // SAFETY: the caller vouches for 17 bytes.
        let bytes = load16(unsafe { &*block.as_ptr().add(1).cast() });
        (_mm256_set1_ps(half_scale(block[0])), look_up(&DOUBLED, halves(bytes)))
    }
}

/// See [`crate::kernel`], "blocks of 32".
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn dot<T: Block, const A: usize>(weights: &[u8], acts: [Row<'_>; A]) -> [f32; A] {
    let n = weights.len() / T::BYTES;
    let acts = Codes::of(&acts, n, 32);
    let mut even = [_mm256_setzero_ps(); A];
    let mut odd = even;
    for b in (0..n - n % 2).step_by(2) {
        if A == 1 {
            prefetch(weights.as_ptr().wrapping_add(b * T::BYTES));
        }
        // SAFETY: both blocks are below n, which the lengths of weights and activations have been held to.
        unsafe {
            step::<T, A>(weights, &acts, b, &mut even);
            step::<T, A>(weights, &acts, b + 1, &mut odd);
        }
    }
    if n % 2 == 1 {
        // SAFETY: as above.
        unsafe { step::<T, A>(weights, &acts, n - 1, &mut even) };
    }
    let mut out = [0.0; A];
    for (a, out) in out.iter_mut().enumerate() {
        *out = sum([even[a], odd[a]]);
    }
    out
}

/// Block `b` of the row.
///
/// # Safety
///
/// Weights and activations have more than `b` blocks; the CPU has the features.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn step<T: Block, const A: usize>(weights: &[u8], acts: &Codes<A>, b: usize, lanes: &mut [__m256; A]) {
    // SAFETY: the caller vouches for block b.
    let (d, w) = unsafe { T::decode(weights.get_unchecked(b * T::BYTES..).get_unchecked(..T::BYTES)) };
    let magnitude = _mm256_abs_epi8(w);
    for (a, lanes) in lanes.iter_mut().enumerate() {
        // SAFETY: the caller vouches for block b.
        let (x, dx) = unsafe { (load32(&*acts.codes[a].add(32 * b).cast()), &*acts.scales[a].add(b)) };
        let fours = _mm256_madd_epi16(pair_sums(w, magnitude, x), _mm256_set1_epi16(1));
        *lanes = add(*lanes, _mm256_mul_ps(d, _mm256_broadcast_ss(dx)), fours);
    }
}
