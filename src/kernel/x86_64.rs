//! x86-64 with AVX2, FMA and F16C: which type goes to which loop.
//!
//! An [`Avx2`] exists only where the CPU has been asked, so holding one is the proof that its functions may
//! be called. Integer dots go through `vpmaddubsw`, which takes one side unsigned: signed weights lend their
//! sign to the activations. No pair of products saturates 16 bits, as activations are never −128.

#![allow(unsafe_code)]
// Several arrays are walked by one number, and closures that are handed on are not compiled for this CPU.
#![allow(clippy::needless_range_loop)]

mod avx512;
mod floats;
mod large;
mod small;
mod tiles;

use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

pub(super) use avx512::Avx512;

use super::activations::{self, Activations, Row};
use super::tiles::StripDot;
use super::{Output, RowDot, drive, wide};
use crate::tensor::{Dtype, WeightView};

/// A CPU that has AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub(super) struct Avx2(());

impl Avx2 {
    /// Asks the CPU.
    pub(super) fn detect() -> Option<Avx2> {
        let has = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has.then_some(Avx2(()))
    }

    /// See [`super::Kernel::multiply`].
    pub(super) fn multiply(
        self,
        weight: WeightView<'_>,
        o_range: Range<usize>,
        acts: &Activations,
        rows: &[u32],
        to: Output<'_>,
    ) {
        match weight.dtype() {
            Dtype::F16 => drive(Floats::<floats::F16>::of(self), weight, o_range, acts, rows, to),
            Dtype::BF16 => drive(Floats::<floats::Bf16>::of(self), weight, o_range, acts, rows, to),
            Dtype::Q8_0 => drive(Blocks32::<small::Q8_0>::of(self), weight, o_range, acts, rows, to),
            Dtype::Q4_0 => drive(Blocks32::<small::Q4_0>::of(self), weight, o_range, acts, rows, to),
            Dtype::Q5_0 => drive(Blocks32::<small::Q5_0>::of(self), weight, o_range, acts, rows, to),
            Dtype::IQ4_NL => drive(Blocks32::<small::Iq4Nl>::of(self), weight, o_range, acts, rows, to),
            Dtype::MXFP4 => drive(Blocks32::<small::Mxfp4>::of(self), weight, o_range, acts, rows, to),
            Dtype::Q2_K => drive(Blocks256::<large::Q2K>::of(self), weight, o_range, acts, rows, to),
            Dtype::Q3_K => drive(Blocks256::<large::Q3K>::of(self), weight, o_range, acts, rows, to),
            Dtype::IQ4_XS => drive(Blocks256::<large::Iq4Xs>::of(self), weight, o_range, acts, rows, to),
            Dtype::Q4_K => drive(Blocks256::<large::Q4K>::of(self), weight, o_range, acts, rows, to),
            Dtype::Q5_K => drive(Blocks256::<large::Q5K>::of(self), weight, o_range, acts, rows, to),
            Dtype::Q6_K => drive(Blocks256::<large::Q6K>::of(self), weight, o_range, acts, rows, to),
            _ => drive(Floats::<floats::F32>::of(self), weight, o_range, acts, rows, to),
        }
    }

    /// See [`super::Kernel::widely`].
    #[inline]
    pub(super) fn widely(self, work: impl wide::Loops) {
        #[target_feature(enable = "avx2,f16c")]
        fn inner(work: impl wide::Loops) {
            work.run();
        }
        // SAFETY: `self` proves that the CPU has the features.
        unsafe { inner(work) }
    }

    /// The portable quantiser, compiled for AVX2.
    pub(super) fn quantize<const N: usize>(self, values: &[f32], codes: &mut [i8], scales: &mut [f32]) {
        #[target_feature(enable = "avx2")]
        fn inner<const N: usize>(values: &[f32], codes: &mut [i8], scales: &mut [f32]) {
            activations::quantize_blocks::<N>(values, codes, scales);
        }
        // SAFETY: `self` proves that the CPU has AVX2.
        unsafe { inner::<N>(values, codes, scales) }
    }
}

