//! Blocks of 32 with one scale.

use std::arch::aarch64::{float32x4_t, int8x16_t, int32x4_t};
use std::marker::PhantomData;

use super::level::{Level, SMALL, Turning};
use super::neon::*;
use super::vectors::{add, gather, halves, load, load_u8, look_up, nibbles, prefetch, signed, store, totals};
use super::walk::Loops;
use super::{Codes, sixteen_of};
use crate::blocks::iq4_nl::STEPS;
use crate::blocks::mxfp4::{DOUBLED, half_scale};

/// A format of 32 weights in `BYTES` bytes. The layouts are drawn in [`crate::blocks`].
pub(super) trait Block {
    const BYTES: usize;
    /// By how much codes are too large.
    const OFFSET: i8 = 0;
    /// The largest magnitude of a code as it is read.
    const LARGEST: i16;

    /// The codes, in order.
    ///
    /// # Safety
    ///
    /// The block is there.
    unsafe fn codes(block: *const u8) -> [int8x16_t; 2];

    /// The scales of four blocks.
    ///
    /// # Safety
    ///
    /// All are there.
    #[inline(always)]
    unsafe fn scales(blocks: [*const u8; 4]) -> float32x4_t {
        // SAFETY: the caller vouches for the blocks, which begin with a half-precision number.
        halves(unsafe { gather(blocks, 0) })
    }
}

pub(super) struct Q8_0;
pub(super) struct Q4_0;
pub(super) struct Q5_0;
pub(super) struct Iq4Nl;
pub(super) struct Mxfp4;

impl Block for Q8_0 {
    const BYTES: usize = 34;
    const LARGEST: i16 = 128;

    #[inline(always)]
    unsafe fn codes(block: *const u8) -> [int8x16_t; 2] {
        // SAFETY: the caller vouches for 34 bytes.
        unsafe { [load(block.add(2)), load(block.add(18))] }
    }
}

impl Block for Q4_0 {
    const BYTES: usize = 18;
    const OFFSET: i8 = 8;
    const LARGEST: i16 = 15;

    #[inline(always)]
    unsafe fn codes(block: *const u8) -> [int8x16_t; 2] {
        // SAFETY: the caller vouches for 18 bytes.
        signed(nibbles(unsafe { load_u8(block.add(2)) }))
    }
}

impl Block for Q5_0 {
    const BYTES: usize = 22;
    const OFFSET: i8 = 16;
    const LARGEST: i16 = 31;

    #[inline(always)]
    unsafe fn codes(block: *const u8) -> [int8x16_t; 2] {
        // SAFETY: the caller vouches for 22 bytes.
        let (bytes, fifths) = unsafe { (load_u8(block.add(6)), block.add(2).cast::<u32>().read_unaligned()) };
        let fifths = vreinterpretq_u8_u32(vdupq_n_u32(fifths));
        // Byte i / 8 of the fifth bits for weight i, of which bit i % 8 is its own.
        let own = vreinterpretq_u8_u64(vdupq_n_u64(0x8040_2010_0804_0201));
        let which = |byte: u64| {
            let which = vcombine_u64(vcreate_u64(byte), vcreate_u64(byte + 0x0101_0101_0101_0101));
            let set = vtstq_u8(vqtbl1q_u8(fifths, vreinterpretq_u8_u64(which)), own);
            vandq_u8(set, vdupq_n_u8(16))
        };
        let [low, high] = nibbles(bytes);
        signed([vorrq_u8(low, which(0)), vorrq_u8(high, which(0x0202_0202_0202_0202))])
    }
}

impl Block for Iq4Nl {
    const BYTES: usize = 18;
    const LARGEST: i16 = 127;

    #[inline(always)]
    unsafe fn codes(block: *const u8) -> [int8x16_t; 2] {
        // SAFETY: the caller vouches for 18 bytes.
        look_up(&STEPS, nibbles(unsafe { load_u8(block.add(2)) }))
    }
}

impl Block for Mxfp4 {
    const BYTES: usize = 17;
    const LARGEST: i16 = 12;

    #[inline(always)]
    unsafe fn codes(block: *const u8) -> [int8x16_t; 2] {
        // SAFETY: the caller vouches for 17 bytes.
        look_up(&DOUBLED, nibbles(unsafe { load_u8(block.add(1)) }))
    }

    #[inline(always)]
    unsafe fn scales(blocks: [*const u8; 4]) -> float32x4_t {
        // SAFETY: the caller vouches for the blocks.
        let e = unsafe { vmovl_u16(vand_u16(gather(blocks, 0), vdup_n_u16(0xff))) };
        // See `half_scale`.
        let halved = vmulq_n_f32(vreinterpretq_f32_u32(vshlq_n_u32::<23>(e)), 0.5);
        vbslq_f32(vceqzq_u32(e), vdupq_n_f32(half_scale(0)), halved)
    }
}

/// The loops of a type; what they compute is in [`crate::kernel`], "blocks of 32".
pub(super) struct Small<T>(PhantomData<T>);

