//! Blocks of 256 whose sixteenths have scales of their own.

use std::arch::aarch64::{float32x4_t, int8x16_t, int16x8_t, int32x4_t, uint8x16_t, vld1q_s16};
use std::marker::PhantomData;

use super::level::{Level, SMALL, Turning};
use super::neon::*;
use super::vectors::{
    add, gather, halves, load, load_u8, look_up, nibbles, prefetch, signed, store, totals, transpose,
};
use super::walk::Loops;
use super::{Codes, sixteen_of};
use crate::blocks::iq4_nl::STEPS;
use crate::kernel::portable::{six_bits_iq4_xs, six_bits_q3_k};

/// A format of 256 weights in `BYTES` bytes. The layouts are drawn in [`crate::blocks`].
pub(super) trait Block {
    const BYTES: usize;
    /// By how much codes are too large.
    const OFFSET: i8 = 0;
    /// The largest magnitude of a code as it is read.
    const LARGEST: i16;
    /// Whether two neighbouring scales are the same: one for 32 weights.
    const PAIRED: bool;
    /// Whether there are minimums.
    const MINIMUMS: bool = false;
    /// Where d is.
    const D: usize;

    /// What comes before the codes, of four blocks.
    ///
    /// # Safety
    ///
    /// All are there.
    unsafe fn head(blocks: [*const u8; 4]) -> Head;

    /// Weights `128 * PART` and on, in order; `PART` is 0 or 1.
    ///
    /// # Safety
    ///
    /// The block is there.
    unsafe fn codes<const PART: usize>(block: *const u8) -> [int8x16_t; 8];

    /// The numbers d of four blocks.
    ///
    /// # Safety
    ///
    /// All are there.
    #[inline(always)]
    unsafe fn d(blocks: [*const u8; 4]) -> float32x4_t {
        // SAFETY: the caller vouches for the blocks.
        halves(unsafe { gather(blocks, Self::D) })
    }
}

/// Of four blocks: scales, and minimums where there are any, of 16 weights each or, where they are paired, of 32 in
/// the first half; d, and dmin.
pub(super) struct Head {
    scales: [[int16x8_t; 2]; 4],
    minimums: [[int16x8_t; 2]; 4],
    d: float32x4_t,
    dmin: float32x4_t,
}

pub(super) struct Q2K;
pub(super) struct Q3K;
pub(super) struct Iq4Xs;
pub(super) struct Q4K;
pub(super) struct Q5K;
pub(super) struct Q6K;

impl Block for Q2K {
    const BYTES: usize = 84;
    const LARGEST: i16 = 3;
    const PAIRED: bool = false;
    const MINIMUMS: bool = true;
    const D: usize = 80;

    #[inline(always)]
    unsafe fn head(blocks: [*const u8; 4]) -> Head {
        // SAFETY: the caller vouches for the blocks.
        unsafe {
            let mut head = Head::empty(Self::d(blocks));
            for r in 0..4 {
                let [scales, minimums] = nibbles(load_u8(blocks[r]));
                (head.scales[r], head.minimums[r]) = (wide_u8(scales), wide_u8(minimums));
            }
            head.dmin = halves(gather(blocks, 82));
            head
        }
    }

    #[inline(always)]
    unsafe fn codes<const PART: usize>(block: *const u8) -> [int8x16_t; 8] {
        // SAFETY: the caller vouches for the block.
        signed(unsafe { pairs(block.add(16 + 32 * PART)) })
    }
}

impl Block for Q3K {
    const BYTES: usize = 110;
    const OFFSET: i8 = 4;
    const LARGEST: i16 = 7;
    const PAIRED: bool = false;
    const D: usize = 108;

    #[inline(always)]
    unsafe fn head(blocks: [*const u8; 4]) -> Head {
        // SAFETY: the caller vouches for the blocks.
        unsafe {
            let mut head = Head::empty(Self::d(blocks));
            for r in 0..4 {
                let (first, second) = six_bits_q3_k(blocks[r].add(96).cast::<[u8; 12]>().read());
                head.scales[r] = [less_32(first), less_32(second)];
            }
            head
        }
    }

