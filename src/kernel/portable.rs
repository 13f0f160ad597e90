//! Plain loops over small arrays, for machines without a path of their own; compilers vectorise most of them.
//!
//! A type is a function that decodes one block; the loops around it are three, for plain numbers, blocks of 32
//! and blocks of 256. Integer sums wrap: they cannot overflow (a block's products sum to less than 2^24), and
//! checks would keep the loops from being vectorised.

mod blocks;

use std::array;
use std::ops::Range;

use half::{bf16, f16};

use super::activations::{Activations, Row};
use super::tiles::StripDot;
use super::{Output, RowDot, drive};
use crate::tensor::{Dtype, WeightView};
use blocks::Block256;
#[cfg(target_arch = "x86_64")]
pub(super) use blocks::six_bit_words;
#[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
pub(super) use blocks::{six_bits_iq4_xs, six_bits_q3_k};

/// See [`super::Kernel::multiply`].
pub(super) fn multiply(
    weight: WeightView<'_>,
    o_range: Range<usize>,
    acts: &Activations,
    rows: &[u32],
    to: Output<'_>,
) {
    match weight.dtype() {
        Dtype::F16 => drive(Floats(|w| f16::from_le_bytes(w).to_f32()), weight, o_range, acts, rows, to),
        Dtype::BF16 => drive(Floats(|w| bf16::from_le_bytes(w).to_f32()), weight, o_range, acts, rows, to),
        Dtype::Q8_0 => drive(Blocks32(blocks::q8_0), weight, o_range, acts, rows, to),
        Dtype::Q4_0 => drive(Blocks32(blocks::q4_0), weight, o_range, acts, rows, to),
        Dtype::Q5_0 => drive(Blocks32(blocks::q5_0), weight, o_range, acts, rows, to),
        Dtype::IQ4_NL => drive(Blocks32(blocks::iq4_nl), weight, o_range, acts, rows, to),
        Dtype::MXFP4 => drive(Blocks32(blocks::mxfp4), weight, o_range, acts, rows, to),
        Dtype::Q2_K => drive(Blocks256(blocks::q2_k), weight, o_range, acts, rows, to),
        Dtype::Q3_K => drive(Blocks256(blocks::q3_k), weight, o_range, acts, rows, to),
        Dtype::IQ4_XS => drive(Blocks256(blocks::iq4_xs), weight, o_range, acts, rows, to),
        Dtype::Q4_K => drive(Blocks256(blocks::q4_k), weight, o_range, acts, rows, to),
        Dtype::Q5_K => drive(Blocks256(blocks::q5_k), weight, o_range, acts, rows, to),
        Dtype::Q6_K => drive(Blocks256(blocks::q6_k), weight, o_range, acts, rows, to),
        _ => drive(Floats(f32::from_le_bytes), weight, o_range, acts, rows, to),
    }
}

/// The decoder of one weight of `BYTES` bytes.
#[derive(Clone, Copy)]
struct Floats<const BYTES: usize, D: Fn([u8; BYTES]) -> f32>(D);

