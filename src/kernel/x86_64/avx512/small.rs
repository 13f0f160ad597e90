//! Blocks of 32 with one scale.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::{AHEAD, Codes, Loops, TURNED, load64, prefetch, quarters, transpose};
use crate::blocks::iq4_nl::STEPS;
use crate::blocks::mxfp4::{DOUBLED, half_scale};
use crate::kernel::x86_64::load16;

/// A format of 32 weights in `BYTES` bytes. The layouts are drawn in [`crate::blocks`].
pub(super) trait Block {
    const BYTES: usize;
    /// By how much codes are too large.
    const OFFSET: i16;

    /// The codes of two blocks.
    ///
    /// # Safety
    ///
    /// Both are there; the CPU has the features.
    unsafe fn codes(first: *const u8, second: *const u8) -> __m512i;

    /// The scales of eight blocks.
    ///
    /// # Safety
    ///
    /// All are there; the CPU has the features.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn scales(blocks: [*const u8; 8]) -> __m256 {
        // SAFETY: the caller vouches for the blocks, which begin with a half-precision number. Put together by the
        // integer units, which have little else to do.
        unsafe {
            let half = |i: usize| u64::from(blocks[i].cast::<u16>().read_unaligned());
            let four = |i: usize| half(i) | half(i + 1) << 16 | half(i + 2) << 32 | half(i + 3) << 48;
            _mm256_cvtph_ps(_mm_set_epi64x(four(4).cast_signed(), four(0).cast_signed()))
        }
    }
}

pub(super) struct Q8_0;
pub(super) struct Q4_0;
pub(super) struct Q5_0;
pub(super) struct Iq4Nl;
pub(super) struct Mxfp4;

impl Block for Q8_0 {
    const BYTES: usize = 34;
    const OFFSET: i16 = 128;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn codes(first: *const u8, second: *const u8) -> __m512i {
        // SAFETY: the caller vouches for the blocks.
        let (first, second) =
            unsafe { (_mm256_loadu_si256(first.add(2).cast()), _mm256_loadu_si256(second.add(2).cast())) };
        let codes = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(first), second);
        _mm512_xor_si512(codes, _mm512_set1_epi8(-128))
    }
}

impl Block for Q4_0 {
    const BYTES: usize = 18;
    const OFFSET: i16 = 8;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn codes(first: *const u8, second: *const u8) -> __m512i {
        // SAFETY: the caller vouches for the blocks.
        unsafe { nibbles(first.add(2), second.add(2)) }
    }
}

impl Block for Q5_0 {
    const BYTES: usize = 22;
    const OFFSET: i16 = 16;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn codes(first: *const u8, second: *const u8) -> __m512i {
        // SAFETY: the caller vouches for the blocks.
        unsafe {
            let fifths = |block: *const u8| u64::from(block.add(2).cast::<u32>().read_unaligned());
            let set = fifths(first) | fifths(second) << 32;
            let codes = nibbles(first.add(6), second.add(6));
            _mm512_mask_add_epi8(codes, set, codes, _mm512_set1_epi8(16))
        }
    }
}

impl Block for Iq4Nl {
    const BYTES: usize = 18;
    const OFFSET: i16 = 128;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn codes(first: *const u8, second: *const u8) -> __m512i {
        // SAFETY: the caller vouches for the blocks.
        look_up(&STEPS, unsafe { nibbles(first.add(2), second.add(2)) })
    }
}

impl Block for Mxfp4 {
    const BYTES: usize = 17;
    const OFFSET: i16 = 128;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn codes(first: *const u8, second: *const u8) -> __m512i {
        // SAFETY: the caller vouches for the blocks.
        look_up(&DOUBLED, unsafe { nibbles(first.add(1), second.add(1)) })
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn scales(blocks: [*const u8; 8]) -> __m256 {
        // SAFETY: the caller vouches for the blocks.
        let e = unsafe {
            let e = |i: usize| u64::from(*blocks[i]) << (8 * i);
            let e = e(0) | e(1) | e(2) | e(3) | e(4) | e(5) | e(6) | e(7);
            _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(e.cast_signed()))
        };
        // See `half_scale`.
        let halved = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(e)), _mm256_set1_ps(0.5));
        let zero = _mm256_cmpeq_epi32_mask(e, _mm256_setzero_si256());
        _mm256_mask_blend_ps(zero, halved, _mm256_set1_ps(half_scale(0)))
    }
}

/// Two times 16 bytes of two codes each: of either the lower halves, then the upper ones.
///
/// # Safety
///
/// The bytes can be read.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn nibbles(first: *const u8, second: *const u8) -> __m512i {
    // SAFETY: the caller vouches for the bytes.
    let (first, second) = unsafe { (load16(&*first.cast()), load16(&*second.cast())) };
    let both = _mm512_mask_broadcast_i32x4(_mm512_broadcast_i32x4(first), 0xff00, second);
    let right = _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4);
    _mm512_and_si512(_mm512_srlv_epi64(both, right), _mm512_set1_epi8(15))
}