/// A block of four rows.
pub(super) struct Turned {
    /// Twice sixteen weights of each row, as [`Turning::turn`] leaves them.
    codes: [[int8x16_t; 4]; 2],
    d: float32x4_t,
}

impl<T: Block> Small<T> {
    const SMALL: bool = T::LARGEST <= SMALL;
}

impl<T: Block> Loops for Small<T> {
    const BYTES: usize = T::BYTES;
    const LEN: usize = 32;
    type Turned = Turned;

    unsafe fn few<L: Level, const A: usize>(
        cpu: L,
        rows: [*const u8; 4],
        n_blocks: usize,
        acts: &Codes<A>,
    ) -> [[f32; 4]; A] {
        // `[A, 8, 4]`: what the contract calls lanes, of four weight rows side by side.
        let mut lanes = [[vdupq_n_f32(0.0); 8]; A];
        let mut blocks = rows;
        // Four rows further the next tile begins.
        let ahead = n_blocks * T::BYTES * 4;
        for b in 0..n_blocks {
            if A == 1 && b % 8 == 0 {
                for block in blocks {
                    prefetch(block.wrapping_add(ahead), 8 * T::BYTES);
                }
            }
            // SAFETY: the caller vouches for `n_blocks` of weights and activations.
            unsafe {
                let mut dots = [[vdupq_n_s32(0); 4]; A];
                for r in 0..4 {
                    let w = T::codes(blocks[r]);
                    for a in 0..A {
                        let x = acts.codes::<32>(a, b);
                        let x = [load(x), load(x.add(16))];
                        dots[a][r] = cpu.dot(offset(T::OFFSET, acts.sums::<2>(a, b)), w, x, Self::SMALL);
                    }
                }
                let d = T::scales(blocks);
                for a in 0..A {
                    let lane = &mut lanes[a][b % 8];
                    *lane = add(*lane, vmulq_n_f32(d, acts.scale(a, b)), totals(&dots[a]));
                }
                for block in &mut blocks {
                    *block = block.add(T::BYTES);
                }
            }
        }
        lanes.map(fold)
    }

    #[inline(always)]
    unsafe fn turn<L: Turning>(cpu: L, blocks: [*const u8; 4]) -> Turned {
        // SAFETY: the caller vouches for the blocks.
        unsafe {
            let mut rows = [[vdupq_n_s8(0); 4]; 2];
            for r in 0..4 {
                let codes = T::codes(blocks[r]);
                rows[0][r] = vsubq_s8(codes[0], vdupq_n_s8(T::OFFSET));
                rows[1][r] = vsubq_s8(codes[1], vdupq_n_s8(T::OFFSET));
            }
            Turned { codes: [cpu.turn(rows[0]), cpu.turn(rows[1])], d: T::scales(blocks) }
        }
    }

    #[inline(always)]
    unsafe fn many<L: Turning, const A: usize>(cpu: L, turned: &[Turned], acts: &Codes<A>) -> [[f32; 4]; A] {
        // SAFETY: the caller vouches for the activations.
        unsafe { many(cpu, turned, acts) }
    }
}

/// See [`Loops::many`], the same for all types.
///
/// # Safety
///
/// The activations have as many blocks.
unsafe fn many<L: Turning, const A: usize>(cpu: L, turned: &[Turned], acts: &Codes<A>) -> [[f32; 4]; A] {
    let mut lanes = [[vdupq_n_f32(0.0); 8]; A];
    for (b, w) in turned.iter().enumerate() {
        let mut dots = [vdupq_n_s32(0); A];
        for (i, codes) in w.codes.iter().enumerate() {
            // SAFETY: the caller vouches for as many blocks of activations.
            let x = unsafe { sixteen_of::<32, A>(acts, b, i) };
            cpu.sixteen(&mut dots, codes, x);
        }
        let dots = cpu.settle(dots);
        for a in 0..A {
            // SAFETY: as above.
            let scale = vmulq_n_f32(w.d, unsafe { acts.scale(a, b) });
            lanes[a][b % 8] = add(lanes[a][b % 8], scale, dots[a]);
        }
    }
    lanes.map(fold)
}

/// What codes that are too large by `offset` add to a block's sum, negative, in some lanes.
///
/// # Safety
///
/// Two sums can be read.
#[inline(always)]
unsafe fn offset(offset: i8, sums: *const i16) -> int32x4_t {
    if offset == 0 {
        return vdupq_n_s32(0);
    }
    // SAFETY: the caller vouches for two sums.
    let sums = unsafe { sums.cast::<u32>().read_unaligned() };
    vmull_n_s16(vcreate_s16(sums.into()), -i16::from(offset))
}

/// The sum of 8 lanes, halves folded onto each other, of four rows.
#[inline(always)]
fn fold(l: [float32x4_t; 8]) -> [f32; 4] {
    let even = vaddq_f32(vaddq_f32(l[0], l[4]), vaddq_f32(l[2], l[6]));
    let odd = vaddq_f32(vaddq_f32(l[1], l[5]), vaddq_f32(l[3], l[7]));
    store(vaddq_f32(even, odd))
}
