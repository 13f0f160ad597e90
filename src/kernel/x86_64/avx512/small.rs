//! Blocks of 32 with one scale.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::{Codes, Loops, TURNED, load64, neighbours, prefetch, quarter_each, quarters, transpose};
use crate::blocks::iq4_nl::STEPS;
use crate::blocks::mxfp4::{DOUBLED, half_scale};
use crate::kernel::x86_64::load16;

/// A format of 32 weights in `BYTES` bytes with one scale: a half-precision number at their beginning, if nothing else is
/// said. The layouts are drawn in [`crate::blocks`].
pub(super) trait Scaled: Sized {
    const BYTES: usize;

    /// The scales of sixteen blocks.
    ///
    /// # Safety
    ///
    /// All are there; the CPU has the features.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    unsafe fn scales(blocks: [*const u8; 16]) -> __m512 {
        // SAFETY: the caller vouches for the blocks.
        _mm512_cvtph_ps(unsafe { firsts(blocks) })
    }

    /// The scales of eight neighbouring blocks, and of eight others.
    ///
    /// # Safety
    ///
    /// All are there; the CPU has the features.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    unsafe fn eight_scales(blocks: [*const u8; 2]) -> __m512 {
        // SAFETY: the caller vouches for the blocks.
        let [first, second] = unsafe { [eight_firsts::<Self>(blocks[0]), eight_firsts::<Self>(blocks[1])] };
        _mm512_cvtph_ps(_mm256_set_m128i(second, first))
    }
}

/// How the codes of such a format are read.
pub(super) trait Block: Scaled {
    /// By how much codes are too large.
    const OFFSET: i16;
    /// Whether [`Block::four`] gives the first half of each block, then the second ones.
    const HALVED: bool;

    /// The codes of two blocks.
    ///
    /// # Safety
    ///
    /// Both are there; the CPU has the features.
    unsafe fn two(first: *const u8, second: *const u8) -> __m512i;

    /// The codes of four blocks.
    ///
    /// # Safety
    ///
    /// All are there; the CPU has the features.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    unsafe fn four(blocks: [*const u8; 4]) -> [__m512i; 2] {
        // SAFETY: the caller vouches for the blocks.
        unsafe { [Self::two(blocks[0], blocks[1]), Self::two(blocks[2], blocks[3])] }
    }
}

/// A format of 16 bytes of two codes each: of the first 16 weights the lower halves, of the others the upper ones.
trait Nibbles: Scaled {
    const OFFSET: i16;

    /// What the lower halves of bytes stand for, and `OFFSET`.
    ///
    /// # Safety
    ///
    /// The CPU has the features.
    unsafe fn values(bytes: __m512i) -> __m512i;
}

impl<T: Nibbles> Block for T {
    const OFFSET: i16 = <T as Nibbles>::OFFSET;
    const HALVED: bool = true;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    unsafe fn two(first: *const u8, second: *const u8) -> __m512i {
        let at = T::BYTES - 16;
        // SAFETY: the caller vouches for the blocks.
        unsafe { T::values(nibbles(first.add(at), second.add(at))) }
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    unsafe fn four(blocks: [*const u8; 4]) -> [__m512i; 2] {
        // SAFETY: the caller vouches for the blocks.
        unsafe {
            let bytes = quarter_each(blocks, T::BYTES - 16);
            [T::values(bytes), T::values(_mm512_srli_epi16::<4>(bytes))]
        }
    }
}

pub(super) struct Q8_0;
pub(super) struct Q4_0;
pub(super) struct Q5_0;
pub(super) struct Iq4Nl;
pub(super) struct Mxfp4;

impl Scaled for Q8_0 {
    const BYTES: usize = 34;
}

impl Scaled for Q4_0 {
    const BYTES: usize = 18;
}

impl Scaled for Q5_0 {
    const BYTES: usize = 22;
}

impl Scaled for Iq4Nl {
    const BYTES: usize = 18;
}

impl Block for Q8_0 {
    const OFFSET: i16 = 128;
    const HALVED: bool = false;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    unsafe fn two(first: *const u8, second: *const u8) -> __m512i {
        // SAFETY: the caller vouches for the blocks.
        let (first, second) =
            unsafe { (_mm256_loadu_si256(first.add(2).cast()), _mm256_loadu_si256(second.add(2).cast())) };
        let codes = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(first), second);
        _mm512_xor_si512(codes, _mm512_set1_epi8(-128))
    }
}

