//! The compiler's NEON functions, those that touch no memory, as plain safe ones.
//!
//! NEON belongs to the target, but the compiler calls its functions unsafe in every function that does not name the
//! feature, and one that names it cannot be made to be inlined.

use std::arch::aarch64::*;

/// Functions of one signature, a line each.
macro_rules! plain {
    ($($args:tt -> $out:ty: $($name:ident)*;)*) => { $($( plain!(@ $name $args -> $out); )*)* };
    (@ $name:ident ($($arg:ident: $type:ty),*) -> $out:ty) => {
        #[inline(always)]
        pub(super) fn $name($($arg: $type),*) -> $out {
            // SAFETY: every CPU of the target has NEON.
            unsafe { std::arch::aarch64::$name($($arg),*) }
        }
    };
}

/// The same with a number that is part of the instruction.
macro_rules! with_number {
    ($($args:tt -> $out:ty: $($name:ident)*;)*) => { $($( with_number!(@ $name $args -> $out); )*)* };
    (@ $name:ident ($($arg:ident: $type:ty),*) -> $out:ty) => {
        #[inline(always)]
        pub(super) fn $name<const N: i32>($($arg: $type),*) -> $out {
            // SAFETY: every CPU of the target has NEON.
            unsafe { std::arch::aarch64::$name::<N>($($arg),*) }
        }
    };
}