impl<const BYTES: usize, D: Fn([u8; BYTES]) -> f32 + Copy> RowDot for Floats<BYTES, D> {
    fn dot<const A: usize>(self, weights: &[u8], acts: [Row<'_>; A]) -> [f32; A] {
        let (sixteens, rest) = weights.as_chunks::<BYTES>().0.as_chunks::<16>();
        let mut padded = [[0; BYTES]; 16];
        padded[..rest.len()].copy_from_slice(rest);
        let last = (!rest.is_empty()).then_some(&padded);
        let mut lanes = [[[0f32; 8]; 2]; A];
        for (b, weights) in sixteens.iter().chain(last).enumerate() {
            let w = weights.map(self.0);
            for (lanes, act) in lanes.iter_mut().zip(acts) {
                let lanes = lanes.as_flattened_mut().iter_mut();
                for ((lane, w), x) in lanes.zip(w).zip(&act.values[16 * b..16 * b + 16]) {
                    *lane = w.mul_add(*x, *lane);
                }
            }
        }
        lanes.map(sum)
    }
}

/// The decoder of a block of 32 in `BYTES` bytes: scale and signed codes.
#[derive(Clone, Copy)]
struct Blocks32<const BYTES: usize, D: Fn(&[u8; BYTES]) -> (f32, [i8; 32])>(D);

impl<const BYTES: usize, D: Fn(&[u8; BYTES]) -> (f32, [i8; 32]) + Copy> RowDot for Blocks32<BYTES, D> {
    fn dot<const A: usize>(self, weights: &[u8], acts: [Row<'_>; A]) -> [f32; A] {
        let mut lanes = [[0f32; 8]; A];
        for (b, block) in weights.as_chunks().0.iter().enumerate() {
            let (d, codes) = self.0(block);
            for (lanes, act) in lanes.iter_mut().zip(acts) {
                let dot = total(dot_fours(&codes, &act.codes.as_chunks().0[b]));
                lanes[b % 8] = (d * act.scales[b]).mul_add(dot as f32, lanes[b % 8]);
            }
        }
        lanes.map(fold)
    }
}

/// The decoder of a block of 256 in `BYTES` bytes.
#[derive(Clone, Copy)]
struct Blocks256<const BYTES: usize, D: Fn(&[u8; BYTES]) -> Block256>(D);

impl<const BYTES: usize, D: Fn(&[u8; BYTES]) -> Block256 + Copy> RowDot for Blocks256<BYTES, D> {
    fn dot<const A: usize>(self, weights: &[u8], acts: [Row<'_>; A]) -> [f32; A] {
        let (mut high, mut low) = ([0f32; A], [0f32; A]);
        for (b, block) in weights.as_chunks().0.iter().enumerate() {
            let w = self.0(block);
            for (a, act) in acts.iter().enumerate() {
                let codes = &act.codes.as_chunks::<32>().0[8 * b..8 * b + 8];
                let mut dots = [0i32; 8];
                for (c, (w_codes, x_codes)) in w.codes.iter().zip(codes).enumerate() {
                    let fours = dot_fours(w_codes, x_codes);
                    for l in 0..8 {
                        let scale = i32::from(w.scales[2 * c + l / 4]);
                        dots[l] = dots[l].wrapping_add(fours[l].wrapping_mul(scale));
                    }
                }
                high[a] = (w.d * act.scales[b]).mul_add(total(dots) as f32, high[a]);
                if let Some((dmin, minimums)) = w.minimums {
                    let sums = &act.sums.as_chunks::<16>().0[b];
                    let products = minimums.iter().zip(sums).map(|(&m, &t)| i32::from(m) * i32::from(t));
                    let sum = products.fold(0i32, i32::wrapping_add);
                    low[a] = (dmin * act.scales[b]).mul_add(sum as f32, low[a]);
                }
            }
        }
        array::from_fn(|a| high[a] - low[a])
    }
}

/// Sums of four neighbouring products.
#[inline(always)]
fn dot_fours(w: &[i8; 32], x: &[i8; 32]) -> [i32; 8] {
    array::from_fn(|l| {
        let product = |i: usize| i32::from(w[i]).wrapping_mul(i32::from(x[i]));
        (4 * l..4 * l + 4).fold(0i32, |sum, i| sum.wrapping_add(product(i)))
    })
}

/// The sum of eight integers.
#[inline(always)]
fn total(dots: [i32; 8]) -> i32 {
    dots.iter().fold(0, |sum, &dot| sum.wrapping_add(dot))
}

/// The sum of 16 lanes, halves folded onto each other.
fn sum(lanes: [[f32; 8]; 2]) -> f32 {
    fold(array::from_fn(|i| lanes[0][i] + lanes[1][i]))
}

/// The sum of 8 lanes, halves folded onto each other.
fn fold(l: [f32; 8]) -> f32 {
    ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]))
}

/// Strips of the NPU's layout.
#[derive(Clone, Copy, Debug)]
pub(super) struct Strips;

impl StripDot for Strips {
    fn dot<const A: usize>(self, strip: &[i8], rows: [&[i8]; A], _: [i32; A]) -> [[i32; 32]; A] {
        let mut out = [[0i32; 32]; A];
        for (kb, block) in strip.as_chunks::<1024>().0.iter().enumerate() {
            for (n, column) in block.as_chunks::<32>().0.iter().enumerate() {
                for (out, row) in out.iter_mut().zip(rows) {
                    let fours = dot_fours(column, &row.as_chunks().0[kb]);
                    out[n] = fours.iter().fold(out[n], |sum, &four| sum.wrapping_add(four));
                }
            }
        }
        out
    }
}
