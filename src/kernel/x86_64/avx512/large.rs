//! Blocks of 256 whose sixteenths have scales of their own.
//!
//! What a type's head holds is taken apart for four weight rows at once, and codes are taken from 64 bytes at once,
//! in whatever order that brings: activations are put in the same order, once for all four rows.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::{
    Codes, Loops, TURNED, UPPER, bits, dpwssd, load64, prefetch, quarter_each, quarters, taken, transpose,
    twice32,
};
use crate::blocks::iq4_nl::STEPS;

/// A format of 256 weights in `BYTES` bytes. The layouts are drawn in [`crate::blocks`].
pub(super) trait Block {
    const BYTES: usize;
    /// By how much codes are too large.
    const OFFSET: u32;
    /// Whether codes pass 63, so that the sum of four products of them does not fit 16 bits. Then parts 0 and 1 have
    /// the same scales, and parts 2 and 3.
    const WIDE: bool = false;
    /// Whether two neighbouring scales are the same: one for 32 weights.
    const PAIRED: bool;
    /// Where d is.
    const D: usize;
    /// Whether there are minimums, and dmin behind d.
    const MINIMUMS: bool = false;
    /// Which sixteenths of the weights the quarters of each [`Block::codes`] are.
    const ORDER: [[usize; 4]; 4];

    /// The scales of four blocks.
    ///
    /// # Safety
    ///
    /// The blocks are there; the CPU has the features.
    unsafe fn heads(blocks: [*const u8; 4]) -> Heads;

    /// A quarter of the codes: the sixteenths `ORDER[part]`.
    ///
    /// # Safety
    ///
    /// The block is there, the CPU has the features, and `part` is below 4.
    unsafe fn codes(block: *const u8, part: usize) -> __m512i;

    /// The activations that belong to [`Block::codes`].
    ///
    /// # Safety
    ///
    /// 256 of them are there, the CPU has the features, and `part` is below 4.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn activations(x: *const i8, part: usize) -> __m512i {
        let [first, _, second, _] = Self::ORDER[part];
        // SAFETY: the caller vouches for 256 bytes; sixteenths go in pairs.
        unsafe {
            let first = _mm512_castsi256_si512(_mm256_loadu_si256(x.add(16 * first).cast()));
            _mm512_inserti64x4::<1>(first, _mm256_loadu_si256(x.add(16 * second).cast()))
        }
    }
}

/// What four blocks, one of each of four rows, begin or end with.
pub(super) struct Heads {
    /// 16-bit scales. Where they are paired, the first holds eight in each quarter, a quarter for each row; else
    /// each holds sixteen for each of two rows.
    scales: [__m512i; 2],
    /// 16-bit minimums, a quarter for each row: of eight sixteenths of the weights, then of the others.
    minimums: [__m512i; 2],
    /// d of each row, and dmin beside it where there are minimums.
    d: __m256,
}

pub(super) struct Q2K;
pub(super) struct Q3K;
pub(super) struct Iq4Xs;
pub(super) struct Q4K;
pub(super) struct Q5K;
pub(super) struct Q6K;

/// Codes of 32 bytes and the 32 after them are 128 weights apart.
const APART: [[usize; 4]; 4] = [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]];
/// The upper halves of 32 bytes are the 32 weights after those of the lower ones.
const BY_TURNS: [[usize; 4]; 4] = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]];
/// The same of 16 bytes.
const BY_SHORT_TURNS: [[usize; 4]; 4] = [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]];
const IN_ORDER: [[usize; 4]; 4] = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]];

impl Block for Q2K {
    const BYTES: usize = 84;
    const OFFSET: u32 = 0;
    const PAIRED: bool = false;
    const D: usize = 80;
    const MINIMUMS: bool = true;
    const ORDER: [[usize; 4]; 4] = APART;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn heads(blocks: [*const u8; 4]) -> Heads {
        // SAFETY: the caller vouches for the blocks.
        let both = unsafe { quarter_each(blocks, 0) };
        let low = _mm512_set1_epi8(15);
        let (scales, upper) =
            (_mm512_and_si512(both, low), _mm512_and_si512(_mm512_srli_epi16::<4>(both), low));
        let zero = _mm512_setzero_si512();
        Heads {
            scales: [
                _mm512_cvtepu8_epi16(_mm512_castsi512_si256(scales)),
                _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64::<1>(scales)),
            ],
            minimums: [_mm512_unpacklo_epi8(upper, zero), _mm512_unpackhi_epi8(upper, zero)],
            // SAFETY: as above.
            d: unsafe { pairs_of(blocks, Self::D) },
        }
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn codes(block: *const u8, part: usize) -> __m512i {
        // SAFETY: the caller vouches for the block.
        unsafe { twos(block.add(16), part) }
    }
}

