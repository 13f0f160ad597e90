//! One block of each type as small integers. The layouts are drawn in [`crate::blocks`].

use half::f16;

use crate::blocks::iq4_nl::STEPS;
use crate::blocks::mxfp4::{DOUBLED, half_scale};

/// A block of 256: `w = d * scale * code`, less `dmin * minimum` where the type has minimums.
pub(super) struct Block256 {
    pub(super) d: f32,
    /// One per 16 weights.
    pub(super) scales: [i8; 16],
    /// `dmin`, and one minimum per 16 weights.
    pub(super) minimums: Option<(f32, [i8; 16])>,
    pub(super) codes: [[i8; 32]; 8],
}

fn half(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

#[inline(always)]
pub(super) fn q8_0(block: &[u8; 34]) -> (f32, [i8; 32]) {
    let mut codes = [0; 32];
    codes.copy_from_slice(bytemuck::cast_slice(&block[2..]));
    (half(block), codes)
}

#[inline(always)]
pub(super) fn q4_0(block: &[u8; 18]) -> (f32, [i8; 32]) {
    (half(block), steps_of(&block[2..], |q| q.cast_signed() - 8))
}

#[inline(always)]
pub(super) fn q5_0(block: &[u8; 22]) -> (f32, [i8; 32]) {
    let mut codes = steps_of(&block[6..], |q| q.cast_signed());
    let fifths = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
    for (i, code) in codes.iter_mut().enumerate() {
        *code = (*code | (((fifths >> i) & 1) << 4) as i8) - 16;
    }
    (half(block), codes)
}

#[inline(always)]
pub(super) fn iq4_nl(block: &[u8; 18]) -> (f32, [i8; 32]) {
    (half(block), steps_of(&block[2..], |q| STEPS[usize::from(q)]))
}

#[inline(always)]
pub(super) fn mxfp4(block: &[u8; 17]) -> (f32, [i8; 32]) {
    (half_scale(block[0]), steps_of(&block[1..], |q| DOUBLED[usize::from(q)]))
}

/// What 16 bytes of two codes each stand for, the lower halves first.
#[inline(always)]
fn steps_of(bytes: &[u8], step: impl Fn(u8) -> i8) -> [i8; 32] {
    let mut codes = [0; 32];
    let (low, high) = codes.split_at_mut(16);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(bytes) {
        *low = step(byte & 15);
        *high = step(byte >> 4);
    }
    codes
}

#[inline(always)]
pub(super) fn q2_k(block: &[u8; 84]) -> Block256 {
    let scales = std::array::from_fn(|g| (block[g] & 15).cast_signed());
    let minimums = std::array::from_fn(|g| (block[g] >> 4).cast_signed());
    let mut codes = [[0; 32]; 8];
    pairs(&block[16..80], &mut codes);
    Block256 { d: half(&block[80..]), scales, minimums: Some((half(&block[82..]), minimums)), codes }
}

#[inline(always)]
pub(super) fn q3_k(block: &[u8; 110]) -> Block256 {
    let mut packed = [0; 12];
    packed.copy_from_slice(&block[96..108]);
    let (first, second) = six_bits_q3_k(packed);
    let scale = |g: usize| (if g < 8 { first } else { second } >> (g % 8 * 8)) as i8 - 32;
    let mut codes = [[0; 32]; 8];
    pairs(&block[32..96], &mut codes);
    for (row, codes) in codes.iter_mut().enumerate() {
        for (code, thirds) in codes.iter_mut().zip(&block[..32]) {
            *code = (*code | ((thirds >> row & 1) << 2).cast_signed()) - 4;
        }
    }
    Block256 { d: half(&block[108..]), scales: std::array::from_fn(scale), minimums: None, codes }
}

#[inline(always)]
pub(super) fn iq4_xs(block: &[u8; 136]) -> Block256 {
    let packed = six_bits_iq4_xs([block[2], block[3]], [block[4], block[5], block[6], block[7]]);
    let scale = |g: usize| (packed >> (g / 2 * 8)) as i8 - 32;
    let group = |g: usize| steps_of(&block[8 + 16 * g..][..16], |q| STEPS[usize::from(q)]);
    let (scales, codes) = (std::array::from_fn(scale), std::array::from_fn(group));
    Block256 { d: half(block), scales, minimums: None, codes }
}

/// 64 bytes of four weights of 2 bits each, 32 apart, half of the block in 32 bytes.
#[inline(always)]
fn pairs(bytes: &[u8], codes: &mut [[i8; 32]; 8]) {
    for (row, codes) in codes.iter_mut().enumerate() {
        for (code, byte) in codes.iter_mut().zip(&bytes[row / 4 * 32..]) {
            *code = (byte >> (2 * (row % 4)) & 3).cast_signed();
        }
    }
}

/// The 12 bytes of Q3_K: sixteen scales of 6 bits, too large by 32, a byte each.
///
/// Eight bytes hold the lower 4 bits, of groups 0 to 7 in their lower halves; four bytes the upper 2, of groups g,
/// g + 4, g + 8 and g + 12 in byte g.
pub(in crate::kernel) fn six_bits_q3_k(bytes: [u8; 12]) -> (u64, u64) {
    let mut first = [0; 8];
    first.copy_from_slice(&bytes[..8]);
    let lower = u64::from_le_bytes(first);
    let upper = u64::from(u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]));
    let two = |shift: u32| upper >> shift & 0x0303_0303;
    let join = |lower: u64, upper: u64| lower & 0x0f0f_0f0f_0f0f_0f0f | upper << 4;
    (join(lower, two(0) | two(2) << 32), join(lower >> 4, two(4) | two(6) << 32))
}