    #[inline(always)]
    unsafe fn codes<const PART: usize>(block: *const u8) -> [int8x16_t; 8] {
        // SAFETY: the caller vouches for the block.
        let (mut codes, thirds) =
            unsafe { (pairs(block.add(32 + 32 * PART)), [load_u8(block), load_u8(block.add(16))]) };
        for i in 0..8 {
            // Bit c of byte i is the third bit of weight 32c + i.
            let set = vandq_u8(thirds[i % 2], vdupq_n_u8(1 << (4 * PART + i / 2)));
            codes[i] = vorrq_u8(codes[i], move_bit(set, (4 * PART + i / 2) as i8, 2));
        }
        signed(codes)
    }
}

impl Block for Iq4Xs {
    const BYTES: usize = 136;
    const LARGEST: i16 = 127;
    const PAIRED: bool = true;
    const D: usize = 0;

    #[inline(always)]
    unsafe fn head(blocks: [*const u8; 4]) -> Head {
        // SAFETY: the caller vouches for the blocks.
        unsafe {
            let mut head = Head::empty(Self::d(blocks));
            for r in 0..4 {
                let [_, _, a, b, c, d, e, f] = blocks[r].cast::<[u8; 8]>().read();
                head.scales[r][0] = less_32(six_bits_iq4_xs([a, b], [c, d, e, f]));
            }
            head
        }
    }

    #[inline(always)]
    unsafe fn codes<const PART: usize>(block: *const u8) -> [int8x16_t; 8] {
        let mut codes = [vdupq_n_s8(0); 8];
        for g in 0..4 {
            // SAFETY: the caller vouches for the block.
            let bytes = unsafe { load_u8(block.add(8 + 64 * PART + 16 * g)) };
            [codes[2 * g], codes[2 * g + 1]] = look_up(&STEPS, nibbles(bytes));
        }
        codes
    }
}

impl Block for Q4K {
    const BYTES: usize = 144;
    const LARGEST: i16 = 15;
    const PAIRED: bool = true;
    const MINIMUMS: bool = true;
    const D: usize = 0;

    #[inline(always)]
    unsafe fn head(blocks: [*const u8; 4]) -> Head {
        // SAFETY: the caller vouches for the blocks.
        unsafe { Head::of_six_bits(blocks) }
    }

    #[inline(always)]
    unsafe fn codes<const PART: usize>(block: *const u8) -> [int8x16_t; 8] {
        // SAFETY: the caller vouches for the block.
        signed(unsafe { halves_of_64(block.add(16 + 64 * PART)) })
    }
}

impl Block for Q5K {
    const BYTES: usize = 176;
    const LARGEST: i16 = 31;
    const PAIRED: bool = true;
    const MINIMUMS: bool = true;
    const D: usize = 0;

    #[inline(always)]
    unsafe fn head(blocks: [*const u8; 4]) -> Head {
        // SAFETY: the caller vouches for the blocks.
        unsafe { Head::of_six_bits(blocks) }
    }

    #[inline(always)]
    unsafe fn codes<const PART: usize>(block: *const u8) -> [int8x16_t; 8] {
        // SAFETY: the caller vouches for the block.
        let (mut codes, fifths) = unsafe {
            (halves_of_64(block.add(48 + 64 * PART)), [load_u8(block.add(16)), load_u8(block.add(32))])
        };
        for i in 0..8 {
            // Bit c of byte i is the fifth bit of weight 32c + i.
            let set = vandq_u8(fifths[i % 2], vdupq_n_u8(1 << (4 * PART + i / 2)));
            codes[i] = vorrq_u8(codes[i], move_bit(set, (4 * PART + i / 2) as i8, 4));
        }
        signed(codes)
    }
}

impl Block for Q6K {
    const BYTES: usize = 210;
    const OFFSET: i8 = 32;
    const LARGEST: i16 = 63;
    const PAIRED: bool = false;
    const D: usize = 208;

    #[inline(always)]
    unsafe fn head(blocks: [*const u8; 4]) -> Head {
        // SAFETY: the caller vouches for the blocks.
        unsafe {
            let mut head = Head::empty(Self::d(blocks));
            for r in 0..4 {
                let scales = load(blocks[r].add(192));
                head.scales[r] = [vmovl_s8(vget_low_s8(scales)), vmovl_high_s8(scales)];
            }
            head
        }
    }