impl Nibbles for Q4_0 {
    const OFFSET: i16 = 8;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    unsafe fn values(bytes: __m512i) -> __m512i {
        _mm512_and_si512(bytes, _mm512_set1_epi8(15))
    }
}

impl Block for Q5_0 {
    const OFFSET: i16 = 16;
    const HALVED: bool = false;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    unsafe fn two(first: *const u8, second: *const u8) -> __m512i {
        // SAFETY: the caller vouches for the blocks.
        unsafe {
            let fifths = |block: *const u8| u64::from(block.add(2).cast::<u32>().read_unaligned());
            let set = fifths(first) | fifths(second) << 32;
            let codes = _mm512_and_si512(nibbles(first.add(6), second.add(6)), _mm512_set1_epi8(15));
            _mm512_mask_add_epi8(codes, set, codes, _mm512_set1_epi8(16))
        }
    }
}

impl Nibbles for Iq4Nl {
    const OFFSET: i16 = 128;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    unsafe fn values(bytes: __m512i) -> __m512i {
        look_up(&STEPS, bytes)
    }
}

impl Nibbles for Mxfp4 {
    const OFFSET: i16 = 128;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    unsafe fn values(bytes: __m512i) -> __m512i {
        look_up(&DOUBLED, bytes)
    }
}

impl Scaled for Mxfp4 {
    const BYTES: usize = 17;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    unsafe fn scales(blocks: [*const u8; 16]) -> __m512 {
        // SAFETY: the caller vouches for the blocks.
        let first = _mm256_and_si256(unsafe { firsts(blocks) }, _mm256_set1_epi16(255));
        half_scales(_mm512_slli_epi32::<23>(_mm512_cvtepu16_epi32(first)))
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    unsafe fn eight_scales(blocks: [*const u8; 2]) -> __m512 {
        // The last byte of each lane is the first one of a block; the other eight take the other half.
        let at = |i: i32| (17 * i) << 24;
        let index = _mm256_setr_epi32(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
        let index = _mm512_broadcast_i64x4(index);
        // SAFETY: the caller vouches for eight blocks each, which are 136 bytes.
        let [first, second] = unsafe { blocks.map(|eight| [load64(eight), load64(eight.add(64))]) };
        let first = _mm512_maskz_permutex2var_epi8(0x8888_8888, first[0], index, first[1]);
        let second = _mm512_maskz_permutex2var_epi8(0x8888_8888 << 32, second[0], index, second[1]);
        half_scales(_mm512_srli_epi32::<1>(_mm512_or_si512(first, second)))
    }
}

/// [`half_scale`] of what stands where a float has its exponent.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
fn half_scales(exponents: __m512i) -> __m512 {
    let halved = _mm512_mul_ps(_mm512_castsi512_ps(exponents), _mm512_set1_ps(0.5));
    // Only that of 0, which became 0, is less.
    _mm512_max_ps(halved, _mm512_set1_ps(half_scale(0)))
}

/// The two bytes that each of sixteen blocks begins with.
///
/// # Safety
///
/// They can be read.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
unsafe fn firsts(blocks: [*const u8; 16]) -> __m256i {
    let mut words = [0u16; 16];
    for i in 0..16 {
        // SAFETY: the caller vouches for two bytes each.
        words[i] = unsafe { blocks[i].cast::<u16>().read_unaligned() };
    }
    // SAFETY: an array of sixteen is read.
    unsafe { _mm256_loadu_si256(words.as_ptr().cast()) }
}

/// The two bytes that each of eight neighbouring blocks of `T`, of an even number of bytes, begins with.
///
/// # Safety
///
/// The blocks are there.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
unsafe fn eight_firsts<T: Scaled>(blocks: *const u8) -> __m128i {
    // Which 16-bit lane of the 64 read first, or of the next 64, each is.
    let mut index = [0i16; 32];
    for i in 0..8 {
        index[i] = (T::BYTES * i / 2 % 64) as i16;
    }
    let there = |from: usize| u32::MAX >> (32 - (8 * T::BYTES / 2).saturating_sub(32 * from).clamp(1, 32));
    // SAFETY: masks keep bytes behind the blocks from being read.
    let words = unsafe {
        let index = load64(index.as_ptr());
        let read = |i: usize| _mm512_maskz_loadu_epi16(there(i), blocks.wrapping_add(64 * i).cast());
        let first = _mm512_permutex2var_epi16(load64(blocks), index, read(1));
        match 7 * T::BYTES / 2 {
            0..64 => first,
            64..96 => {
                let behind = (64usize * 2).div_ceil(T::BYTES);
                _mm512_mask_permutexvar_epi16(first, 0xff << behind, index, read(2))
            }
            _ => {
                let behind = (64usize * 2).div_ceil(T::BYTES);
                let second = _mm512_permutex2var_epi16(read(2), index, read(3));
                _mm512_mask_mov_epi16(first, 0xff << behind, second)
            }
        }
    };
    _mm512_castsi512_si128(words)
}

/// Two times 16 bytes of two codes each: of either the lower halves, then the upper ones, in the lower halves of bytes.
///
/// # Safety
///
/// The bytes can be read.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
unsafe fn nibbles(first: *const u8, second: *const u8) -> __m512i {
    // SAFETY: the caller vouches for the bytes.
    let (first, second) = unsafe { (load16(&*first.cast()), load16(&*second.cast())) };
    let both = _mm512_mask_broadcast_i32x4(_mm512_broadcast_i32x4(first), 0xff00, second);
    _mm512_srlv_epi64(both, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4))
}

/// What the lower halves of bytes stand for, and 128: the table is repeated, so that two more bits do not matter, and
/// the others are not looked at.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn look_up(table: &[i8; 16], bytes: __m512i) -> __m512i {
    // SAFETY: the table is 16 bytes long; no alignment is needed.
    let table = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
    let table = _mm512_broadcast_i32x4(_mm_xor_si128(table, _mm_set1_epi8(-128)));
    _mm512_permutexvar_epi8(bytes, table)
}

