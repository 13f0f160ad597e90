//! Blocks of 256 whose sixteenths have scales of their own.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::{AHEAD, Codes, Loops, TURNED, load64, prefetch, quarters, transpose, twice32};
use crate::blocks::iq4_nl::STEPS;
use crate::kernel::portable::{six_bit_words, six_bits_iq4_xs, six_bits_q3_k};
use crate::kernel::x86_64::large::twice;
use crate::kernel::x86_64::load16;

/// A format of 256 weights in `BYTES` bytes. The layouts are drawn in [`crate::blocks`].
pub(super) trait Block {
    const BYTES: usize;
    /// By how much codes are too large.
    const OFFSET: i16;
    /// Whether codes pass 127, so that two products of them do not fit 16 bits.
    const WIDE: bool = false;
    /// Whether two neighbouring scales are the same: one for 32 weights.
    const PAIRED: bool;
    /// Where d is.
    const D: usize;
    /// Where dmin is, of types with minimums.
    const DMIN: Option<usize> = None;

    /// The scale of each 16 weights, in 16 bits.
    ///
    /// # Safety
    ///
    /// A block is there; the CPU has the features.
    unsafe fn scales(block: *const u8) -> __m256i;

    /// The minimum of each 16 weights, in 16 bits, of types with minimums.
    ///
    /// # Safety
    ///
    /// As [`Block::scales`].
    unsafe fn minimums(block: *const u8) -> __m256i {
        let _ = block;
        // SAFETY: the CPU has the features.
        unsafe { _mm256_setzero_si256() }
    }

    /// Codes `64 * part` and on.
    ///
    /// # Safety
    ///
    /// As [`Block::scales`]; `part` is below 4.
    unsafe fn codes(block: *const u8, part: usize) -> __m512i;
}

pub(super) struct Q2K;
pub(super) struct Q3K;
pub(super) struct Iq4Xs;
pub(super) struct Q4K;
pub(super) struct Q5K;
pub(super) struct Q6K;

impl Block for Q2K {
    const BYTES: usize = 84;
    const OFFSET: i16 = 0;
    const PAIRED: bool = false;
    const D: usize = 80;
    const DMIN: Option<usize> = Some(82);

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn scales(block: *const u8) -> __m256i {
        // SAFETY: the caller vouches for the block.
        _mm256_cvtepu8_epi16(_mm_and_si128(load16(unsafe { &*block.cast() }), _mm_set1_epi8(15)))
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn minimums(block: *const u8) -> __m256i {
        // SAFETY: the caller vouches for the block.
        let both = load16(unsafe { &*block.cast() });
        _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16::<4>(both), _mm_set1_epi8(15)))
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn codes(block: *const u8, part: usize) -> __m512i {
        // SAFETY: the caller vouches for the block.
        unsafe { pairs(block.add(16), part) }
    }
}