impl Block for Q3K {
    const BYTES: usize = 110;
    const OFFSET: u32 = 4;
    const PAIRED: bool = false;
    const D: usize = 108;
    const ORDER: [[usize; 4]; 4] = APART;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn heads(blocks: [*const u8; 4]) -> Heads {
        // SAFETY: the caller vouches for the blocks. The last 16 bytes: two of codes, twelve of scales, two of d.
        let bytes = unsafe { quarter_each(blocks, 94) };
        // Bytes 0 to 7 hold the lower four bits of scales 0 to 7, then of 8 to 15; of bytes 8 to 11 each bit pair
        // is the upper bits of four scales.
        let lower = _mm512_shuffle_epi8(bytes, each(0x0908_0706_0504_0302, 0x0908_0706_0504_0302));
        let upper = _mm512_shuffle_epi8(bytes, each(0x0d0c_0b0a_0d0c_0b0a, 0x0d0c_0b0a_0d0c_0b0a));
        let lower = _mm512_and_si512(_mm512_srlv_epi64(lower, each(0, 4)), _mm512_set1_epi8(15));
        let upper = _mm512_rolv_epi32(upper, each(2 << 32 | 4, 30 << 32));
        let scales = _mm512_sub_epi8(with_bits(lower, upper, 0x30), _mm512_set1_epi8(32));
        Heads {
            scales: [
                _mm512_cvtepi8_epi16(_mm512_castsi512_si256(scales)),
                _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64::<1>(scales)),
            ],
            minimums: [_mm512_setzero_si512(); 2],
            d: four_halves(bytes, [7, 15, 23, 31]),
        }
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn codes(block: *const u8, part: usize) -> __m512i {
        let c = part as i64;
        // SAFETY: the caller vouches for the block. Bit c of byte i is the third bit of weight 32c + i.
        unsafe { with_bits(twos(block.add(32), part), moved(twice32(block), c, c + 4, 2), 4) }
    }
}

impl Block for Iq4Xs {
    const BYTES: usize = 136;
    const OFFSET: u32 = 128;
    const WIDE: bool = true;
    const PAIRED: bool = true;
    const D: usize = 0;
    const ORDER: [[usize; 4]; 4] = BY_SHORT_TURNS;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn heads(blocks: [*const u8; 4]) -> Heads {
        // SAFETY: the caller vouches for the blocks, which begin with d, the upper bits and the lower ones.
        let [a, b, c, d] = unsafe { blocks.map(|block| block.cast::<i64>().read_unaligned()) };
        let heads = _mm512_castsi256_si512(_mm256_setr_epi64x(a, b, c, d));
        let bytes = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3), heads);
        // A word for each scale: nibble i of the last four bytes, bits 2i and 2i + 1 of the two before.
        let lower = _mm512_shuffle_epi8(bytes, each(0x0505_0505_0404_0404, 0x0707_0707_0606_0606));
        let upper = _mm512_shuffle_epi8(bytes, each(0x0302_0302_0302_0302, 0x0302_0302_0302_0302));
        let lower = _mm512_srlv_epi16(lower, each(0x0004_0000_0004_0000, 0x0004_0000_0004_0000));
        let upper = _mm512_srlv_epi16(upper, each(0x0006_0004_0002_0000, 0x000e_000c_000a_0008));
        let lower = _mm512_and_si512(lower, _mm512_set1_epi16(15));
        let upper = _mm512_and_si512(_mm512_slli_epi16::<4>(upper), _mm512_set1_epi16(0x30));
        let scales = _mm512_sub_epi16(_mm512_or_si512(lower, upper), _mm512_set1_epi16(32));
        Heads {
            scales: [scales; 2],
            minimums: [_mm512_setzero_si512(); 2],
            d: four_halves(heads, [0, 4, 8, 12]),
        }
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn codes(block: *const u8, part: usize) -> __m512i {
        // SAFETY: the caller vouches for the block.
        super::small::look_up(&STEPS, unsafe { halves(block.add(8), part) })
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn activations(x: *const i8, part: usize) -> __m512i {
        // SAFETY: the caller vouches for 256 bytes.
        let (first, second) = unsafe { (load64(x.add(part / 2 * 128)), load64(x.add(part / 2 * 128 + 64))) };
        if part.is_multiple_of(2) {
            _mm512_shuffle_i32x4::<0x88>(first, second)
        } else {
            _mm512_shuffle_i32x4::<0xdd>(first, second)
        }
    }
}