/// The loops of a type; what they compute is in [`crate::kernel`], "blocks of 32".
pub(super) struct Small<T>(PhantomData<T>);

/// A block of sixteen rows: lanes are rows.
pub(super) struct Turned {
    /// Four neighbouring weights of each row.
    codes: [__m512i; 8],
    d: __m512,
}

impl<T: Block> Small<T> {
    /// Blocks `b` and on of four rows: eight of each if they are `WHOLE`, else `n`, which is less. The lower half of
    /// a register of `lanes` is that of one row, the upper half that of the next.
    ///
    /// # Safety
    ///
    /// So many blocks from `b` are there, of weights and activations.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    unsafe fn step<const WHOLE: bool, const A: usize>(
        rows: &[*const u8; 4],
        b: usize,
        n: usize,
        acts: &Codes<A>,
        lanes: &mut [[__m512; 2]; A],
    ) {
        // SAFETY: the last block stands in for those that are not there, whose lanes are left alone; masks keep
        // activations from being read beyond their end.
        unsafe {
            let mut x = [[_mm512_setzero_si512(); 4]; A];
            for a in 0..A {
                for (i, x) in x[a].iter_mut().enumerate() {
                    let at = acts.codes[a].add(32 * b + 64 * i);
                    *x = match WHOLE {
                        true => load64(at),
                        false if 2 * i + 1 < n => load64(at),
                        false if 2 * i < n => _mm512_zextsi256_si512(_mm256_loadu_si256(at.cast())),
                        false => _mm512_setzero_si512(),
                    };
                }
                if T::HALVED {
                    x[a] = halved(x[a]);
                }
            }
            for pair in 0..2 {
                let block = |r: usize, i: usize| {
                    let i = if WHOLE { i } else { i.min(n - 1) };
                    rows[2 * pair + r].add((b + i) * T::BYTES)
                };
                let mut dots = [[[_mm512_setzero_si512(); 4]; 2]; A];
                for r in 0..2 {
                    for i in [0, 2] {
                        let four =
                            [block(r, 2 * i), block(r, 2 * i + 1), block(r, 2 * i + 2), block(r, 2 * i + 3)];
                        let [first, second] = T::four(four);
                        for a in 0..A {
                            let dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), first, x[a][i]);
                            if T::HALVED {
                                dots[a][r][i] = _mm512_dpbusd_epi32(dot, second, x[a][i + 1]);
                            } else {
                                dots[a][r][i] = dot;
                                dots[a][r][i + 1] =
                                    _mm512_dpbusd_epi32(_mm512_setzero_si512(), second, x[a][i + 1]);
                            }
                        }
                    }
                }
                let d = match WHOLE {
                    true => T::eight_scales([block(0, 0), block(1, 0)]),
                    false => T::scales(std::array::from_fn(|i| block(i / 8, i % 8))),
                };
                let there = if WHOLE { 0xff } else { 0xff >> (8 - n) };
                let sums_there = if WHOLE { u16::MAX } else { u16::MAX >> (16 - 2 * n) };
                for a in 0..A {
                    let sums = _mm256_maskz_loadu_epi16(sums_there, acts.sums[a].add(2 * b));
                    let offset =
                        _mm512_madd_epi16(_mm512_broadcast_i64x4(sums), _mm512_set1_epi16(T::OFFSET));
                    let [first, second] = dots[a];
                    let dots = if T::HALVED { of_halves(first, second) } else { in_order(first, second) };
                    let dots = _mm512_cvtepi32_ps(_mm512_sub_epi32(dots, offset));
                    let dx = _mm512_broadcast_f32x8(_mm256_maskz_loadu_ps(there, acts.scales[a].add(b)));
                    let there = u16::from(there) | u16::from(there) << 8;
                    lanes[a][pair] = _mm512_mask3_fmadd_ps(_mm512_mul_ps(d, dx), dots, lanes[a][pair], there);
                }
            }
        }
    }
}