impl Block for Q3K {
    const BYTES: usize = 110;
    const OFFSET: i16 = 4;
    const PAIRED: bool = false;
    const D: usize = 108;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn scales(block: *const u8) -> __m256i {
        // SAFETY: the caller vouches for the block.
        let (first, second) = six_bits_q3_k(unsafe { *block.add(96).cast() });
        let scales = _mm_set_epi64x(second.cast_signed(), first.cast_signed());
        _mm256_sub_epi16(_mm256_cvtepu8_epi16(scales), _mm256_set1_epi16(32))
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn codes(block: *const u8, part: usize) -> __m512i {
        // SAFETY: the caller vouches for the block.
        unsafe {
            // Bit c of byte i is the third bit of weight 32c + i.
            let set = _mm512_test_epi8_mask(twice32(block), bits(part));
            let codes = pairs(block.add(32), part);
            _mm512_mask_add_epi8(codes, set, codes, _mm512_set1_epi8(4))
        }
    }
}

impl Block for Iq4Xs {
    const BYTES: usize = 136;
    const OFFSET: i16 = 128;
    const WIDE: bool = true;
    const PAIRED: bool = true;
    const D: usize = 0;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn scales(block: *const u8) -> __m256i {
        // SAFETY: the caller vouches for the block.
        let packed = unsafe { six_bits_iq4_xs(*block.add(2).cast(), *block.add(4).cast()) };
        _mm256_sub_epi16(_mm256_cvtepu8_epi16(twice(packed)), _mm256_set1_epi16(32))
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn codes(block: *const u8, part: usize) -> __m512i {
        // SAFETY: the caller vouches for the block.
        let nibbles = unsafe { super::small::nibbles(block.add(8 + 32 * part), block.add(24 + 32 * part)) };
        super::small::look_up(&STEPS, nibbles)
    }
}

impl Block for Q4K {
    const BYTES: usize = 144;
    const OFFSET: i16 = 0;
    const PAIRED: bool = true;
    const D: usize = 0;
    const DMIN: Option<usize> = Some(2);

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn scales(block: *const u8) -> __m256i {
        // SAFETY: the caller vouches for the block.
        _mm256_cvtepu8_epi16(twice(six_bit_words(unsafe { *block.add(4).cast() }).0))
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn minimums(block: *const u8) -> __m256i {
        // SAFETY: the caller vouches for the block.
        _mm256_cvtepu8_epi16(twice(six_bit_words(unsafe { *block.add(4).cast() }).1))
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn codes(block: *const u8, part: usize) -> __m512i {
        // SAFETY: the caller vouches for the block.
        halves(unsafe { twice32(block.add(16 + 32 * part)) })
    }
}

impl Block for Q5K {
    const BYTES: usize = 176;
    const OFFSET: i16 = 0;
    const PAIRED: bool = true;
    const D: usize = 0;
    const DMIN: Option<usize> = Some(2);

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn scales(block: *const u8) -> __m256i {
        // SAFETY: the caller vouches for the block; heads are alike.
        unsafe { Q4K::scales(block) }
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn minimums(block: *const u8) -> __m256i {
        // SAFETY: as above.
        unsafe { Q4K::minimums(block) }
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn codes(block: *const u8, part: usize) -> __m512i {
        // SAFETY: the caller vouches for the block.
        unsafe {
            // Bit c of byte i is the fifth bit of weight 32c + i.
            let set = _mm512_test_epi8_mask(twice32(block.add(16)), bits(part));
            let codes = halves(twice32(block.add(48 + 32 * part)));
            _mm512_mask_add_epi8(codes, set, codes, _mm512_set1_epi8(16))
        }
    }
}

impl Block for Q6K {
    const BYTES: usize = 210;
    const OFFSET: i16 = 32;
    const PAIRED: bool = false;
    const D: usize = 208;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn scales(block: *const u8) -> __m256i {
        // SAFETY: the caller vouches for the block.
        _mm256_cvtepi8_epi16(load16(unsafe { &*block.add(192).cast() }))
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn codes(block: *const u8, part: usize) -> __m512i {
        // SAFETY: the caller vouches for the block.
        let (lower, upper) =
            unsafe { (load64(block.add(part / 2 * 64)), twice32(block.add(128 + part / 2 * 32))) };
        let low = _mm512_set1_epi8(15);
        // The 2 bits of the first 32 weights and those of the others, moved to bits 4 and 5.
        let (lower, upper) = if part.is_multiple_of(2) {
            let left = _mm512_setr_epi64(4, 4, 4, 4, 2, 2, 2, 2);
            (_mm512_and_si512(lower, low), _mm512_sllv_epi64(upper, left))
        } else {
            let right = _mm512_setr_epi64(0, 0, 0, 0, 2, 2, 2, 2);
            (_mm512_and_si512(_mm512_srli_epi16::<4>(lower), low), _mm512_srlv_epi64(upper, right))
        };
        // lower | upper & 0x30
        _mm512_ternarylogic_epi64::<0xf8>(lower, upper, _mm512_set1_epi8(0x30))
    }
}

/// Bits `2 * part` for the first 32 weights of a part, the next bits for the others.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn bits(part: usize) -> __m512i {
    let first = _mm256_set1_epi8((1u8 << (2 * part)).cast_signed());
    let second = _mm256_set1_epi8((2u8 << (2 * part)).cast_signed());
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(first), second)
}

/// 32 bytes of two codes each, given twice: the lower halves, then the upper ones.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn halves(bytes: __m512i) -> __m512i {
    let right = _mm512_setr_epi64(0, 0, 0, 0, 4, 4, 4, 4);
    _mm512_and_si512(_mm512_srlv_epi64(bytes, right), _mm512_set1_epi8(15))
}

/// 64 bytes of four codes each, 32 apart, half of the block in 32 bytes: 64 codes.
///
/// # Safety
///
/// The bytes can be read.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn pairs(bytes: *const u8, part: usize) -> __m512i {
    let first = (part % 2 * 4) as i64;
    let second = first + 2;
    let right = _mm512_setr_epi64(first, first, first, first, second, second, second, second);
    // SAFETY: the caller vouches for the bytes.
    let bytes = unsafe { twice32(bytes.add(part / 2 * 32)) };
    _mm512_and_si512(_mm512_srlv_epi64(bytes, right), _mm512_set1_epi8(3))
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

    /// What the sums of 16 activations are multiplied with: the minimums, or scales times the offset.
    ///
    /// # Safety
    ///
    /// A block is there.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn of_sums(block: *const u8, scales: __m256i) -> __m256i {
        match T::DMIN {
            // SAFETY: the caller vouches for the block.
            Some(_) => unsafe { T::minimums(block) },
            None => _mm256_mullo_epi16(scales, _mm256_set1_epi16(T::OFFSET)),
        }
    }
}

impl<T: Block> Loops for Large<T> {
    const BYTES: usize = T::BYTES;
    const LEN: usize = 256;
    type Turned = Turned;

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn few<const A: usize>(rows: &[*const u8; 4], n_blocks: usize, acts: &Codes<A>) -> [[f32; 4]; A] {
        let mut high = [_mm_setzero_ps(); A];
        let mut low = [_mm_setzero_ps(); A];
        let ahead = AHEAD.max(4 * n_blocks * T::BYTES);
        for b in 0..n_blocks {
            let mut dots = [[_mm512_setzero_si512(); 4]; A];
            let mut lows = [[_mm256_setzero_si256(); 4]; A];
            // SAFETY: the caller vouches for `n_blocks` blocks of weights and activations.
            let block = |r: usize| unsafe { rows[r].add(b * T::BYTES) };
            for r in 0..4 {
                if A == 1 {
                    (0..T::BYTES).step_by(64).for_each(|line| prefetch(block(r).wrapping_add(line), ahead));
                }
                // SAFETY: as above.
                let scales = unsafe { T::scales(block(r)) };
                let mut sums = [_mm512_setzero_si512(); A];
                for part in 0..4 {
                    let own = _mm512_permutexvar_epi16(sixteenths(part), _mm512_castsi256_si512(scales));
                    // SAFETY: as above.
                    let codes = unsafe { T::codes(block(r), part) };
                    for a in 0..A {
                        // SAFETY: as above.
                        let x = unsafe { load64(acts.codes[a].add(256 * b + 64 * part)) };
                        sums[a] = if T::WIDE {
                            // The lower of two equal scales, its sign taken along.
                            let own = _mm512_srai_epi32::<16>(own);
                            let fours = _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes, x);
                            _mm512_add_epi32(sums[a], _mm512_mullo_epi32(fours, own))
                        } else {
                            _mm512_dpwssd_epi32(sums[a], _mm512_maddubs_epi16(codes, x), own)
                        };
                    }
                }
                // SAFETY: as above.
                let of_sums = unsafe { Self::of_sums(block(r), scales) };
                for a in 0..A {
                    // SAFETY: as above.
                    let sixteen = unsafe { _mm256_loadu_si256(acts.sums[a].add(16 * b).cast()) };
                    let low = _mm256_madd_epi16(of_sums, sixteen);
                    match T::DMIN {
                        Some(_) => lows[a][r] = low,
                        None => sums[a] = _mm512_sub_epi32(sums[a], _mm512_zextsi256_si512(low)),
                    }
                    dots[a][r] = sums[a];
                }
            }
            // SAFETY: as above.
            let d = unsafe { halves_of([block(0), block(1), block(2), block(3)], T::D) };
            for a in 0..A {
                // SAFETY: as above.
                let dx = _mm_set1_ps(unsafe { *acts.scales[a].add(b) });
                let dot = _mm_cvtepi32_ps(four_sums(quarters(dots[a])));
                high[a] = _mm_fmadd_ps(_mm_mul_ps(d, dx), dot, high[a]);
                if let Some(at) = T::DMIN {
                    // SAFETY: as above.
                    let dmin = unsafe { halves_of([block(0), block(1), block(2), block(3)], at) };
                    let mut wide = [_mm512_setzero_si512(); 4];
                    for r in 0..4 {
                        wide[r] = _mm512_zextsi256_si512(lows[a][r]);
                    }
                    let sum = quarters(wide);
                    low[a] = _mm_fmadd_ps(_mm_mul_ps(dmin, dx), _mm_cvtepi32_ps(four_sums(sum)), low[a]);
                }
            }
        }
        let mut out = [[0.0; 4]; A];
        for a in 0..A {
            // SAFETY: four floats are written to an array of four.
            unsafe { _mm_storeu_ps(out[a].as_mut_ptr(), _mm_sub_ps(high[a], low[a])) };
        }
        out
    }

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
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

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
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
                if T::DMIN.is_some() {
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
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn turn_block(blocks: [*const u8; TURNED], turned: &mut Turned) {
        // Loops, not closures: a closure that is handed on is not compiled for this CPU.
        let mut rows = [_mm512_setzero_si512(); TURNED];
        for part in 0..4 {
            for r in 0..TURNED {
                // SAFETY: the caller vouches for the blocks.
                rows[r] = unsafe { T::codes(blocks[r], part) };
            }
            turned.codes[16 * part..16 * part + 16].copy_from_slice(&transpose(rows));
        }
        let mut pairs = rows;
        for r in 0..TURNED {
            // SAFETY: as above.
            let scales = unsafe { T::scales(blocks[r]) };
            // SAFETY: as above.
            let of_sums = unsafe { Self::of_sums(blocks[r], scales) };
            if T::PAIRED {
                let scales = _mm512_castsi256_si512(_mm256_srai_epi32::<16>(scales));
                rows[r] = _mm512_inserti64x4::<1>(scales, of_sums);
            } else {
                rows[r] = _mm512_cvtepi16_epi32(scales);
                pairs[r] = _mm512_castsi256_si512(of_sums);
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
        if let Some(at) = T::DMIN {
            // SAFETY: as above.
            turned.dmin = unsafe { sixteen_halves(blocks, at) };
        }
    }
}

impl Turned {
    fn zero() -> Turned {
        // SAFETY: zeros are numbers in every lane.
        unsafe { std::mem::zeroed() }
    }
}

/// For each 16-bit lane of a part, 64 weights, which 16 weights it belongs to.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn sixteenths(part: usize) -> __m512i {
    let lanes = |i: i64| (4 * part as i64 + i) * 0x0001_0001_0001_0001;
    let (a, b, c, d) = (lanes(0), lanes(1), lanes(2), lanes(3));
    _mm512_setr_epi64(a, a, b, b, c, c, d, d)
}

/// The sums of the four quarters, lane by lane.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn four_sums(quarters: __m512i) -> __m128i {
    let halves = _mm256_add_epi32(_mm512_castsi512_si256(quarters), _mm512_extracti64x4_epi64::<1>(quarters));
    _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves))
}

/// Half-precision numbers `at` bytes into four blocks.
///
/// # Safety
///
/// They can be read.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn halves_of(blocks: [*const u8; 4], at: usize) -> __m128 {
    let mut halves = [0i16; 8];
    for r in 0..4 {
        // SAFETY: the caller vouches for two bytes each.
        halves[r] = unsafe { blocks[r].add(at).cast::<i16>().read_unaligned() };
    }
    let [a, b, c, d, ..] = halves;
    _mm_cvtph_ps(_mm_setr_epi16(a, b, c, d, 0, 0, 0, 0))
}

/// Half-precision numbers `at` bytes into sixteen blocks.
///
/// # Safety
///
/// They can be read.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
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