    #[inline(always)]
    unsafe fn codes<const PART: usize>(block: *const u8) -> [int8x16_t; 8] {
        // SAFETY: the caller vouches for the block.
        unsafe {
            let (low, high) = (block.add(64 * PART), block.add(128 + 32 * PART));
            let upper = [load_u8(high), load_u8(high.add(16))];
            let mut codes = [vdupq_n_u8(0); 8];
            for i in 0..4 {
                [codes[i], codes[i + 4]] = nibbles(load_u8(low.add(16 * i)));
            }
            for i in 0..8 {
                // Two more bits, moved to bits 4 and 5.
                let upper = match i / 2 {
                    0 => vshlq_n_u8::<4>(upper[i % 2]),
                    1 => vshlq_n_u8::<2>(upper[i % 2]),
                    2 => upper[i % 2],
                    _ => vshrq_n_u8::<2>(upper[i % 2]),
                };
                codes[i] = vorrq_u8(codes[i], vandq_u8(upper, vdupq_n_u8(0x30)));
            }
            signed(codes)
        }
    }
}

impl Head {
    /// With d alone.
    #[inline(always)]
    fn empty(d: float32x4_t) -> Head {
        let none = [[vdupq_n_s16(0); 2]; 4];
        Head { scales: none, minimums: none, d, dmin: vdupq_n_f32(0.0) }
    }

    /// The first 16 bytes of Q4_K and Q5_K, of four blocks at once.
    ///
    /// ```text
    /// word 0          1                     2                     3
    /// d | dmin   s0 s1 s2 s3 (6 bits)  m0 m1 m2 m3 (6 bits)  lower 4 bits: s4 … s7, upper 4: m4 … m7
    ///            their top 2 bits: s4 … s7, m4 … m7
    /// ```
    ///
    /// # Safety
    ///
    /// The blocks are there.
    #[inline(always)]
    unsafe fn of_six_bits(blocks: [*const u8; 4]) -> Head {
        // SAFETY: the caller vouches for the blocks.
        let rows = unsafe { [load(blocks[0]), load(blocks[1]), load(blocks[2]), load(blocks[3])] };
        let [both, first, second, third] = transpose(rows);
        let (both, first) = (vreinterpretq_u32_s8(both), vreinterpretq_u8_s8(first));
        let (second, third) = (vreinterpretq_u8_s8(second), vreinterpretq_u8_s8(third));
        let top = |word: uint8x16_t| vandq_u8(vshrq_n_u8::<2>(word), vdupq_n_u8(0x30));
        let [lower, upper] = nibbles(third);
        let six = vdupq_n_u8(0x3f);
        Head {
            scales: eights(vandq_u8(first, six), vorrq_u8(lower, top(first))),
            minimums: eights(vandq_u8(second, six), vorrq_u8(upper, top(second))),
            d: halves(vmovn_u32(both)),
            dmin: halves(vshrn_n_u32::<16>(both)),
        }
    }
}

/// Four bytes of each of four rows, and four more, as eight numbers of each row.
#[inline(always)]
fn eights(first: uint8x16_t, second: uint8x16_t) -> [[int16x8_t; 2]; 4] {
    let (first, second) = (vreinterpretq_u32_u8(first), vreinterpretq_u32_u8(second));
    let low = vreinterpretq_u8_u32(vzip1q_u32(first, second));
    let high = vreinterpretq_u8_u32(vzip2q_u32(first, second));
    let ([a, b], [c, d]) = (wide_u8(low), wide_u8(high));
    let none = vdupq_n_s16(0);
    [[a, none], [b, none], [c, none], [d, none]]
}

/// Sixteen bytes as numbers that are not negative.
#[inline(always)]
fn wide_u8(bytes: uint8x16_t) -> [int16x8_t; 2] {
    [vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes))), vreinterpretq_s16_u16(vmovl_high_u8(bytes))]
}

/// Eight bytes, each too large by 32.
#[inline(always)]
fn less_32(bytes: u64) -> int16x8_t {
    vreinterpretq_s16_u16(vsubl_u8(vcreate_u8(bytes), vdup_n_u8(32)))
}

/// Bit `from` of every byte, alone in it, as bit `to`. The numbers are known when this is compiled.
#[inline(always)]
fn move_bit(bytes: uint8x16_t, from: i8, to: i8) -> uint8x16_t {
    vshlq_u8(bytes, vdupq_n_s8(to - from))
}

