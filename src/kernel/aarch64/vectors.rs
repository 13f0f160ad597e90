//! What the loops share: loads, turning, sums across lanes.
//!
//! Loops and not closures, here as in the loops over blocks: a closure that is handed on is not always inlined.

use std::arch::aarch64::{
    float32x4_t, int8x16_t, int32x4_t, uint8x16_t, uint16x4_t, vld1_lane_u16, vld1q_s8, vld1q_u8, vst1q_f32,
};
use std::arch::asm;

use super::neon::*;

/// 16 bytes from anywhere.
///
/// # Safety
///
/// They can be read.
#[inline(always)]
pub(super) unsafe fn load<T>(bytes: *const T) -> int8x16_t {
    // SAFETY: the caller vouches for 16 bytes; no alignment is needed.
    unsafe { vld1q_s8(bytes.cast()) }
}

/// The same, as numbers that are not negative.
///
/// # Safety
///
/// As [`load`].
#[inline(always)]
pub(super) unsafe fn load_u8(bytes: *const u8) -> uint8x16_t {
    // SAFETY: the caller vouches for 16 bytes; no alignment is needed.
    unsafe { vld1q_u8(bytes) }
}

/// 16 bytes of two codes each: the lower halves, the upper ones.
#[inline(always)]
pub(super) fn nibbles(bytes: uint8x16_t) -> [uint8x16_t; 2] {
    [vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8::<4>(bytes)]
}

/// What codes below 16 stand for.
#[inline(always)]
pub(super) fn look_up(table: &[i8; 16], codes: [uint8x16_t; 2]) -> [int8x16_t; 2] {
    // SAFETY: the table is 16 bytes long.
    let table = unsafe { load(table.as_ptr()) };
    [vqtbl1q_s8(table, codes[0]), vqtbl1q_s8(table, codes[1])]
}

/// The halves of two registers side by side: the lower ones, the upper ones.
#[inline(always)]
pub(super) fn zip64(a: int8x16_t, b: int8x16_t) -> [int8x16_t; 2] {
    let (a, b) = (vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b));
    [vreinterpretq_s8_s64(vzip1q_s64(a, b)), vreinterpretq_s8_s64(vzip2q_s64(a, b))]
}

/// Rows of 32-bit lanes to columns.
#[inline(always)]
pub(super) fn transpose(rows: [int8x16_t; 4]) -> [int8x16_t; 4] {
    let (a, b) = (vreinterpretq_s32_s8(rows[0]), vreinterpretq_s32_s8(rows[1]));
    let (c, d) = (vreinterpretq_s32_s8(rows[2]), vreinterpretq_s32_s8(rows[3]));
    let ab_low = vreinterpretq_s8_s32(vzip1q_s32(a, b));
    let ab_high = vreinterpretq_s8_s32(vzip2q_s32(a, b));
    let cd_low = vreinterpretq_s8_s32(vzip1q_s32(c, d));
    let cd_high = vreinterpretq_s8_s32(vzip2q_s32(c, d));
    let ([first, second], [third, fourth]) = (zip64(ab_low, cd_low), zip64(ab_high, cd_high));
    [first, second, third, fourth]
}

/// Codes below 128 as what they are.
#[inline(always)]
pub(super) fn signed<const N: usize>(codes: [uint8x16_t; N]) -> [int8x16_t; N] {
    let mut out = [vdupq_n_s8(0); N];
    for i in 0..N {
        out[i] = vreinterpretq_s8_u8(codes[i]);
    }
    out
}

/// The sum of each of four registers.
#[inline(always)]
pub(super) fn totals(rows: &[int32x4_t; 4]) -> int32x4_t {
    vpaddq_s32(vpaddq_s32(rows[0], rows[1]), vpaddq_s32(rows[2], rows[3]))
}

/// `lanes + scale * dots`, rounded once.
#[inline(always)]
pub(super) fn add(lanes: float32x4_t, scale: float32x4_t, dots: int32x4_t) -> float32x4_t {
    vfmaq_f32(lanes, scale, vcvtq_f32_s32(dots))
}

/// The four lanes.
#[inline(always)]
pub(super) fn store(lanes: float32x4_t) -> [f32; 4] {
    let mut out = [0.0; 4];
    // SAFETY: four floats are written to an array of four.
    unsafe { vst1q_f32(out.as_mut_ptr(), lanes) };
    out
}

/// Two bytes each, `at` bytes into four blocks.
///
/// # Safety
///
/// They can be read.
#[inline(always)]
pub(super) unsafe fn gather(blocks: [*const u8; 4], at: usize) -> uint16x4_t {
    // SAFETY: the caller vouches for two bytes each; a lane's load needs no alignment.
    unsafe {
        let lanes = vld1_lane_u16::<0>(blocks[0].add(at).cast(), vdup_n_u16(0));
        let lanes = vld1_lane_u16::<1>(blocks[1].add(at).cast(), lanes);
        let lanes = vld1_lane_u16::<2>(blocks[2].add(at).cast(), lanes);
        vld1_lane_u16::<3>(blocks[3].add(at).cast(), lanes)
    }
}

/// Four half-precision numbers. Every CPU converts them; the compiler's own function is not to be had yet.
#[inline(always)]
pub(super) fn halves(bits: uint16x4_t) -> float32x4_t {
    let out;
    // SAFETY: `fcvtl` is part of NEON and touches nothing but the registers named.
    unsafe {
        asm!(
            "fcvtl {out:v}.4s, {bits:v}.4h",
            out = out(vreg) out, bits = in(vreg) bits,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    out
}

/// Asks for `n` bytes from `bytes` on, which need not be there.
#[inline(always)]
pub(super) fn prefetch(bytes: *const u8, n: usize) {
    for line in (0..n).step_by(64) {
        // SAFETY: `prfm` is a hint: it changes nothing and fails nowhere.
        unsafe {
            asm!(
                "prfm pldl1keep, [{at}]",
                at = in(reg) bytes.wrapping_add(line),
                options(readonly, nostack, preserves_flags),
            );
        }
    }
}