impl<T: Block> Loops for Small<T> {
    const BYTES: usize = T::BYTES;
    const LEN: usize = 32;
    type Turned = Turned;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    unsafe fn few<const A: usize>(rows: &[*const u8; 4], n_blocks: usize, acts: &Codes<A>) -> [[f32; 4]; A] {
        let mut lanes = [[_mm512_setzero_ps(); 2]; A];
        let whole = n_blocks - n_blocks % 8;
        for b in (0..whole).step_by(8) {
            if A == 1 {
                prefetch(rows, b * T::BYTES, 8 * T::BYTES);
            }
            // SAFETY: the caller vouches for `n_blocks` blocks.
            unsafe { Self::step::<true, A>(rows, b, 8, acts, &mut lanes) };
        }
        if whole < n_blocks {
            // SAFETY: as above.
            unsafe { Self::step::<false, A>(rows, whole, n_blocks - whole, acts, &mut lanes) };
        }
        let mut out = [[0.0; 4]; A];
        for a in 0..A {
            for pair in 0..2 {
                out[a][2 * pair] = fold(_mm512_castps512_ps256(lanes[a][pair]));
                out[a][2 * pair + 1] = fold(_mm512_extractf32x8_ps::<1>(lanes[a][pair]));
            }
        }
        out
    }

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    unsafe fn turn(rows: &[*const u8; TURNED], n_blocks: usize, turned: &mut Vec<Turned>) {
        turned.resize_with(n_blocks, Turned::zero);
        for (b, two) in (0..).step_by(2).zip(turned.chunks_mut(2)) {
            // SAFETY: the caller vouches for `n_blocks` blocks.
            let block = |r: usize, b: usize| unsafe { rows[r].add(b * T::BYTES) };
            let last = b + two.len() - 1;
            let mut codes = [_mm512_setzero_si512(); TURNED];
            for r in 0..TURNED {
                // SAFETY: as above.
                codes[r] = unsafe { T::two(block(r, b), block(r, last)) };
            }
            let columns = transpose(codes);
            for (i, turned) in two.iter_mut().enumerate() {
                turned.codes.copy_from_slice(&columns[8 * i..8 * i + 8]);
                // SAFETY: as above.
                turned.d = unsafe { T::scales(std::array::from_fn(|r| block(r, b + i))) };
            }
        }
    }

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    unsafe fn many<const A: usize>(turned: &[Turned], acts: &Codes<A>) -> [[f32; TURNED]; A] {
        let mut lanes = [[_mm512_setzero_ps(); 8]; A];
        for lane in 0..8 {
            let mut sums = [_mm512_setzero_ps(); A];
            for b in (lane..turned.len()).step_by(8) {
                let w = &turned[b];
                for a in 0..A {
                    // SAFETY: the caller vouches for as many blocks of activations.
                    let at = |i: usize| unsafe {
                        acts.codes[a].add(32 * b + 4 * i).cast::<i32>().read_unaligned()
                    };
                    // SAFETY: as above.
                    let both = unsafe { acts.sums[a].add(2 * b).cast::<i32>().read_unaligned() };
                    let offset = _mm512_set1_epi16(-T::OFFSET);
                    let mut dot =
                        _mm512_dpwssd_epi32(_mm512_setzero_si512(), offset, _mm512_set1_epi32(both));
                    for (i, &codes) in w.codes.iter().enumerate() {
                        dot = _mm512_dpbusd_epi32(dot, codes, _mm512_set1_epi32(at(i)));
                    }
                    // SAFETY: as above.
                    let dx = _mm512_set1_ps(unsafe { *acts.scales[a].add(b) });
                    sums[a] = _mm512_fmadd_ps(_mm512_mul_ps(w.d, dx), _mm512_cvtepi32_ps(dot), sums[a]);
                }
            }
            for a in 0..A {
                lanes[a][lane] = sums[a];
            }
        }
        let mut out = [[0.0; TURNED]; A];
        for a in 0..A {
            let l = lanes[a];
            let even = _mm512_add_ps(_mm512_add_ps(l[0], l[4]), _mm512_add_ps(l[2], l[6]));
            let odd = _mm512_add_ps(_mm512_add_ps(l[1], l[5]), _mm512_add_ps(l[3], l[7]));
            let sum = _mm512_add_ps(even, odd);
            // SAFETY: sixteen floats are written to an array of sixteen.
            unsafe { _mm512_storeu_ps(out[a].as_mut_ptr(), sum) };
        }
        out
    }
}