impl Block for Q4K {
    const BYTES: usize = 144;
    const OFFSET: u32 = 0;
    const PAIRED: bool = true;
    const D: usize = 0;
    const MINIMUMS: bool = true;
    const ORDER: [[usize; 4]; 4] = BY_TURNS;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn heads(blocks: [*const u8; 4]) -> Heads {
        // SAFETY: the caller vouches for the blocks: d and dmin, then three times four bytes. The first four are scales
        // 0 to 3 and two bits of scales 4 to 7, the second the same of minimums, the third the four bits left of both.
        let bytes = unsafe { quarter_each(blocks, 0) };
        let (low, lows) = (each(0x0f0f_0f0f_3f3f_3f3f, 0x0f0f_0f0f_3f3f_3f3f), each(0, 4 << 32));
        let lower = _mm512_srlv_epi32(_mm512_shuffle_epi32::<0b11_10_11_01>(bytes), lows);
        let upper = _mm512_srli_epi32::<2>(_mm512_shuffle_epi32::<0b10_10_01_01>(bytes));
        let upper = _mm512_and_si512(upper, each(0x3030_3030_0000_0000, 0x3030_3030_0000_0000));
        // Scales 0 to 7, minimums 0 to 7: (lower & low) | upper
        let all = _mm512_ternarylogic_epi64::<0xf8>(upper, lower, low);
        Heads {
            scales: [_mm512_unpacklo_epi8(all, _mm512_setzero_si512()); 2],
            minimums: [
                _mm512_shuffle_epi8(
                    all,
                    each(0xff09_ff09_ff08_ff08_u64.cast_signed(), 0xff0b_ff0b_ff0a_ff0a_u64.cast_signed()),
                ),
                _mm512_shuffle_epi8(
                    all,
                    each(0xff0d_ff0d_ff0c_ff0c_u64.cast_signed(), 0xff0f_ff0f_ff0e_ff0e_u64.cast_signed()),
                ),
            ],
            d: {
                let firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
                _mm256_cvtph_ps(_mm512_castsi512_si128(_mm512_permutexvar_epi32(firsts, bytes)))
            },
        }
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn codes(block: *const u8, part: usize) -> __m512i {
        // SAFETY: the caller vouches for the block.
        unsafe { nibbles(block.add(16), part) }
    }
}

impl Block for Q5K {
    const BYTES: usize = 176;
    const OFFSET: u32 = 0;
    const PAIRED: bool = true;
    const D: usize = 0;
    const MINIMUMS: bool = true;
    const ORDER: [[usize; 4]; 4] = BY_TURNS;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn heads(blocks: [*const u8; 4]) -> Heads {
        // SAFETY: the caller vouches for the blocks; heads are alike.
        unsafe { Q4K::heads(blocks) }
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn codes(block: *const u8, part: usize) -> __m512i {
        let c = (part % 2 + part / 2 * 4) as i64;
        // SAFETY: the caller vouches for the block. Bit c of byte i is the fifth bit of weight 32c + i.
        unsafe { with_bits(nibbles(block.add(48), part), moved(twice32(block.add(16)), c, c + 2, 4), 16) }
    }
}

impl Block for Q6K {
    const BYTES: usize = 210;
    const OFFSET: u32 = 32;
    const PAIRED: bool = false;
    const D: usize = 208;
    const ORDER: [[usize; 4]; 4] = IN_ORDER;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn heads(blocks: [*const u8; 4]) -> Heads {
        // SAFETY: the caller vouches for the blocks.
        let scales = unsafe { quarter_each(blocks, 192) };
        Heads {
            scales: [
                _mm512_cvtepi8_epi16(_mm512_castsi512_si256(scales)),
                _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64::<1>(scales)),
            ],
            minimums: [_mm512_setzero_si512(); 2],
            // SAFETY: as above.
            d: unsafe { halves_of(blocks, Self::D) },
        }
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn codes(block: *const u8, part: usize) -> __m512i {
        let pair = (part % 2 * 4) as i64;
        // SAFETY: the caller vouches for the block. Bits 2c and 2c + 1 of byte i are the upper bits of weight 32c + i.
        unsafe {
            let upper = twice32(block.add(128 + part / 2 * 32));
            with_bits(nibbles(block, part), moved(upper, pair, pair + 2, 4), 0x30)
        }
    }
}

/// Two words in each quarter.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
fn each(first: i64, second: i64) -> __m512i {
    _mm512_broadcast_i32x4(_mm_set_epi64x(second, first))
}

/// `codes`, and of `bits` those of `mask`.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
fn with_bits(codes: __m512i, bits: __m512i, mask: i8) -> __m512i {
    _mm512_ternarylogic_epi64::<0xf8>(codes, bits, _mm512_set1_epi8(mask))
}

/// In each byte of the first half bit `first` to bit `to`, in the others bit `second`; the bits beside them likewise.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
fn moved(bytes: __m512i, first: i64, second: i64, to: i64) -> __m512i {
    let (first, second) = ((to - first) & 63, (to - second) & 63);
    let left = _mm512_setr_epi64(first, first, first, first, second, second, second, second);
    _mm512_rolv_epi64(bytes, left)
}

/// 128 bytes of two codes each: of 64 bytes the lower halves, then the upper ones, then those of the next.
///
/// # Safety
///
/// The bytes can be read.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
unsafe fn nibbles(bytes: *const u8, part: usize) -> __m512i {
    // SAFETY: the caller vouches for the bytes.
    let bytes = unsafe { load64(bytes.add(part / 2 * 64)) };
    if part.is_multiple_of(2) { _mm512_and_si512(bytes, _mm512_set1_epi8(15)) } else { bits(bytes, UPPER) }
}

/// The same, with anything in the upper halves of bytes.
///
/// # Safety
///
/// The bytes can be read.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
unsafe fn halves(bytes: *const u8, part: usize) -> __m512i {
    // SAFETY: the caller vouches for the bytes.
    let bytes = unsafe { load64(bytes.add(part / 2 * 64)) };
    if part.is_multiple_of(2) { bytes } else { _mm512_srli_epi16::<4>(bytes) }
}

/// 64 bytes of four codes each: the `part`-th of each.
///
/// # Safety
///
/// The bytes can be read.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
unsafe fn twos(bytes: *const u8, part: usize) -> __m512i {
    // SAFETY: the caller vouches for the bytes.
    let bytes = unsafe { load64(bytes) };
    match part {
        0 => _mm512_and_si512(bytes, _mm512_set1_epi8(3)),
        1 => bits(bytes, taken(2, 2)),
        2 => bits(bytes, taken(4, 2)),
        _ => bits(bytes, taken(6, 2)),
    }
}

/// The loops of a type; what they compute is in [`crate::kernel`], "blocks of 256".
pub(super) struct Large<T>(PhantomData<T>);

/// A block of sixteen rows: lanes are rows.
pub(super) struct Turned {
    /// Four neighbouring weights of each row.
    codes: [__m512i; 64],
    /// Of 16 weights, or of 32 where scales are paired.
    scales: [__m512i; 16],
    /// What two neighbouring sums of activations are multiplied with: the minimums, or scales times the offset.
    pairs: [__m512i; 8],
    d: __m512,
    dmin: __m512,
}

impl<T: Block> Large<T> {
    const GROUPS: usize = if T::PAIRED { 8 } else { 16 };
    /// By row and pair of parts: which lane of [`Heads::scales`] is the scale of each 16-bit lane of both parts' sums,
    /// of which every quarter has four of the first part, then four of the second.
    const OWN: &[[[i16; 32]; 2]; 4] = &{
        let mut own = [[[0; 32]; 2]; 4];
        let mut i = 0;
        while i < 4 * 2 * 32 {
            let (row, pair, lane) = (i / 64, i / 32 % 2, i % 32);
            own[row][pair][lane] = Self::lane(row, T::ORDER[2 * pair + lane % 8 / 4][lane / 8]);
            i += 1;
        }
        own
    };
    /// By row of two and pair of parts: which lane of [`Self::wide_scales`] is the scale of each 32-bit lane of both
    /// parts' sums, where they have the same.
    const OWN_WIDE: &[[[i32; 16]; 2]; 2] = &{
        let mut own = [[[0; 16]; 2]; 2];
        let mut i = 0;
        while i < 2 * 2 * 16 {
            let (row, pair, lane) = (i / 32, i / 16 % 2, i % 16);
            own[row][pair][lane] = (8 * row + T::ORDER[2 * pair][lane / 4] / 2) as i32;
            i += 1;
        }
        own
    };
    /// By row: which lanes of [`Heads::scales`] are the scales of the sixteenths in order.
    const IN_ORDER: &[[i16; 32]; 4] = &{
        let mut all = [[0; 32]; 4];
        let mut i = 0;
        while i < 4 * 16 {
            all[i / 16][i % 16] = Self::lane(i / 16, i % 16);
            i += 1;
        }
        all
    };

