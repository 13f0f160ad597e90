//! Weights in blocks of 32 with one scale.

use std::arch::x86_64::*;

use super::{Codes, Row, add, half, halves, load16, load32, look_up, pair_sums, prefetch, sum, total};
use crate::blocks::iq4_nl::STEPS;
use crate::blocks::mxfp4::{DOUBLED, half_scale};

/// A format of 32 weights in `BYTES` bytes. The layouts are drawn in [`crate::blocks`].
pub(super) trait Block {
    const BYTES: usize;

    /// Scale and signed codes, in order.
    ///
    /// # Safety
    ///
    /// `block` is `BYTES` long; the CPU has the features.
    unsafe fn decode(block: &[u8]) -> (f32, __m256i);
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
    unsafe fn decode(block: &[u8]) -> (f32, __m256i) {
        // SAFETY: the caller vouches for 34 bytes.
        let codes = unsafe { &*block.as_ptr().add(2).cast() };
        (half([block[0], block[1]]), load32(codes))
    }
}

impl Block for Q4_0 {
    const BYTES: usize = 18;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn decode(block: &[u8]) -> (f32, __m256i) {
        // SAFETY: the caller vouches for 18 bytes.
        let bytes = load16(unsafe { &*block.as_ptr().add(2).cast() });
        (half([block[0], block[1]]), _mm256_sub_epi8(halves(bytes), _mm256_set1_epi8(8)))
    }
}

impl Block for Q5_0 {
    const BYTES: usize = 22;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn decode(block: &[u8]) -> (f32, __m256i) {
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
    unsafe fn decode(block: &[u8]) -> (f32, __m256i) {
        // SAFETY: the caller vouches for 18 bytes.
        let bytes = load16(unsafe { &*block.as_ptr().add(2).cast() });
        (half([block[0], block[1]]), look_up(&STEPS, halves(bytes)))
    }
}

impl Block for Mxfp4 {
    const BYTES: usize = 17;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn decode(block: &[u8]) -> (f32, __m256i) {
        // SAFETY: the caller vouches for 17 bytes.
        let bytes = load16(unsafe { &*block.as_ptr().add(1).cast() });
        (half_scale(block[0]), look_up(&DOUBLED, halves(bytes)))
    }
}

/// See [`crate::kernel`], "blocks of 32".
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn dot<T: Block, const A: usize>(weights: &[u8], acts: [Row<'_>; A]) -> [f32; A] {
    let n = weights.len() / T::BYTES;
    let acts = Codes::of(&acts, n, 32);
    let mut lanes = [_mm256_setzero_ps(); A];
    for b in (0..n - n % 8).step_by(8) {
        let mut scales = [0f32; 8];
        let mut dots = [[_mm256_setzero_si256(); 8]; A];
        for i in 0..8 {
            if A == 1 && i % 2 == 0 {
                prefetch(weights.as_ptr().wrapping_add((b + i) * T::BYTES));
            }
            // SAFETY: the block is below n, which the lengths of weights and activations have been held to.
            scales[i] = unsafe { step::<T, A>(weights, &acts, b + i, |a, fours| dots[a][i] = fours) };
        }
        // SAFETY: eight floats are read from an array of eight.
        let d = unsafe { _mm256_loadu_ps(scales.as_ptr()) };
        for a in 0..A {
            // SAFETY: eight blocks from b are below n.
            let dx = unsafe { _mm256_loadu_ps(acts.scales[a].add(b)) };
            lanes[a] = add(lanes[a], _mm256_mul_ps(d, dx), totals(dots[a]));
        }
    }
    let mut out = [0.0; A];
    let mut rest = [[0f32; 8]; A];
    for b in n - n % 8..n {
        // SAFETY: as above.
        let mut dots = [0; A];
        let d = unsafe { step::<T, A>(weights, &acts, b, |a, fours| dots[a] = total(fours)) };
        for a in 0..A {
            if b % 8 == 0 {
                // SAFETY: eight floats are written to an array of eight.
                unsafe { _mm256_storeu_ps(rest[a].as_mut_ptr(), lanes[a]) };
            }
            // SAFETY: the block is below n.
            let dx = unsafe { *acts.scales[a].add(b) };
            rest[a][b % 8] = (d * dx).mul_add(dots[a] as f32, rest[a][b % 8]);
        }
    }
    for a in 0..A {
        if !n.is_multiple_of(8) {
            // SAFETY: eight floats are read from an array of eight.
            lanes[a] = unsafe { _mm256_loadu_ps(rest[a].as_ptr()) };
        }
        out[a] = sum([lanes[a], _mm256_setzero_ps()]);
    }
    out
}

/// Block `b` of the row: gives its scale, and `each` activation row's sums of four neighbouring products.
///
/// # Safety
///
/// Weights and activations have more than `b` blocks; the CPU has the features.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn step<T: Block, const A: usize>(
    weights: &[u8],
    acts: &Codes<A>,
    b: usize,
    mut each: impl FnMut(usize, __m256i),
) -> f32 {
    // SAFETY: the caller vouches for block b.
    let (d, w) = unsafe { T::decode(weights.get_unchecked(b * T::BYTES..).get_unchecked(..T::BYTES)) };
    let magnitude = _mm256_abs_epi8(w);
    for a in 0..A {
        // SAFETY: the caller vouches for block b.
        let x = load32(unsafe { &*acts.codes[a].add(32 * b).cast() });
        each(a, _mm256_madd_epi16(pair_sums(w, magnitude, x), _mm256_set1_epi16(1)));
    }
    d
}

/// The sum of each of eight registers.
#[inline]
#[target_feature(enable = "avx2")]
fn totals(dots: [__m256i; 8]) -> __m256i {
    let pairs: [_; 4] = std::array::from_fn(|i| _mm256_hadd_epi32(dots[2 * i], dots[2 * i + 1]));
    let first = _mm256_hadd_epi32(pairs[0], pairs[1]);
    let second = _mm256_hadd_epi32(pairs[2], pairs[3]);
    let lower = _mm256_permute2x128_si256::<0x20>(first, second);
    _mm256_add_epi32(lower, _mm256_permute2x128_si256::<0x31>(first, second))
}
