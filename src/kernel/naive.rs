//! The contract of [`crate::kernel`] word for word: the oracle of the other paths.
//!
//! Nothing here is shared with them but the types. A weight is fetched by its number from its block, one at a
//! time, as the formats are defined; the lanes are summed as the contract says.

use std::array;

use half::{bf16, f16};

use super::RowDot;
use super::activations::{self, Row};
use crate::tensor::{Dtype, MatrixView};

/// The product for one type.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dot(pub(super) Dtype);

impl RowDot for Dot {
    fn dot<const A: usize>(self, weights: &[u8], acts: [Row<'_>; A]) -> [f32; A] {
        acts.map(|act| match self.0 {
            Dtype::F32 | Dtype::F16 | Dtype::BF16 => sum(floats(self.0, weights, act)),
            Dtype::Q8_0 | Dtype::Q4_0 | Dtype::Q5_0 | Dtype::IQ4_NL | Dtype::MXFP4 => {
                sum(blocks_of_32(self.0, weights, act))
            }
            _ => blocks_of_256(self.0, weights, act),
        })
    }
}

/// Halves folded onto each other until one lane is left.
fn sum<const N: usize>(mut lanes: [f32; N]) -> f32 {
    let mut half = N / 2;
    while half > 0 {
        for l in 0..half {
            lanes[l] += lanes[l + half];
        }
        half /= 2;
    }
    lanes[0]
}

fn floats(dtype: Dtype, weights: &[u8], act: Row<'_>) -> [f32; 16] {
    let bytes = dtype.block_bytes();
    let mut lanes = [0f32; 16];
    for (i, &x) in act.values.iter().enumerate() {
        let w = match weights.get(i * bytes..(i + 1) * bytes) {
            Some(&[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            Some(&[a, b]) if dtype == Dtype::F16 => f16::from_le_bytes([a, b]).to_f32(),
            Some(&[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
            _ => 0.0,
        };
        lanes[i % 16] = w.mul_add(x, lanes[i % 16]);
    }
    lanes
}

fn blocks_of_32(dtype: Dtype, weights: &[u8], act: Row<'_>) -> [f32; 8] {
    let mut lanes = [0f32; 8];
    for (b, block) in weights.chunks(dtype.block_bytes()).enumerate() {
        let d = match dtype {
            Dtype::MXFP4 if block[0] == 255 => f32::INFINITY,
            Dtype::MXFP4 => (f32::from(block[0]) - 128.0).exp2(),
            _ => half(block, 0),
        };
        let dot: i32 = (0..32).map(|i| code(dtype, block, i) * i32::from(act.codes[32 * b + i])).sum();
        lanes[b % 8] = (d * act.scales[b]).mul_add(dot as f32, lanes[b % 8]);
    }
    lanes
}

fn blocks_of_256(dtype: Dtype, weights: &[u8], act: Row<'_>) -> f32 {
    let (mut high, mut low) = (0f32, 0f32);
    for (b, block) in weights.chunks(dtype.block_bytes()).enumerate() {
        let (at_d, at_dmin) = match dtype {
            Dtype::Q6_K => (208, None),
            Dtype::Q3_K => (108, None),
            Dtype::IQ4_XS => (0, None),
            Dtype::Q2_K => (80, Some(82)),
            _ => (0, Some(2)),
        };
        let groups: [_; 16] = array::from_fn(|g| scale_and_minimum(dtype, block, g));
        let dot: i32 = (0..256)
            .map(|i| groups[i / 16].0 * code(dtype, block, i) * i32::from(act.codes[256 * b + i]))
            .sum();
        high = (half(block, at_d) * act.scales[b]).mul_add(dot as f32, high);
        if let Some(at_dmin) = at_dmin {
            let sum: i32 = (0..16).map(|g| groups[g].1 * i32::from(act.sums[16 * b + g])).sum();
            low = (half(block, at_dmin) * act.scales[b]).mul_add(sum as f32, low);
        }
    }
    high - low
}

fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Weight `i` of a block without its scale and minimum.
fn code(dtype: Dtype, block: &[u8], i: usize) -> i32 {
    let bits = |byte: usize, shift: usize, n: u32| i32::from(block[byte] >> shift) & ((1 << n) - 1);
    match dtype {
        Dtype::Q8_0 => i32::from(block[2 + i].cast_signed()),
        // Two weights to a byte, 16 apart.
        Dtype::Q4_0 => bits(2 + i % 16, i / 16 * 4, 4) - 8,
        Dtype::Q5_0 => bits(6 + i % 16, i / 16 * 4, 4) + 16 * bits(2 + i / 8, i % 8, 1) - 16,
        Dtype::IQ4_NL => step(bits(2 + i % 16, i / 16 * 4, 4)),
        Dtype::MXFP4 => fp4(bits(1 + i % 16, i / 16 * 4, 4)),
        // The same in 16 bytes for each 32 weights.
        Dtype::IQ4_XS => step(bits(8 + i / 32 * 16 + i % 16, i / 16 % 2 * 4, 4)),
        // Four weights to a byte, 32 apart, each half of the block by itself; Q3_K has a third bit, which takes off 4
        // where it is not set.
        Dtype::Q2_K => bits(16 + i / 128 * 32 + i % 32, i / 32 % 4 * 2, 2),
        Dtype::Q3_K => {
            bits(32 + i / 128 * 32 + i % 32, i / 32 % 4 * 2, 2) - 4 * (1 - bits(i % 32, i / 32, 1))
        }
        // Two weights to a byte, 32 apart.
        Dtype::Q4_K => bits(16 + i / 64 * 32 + i % 32, i / 32 % 2 * 4, 4),
        // The same, and a fifth bit: bit i/32 of one of 32 bytes.
        Dtype::Q5_K => bits(48 + i / 64 * 32 + i % 32, i / 32 % 2 * 4, 4) + 16 * bits(16 + i % 32, i / 32, 1),
        // In each half: 64 bytes with two low parts each, 64 apart; 32 bytes with four high parts each.
        Dtype::Q6_K => {
            let (part, i) = (i / 128, i % 128);
            bits(64 * part + i % 64, i / 64 * 4, 4) + 16 * bits(128 + 32 * part + i % 32, i / 32 * 2, 2) - 32
        }
        _ => 0,
    }
}

/// The uneven steps of the IQ4 types.
fn step(code: i32) -> i32 {
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113][code as usize]
}

/// Twice what a float of 4 bits is: a sign, two bits of exponent, one of fraction.
fn fp4(code: i32) -> i32 {
    let (exponent, fraction) = (code >> 1 & 3, code & 1);
    let magnitude = if exponent == 0 { fraction } else { (2 + fraction) << (exponent - 1) };
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// Scale and minimum of the `g`-th 16 weights of a block of 256.
fn scale_and_minimum(dtype: Dtype, block: &[u8], g: usize) -> (i32, i32) {
    if dtype == Dtype::Q6_K {
        return (i32::from(block[192 + g].cast_signed()), 0);
    }
    let bits = |byte: usize, shift: usize, n: u32| i32::from(block[byte] >> shift) & ((1 << n) - 1);
    match dtype {
        Dtype::Q2_K => return (bits(g, 0, 4), bits(g, 4, 4)),
        Dtype::Q3_K => {
            return (bits(96 + g % 8, g / 8 * 4, 4) + 16 * bits(104 + g % 4, g / 4 * 2, 2) - 32, 0);
        }
        // One scale for 32 weights.
        Dtype::IQ4_XS => {
            let j = g / 2;
            return (bits(4 + j / 2, j % 2 * 4, 4) + 16 * bits(2 + j / 4, j % 4 * 2, 2) - 32, 0);
        }
        _ => {}
    }
    // Q4_K and Q5_K: eight pairs of 6 bits, one for 32 weights, in 12 bytes after the two halves.
    let packed = |i: usize| i32::from(block[4 + i]);
    match g / 2 {
        j @ 0..4 => (packed(j) & 63, packed(j + 4) & 63),
        j => (packed(j + 4) & 15 | packed(j - 4) >> 6 << 4, packed(j + 4) >> 4 | packed(j) >> 6 << 4),
    }
}

/// Blocks of `block_len` values to codes and a scale each.
pub(super) fn quantize(block_len: usize, values: &[f32], codes: &mut [i8], scales: &mut [f32]) {
    for (b, block) in values.chunks(block_len).enumerate() {
        if block.iter().any(|v| !v.is_finite()) {
            codes[b * block_len..][..block_len].fill(0);
            scales[b] = f32::NAN;
            continue;
        }
        let amax = block.iter().fold(0f32, |amax, v| amax.max(v.abs()));
        let steps = activations::steps(amax);
        scales[b] = if steps > 0.0 { amax / 127.0 } else { 0.0 };
        for (code, v) in codes[b * block_len..].iter_mut().zip(block) {
            *code = (v * steps).round_ties_even() as i8;
        }
    }
}

/// See [`super::Kernel::int8_tiles`].
pub(super) fn int8_tiles(tiles: &[i8], k: usize, n: usize, rows: MatrixView<'_, i8>, out: &mut [i32]) {
    for m in 0..rows.n_rows() {
        for column in 0..n {
            let weight = |i: usize| tiles[column / 32 * k * 32 + i / 32 * 1024 + column % 32 * 32 + i % 32];
            out[m * n + column] = (0..k).map(|i| i32::from(weight(i)) * i32::from(rows.row(m)[i])).sum();
        }
    }
}