    const fn lane(row: usize, sixteenth: usize) -> i16 {
        (if T::PAIRED { 8 * row + sixteenth / 2 } else { 16 * (row % 2) + sixteenth }) as i16
    }

    /// The lanes `own` of the scales that belong to row `r`.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    fn scales(heads: &Heads, r: usize, own: &[i16; 32]) -> __m512i {
        // SAFETY: the array is 64 bytes long.
        let own = unsafe { load64(own.as_ptr()) };
        _mm512_permutexvar_epi16(own, heads.scales[if T::PAIRED { 0 } else { r / 2 }])
    }

    /// The paired scales in 32 bits: eight for each of two rows, then of the other two.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    fn wide_scales(heads: &Heads) -> [__m512i; 2] {
        let scales = heads.scales[0];
        let upper = _mm512_extracti64x4_epi64::<1>(scales);
        [_mm512_cvtepi16_epi32(_mm512_castsi512_si256(scales)), _mm512_cvtepi16_epi32(upper)]
    }

    /// What codes that are too large by the offset are too much in four rows' sums, each beginning with minus that.
    ///
    /// # Safety
    ///
    /// 16 sums of activations are there.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn less_offset(heads: &Heads, sums: *const i16) -> [__m512i; 4] {
        // SAFETY: the caller vouches for 16 sums.
        let sums = unsafe { _mm256_loadu_si256(sums.cast()) };
        let negative = _mm256_sub_epi16(_mm256_setzero_si256(), sums);
        let shift = _mm_cvtsi32_si128(T::OFFSET.ilog2().cast_signed());
        if T::PAIRED {
            // The sum of 32 fits 16 bits: 16 are 2,032 at most.
            let two = _mm256_madd_epi16(negative, _mm256_set1_epi16(1));
            let two = _mm_packs_epi32(_mm256_castsi256_si128(two), _mm256_extracti128_si256::<1>(two));
            let all = _mm512_madd_epi16(heads.scales[0], _mm512_broadcast_i32x4(two));
            let all = _mm512_sll_epi32(all, shift);
            [
                _mm512_maskz_mov_epi32(0x000f, all),
                _mm512_maskz_mov_epi32(0x00f0, all),
                _mm512_maskz_mov_epi32(0x0f00, all),
                _mm512_maskz_mov_epi32(0xf000, all),
            ]
        } else {
            let both = _mm512_broadcast_i64x4(negative);
            let first = _mm512_sll_epi32(_mm512_madd_epi16(heads.scales[0], both), shift);
            let second = _mm512_sll_epi32(_mm512_madd_epi16(heads.scales[1], both), shift);
            [
                _mm512_maskz_mov_epi32(0x00ff, first),
                _mm512_maskz_mov_epi32(0xff00, first),
                _mm512_maskz_mov_epi32(0x00ff, second),
                _mm512_maskz_mov_epi32(0xff00, second),
            ]
        }
    }

    /// The minimums of four rows times the sums of activations: a quarter for each row, all its lanes alike.
    ///
    /// # Safety
    ///
    /// 16 sums of activations are there.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn of_minimums(heads: &Heads, sums: *const i16) -> __m512i {
        // SAFETY: the caller vouches for 16 sums.
        let (first, second) = unsafe { (_mm_loadu_si128(sums.cast()), _mm_loadu_si128(sums.add(8).cast())) };
        let fours = _mm512_madd_epi16(heads.minimums[0], _mm512_broadcast_i32x4(first));
        let fours = dpwssd(fours, heads.minimums[1], _mm512_broadcast_i32x4(second));
        let twos = _mm512_add_epi32(fours, _mm512_shuffle_epi32::<0b10_11_00_01>(fours));
        _mm512_add_epi32(twos, _mm512_shuffle_epi32::<0b01_00_11_10>(twos))
    }

    /// What the sums of 16 activations each are multiplied with in row `r`: its minimums, or scales times the offset.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    fn of_sums(heads: &Heads, r: usize) -> __m256i {
        if T::MINIMUMS {
            let r = r as i64;
            let row = _mm512_setr_epi64(2 * r, 2 * r + 1, 2 * r + 8, 2 * r + 9, 0, 0, 0, 0);
            let [first, second] = heads.minimums;
            _mm512_castsi512_si256(_mm512_permutex2var_epi64(first, row, second))
        } else {
            let scales = _mm512_castsi512_si256(Self::scales(heads, r, &Self::IN_ORDER[r]));
            _mm256_mullo_epi16(scales, _mm256_set1_epi16(T::OFFSET as i16))
        }
    }
}