/// 32 bytes of four weights of 2 bits each, 32 apart.
///
/// # Safety
///
/// They can be read.
#[inline(always)]
unsafe fn pairs(bytes: *const u8) -> [uint8x16_t; 8] {
    // SAFETY: the caller vouches for the bytes.
    let bytes = unsafe { [load_u8(bytes), load_u8(bytes.add(16))] };
    let (three, mut codes) = (vdupq_n_u8(3), [vdupq_n_u8(0); 8]);
    for i in 0..2 {
        codes[i] = vandq_u8(bytes[i], three);
        codes[2 + i] = vandq_u8(vshrq_n_u8::<2>(bytes[i]), three);
        codes[4 + i] = vandq_u8(vshrq_n_u8::<4>(bytes[i]), three);
        codes[6 + i] = vshrq_n_u8::<6>(bytes[i]);
    }
    codes
}

/// 64 bytes of two weights each, 32 apart.
///
/// # Safety
///
/// They can be read.
#[inline(always)]
unsafe fn halves_of_64(bytes: *const u8) -> [uint8x16_t; 8] {
    let mut codes = [vdupq_n_u8(0); 8];
    for i in 0..4 {
        // SAFETY: the caller vouches for the bytes.
        let [low, high] = nibbles(unsafe { load_u8(bytes.add(16 * i)) });
        (codes[i / 2 * 4 + i % 2], codes[i / 2 * 4 + 2 + i % 2]) = (low, high);
    }
    codes
}

/// The loops of a type; what they compute is in [`crate::kernel`], "blocks of 256".
pub(super) struct Large<T>(PhantomData<T>);

/// A block of four rows.
pub(super) struct Turned {
    /// Sixteen weights of each row, as [`Turning::turn`] leaves them.
    codes: [[int8x16_t; 4]; 16],
    /// Of 16 weights, or of 32 in the first half.
    scales: [int32x4_t; 16],
    /// Likewise, two groups to a register.
    minimums: [int16x8_t; 8],
    d: float32x4_t,
    dmin: float32x4_t,
}

impl<T: Block> Large<T> {
    const SMALL: bool = T::LARGEST <= SMALL;

    /// Weights `128 * PART` and on of four rows times those of `A`, with the scales: added to `dots`.
    ///
    /// # Safety
    ///
    /// The blocks and the activations are there.
    #[inline(always)]
    unsafe fn part<L: Level, const PART: usize, const A: usize>(
        cpu: L,
        blocks: [*const u8; 4],
        head: &Head,
        acts: [*const i8; A],
        dots: &mut [[int32x4_t; 4]; A],
    ) {
        let zero = vdupq_n_s32(0);
        for r in 0..4 {
            // SAFETY: the caller vouches for the block.
            let w = unsafe { T::codes::<PART>(blocks[r]) };
            let own = head.scales[r];
            for a in 0..A {
                let mut x = [vdupq_n_s8(0); 8];
                for i in 0..8 {
                    // SAFETY: the caller vouches for the activations.
                    x[i] = unsafe { load(acts[a].add(128 * PART + 16 * i)) };
                }
                let (mut sums, mut fours) = (dots[a][r], [[zero; 4]; 2]);
                if T::PAIRED {
                    for g in 0..4 {
                        let (w, x) = ([w[2 * g], w[2 * g + 1]], [x[2 * g], x[2 * g + 1]]);
                        fours[0][g] = cpu.dot(zero, w, x, Self::SMALL);
                    }
                    let own =
                        if PART == 0 { vmovl_s16(vget_low_s16(own[0])) } else { vmovl_high_s16(own[0]) };
                    sums = vmlaq_s32(sums, totals(&fours[0]), own);
                } else {
                    for g in 0..8 {
                        fours[g / 4][g % 4] = cpu.dot(zero, [w[g]], [x[g]], Self::SMALL);
                    }
                    sums = vmlaq_s32(sums, totals(&fours[0]), vmovl_s16(vget_low_s16(own[PART])));
                    sums = vmlaq_s32(sums, totals(&fours[1]), vmovl_high_s16(own[PART]));
                }
                dots[a][r] = sums;
            }
        }
    }

    /// What the sums of a block's activations are multiplied with, times those: minimums, or scales where codes are
    /// too large.
    ///
    /// # Safety
    ///
    /// Sixteen sums can be read.
    #[inline(always)]
    unsafe fn of_sums(head: &Head, r: usize, sums: *const i16) -> int32x4_t {
        let of = if T::MINIMUMS { head.minimums[r] } else { head.scales[r] };
        // SAFETY: the caller vouches for the sums.
        let sums = unsafe { [vld1q_s16(sums), vld1q_s16(sums.add(8))] };
        if T::PAIRED {
            return products(vdupq_n_s32(0), of[0], vpaddq_s16(sums[0], sums[1]));
        }
        products(products(vdupq_n_s32(0), of[0], sums[0]), of[1], sums[1])
    }
}