/// A loop for one type, on a CPU that has been asked.
macro_rules! row_dots {
    ($($name:ident: $trait:path => $dot:path;)*) => { $(
        struct $name<T>(PhantomData<T>);

        impl<T> $name<T> {
            /// The CPU is the proof that [`RowDot::dot`] may run.
            fn of(_: Avx2) -> Self {
                $name(PhantomData)
            }
        }

        impl<T> Clone for $name<T> {
            fn clone(&self) -> Self {
                *self
            }
        }

        impl<T> Copy for $name<T> {}

        impl<T: $trait> RowDot for $name<T> {
            fn dot<const A: usize>(self, weights: &[u8], acts: [Row<'_>; A]) -> [f32; A] {
                // SAFETY: `self` was made from an `Avx2`, so the CPU has the features.
                unsafe { $dot(weights, acts) }
            }
        }
    )* };
}

row_dots! {
    Floats: floats::Float => floats::dot::<T, A>;
    Blocks32: small::Block => small::dot::<T, A>;
    Blocks256: large::Block => large::dot::<T, A>;
}

impl StripDot for Avx2 {
    fn dot<const A: usize>(self, strip: &[i8], rows: [&[i8]; A], _: [i32; A]) -> [[i32; 32]; A] {
        // SAFETY: `self` proves that the CPU has AVX2.
        unsafe { tiles::dot(strip, rows) }
    }
}

/// Where the activations of `A` rows are, their lengths having been checked once and not in every step.
struct Codes<const A: usize> {
    codes: [*const i8; A],
    scales: [*const f32; A],
    sums: [*const i16; A],
}

impl<const A: usize> Codes<A> {
    /// # Panics
    ///
    /// When a row has less than `n` blocks of `len`, or of the sums if there are any: a bug of the caller.
    fn of(acts: &[Row<'_>; A], n: usize, len: usize) -> Codes<A> {
        for act in acts {
            assert!(act.codes.len() >= n * len && act.scales.len() >= n, "too few activations");
            assert!(act.sums.len() >= n * len / 16, "too few sums");
        }
        Codes {
            codes: acts.map(|act| act.codes.as_ptr()),
            scales: acts.map(|act| act.scales.as_ptr()),
            sums: acts.map(|act| act.sums.as_ptr()),
        }
    }
}

/// Asks for the weights that come some way after `bytes`: the next rows of the matrix lie there, and one core
/// does not look far enough ahead by itself to keep the memory busy.
#[inline]
#[target_feature(enable = "avx2")]
fn prefetch(bytes: *const u8) {
    const AHEAD: usize = 2048;
    _mm_prefetch::<_MM_HINT_T0>(bytes.wrapping_add(AHEAD).cast());
}

/// 32 bytes from anywhere.
#[inline]
#[target_feature(enable = "avx2")]
fn load32(bytes: &[i8; 32]) -> __m256i {
    // SAFETY: the array is 32 bytes long and the load needs no alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// 16 bytes from anywhere.
#[inline]
#[target_feature(enable = "avx2")]
fn load16(bytes: &[u8; 16]) -> __m128i {
    // SAFETY: the array is 16 bytes long and the load needs no alignment.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

/// 16 bytes of two codes each, the lower halves first.
#[inline]
#[target_feature(enable = "avx2")]
fn halves(bytes: __m128i) -> __m256i {
    let halves = _mm256_set_m128i(_mm_srli_epi16::<4>(bytes), bytes);
    _mm256_and_si256(halves, _mm256_set1_epi8(15))
}

/// What codes below 16 stand for.
#[inline]
#[target_feature(enable = "avx2")]
fn look_up(table: &[i8; 16], codes: __m256i) -> __m256i {
    let table = load16(&table.map(i8::cast_unsigned));
    _mm256_shuffle_epi8(_mm256_set_m128i(table, table), codes)
}

/// The half-precision number in two bytes.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn half(bytes: [u8; 2]) -> f32 {
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(u16::from_le_bytes(bytes).into())))
}

/// The sum of eight integers.
#[inline]
#[target_feature(enable = "avx2")]
fn total(lanes: __m256i) -> i32 {
    let four = _mm_add_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256::<1>(lanes));
    let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b1110>(four));
    _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<1>(two)))
}

/// Sums of four neighbouring products of signed weights (`magnitude` = |w|) and activations.
#[inline]
#[target_feature(enable = "avx2")]
fn pair_sums(w: __m256i, magnitude: __m256i, x: __m256i) -> __m256i {
    _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, w))
}

/// `lanes + scale * dots`, rounded once.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn add(lanes: __m256, scale: __m256, dots: __m256i) -> __m256 {
    _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(dots), lanes)
}

/// The sum of 16 lanes, halves folded onto each other.
#[inline]
#[target_feature(enable = "avx2")]
fn sum(lanes: [__m256; 2]) -> f32 {
    let eight = _mm256_add_ps(lanes[0], lanes[1]);
    let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
}