impl<T: Block> Loops for Large<T> {
    const BYTES: usize = T::BYTES;
    const LEN: usize = 256;
    type Turned = Turned;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn few<const A: usize>(rows: &[*const u8; 4], n_blocks: usize, acts: &Codes<A>) -> [[f32; 4]; A] {
        // Of each row the sum with d, and, where there are minimums, the one with dmin beside it.
        let mut total = [_mm256_setzero_ps(); A];
        // A block's sums are put together while the next one is multiplied: what waits for each other lies apart.
        let mut last = [Products::none(); A];
        for b in 0..n_blocks {
            if A == 1 {
                prefetch(rows, b * T::BYTES, T::BYTES);
            }
            // SAFETY: the caller vouches for `n_blocks` blocks of weights and activations.
            unsafe {
                let mut blocks = *rows;
                for block in &mut blocks {
                    *block = block.add(b * T::BYTES);
                }
                let heads = T::heads(blocks);
                let wide = if T::WIDE { Self::wide_scales(&heads) } else { heads.scales };
                let mut sums = [[_mm512_setzero_si512(); 4]; A];
                if !T::MINIMUMS {
                    for a in 0..A {
                        sums[a] = Self::less_offset(&heads, acts.sums[a].add(16 * b));
                    }
                }
                for pair in 0..2 {
                    if pair == 1 {
                        for a in 0..A {
                            total[a] = last[a].add_to::<T>(total[a]);
                        }
                    }
                    let mut x = [[_mm512_setzero_si512(); 2]; A];
                    for a in 0..A {
                        let codes = acts.codes[a].add(256 * b);
                        x[a] = [T::activations(codes, 2 * pair), T::activations(codes, 2 * pair + 1)];
                    }
                    for r in 0..4 {
                        let first = T::codes(blocks[r], 2 * pair);
                        let second = T::codes(blocks[r], 2 * pair + 1);
                        let own = match T::WIDE {
                            true => {
                                let lanes = load64(Self::OWN_WIDE[r % 2][pair].as_ptr());
                                _mm512_permutexvar_epi32(lanes, wide[r / 2])
                            }
                            false => Self::scales(&heads, r, &Self::OWN[r][pair]),
                        };
                        for a in 0..A {
                            let fours = _mm512_dpbusd_epi32(_mm512_setzero_si512(), first, x[a][0]);
                            sums[a][r] = if T::WIDE {
                                // Both parts have the same scales.
                                let eights = _mm512_dpbusd_epi32(fours, second, x[a][1]);
                                _mm512_add_epi32(sums[a][r], _mm512_mullo_epi32(eights, own))
                            } else {
                                let others = _mm512_dpbusd_epi32(_mm512_setzero_si512(), second, x[a][1]);
                                dpwssd(sums[a][r], _mm512_packs_epi32(fours, others), own)
                            };
                        }
                    }
                }
                for a in 0..A {
                    let low = match T::MINIMUMS {
                        true => Self::of_minimums(&heads, acts.sums[a].add(16 * b)),
                        false => _mm512_setzero_si512(),
                    };
                    let scale = _mm256_mul_ps(heads.d, _mm256_set1_ps(*acts.scales[a].add(b)));
                    last[a] = Products { sums: sums[a], low, scale };
                }
            }
        }
        for a in 0..A {
            total[a] = last[a].add_to::<T>(total[a]);
        }
        let mut out = [[0.0; 4]; A];
        for a in 0..A {
            let sum = if T::MINIMUMS {
                let less = _mm256_hsub_ps(total[a], total[a]);
                _mm_movelh_ps(_mm256_castps256_ps128(less), _mm256_extractf128_ps::<1>(less))
            } else {
                _mm256_castps256_ps128(total[a])
            };
            // SAFETY: four floats are written to an array of four.
            unsafe { _mm_storeu_ps(out[a].as_mut_ptr(), sum) };
        }
        out
    }

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn turn(rows: &[*const u8; TURNED], n_blocks: usize, turned: &mut Vec<Turned>) {
        turned.resize_with(n_blocks, Turned::zero);
        for (b, turned) in turned.iter_mut().enumerate() {
            // SAFETY: the caller vouches for `n_blocks` blocks.
            unsafe {
                let mut blocks = *rows;
                for block in &mut blocks {
                    *block = block.add(b * T::BYTES);
                }
                Self::turn_block(blocks, turned);
            }
        }
    }

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn many<const A: usize>(turned: &[Turned], acts: &Codes<A>) -> [[f32; TURNED]; A] {
        let mut high = [_mm512_setzero_ps(); A];
        let mut low = [_mm512_setzero_ps(); A];
        for (b, w) in turned.iter().enumerate() {
            let mut dots = [_mm512_setzero_si512(); A];
            let per_group = 64 / Self::GROUPS;
            for g in 0..Self::GROUPS {
                for a in 0..A {
                    let mut fours = _mm512_setzero_si512();
                    for i in per_group * g..per_group * (g + 1) {
                        // SAFETY: the caller vouches for as many blocks of activations.
                        let x = unsafe { acts.codes[a].add(256 * b + 4 * i).cast::<i32>().read_unaligned() };
                        fours = _mm512_dpbusd_epi32(fours, w.codes[i], _mm512_set1_epi32(x));
                    }
                    dots[a] = _mm512_add_epi32(dots[a], _mm512_mullo_epi32(fours, w.scales[g]));
                }
            }
            for a in 0..A {
                let mut sum = _mm512_setzero_si512();
                for (i, &pair) in w.pairs.iter().enumerate() {
                    // SAFETY: as above.
                    let sums = unsafe { acts.sums[a].add(16 * b + 2 * i).cast::<i32>().read_unaligned() };
                    sum = _mm512_dpwssd_epi32(sum, pair, _mm512_set1_epi32(sums));
                }
                // SAFETY: as above.
                let dx = _mm512_set1_ps(unsafe { *acts.scales[a].add(b) });
                if T::MINIMUMS {
                    low[a] = _mm512_fmadd_ps(_mm512_mul_ps(w.dmin, dx), _mm512_cvtepi32_ps(sum), low[a]);
                } else {
                    dots[a] = _mm512_sub_epi32(dots[a], sum);
                }
                high[a] = _mm512_fmadd_ps(_mm512_mul_ps(w.d, dx), _mm512_cvtepi32_ps(dots[a]), high[a]);
            }
        }
        let mut out = [[0.0; TURNED]; A];
        for a in 0..A {
            // SAFETY: sixteen floats are written to an array of sixteen.
            unsafe { _mm512_storeu_ps(out[a].as_mut_ptr(), _mm512_sub_ps(high[a], low[a])) };
        }
        out
    }
}

