//! Blocks of 32 with one scale.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::{
    Codes, LOWER, Loops, TURNED, UPPER, bits, dpwssd, load64, neighbours, prefetch, quarter_each, quarters,
    transpose,
};
use crate::blocks::iq4_nl::STEPS;
use crate::blocks::mxfp4::{DOUBLED, half_scale};
use crate::kernel::x86_64::load16;

/// What the lanes of a register are, where it holds a number for each of eight blocks of two rows: in quarter q those of
/// blocks q and q + 4 of the first row, then of the second. The sums of halves come out like that.
struct Lane(usize);

impl Lane {
    const fn row(self) -> usize {
        self.0 / 2 % 2
    }

    const fn block(self) -> usize {
        self.0 / 4 + self.0 % 2 * 4
    }
}

/// Which lane of eight, one for each block, belongs to each [`Lane`].
const BLOCKS: [i32; 16] = {
    let mut blocks = [0; 16];
    let mut lane = 0;
    while lane < 16 {
        blocks[lane] = Lane(lane).block() as i32;
        lane += 1;
    }
    blocks
};

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
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn scales(blocks: [*const u8; 16]) -> __m512 {
        // SAFETY: the caller vouches for the blocks.
        _mm512_cvtph_ps(unsafe { firsts(blocks) })
    }

    /// The scales of eight neighbouring blocks of each of two rows, by [`Lane`].
    ///
    /// # Safety
    ///
    /// All are there; the CPU has the features.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn eight_scales(rows: [*const u8; 2]) -> __m512 {
        // SAFETY: the caller vouches for the blocks.
        let [first, second] = unsafe { [eight_firsts::<Self>(rows[0]), eight_firsts::<Self>(rows[1])] };
        _mm512_cvtph_ps(_mm256_mask_blend_epi32(0b1010_1010, first, second))
    }
}

/// How the codes of such a format are read.
pub(super) trait Block: Scaled {
    /// By how much codes are too large.
    const OFFSET: i16;
    /// Whether [`Block::four`] gives the first half of each block, then the second ones.
    const HALVED: bool;
    /// Whether the sum of 16 products fits 16 bits: codes are 16 at most.
    const NARROW: bool = false;

    /// The codes of two blocks.
    ///
    /// # Safety
    ///
    /// Both are there; the CPU has the features.
    unsafe fn two(first: *const u8, second: *const u8) -> __m512i;

    /// The codes of four blocks, which follow each other if they are `NEXT`.
    ///
    /// # Safety
    ///
    /// All are there; the CPU has the features.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn four<const NEXT: bool>(blocks: [*const u8; 4]) -> [__m512i; 2] {
        // SAFETY: the caller vouches for the blocks.
        unsafe { [Self::two(blocks[0], blocks[1]), Self::two(blocks[2], blocks[3])] }
    }
}

/// A format of 16 bytes of two codes each: of the first 16 weights the lower halves, of the others the upper ones.
trait Nibbles: Scaled {
    const OFFSET: i16;
    const NARROW: bool = false;

    /// What the lower halves of bytes stand for, and `OFFSET`.
    ///
    /// # Safety
    ///
    /// The CPU has the features.
    unsafe fn lower(bytes: __m512i) -> __m512i;

    /// What the upper halves of bytes stand for, and `OFFSET`.
    ///
    /// # Safety
    ///
    /// The CPU has the features.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn upper(bytes: __m512i) -> __m512i {
        // SAFETY: the caller vouches for the CPU.
        unsafe { Self::lower(_mm512_srli_epi16::<4>(bytes)) }
    }
}

