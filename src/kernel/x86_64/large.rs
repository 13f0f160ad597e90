//! Weights in blocks of 256 whose sixteenths have scales of their own.

use std::arch::x86_64::*;

use super::{Codes, Row, half, halves, load16, load32, look_up, pair_sums, prefetch, total};
use crate::blocks::iq4_nl::STEPS;
use crate::kernel::portable::{six_bit_words, six_bits_iq4_xs, six_bits_q3_k};

/// A format of 256 weights in `BYTES` bytes. The layouts are drawn in [`crate::blocks`].
pub(super) trait Block {
    const BYTES: usize;

    /// Whether codes are signed; unsigned ones are at most 31.
    const SIGNED: bool;

    /// The scales.
    ///
    /// # Safety
    ///
    /// `block` is `BYTES` long; the CPU has the features.
    unsafe fn head(block: &[u8]) -> Head;

    /// Weights `128 * part` and on, 32 to a register, in order.
    ///
    /// # Safety
    ///
    /// `block` is `BYTES` long, `part` 0 or 1; the CPU has the features.
    unsafe fn codes(block: &[u8], part: usize) -> [__m256i; 4];
}

/// `w = d * scale * code − dmin * minimum`: scales and minimums, which come with dmin, are 16 × i8, one per 16
/// weights.
pub(super) struct Head {
    d: f32,
    scales: __m128i,
    minimums: Option<(f32, __m128i)>,
}

pub(super) struct Q2K;
pub(super) struct Q3K;
pub(super) struct Iq4Xs;
pub(super) struct Q4K;
pub(super) struct Q5K;
pub(super) struct Q6K;