plain! {
    (a: f32) -> float32x4_t: vdupq_n_f32;
    (a: i8) -> int8x16_t: vdupq_n_s8;
    (a: i16) -> int16x8_t: vdupq_n_s16;
    (a: i32) -> int32x4_t: vdupq_n_s32;
    (a: u8) -> uint8x16_t: vdupq_n_u8;
    (a: u8) -> uint8x8_t: vdup_n_u8;
    (a: u16) -> uint16x4_t: vdup_n_u16;
    (a: u32) -> uint32x4_t: vdupq_n_u32;
    (a: u64) -> uint64x2_t: vdupq_n_u64;
    (a: u64) -> int16x4_t: vcreate_s16;
    (a: u64) -> uint8x8_t: vcreate_u8;
    (a: u64) -> uint64x1_t: vcreate_u64;

    (a: int16x4_t, b: int16x4_t) -> int16x8_t: vcombine_s16;
    (a: uint64x1_t, b: uint64x1_t) -> uint64x2_t: vcombine_u64;
    (a: float32x4_t) -> float32x2_t: vget_low_f32 vget_high_f32;
    (a: int8x16_t) -> int8x8_t: vget_low_s8;
    (a: int16x8_t) -> int16x4_t: vget_low_s16;
    (a: uint8x16_t) -> uint8x8_t: vget_low_u8;

    (a: float32x4_t, b: float32x4_t) -> float32x4_t: vaddq_f32 vsubq_f32;
    (a: float32x4_t, b: f32) -> float32x4_t: vmulq_n_f32;
    (a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t: vfmaq_f32;
    (a: float32x2_t, b: float32x2_t) -> float32x2_t: vadd_f32;
    (a: float32x2_t) -> f32: vpadds_f32;
    (a: int32x4_t) -> float32x4_t: vcvtq_f32_s32;

    (a: int8x16_t, b: int8x16_t) -> int8x16_t: vsubq_s8;
    (a: int16x8_t, b: int16x8_t) -> int16x8_t: vpaddq_s16 vuzp1q_s16 vuzp2q_s16;
    (a: int32x4_t, b: int32x4_t) -> int32x4_t: vpaddq_s32 vzip1q_s32 vzip2q_s32 vuzp1q_s32 vuzp2q_s32;
    (a: int64x2_t, b: int64x2_t) -> int64x2_t: vzip1q_s64 vzip2q_s64;
    (a: uint8x8_t, b: uint8x8_t) -> uint16x8_t: vsubl_u8;
    (a: uint8x16_t, b: uint8x16_t) -> uint8x16_t: vandq_u8 vorrq_u8 vtstq_u8;
    (a: uint16x4_t, b: uint16x4_t) -> uint16x4_t: vand_u16;
    (a: uint32x4_t, b: uint32x4_t) -> uint32x4_t: vzip1q_u32 vzip2q_u32;

    (a: int8x8_t, b: int8x8_t) -> int16x8_t: vmull_s8;
    (a: int16x8_t, b: int8x8_t, c: int8x8_t) -> int16x8_t: vmlal_s8;
    (a: int16x8_t, b: int8x16_t, c: int8x16_t) -> int16x8_t: vmlal_high_s8;
    (a: int16x4_t, b: i16) -> int32x4_t: vmull_n_s16;
    (a: int32x4_t, b: int16x4_t, c: int16x4_t) -> int32x4_t: vmlal_s16;
    (a: int32x4_t, b: int16x8_t, c: int16x8_t) -> int32x4_t: vmlal_high_s16;
    (a: int32x4_t, b: int16x8_t) -> int32x4_t: vpadalq_s16;
    (a: int32x4_t, b: int32x4_t, c: int32x4_t) -> int32x4_t: vmlaq_s32;
    (a: int32x4_t, b: int32x4_t, c: i32) -> int32x4_t: vmlsq_n_s32;

    (a: int8x8_t) -> int16x8_t: vmovl_s8;
    (a: int8x16_t) -> int16x8_t: vmovl_high_s8;
    (a: int16x4_t) -> int32x4_t: vmovl_s16;
    (a: int16x8_t) -> int32x4_t: vmovl_high_s16;
    (a: uint8x8_t) -> uint16x8_t: vmovl_u8;
    (a: uint8x16_t) -> uint16x8_t: vmovl_high_u8;
    (a: uint16x4_t) -> uint32x4_t: vmovl_u16;
    (a: int32x4_t) -> int16x4_t: vmovn_s32;
    (a: uint32x4_t) -> uint16x4_t: vmovn_u32;

    (a: uint8x16_t, b: int8x16_t) -> uint8x16_t: vshlq_u8;
    (a: uint32x4_t) -> uint32x4_t: vceqzq_u32;
    (a: uint32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t: vbslq_f32;
    (a: int8x16_t, b: uint8x16_t) -> int8x16_t: vqtbl1q_s8;
    (a: uint8x16_t, b: uint8x16_t) -> uint8x16_t: vqtbl1q_u8;

    (a: int8x16_t) -> int16x8_t: vreinterpretq_s16_s8;
    (a: int8x16_t) -> int32x4_t: vreinterpretq_s32_s8;
    (a: int8x16_t) -> int64x2_t: vreinterpretq_s64_s8;
    (a: int8x16_t) -> uint8x16_t: vreinterpretq_u8_s8;
    (a: int8x16_t) -> uint32x4_t: vreinterpretq_u32_s8;
    (a: int16x8_t) -> int8x16_t: vreinterpretq_s8_s16;
    (a: int32x4_t) -> int8x16_t: vreinterpretq_s8_s32;
    (a: int64x2_t) -> int8x16_t: vreinterpretq_s8_s64;
    (a: uint8x8_t) -> uint16x4_t: vreinterpret_u16_u8;
    (a: uint8x16_t) -> int8x16_t: vreinterpretq_s8_u8;
    (a: uint8x16_t) -> uint32x4_t: vreinterpretq_u32_u8;
    (a: uint8x16_t) -> float32x4_t: vreinterpretq_f32_u8;
    (a: uint16x8_t) -> int16x8_t: vreinterpretq_s16_u16;
    (a: uint32x4_t) -> uint8x16_t: vreinterpretq_u8_u32;
    (a: uint32x4_t) -> float32x4_t: vreinterpretq_f32_u32;
    (a: uint64x2_t) -> uint8x16_t: vreinterpretq_u8_u64;
}

with_number! {
    (a: int16x8_t) -> int16x4_t: vdup_laneq_s16;
    (a: int32x4_t, b: int16x4_t, c: int16x8_t) -> int32x4_t: vmlal_laneq_s16;
    (a: int32x4_t, b: int16x8_t, c: int16x8_t) -> int32x4_t: vmlal_high_laneq_s16;
    (a: uint8x16_t) -> uint8x16_t: vshlq_n_u8 vshrq_n_u8;
    (a: uint16x4_t) -> uint32x4_t: vshll_n_u16;
    (a: uint32x4_t) -> uint32x4_t: vshlq_n_u32;
    (a: uint32x4_t) -> uint16x4_t: vshrn_n_u32;
}