impl<T: Block> Loops for Large<T> {
    const BYTES: usize = T::BYTES;
    const LEN: usize = 256;
    type Turned = Turned;

    unsafe fn few<L: Level, const A: usize>(
        cpu: L,
        rows: [*const u8; 4],
        n_blocks: usize,
        acts: &Codes<A>,
    ) -> [[f32; 4]; A] {
        let (mut high, mut low) = ([vdupq_n_f32(0.0); A], [vdupq_n_f32(0.0); A]);
        let mut blocks = rows;
        // Four rows further the next tile begins.
        let ahead = n_blocks * T::BYTES * 4;
        for b in 0..n_blocks {
            if A == 1 {
                for block in blocks {
                    prefetch(block.wrapping_add(ahead), T::BYTES);
                }
            }
            // SAFETY: the caller vouches for `n_blocks` of weights and activations.
            unsafe {
                let head = T::head(blocks);
                let mut dots = [[vdupq_n_s32(0); 4]; A];
                let mut x = acts.codes;
                for a in 0..A {
                    x[a] = acts.codes::<256>(a, b);
                }
                Self::part::<L, 0, A>(cpu, blocks, &head, x, &mut dots);
                Self::part::<L, 1, A>(cpu, blocks, &head, x, &mut dots);
                for a in 0..A {
                    let dx = acts.scale(a, b);
                    let mut dot = totals(&dots[a]);
                    if T::MINIMUMS || T::OFFSET != 0 {
                        let mut sums = [vdupq_n_s32(0); 4];
                        for r in 0..4 {
                            sums[r] = Self::of_sums(&head, r, acts.sums::<16>(a, b));
                        }
                        let sum = totals(&sums);
                        if T::MINIMUMS {
                            low[a] = add(low[a], vmulq_n_f32(head.dmin, dx), sum);
                        } else {
                            dot = vmlsq_n_s32(dot, sum, T::OFFSET.into());
                        }
                    }
                    high[a] = add(high[a], vmulq_n_f32(head.d, dx), dot);
                }
                for block in &mut blocks {
                    *block = block.add(T::BYTES);
                }
            }
        }
        less(high, low)
    }

    #[inline(always)]
    unsafe fn turn<L: Turning>(cpu: L, blocks: [*const u8; 4]) -> Turned {
        // SAFETY: the caller vouches for the blocks.
        unsafe {
            let head = T::head(blocks);
            let (mut codes, offset) = ([[vdupq_n_s8(0); 4]; 16], vdupq_n_s8(T::OFFSET));
            for r in 0..4 {
                let (first, second) = (T::codes::<0>(blocks[r]), T::codes::<1>(blocks[r]));
                for i in 0..8 {
                    codes[i][r] = vsubq_s8(first[i], offset);
                    codes[8 + i][r] = vsubq_s8(second[i], offset);
                }
            }
            for four in &mut codes {
                *four = cpu.turn(*four);
            }
            Turned {
                codes,
                scales: columns(&head.scales),
                minimums: if T::MINIMUMS { pairs_of(columns(&head.minimums)) } else { [vdupq_n_s16(0); 8] },
                d: head.d,
                dmin: head.dmin,
            }
        }
    }

    #[inline(always)]
    unsafe fn many<L: Turning, const A: usize>(cpu: L, turned: &[Turned], acts: &Codes<A>) -> [[f32; 4]; A] {
        // SAFETY: the caller vouches for the activations.
        unsafe {
            match (T::PAIRED, T::MINIMUMS) {
                (true, true) => many::<L, true, true, A>(cpu, turned, acts),
                (true, false) => many::<L, true, false, A>(cpu, turned, acts),
                (false, true) => many::<L, false, true, A>(cpu, turned, acts),
                (false, false) => many::<L, false, false, A>(cpu, turned, acts),
            }
        }
    }
}