impl<T: Block> Large<T> {
    /// # Safety
    ///
    /// The blocks are there.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn turn_block(blocks: [*const u8; TURNED], turned: &mut Turned) {
        // Loops, not closures: a closure that is handed on is not compiled for this CPU.
        let mut rows = [_mm512_setzero_si512(); TURNED];
        for part in 0..4 {
            for r in 0..TURNED {
                // SAFETY: the caller vouches for the blocks.
                rows[r] = unsafe { T::codes(blocks[r], part) };
            }
            let columns = transpose(rows);
            for (quarter, sixteenth) in T::ORDER[part].into_iter().enumerate() {
                turned.codes[4 * sixteenth..][..4].copy_from_slice(&columns[4 * quarter..][..4]);
            }
        }
        let mut pairs = rows;
        for (i, four) in blocks.as_chunks::<4>().0.iter().enumerate() {
            // SAFETY: as above.
            let heads = unsafe { T::heads(*four) };
            for r in 0..4 {
                let scales = _mm512_castsi512_si256(Self::scales(&heads, r, &Self::IN_ORDER[r]));
                let of_sums = Self::of_sums(&heads, r);
                if T::PAIRED {
                    let scales = _mm512_castsi256_si512(_mm256_srai_epi32::<16>(scales));
                    rows[4 * i + r] = _mm512_inserti64x4::<1>(scales, of_sums);
                } else {
                    rows[4 * i + r] = _mm512_cvtepi16_epi32(scales);
                    pairs[4 * i + r] = _mm512_castsi256_si512(of_sums);
                }
            }
        }
        let columns = transpose(rows);
        if T::PAIRED {
            turned.scales[..8].copy_from_slice(&columns[..8]);
            turned.pairs.copy_from_slice(&columns[8..]);
        } else {
            turned.scales = columns;
            turned.pairs.copy_from_slice(&transpose(pairs)[..8]);
        }
        // SAFETY: as above.
        turned.d = unsafe { sixteen_halves(blocks, T::D) };
        if T::MINIMUMS {
            // SAFETY: as above.
            turned.dmin = unsafe { sixteen_halves(blocks, T::D + 2) };
        }
    }
}

