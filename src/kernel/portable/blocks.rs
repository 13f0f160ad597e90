//! One block of each type as small integers. The layouts are drawn in [`crate::blocks`].

use half::f16;

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
    let mut codes = [0; 32];
    let (low, high) = codes.split_at_mut(16);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(&block[2..]) {
        *low = (byte & 15).cast_signed() - 8;
        *high = (byte >> 4).cast_signed() - 8;
    }
    (half(block), codes)
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