impl Block for Q2K {
    const BYTES: usize = 84;
    const SIGNED: bool = false;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn head(block: &[u8]) -> Head {
        // SAFETY: the caller vouches for 84 bytes.
        let both = load16(unsafe { &*block.as_ptr().cast() });
        let low = _mm_set1_epi8(15);
        let minimums = _mm_and_si128(_mm_srli_epi16::<4>(both), low);
        Head {
            d: half([block[80], block[81]]),
            scales: _mm_and_si128(both, low),
            minimums: Some((half([block[82], block[83]]), minimums)),
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes(block: &[u8], part: usize) -> [__m256i; 4] {
        pairs(&block[16 + 32 * part..])
    }
}

impl Block for Q3K {
    const BYTES: usize = 110;
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn head(block: &[u8]) -> Head {
        let mut packed = [0; 12];
        packed.copy_from_slice(&block[96..108]);
        let (first, second) = six_bits_q3_k(packed);
        let scales = _mm_set_epi64x(second.cast_signed(), first.cast_signed());
        let scales = _mm_sub_epi8(scales, _mm_set1_epi8(32));
        Head { d: half([block[108], block[109]]), scales, minimums: None }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes(block: &[u8], part: usize) -> [__m256i; 4] {
        let mut codes = pairs(&block[32 + 32 * part..]);
        // Bit c of byte i is the third bit of weight 32c + i, and takes off 4 where it is not set.
        let thirds = bytes32(block);
        for (r, codes) in codes.iter_mut().enumerate() {
            let bit = _mm256_set1_epi8((1u8 << (4 * part + r)).cast_signed());
            let set = _mm256_cmpeq_epi8(_mm256_and_si256(thirds, bit), bit);
            *codes = _mm256_or_si256(*codes, _mm256_andnot_si256(set, _mm256_set1_epi8(-4)));
        }
        codes
    }
}

impl Block for Iq4Xs {
    const BYTES: usize = 136;
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn head(block: &[u8]) -> Head {
        let packed = six_bits_iq4_xs([block[2], block[3]], [block[4], block[5], block[6], block[7]]);
        let scales = _mm_sub_epi8(twice(packed), _mm_set1_epi8(32));
        Head { d: half([block[0], block[1]]), scales, minimums: None }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes(block: &[u8], part: usize) -> [__m256i; 4] {
        let groups = &block[8 + 64 * part..][..64];
        std::array::from_fn(|r| {
            // SAFETY: the slice is 64 bytes long.
            let bytes = load16(unsafe { &*groups.as_ptr().add(16 * r).cast() });
            look_up(&STEPS, halves(bytes))
        })
    }
}

impl Block for Q4K {
    const BYTES: usize = 144;
    const SIGNED: bool = false;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn head(block: &[u8]) -> Head {
        head_with_minimums(block)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes(block: &[u8], part: usize) -> [__m256i; 4] {
        nibbles(&block[16 + 64 * part..])
    }
}

impl Block for Q5K {
    const BYTES: usize = 176;
    const SIGNED: bool = false;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn head(block: &[u8]) -> Head {
        head_with_minimums(block)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes(block: &[u8], part: usize) -> [__m256i; 4] {
        let mut codes = nibbles(&block[48 + 64 * part..]);
        // Bit c of byte i is the fifth bit of weight 32c + i.
        let fifths = bytes32(&block[16..]);
        for (r, codes) in codes.iter_mut().enumerate() {
            let bit = _mm256_set1_epi8((1u8 << (4 * part + r)).cast_signed());
            let set = _mm256_cmpeq_epi8(_mm256_and_si256(fifths, bit), bit);
            *codes = _mm256_or_si256(*codes, _mm256_and_si256(set, _mm256_set1_epi8(16)));
        }
        codes
    }
}

impl Block for Q6K {
    const BYTES: usize = 210;
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn head(block: &[u8]) -> Head {
        // SAFETY: the caller vouches for 210 bytes.
        let scales = load16(unsafe { &*block.as_ptr().add(192).cast() });
        Head { d: half([block[208], block[209]]), scales, minimums: None }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes(block: &[u8], part: usize) -> [__m256i; 4] {
        let (low, high) = (_mm256_set1_epi8(15), _mm256_set1_epi8(0x30));
        let (first, second) = (bytes32(&block[64 * part..]), bytes32(&block[64 * part + 32..]));
        let upper = bytes32(&block[128 + 32 * part..]);
        // Two more bits from `upper`, moved to bits 4 and 5, and the offset of 32 taken off.
        let join = |lower: __m256i, upper: __m256i| {
            let code = _mm256_or_si256(_mm256_and_si256(lower, low), _mm256_and_si256(upper, high));
            _mm256_sub_epi8(code, _mm256_set1_epi8(32))
        };
        [
            join(first, _mm256_slli_epi16::<4>(upper)),
            join(second, _mm256_slli_epi16::<2>(upper)),
            join(_mm256_srli_epi16::<4>(first), upper),
            join(_mm256_srli_epi16::<4>(second), _mm256_srli_epi16::<2>(upper)),
        ]
    }
}

/// The first 16 bytes of Q4_K and Q5_K: d, dmin, eight scales and minimums of 6 bits for 32 weights each.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn head_with_minimums(block: &[u8]) -> Head {
    let mut packed = [0; 12];
    packed.copy_from_slice(&block[4..16]);
    let (scales, minimums) = six_bit_words(packed);
    let dmin = half([block[2], block[3]]);
    Head { d: half([block[0], block[1]]), scales: twice(scales), minimums: Some((dmin, twice(minimums))) }
}

/// Each of eight bytes twice in a row.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn twice(bytes: u64) -> __m128i {
    let bytes = _mm_cvtsi64_si128(bytes.cast_signed());
    _mm_unpacklo_epi8(bytes, bytes)
}

/// 32 bytes of four weights of 2 bits each, 32 apart.
#[inline]
#[target_feature(enable = "avx2")]
fn pairs(bytes: &[u8]) -> [__m256i; 4] {
    let (bytes, low) = (bytes32(bytes), _mm256_set1_epi8(3));
    [
        _mm256_and_si256(bytes, low),
        _mm256_and_si256(_mm256_srli_epi16::<2>(bytes), low),
        _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), low),
        _mm256_and_si256(_mm256_srli_epi16::<6>(bytes), low),
    ]
}

/// 64 bytes of two weights each, 32 apart.
#[inline]
#[target_feature(enable = "avx2")]
fn nibbles(bytes: &[u8]) -> [__m256i; 4] {
    let low = _mm256_set1_epi8(15);
    let (first, second) = (bytes32(bytes), bytes32(&bytes[32..]));
    [
        _mm256_and_si256(first, low),
        _mm256_and_si256(_mm256_srli_epi16::<4>(first), low),
        _mm256_and_si256(second, low),
        _mm256_and_si256(_mm256_srli_epi16::<4>(second), low),
    ]
}

/// The first 32 bytes of a slice.
#[inline]
#[target_feature(enable = "avx2")]
fn bytes32(bytes: &[u8]) -> __m256i {
    let bytes = &bytes[..32];
    // SAFETY: the slice is 32 bytes long and the load needs no alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// See [`crate::kernel`], "blocks of 256".
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn dot<T: Block, const A: usize>(weights: &[u8], acts: [Row<'_>; A]) -> [f32; A] {
    let acts = Codes::of(&acts, weights.len() / T::BYTES, 256);
    let (mut high, mut low) = ([0f32; A], [0f32; A]);
    for (b, block) in weights.chunks_exact(T::BYTES).enumerate() {
        // SAFETY: the chunk is one block.
        let head = unsafe { T::head(block) };
        let mut dots = [_mm256_setzero_si256(); A];
        for part in 0..2 {
            if A == 1 {
                prefetch(block.as_ptr().wrapping_add(part * 64));
                prefetch(block.as_ptr().wrapping_add(part * 64 + 128));
            }
            // SAFETY: the chunk is one block.
            let codes = unsafe { T::codes(block, part) };
            for (r, w) in codes.into_iter().enumerate() {
                let c = 4 * part + r;
                let scales = scales_of(head.scales, c);
                let magnitude = if T::SIGNED { _mm256_abs_epi8(w) } else { w };
                for (dots, codes) in dots.iter_mut().zip(acts.codes) {
                    // SAFETY: the lengths have been held to the number of blocks.
                    let x = load32(unsafe { &*codes.add(256 * b + 32 * c).cast() });
                    let pairs =
                        if T::SIGNED { pair_sums(w, magnitude, x) } else { _mm256_maddubs_epi16(w, x) };
                    *dots = _mm256_add_epi32(*dots, _mm256_madd_epi16(pairs, scales));
                }
            }
        }
        for a in 0..A {
            // SAFETY: the lengths have been held to the number of blocks.
            let dx = unsafe { *acts.scales[a].add(b) };
            high[a] = (head.d * dx).mul_add(total(dots[a]) as f32, high[a]);
            if let Some((dmin, minimums)) = head.minimums {
                // SAFETY: the lengths have been held to the number of blocks; no alignment is needed.
                let sums = unsafe { _mm256_loadu_si256(acts.sums[a].add(16 * b).cast()) };
                let sum = total(_mm256_madd_epi16(_mm256_cvtepi8_epi16(minimums), sums));
                low[a] = (dmin * dx).mul_add(sum as f32, low[a]);
            }
        }
    }
    std::array::from_fn(|a| high[a] - low[a])
}

/// Scales `2c` and `2c + 1` as 16-bit numbers, eight of each: one per pair of weights.
#[inline]
#[target_feature(enable = "avx2")]
fn scales_of(scales: __m128i, c: usize) -> __m256i {
    let first = 2 * c as i64;
    let index = _mm_set_epi64x((first + 1) * 0x0101_0101_0101_0101, first * 0x0101_0101_0101_0101);
    _mm256_cvtepi8_epi16(_mm_shuffle_epi8(scales, index))
}