impl<T: Nibbles> Block for T {
    const OFFSET: i16 = <T as Nibbles>::OFFSET;
    const HALVED: bool = true;
    const NARROW: bool = <T as Nibbles>::NARROW;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn two(first: *const u8, second: *const u8) -> __m512i {
        let at = T::BYTES - 16;
        // SAFETY: the caller vouches for the blocks.
        unsafe { T::lower(nibbles(first.add(at), second.add(at))) }
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn four<const NEXT: bool>(blocks: [*const u8; 4]) -> [__m512i; 2] {
        // SAFETY: the caller vouches for the blocks.
        unsafe {
            let bytes = match NEXT {
                true => last_sixteens::<T>(blocks[0]),
                false => quarter_each(blocks, T::BYTES - 16),
            };
            [T::lower(bytes), T::upper(bytes)]
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
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
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
    const NARROW: bool = true;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn lower(bytes: __m512i) -> __m512i {
        _mm512_and_si512(bytes, _mm512_set1_epi8(15))
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn upper(bytes: __m512i) -> __m512i {
        bits(bytes, UPPER)
    }
}

impl Block for Q5_0 {
    const OFFSET: i16 = 16;
    const HALVED: bool = false;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn two(first: *const u8, second: *const u8) -> __m512i {
        // SAFETY: the caller vouches for the blocks.
        unsafe {
            let fifths = |block: *const u8| u64::from(block.add(2).cast::<u32>().read_unaligned());
            let set = fifths(first) | fifths(second) << 32;
            let codes = nibbles(first.add(6), second.add(6));
            _mm512_mask_add_epi8(codes, set, codes, _mm512_set1_epi8(16))
        }
    }
}

impl Nibbles for Iq4Nl {
    const OFFSET: i16 = 128;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn lower(bytes: __m512i) -> __m512i {
        look_up(&STEPS, bytes)
    }
}

impl Nibbles for Mxfp4 {
    const OFFSET: i16 = 128;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn lower(bytes: __m512i) -> __m512i {
        look_up(&DOUBLED, bytes)
    }
}

impl Scaled for Mxfp4 {
    const BYTES: usize = 17;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn scales(blocks: [*const u8; 16]) -> __m512 {
        // SAFETY: the caller vouches for the blocks.
        let first = _mm256_and_si256(unsafe { firsts(blocks) }, _mm256_set1_epi16(255));
        half_scales(_mm512_slli_epi32::<23>(_mm512_cvtepu16_epi32(first)))
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn eight_scales(rows: [*const u8; 2]) -> __m512 {
        // The last byte of each lane is the first one of a block.
        let mut index = [0i32; 16];
        for lane in 0..16 {
            index[lane] = (17 * BLOCKS[lane]) << 24;
        }
        // SAFETY: the caller vouches for eight blocks of each row, which are 136 bytes.
        let (index, [first, second]) =
            unsafe { (load64(index.as_ptr()), rows.map(|eight| [load64(eight), load64(eight.add(64))])) };
        let first = _mm512_maskz_permutex2var_epi8(0x0088_0088_0088_0088, first[0], index, first[1]);
        let second = _mm512_maskz_permutex2var_epi8(0x8800_8800_8800_8800, second[0], index, second[1]);
        half_scales(_mm512_srli_epi32::<1>(_mm512_or_si512(first, second)))
    }
}

/// [`half_scale`] of what stands where a float has its exponent.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
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
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
unsafe fn firsts(blocks: [*const u8; 16]) -> __m256i {
    let mut words = [0u16; 16];
    for i in 0..16 {
        // SAFETY: the caller vouches for two bytes each.
        words[i] = unsafe { blocks[i].cast::<u16>().read_unaligned() };
    }
    // SAFETY: an array of sixteen is read.
    unsafe { _mm256_loadu_si256(words.as_ptr().cast()) }
}

/// The two bytes that each of eight neighbouring blocks of `T`, of an even number of bytes, begins with, by [`Lane`]: the
/// same for either row.
///
/// # Safety
///
/// The blocks are there.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
unsafe fn eight_firsts<T: Scaled>(blocks: *const u8) -> __m256i {
    // Which 16-bit lane of the 64 read first, or of the next 64, each is; and which are of the next.
    let mut index = [0i16; 32];
    let mut next = 0u32;
    for lane in 0..16 {
        let at = T::BYTES * Lane(lane).block() / 2;
        index[lane] = (at % 64) as i16;
        next |= u32::from(at >= 64) << lane;
    }
    let there = |from: usize| u32::MAX >> (32 - (8 * T::BYTES / 2).saturating_sub(32 * from).clamp(1, 32));
    // SAFETY: masks keep bytes behind the blocks from being read.
    let words = unsafe {
        let index = load64(index.as_ptr());
        let read = |i: usize| _mm512_maskz_loadu_epi16(there(i), blocks.wrapping_add(64 * i).cast());
        let first = _mm512_permutex2var_epi16(load64(blocks), index, read(1));
        match 7 * T::BYTES / 2 {
            0..64 => first,
            64..96 => _mm512_mask_permutexvar_epi16(first, next, index, read(2)),
            _ => {
                let second = _mm512_permutex2var_epi16(read(2), index, read(3));
                _mm512_mask_mov_epi16(first, next, second)
            }
        }
    };
    _mm512_castsi512_si256(words)
}

/// The last 16 bytes of each of four neighbouring blocks of `T`, a quarter each.
///
/// # Safety
///
/// The blocks are there, and longer than 64 bytes.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
unsafe fn last_sixteens<T: Scaled>(blocks: *const u8) -> __m512i {
    // All but the first are in the last 64 bytes.
    let skipped = 4 * T::BYTES - 64;
    let mut index = [0i8; 64];
    for i in 16..64 {
        index[i] = (T::BYTES * (i / 16 + 1) - 16 + i % 16 - skipped) as i8;
    }
    // SAFETY: the caller vouches for the blocks.
    let (first, others, index) = unsafe {
        (load16(&*blocks.add(T::BYTES - 16).cast()), load64(blocks.add(skipped)), load64(index.as_ptr()))
    };
    permuted_into(_mm512_zextsi128_si512(first), u64::MAX << 16, index, others)
}

/// `_mm512_mask_permutexvar_epi8`: the compiler would make two instructions of it where the mask is one of quarters.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
fn permuted_into(mut first: __m512i, mask: u64, index: __m512i, bytes: __m512i) -> __m512i {
    // SAFETY: the instruction is of the features above, and reads and writes these registers alone.
    unsafe {
        std::arch::asm!(
            "vpermb {0}{{{1}}}, {2}, {3}",
            inout(zmm_reg) first, in(kreg) mask, in(zmm_reg) index, in(zmm_reg) bytes,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    first
}

/// Two times 16 bytes of two codes each: of either the lower halves, then the upper ones.
///
/// # Safety
///
/// The bytes can be read.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
unsafe fn nibbles(first: *const u8, second: *const u8) -> __m512i {
    // SAFETY: the caller vouches for the bytes.
    let (first, second) = unsafe { (load16(&*first.cast()), load16(&*second.cast())) };
    let both = _mm512_mask_broadcast_i32x4(_mm512_broadcast_i32x4(first), 0xff00, second);
    let halves = _mm512_setr_epi64(LOWER, LOWER, UPPER, UPPER, LOWER, LOWER, UPPER, UPPER);
    _mm512_gf2p8affine_epi64_epi8::<0>(both, halves)
}

/// What the lower halves of bytes stand for, and 128: the table is repeated, so that two more bits do not matter, and
/// the others are not looked at.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
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

/// Eight blocks of two weight rows times one activation row.
#[derive(Clone, Copy)]
struct Products {
    /// Of each row, as [`Small::products`] leaves them.
    dots: [[__m512i; 4]; 2],
    /// Minus what codes that are too large add, by [`Lane`].
    less: __m512i,
    /// The scales of weights and of activations, by [`Lane`].
    d: __m512,
    dx: __m512,
}

impl Products {
    /// Of no block: adds nothing.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    fn none() -> Products {
        let (zero, none) = (_mm512_setzero_si512(), _mm512_setzero_ps());
        Products { dots: [[zero; 4]; 2], less: zero, d: none, dx: none }
    }

    /// Adds the first `n` blocks of each row to the sums of those before, by [`Lane`].
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    fn add_to<T: Block>(self, lanes: __m512, n: usize) -> __m512 {
        let [first, second] = self.dots;
        let dots = match (T::HALVED, T::NARROW) {
            (true, true) => of_narrow_halves(first, second, self.less),
            (true, false) => _mm512_add_epi32(of_halves(first, second), self.less),
            (false, _) => _mm512_add_epi32(of_pairs(first, second), self.less),
        };
        let (d, dots) = (_mm512_mul_ps(self.d, self.dx), _mm512_cvtepi32_ps(dots));
        if n == 8 {
            return _mm512_fmadd_ps(d, dots, lanes);
        }
        // SAFETY: the array is 64 bytes long.
        let there = _mm512_cmplt_epi32_mask(unsafe { load64(BLOCKS.as_ptr()) }, _mm512_set1_epi32(n as i32));
        _mm512_mask3_fmadd_ps(d, dots, lanes, there)
    }
}

impl<T: Block> Small<T> {
    /// Blocks `b` and on of two rows: eight of each if they are `WHOLE`, else `n`, which is less.
    ///
    /// # Safety
    ///
    /// So many blocks from `b` are there.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn products<const WHOLE: bool, const A: usize>(
        rows: [*const u8; 2],
        b: usize,
        n: usize,
        x: &[Factors; A],
    ) -> [Products; A] {
        let mut products = [Products::none(); A];
        // SAFETY: the last block stands in for those that are not there, whose products are left alone.
        unsafe {
            let block = |r: usize, i: usize| {
                let i = if WHOLE { i } else { i.min(n - 1) };
                rows[r].add((b + i) * T::BYTES)
            };
            for r in 0..2 {
                for i in [0, 2] {
                    let four =
                        [block(r, 2 * i), block(r, 2 * i + 1), block(r, 2 * i + 2), block(r, 2 * i + 3)];
                    let [first, second] = T::four::<WHOLE>(four);
                    for a in 0..A {
                        let dots = &mut products[a].dots[r];
                        let dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), first, x[a].codes[i]);
                        if T::HALVED {
                            dots[i] = _mm512_dpbusd_epi32(dot, second, x[a].codes[i + 1]);
                        } else {
                            dots[i] = dot;
                            dots[i + 1] =
                                _mm512_dpbusd_epi32(_mm512_setzero_si512(), second, x[a].codes[i + 1]);
                        }
                    }
                }
            }
            let d = match WHOLE {
                true => T::eight_scales([block(0, 0), block(1, 0)]),
                false => T::scales(std::array::from_fn(|i| block(Lane(i).row(), Lane(i).block()))),
            };
            for a in 0..A {
                (products[a].less, products[a].d, products[a].dx) = (x[a].less, d, x[a].scales);
            }
        }
        products
    }
}

/// Eight blocks of an activation row.
#[derive(Clone, Copy)]
struct Factors {
    /// In the order of [`Block::four`].
    codes: [__m512i; 4],
    /// What codes of weights that are too large add, negative, by [`Lane`].
    less: __m512i,
    /// By [`Lane`].
    scales: __m512,
}

impl Factors {
    /// Blocks `b` and on: eight of each row if they are `WHOLE`, else `n`, which is less.
    ///
    /// # Safety
    ///
    /// So many blocks from `b` are there.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn of<T: Block, const WHOLE: bool, const A: usize>(
        acts: &Codes<A>,
        b: usize,
        n: usize,
    ) -> [Factors; A] {
        let none = Factors {
            codes: [_mm512_setzero_si512(); 4],
            less: _mm512_setzero_si512(),
            scales: _mm512_setzero_ps(),
        };
        let mut factors = [none; A];
        let there = if WHOLE { 0xff } else { 0xff >> (8 - n) };
        let sums_there = if WHOLE { u16::MAX } else { u16::MAX >> (16 - 2 * n) };
        // SAFETY: masks keep activations from being read beyond their end.
        unsafe {
            let blocks = load64(BLOCKS.as_ptr());
            for a in 0..A {
                let mut codes = [_mm512_setzero_si512(); 4];
                for (i, x) in codes.iter_mut().enumerate() {
                    let at = acts.codes[a].add(32 * b + 64 * i);
                    *x = match WHOLE {
                        true => load64(at),
                        false if 2 * i + 1 < n => load64(at),
                        false if 2 * i < n => _mm512_zextsi256_si512(_mm256_loadu_si256(at.cast())),
                        false => _mm512_setzero_si512(),
                    };
                }
                let sums = _mm256_maskz_loadu_epi16(sums_there, acts.sums[a].add(2 * b));
                let less = _mm256_madd_epi16(sums, _mm256_set1_epi16(-T::OFFSET));
                let scales = _mm256_maskz_loadu_ps(there, acts.scales[a].add(b));
                factors[a] = Factors {
                    codes: if T::HALVED { halved(codes) } else { codes },
                    less: _mm512_permutexvar_epi32(blocks, _mm512_castsi256_si512(less)),
                    scales: _mm512_permutexvar_ps(blocks, _mm512_castps256_ps512(scales)),
                };
            }
        }
        factors
    }
}

impl<T: Block> Loops for Small<T> {
    const BYTES: usize = T::BYTES;
    const LEN: usize = 32;
    type Turned = Turned;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn few<const A: usize>(rows: &[*const u8; 4], n_blocks: usize, acts: &Codes<A>) -> [[f32; 4]; A] {
        let mut lanes = [[_mm512_setzero_ps(); 2]; A];
        let pairs = [[rows[0], rows[1]], [rows[2], rows[3]]];
        // Those of one activation row are put together while the next ones are made: what waits for each other lies
        // apart. There are no registers to do that for more.
        let mut last = Products::none();
        let whole = n_blocks - n_blocks % 8;
        for b in (0..whole).step_by(8) {
            if A == 1 {
                prefetch(rows, b * T::BYTES, 8 * T::BYTES);
            }
            // SAFETY: the caller vouches for `n_blocks` blocks.
            let x = unsafe { Factors::of::<T, true, A>(acts, b, 8) };
            for pair in 0..2 {
                // SAFETY: as above.
                let next = unsafe { Self::products::<true, A>(pairs[pair], b, 8, &x) };
                if A == 1 {
                    lanes[0][1 - pair] = last.add_to::<T>(lanes[0][1 - pair], 8);
                    last = next[0];
                } else {
                    for a in 0..A {
                        lanes[a][pair] = next[a].add_to::<T>(lanes[a][pair], 8);
                    }
                }
            }
        }
        if A == 1 {
            lanes[0][1] = last.add_to::<T>(lanes[0][1], 8);
        }
        if whole < n_blocks {
            let n = n_blocks - whole;
            // SAFETY: as above.
            let x = unsafe { Factors::of::<T, false, A>(acts, whole, n) };
            for pair in 0..2 {
                // SAFETY: as above.
                let last = unsafe { Self::products::<false, A>(pairs[pair], whole, n, &x) };
                for a in 0..A {
                    lanes[a][pair] = last[a].add_to::<T>(lanes[a][pair], n);
                }
            }
        }
        let mut out = [[0.0; 4]; A];
        let in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        for a in 0..A {
            for pair in 0..2 {
                let lanes = _mm512_permutexvar_ps(in_order, lanes[a][pair]);
                out[a][2 * pair] = fold(_mm512_castps512_ps256(lanes));
                out[a][2 * pair + 1] = fold(_mm512_extractf32x8_ps::<1>(lanes));
            }
        }
        out
    }

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
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

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
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
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
fn halved([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    [
        _mm512_shuffle_i32x4::<0x88>(a, b),
        _mm512_shuffle_i32x4::<0xdd>(a, b),
        _mm512_shuffle_i32x4::<0x88>(c, d),
        _mm512_shuffle_i32x4::<0xdd>(c, d),
    ]
}

/// The sums of eight blocks of two rows by [`Lane`], from registers of two blocks each.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
fn of_pairs(first: [__m512i; 4], second: [__m512i; 4]) -> __m512i {
    // Lane i of the first two quarters is of block 2i, of the others of block 2i + 1.
    let (first, second) = (quarters(first), quarters(second));
    let mut lower = [0i32; 16];
    for lane in 0..16 {
        let block = Lane(lane).block();
        lower[lane] = (16 * Lane(lane).row() + block % 2 * 8 + block / 2) as i32;
    }
    // SAFETY: the array is 64 bytes long.
    let lower = unsafe { load64(lower.as_ptr()) };
    let upper = _mm512_add_epi32(lower, _mm512_set1_epi32(4));
    let lower = _mm512_permutex2var_epi32(first, lower, second);
    _mm512_add_epi32(lower, _mm512_permutex2var_epi32(first, upper, second))
}

/// The sums of eight blocks of two rows by [`Lane`], from the first and third of their registers: a quarter of each for a
/// block.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
fn of_halves(first: [__m512i; 4], second: [__m512i; 4]) -> __m512i {
    // In quarter i two lanes are of block i, two of block i + 4.
    neighbours(neighbours(first[0], first[2]), neighbours(second[0], second[2]))
}

/// [`of_halves`] of narrow codes, and `less`.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
fn of_narrow_halves(first: [__m512i; 4], second: [__m512i; 4], less: __m512i) -> __m512i {
    let one = _mm512_set1_epi16(1);
    let first = _mm512_madd_epi16(_mm512_packs_epi32(first[0], first[2]), one);
    let second = _mm512_madd_epi16(_mm512_packs_epi32(second[0], second[2]), one);
    dpwssd(less, _mm512_packs_epi32(first, second), one)
}

/// The sum of 8 lanes, halves folded onto each other.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
fn fold(lanes: __m256) -> f32 {
    crate::kernel::x86_64::sum([lanes, _mm256_setzero_ps()])
}