/// See [`Loops::many`]; `P` says that scales are paired, `M` that there are minimums.
///
/// # Safety
///
/// The activations have as many blocks.
unsafe fn many<L: Turning, const P: bool, const M: bool, const A: usize>(
    cpu: L,
    turned: &[Turned],
    acts: &Codes<A>,
) -> [[f32; 4]; A] {
    let (mut high, mut low) = ([vdupq_n_f32(0.0); A], [vdupq_n_f32(0.0); A]);
    let per_group = if P { 2 } else { 1 };
    for (b, w) in turned.iter().enumerate() {
        let mut dots = [vdupq_n_s32(0); A];
        for g in 0..16 / per_group {
            let mut fours = [vdupq_n_s32(0); A];
            for i in per_group * g..per_group * (g + 1) {
                // SAFETY: the caller vouches for as many blocks of activations.
                let x = unsafe { sixteen_of::<256, A>(acts, b, i) };
                cpu.sixteen(&mut fours, &w.codes[i], x);
            }
            let scales = cpu.spread(w.scales[g]);
            for a in 0..A {
                dots[a] = vmlaq_s32(dots[a], fours[a], scales[a % 2]);
            }
        }
        let dots = cpu.settle(dots);
        for a in 0..A {
            // SAFETY: as above.
            let (dx, sums) = unsafe { (acts.scale(a, b), acts.sums::<16>(a, b)) };
            if M {
                // SAFETY: as above.
                let sums = unsafe { [vld1q_s16(sums), vld1q_s16(sums.add(8))] };
                let sum = if P {
                    by_lanes(vdupq_n_s32(0), &w.minimums[..4], vpaddq_s16(sums[0], sums[1]))
                } else {
                    let first = by_lanes(vdupq_n_s32(0), &w.minimums[..4], sums[0]);
                    by_lanes(first, &w.minimums[4..], sums[1])
                };
                low[a] = add(low[a], vmulq_n_f32(w.dmin, dx), sum);
            }
            high[a] = add(high[a], vmulq_n_f32(w.d, dx), dots[a]);
        }
    }
    less(high, low)
}

/// `high - low` for each activation row.
#[inline(always)]
fn less<const A: usize>(high: [float32x4_t; A], low: [float32x4_t; A]) -> [[f32; 4]; A] {
    let mut out = [[0.0; 4]; A];
    for a in 0..A {
        out[a] = store(vsubq_f32(high[a], low[a]));
    }
    out
}

/// `sums` and eight products, each in one lane or another.
#[inline(always)]
fn products(sums: int32x4_t, a: int16x8_t, b: int16x8_t) -> int32x4_t {
    vmlal_high_s16(vmlal_s16(sums, vget_low_s16(a), vget_low_s16(b)), a, b)
}

/// Sixteen numbers of each of four rows as four numbers of each of sixteen columns.
#[inline(always)]
fn columns(rows: &[[int16x8_t; 2]; 4]) -> [int32x4_t; 16] {
    let mut out = [vdupq_n_s32(0); 16];
    for four in 0..4 {
        let mut wide = [vdupq_n_s8(0); 4];
        for r in 0..4 {
            let eight = rows[r][four / 2];
            let own = if four % 2 == 0 { vmovl_s16(vget_low_s16(eight)) } else { vmovl_high_s16(eight) };
            wide[r] = vreinterpretq_s8_s32(own);
        }
        let columns = transpose(wide);
        for i in 0..4 {
            out[4 * four + i] = vreinterpretq_s32_s8(columns[i]);
        }
    }
    out
}

/// Two neighbouring columns to a register.
#[inline(always)]
fn pairs_of(columns: [int32x4_t; 16]) -> [int16x8_t; 8] {
    let mut out = [vdupq_n_s16(0); 8];
    for i in 0..8 {
        out[i] = vcombine_s16(vmovn_s32(columns[2 * i]), vmovn_s32(columns[2 * i + 1]));
    }
    out
}

/// `sums` and four numbers of each of eight columns, each column times its lane of `x`.
#[inline(always)]
fn by_lanes(sums: int32x4_t, columns: &[int16x8_t], x: int16x8_t) -> int32x4_t {
    let [a, b, c, d] = [columns[0], columns[1], columns[2], columns[3]];
    let sums = vmlal_high_laneq_s16::<1>(vmlal_laneq_s16::<0>(sums, vget_low_s16(a), x), a, x);
    let sums = vmlal_high_laneq_s16::<3>(vmlal_laneq_s16::<2>(sums, vget_low_s16(b), x), b, x);
    let sums = vmlal_high_laneq_s16::<5>(vmlal_laneq_s16::<4>(sums, vget_low_s16(c), x), c, x);
    vmlal_high_laneq_s16::<7>(vmlal_laneq_s16::<6>(sums, vget_low_s16(d), x), d, x)
}