/// A block of four rows times one activation row.
#[derive(Clone, Copy)]
struct Products {
    /// Of each row, in any lanes.
    sums: [__m512i; 4],
    /// The minimums' products: a quarter for each row, all its lanes alike.
    low: __m512i,
    /// Of each row what its sum is multiplied with, and, where there are minimums, theirs beside it.
    scale: __m256,
}

impl Products {
    /// Of no block: adds nothing.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    fn none() -> Products {
        let zero = _mm512_setzero_si512();
        Products { sums: [zero; 4], low: zero, scale: _mm256_setzero_ps() }
    }

    /// Adds them to the sums of the blocks before.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    fn add_to<T: Block>(self, total: __m256) -> __m256 {
        let mut sums = _mm512_castsi128_si512(four_sums(quarters(self.sums)));
        if T::MINIMUMS {
            let by_turns = _mm512_setr_epi32(0, 16, 1, 20, 2, 24, 3, 28, 0, 0, 0, 0, 0, 0, 0, 0);
            sums = _mm512_permutex2var_epi32(sums, by_turns, self.low);
        }
        _mm256_fmadd_ps(self.scale, _mm256_cvtepi32_ps(_mm512_castsi512_si256(sums)), total)
    }
}

impl Turned {
    fn zero() -> Turned {
        // SAFETY: zeros are numbers in every lane.
        unsafe { std::mem::zeroed() }
    }
}

