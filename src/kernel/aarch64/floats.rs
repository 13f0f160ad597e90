//! Weights that are plain numbers: sixteen at a time, several weight rows by several activation rows.

use std::arch::aarch64::{float32x4_t, vld1_u8, vld1q_f32, vld1q_u8};

use super::Call;
use super::neon::*;
use super::vectors::{halves, prefetch};
use crate::kernel::TILE_ROWS;

/// A plain type, `BYTES` wide.
pub(super) trait Float {
    const BYTES: usize;

    /// Sixteen weights.
    ///
    /// # Safety
    ///
    /// They can be read at `bytes`.
    unsafe fn load(bytes: *const u8) -> [float32x4_t; 4];
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct Bf16;

impl Float for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load(bytes: *const u8) -> [float32x4_t; 4] {
        let mut out = [vdupq_n_f32(0.0); 4];
        for i in 0..4 {
            // SAFETY: the caller vouches for 64 bytes, which need no alignment.
            out[i] = vreinterpretq_f32_u8(unsafe { vld1q_u8(bytes.add(16 * i)) });
        }
        out
    }
}

impl Float for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(bytes: *const u8) -> [float32x4_t; 4] {
        let mut out = [vdupq_n_f32(0.0); 4];
        for i in 0..4 {
            // SAFETY: the caller vouches for 32 bytes.
            out[i] = halves(vreinterpret_u16_u8(unsafe { vld1_u8(bytes.add(8 * i)) }));
        }
        out
    }
}

impl Float for Bf16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(bytes: *const u8) -> [float32x4_t; 4] {
        let mut out = [vdupq_n_f32(0.0); 4];
        for i in 0..4 {
            // SAFETY: the caller vouches for 32 bytes.
            let upper_halves = vreinterpret_u16_u8(unsafe { vld1_u8(bytes.add(8 * i)) });
            out[i] = vreinterpretq_f32_u32(vshll_n_u16::<16>(upper_halves));
        }
        out
    }
}

/// One type. A few tens of KiB of weights stay in the first cache while all activation rows pass by.
pub(super) fn multiply<T: Float>(mut call: Call<'_>) {
    for first in call.o_range.clone().step_by(TILE_ROWS) {
        let (twos, one) = call.rows.as_chunks::<2>();
        for (i, &rows) in twos.iter().enumerate() {
            for first in call.tile(first).step_by(2) {
                times::<T, 2, 2>(&mut call, rows, 2 * i, first);
            }
        }
        for &row in one {
            for first in call.tile(first).step_by(4) {
                let m = call.rows.len() - 1;
                times::<T, 4, 1>(&mut call, [row], m, first);
            }
        }
    }
}

/// Weight rows `first` and on times activation rows `rows`, the `m`-th and on.
fn times<T: Float, const R: usize, const A: usize>(
    call: &mut Call<'_>,
    rows: [u32; A],
    m: usize,
    first: usize,
) {
    let n_in = call.weight.n_in();
    let acts = rows.map(|row| call.acts.row(row).values);
    assert!(acts.iter().all(|x| x.len() >= n_in.next_multiple_of(16)), "too few activations");
    // SAFETY: the weight rows are `n_in` long, and so are the activations, with zeros to a multiple of 16.
    let sums = unsafe { dot::<T, R, A>(call.weights(first), n_in, acts.map(|x| x.as_ptr())) };
    call.write(&sums, m, first);
}

/// `R` weight rows of `n_in` times `A` activation rows: see [`crate::kernel`], "floats".
///
/// # Safety
///
/// The rows are that long; activations are padded to a multiple of 16.
unsafe fn dot<T: Float, const R: usize, const A: usize>(
    rows: [*const u8; R],
    n_in: usize,
    acts: [*const f32; A],
) -> [[f32; R]; A] {
    let mut lanes = [[[vdupq_n_f32(0.0); 4]; R]; A];
    let whole = n_in - n_in % 16;
    // Here, as in the step, loops and not closures: such a closure is not always inlined.
    let (mut w, mut x) = (rows, acts);
    // The next tile begins `R` rows further.
    let ahead = n_in * R * T::BYTES;
    for _ in 0..whole / 16 {
        for r in 0..R {
            if A == 1 {
                prefetch(w[r].wrapping_add(ahead), 16 * T::BYTES);
            }
        }
        // SAFETY: the caller vouches for `n_in` weights and activations.
        unsafe { step::<T, R, A>(&w, &x, &mut lanes) };
        for r in 0..R {
            w[r] = w[r].wrapping_add(16 * T::BYTES);
        }
        for a in 0..A {
            x[a] = x[a].wrapping_add(16);
        }
    }
    if whole < n_in {
        // Zeros behind the last weights; the widest type needs 64 bytes.
        let mut padded = [[0u8; 64]; R];
        for r in 0..R {
            // SAFETY: so many bytes are left of the row, fewer than 64.
            unsafe { w[r].copy_to_nonoverlapping(padded[r].as_mut_ptr(), (n_in - whole) * T::BYTES) };
            w[r] = padded[r].as_ptr();
        }
        // SAFETY: 64 bytes are there, and the activations are padded.
        unsafe { step::<T, R, A>(&w, &x, &mut lanes) };
    }
    let mut out = [[0.0; R]; A];
    for a in 0..A {
        for r in 0..R {
            out[a][r] = fold(lanes[a][r]);
        }
    }
    out
}

/// Sixteen weights of each row.
///
/// # Safety
///
/// They are there, and so are the activations.
#[inline(always)]
unsafe fn step<T: Float, const R: usize, const A: usize>(
    rows: &[*const u8; R],
    acts: &[*const f32; A],
    lanes: &mut [[[float32x4_t; 4]; R]; A],
) {
    let mut w = [[vdupq_n_f32(0.0); 4]; R];
    for r in 0..R {
        // SAFETY: the caller vouches for the weights.
        w[r] = unsafe { T::load(rows[r]) };
    }
    for a in 0..A {
        for i in 0..4 {
            // SAFETY: the caller vouches for the activations.
            let x = unsafe { vld1q_f32(acts[a].add(4 * i)) };
            for r in 0..R {
                lanes[a][r][i] = vfmaq_f32(lanes[a][r][i], w[r][i], x);
            }
        }
    }
}

/// The sum of 16 lanes, halves folded onto each other.
#[inline(always)]
fn fold(l: [float32x4_t; 4]) -> f32 {
    let four = vaddq_f32(vaddq_f32(l[0], l[2]), vaddq_f32(l[1], l[3]));
    vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)))
}