/// What codes below 16 stand for, and 128.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn look_up(table: &[i8; 16], codes: __m512i) -> __m512i {
    // SAFETY: the table is 16 bytes long; no alignment is needed.
    let table = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
    let table = _mm512_broadcast_i32x4(_mm_xor_si128(table, _mm_set1_epi8(-128)));
    _mm512_shuffle_epi8(table, codes)
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
    /// Blocks `b` and on of one row: eight of them if they are `WHOLE`, else `n`, which is less.
    ///
    /// # Safety
    ///
    /// So many blocks from `b` are there, of weights and activations.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn step<const WHOLE: bool, const A: usize>(
        row: *const u8,
        b: usize,
        n: usize,
        acts: &Codes<A>,
        lanes: &mut [__m256; A],
    ) {
        // SAFETY: the last block stands in for those that are not there, whose lanes are left alone; masks keep
        // activations from being read beyond their end.
        unsafe {
            let first = row.add(b * T::BYTES);
            let block = |i: usize| first.add(if WHOLE { i } else { i.min(n - 1) } * T::BYTES);
            if A == 1 && WHOLE {
                (0..8 * T::BYTES).step_by(64).for_each(|line| prefetch(first.wrapping_add(line), AHEAD));
            }
            let mut dots = [[_mm512_setzero_si512(); 4]; A];
            for pair in 0..4 {
                if !WHOLE && 2 * pair >= n {
                    break;
                }
                let codes = T::codes(block(2 * pair), block(2 * pair + 1));
                for a in 0..A {
                    let at = acts.codes[a].add(32 * (b + 2 * pair));
                    let x = match WHOLE || 2 * pair + 1 < n {
                        true => load64(at),
                        false => _mm512_zextsi256_si512(_mm256_loadu_si256(at.cast())),
                    };
                    dots[a][pair] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes, x);
                }
            }
            let d = T::scales(std::array::from_fn(block));
            let there = if WHOLE { 0xff } else { 0xff >> (8 - n) };
            let sums_there = if WHOLE { u16::MAX } else { u16::MAX >> (16 - 2 * n) };
            for a in 0..A {
                let sums = _mm256_maskz_loadu_epi16(sums_there, acts.sums[a].add(2 * b));
                let offset = _mm256_madd_epi16(sums, _mm256_set1_epi16(T::OFFSET));
                let dots = _mm256_sub_epi32(eight_sums(quarters(dots[a])), offset);
                let dx = _mm256_maskz_loadu_ps(there, acts.scales[a].add(b));
                let (scale, dots) = (_mm256_mul_ps(d, dx), _mm256_cvtepi32_ps(dots));
                lanes[a] = _mm256_mask3_fmadd_ps(scale, dots, lanes[a], there);
            }
        }
    }
}

impl<T: Block> Loops for Small<T> {
    const BYTES: usize = T::BYTES;
    const LEN: usize = 32;
    type Turned = Turned;

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn few<const A: usize>(rows: &[*const u8; 4], n_blocks: usize, acts: &Codes<A>) -> [[f32; 4]; A] {
        let mut out = [[0.0; 4]; A];
        let whole = n_blocks - n_blocks % 8;
        for (r, &row) in rows.iter().enumerate() {
            let mut lanes = [_mm256_setzero_ps(); A];
            for b in (0..whole).step_by(8) {
                // SAFETY: the caller vouches for `n_blocks` blocks.
                unsafe { Self::step::<true, A>(row, b, 8, acts, &mut lanes) };
            }
            if whole < n_blocks {
                // SAFETY: as above.
                unsafe { Self::step::<false, A>(row, whole, n_blocks - whole, acts, &mut lanes) };
            }
            for a in 0..A {
                out[a][r] = fold(lanes[a]);
            }
        }
        out
    }

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn turn(rows: &[*const u8; TURNED], n_blocks: usize, turned: &mut Vec<Turned>) {
        turned.resize_with(n_blocks, Turned::zero);
        for (b, two) in (0..).step_by(2).zip(turned.chunks_mut(2)) {
            // SAFETY: the caller vouches for `n_blocks` blocks.
            let block = |r: usize, b: usize| unsafe { rows[r].add(b * T::BYTES) };
            let last = b + two.len() - 1;
            let mut codes = [_mm512_setzero_si512(); TURNED];
            for r in 0..TURNED {
                // SAFETY: as above.
                codes[r] = unsafe { T::codes(block(r, b), block(r, last)) };
            }
            let columns = transpose(codes);
            for (i, turned) in two.iter_mut().enumerate() {
                turned.codes.copy_from_slice(&columns[8 * i..8 * i + 8]);
                // SAFETY: as above.
                let d = |first: usize| unsafe { T::scales(std::array::from_fn(|r| block(first + r, b + i))) };
                turned.d = _mm512_insertf32x8::<1>(_mm512_castps256_ps512(d(0)), d(8));
            }
        }
    }

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
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

/// The sums of eight blocks in order, from the quarters of four pairs of them.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn eight_sums(quarters: __m512i) -> __m256i {
    let swapped = _mm512_shuffle_i32x4::<0b10_11_00_01>(quarters, quarters);
    // The first quarter is now that of blocks 0, 2, 4 and 6, the third that of the others.
    let sums = _mm512_add_epi32(quarters, swapped);
    let in_order = _mm512_castsi256_si512(_mm256_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11));
    _mm512_castsi512_si256(_mm512_permutexvar_epi32(in_order, sums))
}

/// The sum of 8 lanes, halves folded onto each other.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn fold(lanes: __m256) -> f32 {
    crate::kernel::x86_64::sum([lanes, _mm256_setzero_ps()])
}