/// The sums of the four quarters, lane by lane.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
fn four_sums(quarters: __m512i) -> __m128i {
    let halves = _mm256_add_epi32(_mm512_castsi512_si256(quarters), _mm512_extracti64x4_epi64::<1>(quarters));
    _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves))
}

/// Half-precision numbers in these 16-bit lanes.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
fn four_halves(words: __m512i, lanes: [i64; 4]) -> __m256 {
    let [a, b, c, d] = lanes;
    let index = _mm512_castsi128_si512(_mm_cvtsi64_si128(a | b << 16 | c << 32 | d << 48));
    _mm256_cvtph_ps(_mm512_castsi512_si128(_mm512_permutexvar_epi16(index, words)))
}

/// Half-precision numbers `at` bytes into four blocks.
///
/// # Safety
///
/// They can be read.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
unsafe fn halves_of(blocks: [*const u8; 4], at: usize) -> __m256 {
    let mut halves = [0i16; 4];
    for r in 0..4 {
        // SAFETY: the caller vouches for two bytes each.
        halves[r] = unsafe { blocks[r].add(at).cast::<i16>().read_unaligned() };
    }
    let [a, b, c, d] = halves;
    _mm256_cvtph_ps(_mm_setr_epi16(a, b, c, d, 0, 0, 0, 0))
}

/// Two half-precision numbers each, `at` bytes into four blocks.
///
/// # Safety
///
/// They can be read.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
unsafe fn pairs_of(blocks: [*const u8; 4], at: usize) -> __m256 {
    let mut pairs = [0i32; 4];
    for r in 0..4 {
        // SAFETY: the caller vouches for four bytes each.
        pairs[r] = unsafe { blocks[r].add(at).cast::<i32>().read_unaligned() };
    }
    let [a, b, c, d] = pairs;
    _mm256_cvtph_ps(_mm_setr_epi32(a, b, c, d))
}

/// Half-precision numbers `at` bytes into sixteen blocks.
///
/// # Safety
///
/// They can be read.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
unsafe fn sixteen_halves(blocks: [*const u8; TURNED], at: usize) -> __m512 {
    // SAFETY: the caller vouches for two bytes each.
    let mut halves = [0i16; TURNED];
    for r in 0..TURNED {
        // SAFETY: the caller vouches for two bytes each.
        halves[r] = unsafe { blocks[r].add(at).cast::<i16>().read_unaligned() };
    }
    // SAFETY: an array of sixteen is read.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(halves.as_ptr().cast()) })
}