/// The 6 bytes of IQ4_XS: eight scales of 6 bits, too large by 32, a byte each. Two bytes hold the upper 2 bits of each,
/// four bytes the lower 4.
pub(in crate::kernel) fn six_bits_iq4_xs(upper: [u8; 2], lower: [u8; 4]) -> u64 {
    let mut lower = u64::from(u32::from_le_bytes(lower));
    lower = (lower | lower << 16) & 0x0000_ffff_0000_ffff;
    lower = (lower | lower << 8) & 0x00ff_00ff_00ff_00ff;
    lower = (lower | lower << 4) & 0x0f0f_0f0f_0f0f_0f0f;
    let mut upper = u64::from(u16::from_le_bytes(upper));
    upper = (upper | upper << 24) & 0x0000_00ff_0000_00ff;
    upper = (upper | upper << 12) & 0x000f_000f_000f_000f;
    upper = (upper | upper << 6) & 0x0303_0303_0303_0303;
    lower | upper << 4
}

#[inline(always)]
pub(super) fn q4_k(block: &[u8; 144]) -> Block256 {
    let (scales, minimums) = six_bit_pairs(&block[4..16]);
    let mut codes = [[0; 32]; 8];
    nibbles(&block[16..], &mut codes);
    Block256 { d: half(block), scales, minimums: Some((half(&block[2..]), minimums)), codes }
}

#[inline(always)]
pub(super) fn q5_k(block: &[u8; 176]) -> Block256 {
    let (scales, minimums) = six_bit_pairs(&block[4..16]);
    let mut codes = [[0; 32]; 8];
    nibbles(&block[48..], &mut codes);
    for (c, codes) in codes.iter_mut().enumerate() {
        for (code, fifths) in codes.iter_mut().zip(&block[16..48]) {
            *code |= ((fifths >> c & 1) << 4).cast_signed();
        }
    }
    Block256 { d: half(block), scales, minimums: Some((half(&block[2..]), minimums)), codes }
}

#[inline(always)]
pub(super) fn q6_k(block: &[u8; 210]) -> Block256 {
    let mut codes = [[0; 32]; 8];
    for (part, codes) in codes.chunks_exact_mut(4).enumerate() {
        let lower = &block[64 * part..][..64];
        let upper = &block[128 + 32 * part..][..32];
        for (r, codes) in codes.iter_mut().enumerate() {
            let lower = &lower[r % 2 * 32..][..32];
            for ((code, low), up) in codes.iter_mut().zip(lower).zip(upper) {
                *code = (low >> (r / 2 * 4) & 15 | (up >> (2 * r) & 3) << 4).cast_signed() - 32;
            }
        }
    }
    let mut scales = [0; 16];
    scales.copy_from_slice(bytemuck::cast_slice(&block[192..208]));
    Block256 { d: half(&block[208..]), scales, minimums: None, codes }
}

/// 128 bytes of two weights each, 32 apart.
#[inline(always)]
fn nibbles(bytes: &[u8], codes: &mut [[i8; 32]; 8]) {
    for (codes, bytes) in codes.chunks_exact_mut(2).zip(bytes.chunks_exact(32)) {
        for (i, byte) in bytes.iter().enumerate() {
            codes[0][i] = (byte & 15).cast_signed();
            codes[1][i] = (byte >> 4).cast_signed();
        }
    }
}

/// The 12 bytes of Q4_K and Q5_K: eight scales and eight minimums of 6 bits, each here twice in a row.
///
/// Of the three words, the first two hold the low four of each in their lower 6 bits; the third holds the
/// lower 4 bits of the others, whose upper 2 are the top bits of the first two words.
pub(in crate::kernel) fn six_bit_words(bytes: [u8; 12]) -> (u64, u64) {
    let word = |i: usize| u32::from_le_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
    let (first, second, third) = (word(0), word(4), word(8));
    let scales = third & 0x0f0f_0f0f | (first >> 6 & 0x0303_0303) << 4;
    let minimums = third >> 4 & 0x0f0f_0f0f | (second >> 6 & 0x0303_0303) << 4;
    let join = |low: u32, high: u32| u64::from(low & 0x3f3f_3f3f) | u64::from(high) << 32;
    (join(first, scales), join(second, minimums))
}

fn six_bit_pairs(bytes: &[u8]) -> ([i8; 16], [i8; 16]) {
    let mut packed = [0; 12];
    packed.copy_from_slice(bytes);
    let (scales, minimums) = six_bit_words(packed);
    let twice = |word: u64| std::array::from_fn(|g| (word >> (g / 2 * 8) & 63) as i8);
    (twice(scales), twice(minimums))
}