impl Turned {
    fn zero() -> Turned {
        // SAFETY: zeros are numbers in every lane.
        unsafe { std::mem::zeroed() }
    }
}

/// Eight times 32 bytes: the first halves of four, the second ones, then the same of the other four.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
fn halved([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    [
        _mm512_shuffle_i32x4::<0x88>(a, b),
        _mm512_shuffle_i32x4::<0xdd>(a, b),
        _mm512_shuffle_i32x4::<0x88>(c, d),
        _mm512_shuffle_i32x4::<0xdd>(c, d),
    ]
}

/// The sums of eight blocks of two rows, from registers of two blocks each.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
fn in_order(first: [__m512i; 4], second: [__m512i; 4]) -> __m512i {
    // Lane i of the first two quarters is of block 2i, of the others of block 2i + 1.
    let (first, second) = (quarters(first), quarters(second));
    let lower = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 16, 24, 17, 25, 18, 26, 19, 27);
    let upper = _mm512_add_epi32(lower, _mm512_set1_epi32(4));
    let lower = _mm512_permutex2var_epi32(first, lower, second);
    _mm512_add_epi32(lower, _mm512_permutex2var_epi32(first, upper, second))
}

/// The sums of eight blocks of two rows, from the first and third of their registers: a quarter of each for a block.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
fn of_halves(first: [__m512i; 4], second: [__m512i; 4]) -> __m512i {
    // In quarter i two lanes are of block i, two of block i + 4.
    let (first, second) = (neighbours(first[0], first[2]), neighbours(second[0], second[2]));
    let even = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 16, 20, 24, 28, 18, 22, 26, 30);
    let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    let even = _mm512_permutex2var_epi32(first, even, second);
    _mm512_add_epi32(even, _mm512_permutex2var_epi32(first, odd, second))
}

/// The sum of 8 lanes, halves folded onto each other.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
fn fold(lanes: __m256) -> f32 {
    crate::kernel::x86_64::sum([lanes, _mm256_setzero_ps()])
}
