//! Q3_K: 256 weights of 3 bits in 16 groups of 16, each group with a scale of 6 bits.
//!
//! ```text
//! byte   0             32                      96             108  110
//!        | h0 …    h31 | b0 b1 …           b63 | scales       | d  |
//!          bit r of      the lower 2 bits of q,  16 × 6 bits,  f16
//!          h[i]: third   placed as in Q2_K       see below
//!          bit of weight 32r + i
//!
//!        w = d * (scale[g] - 32) * (q - 4)
//!
//! the 12 bytes, bit 7 on the left; letters are groups, each bit one character:
//!        0..4    IIIIAAAA  JJJJBBBB  KKKKCCCC  LLLLDDDD     lower four bits of the scales,
//!        4..8    MMMMEEEE  NNNNFFFF  OOOOGGGG  PPPPHHHH     A to P = groups 0 to 15
//!        8..12   MMIIEEAA  NNJJFFBB  OOKKGGCC  PPLLHHDD     upper two bits
//! ```

use super::{Block, half};

pub(super) struct Q3K;

impl Block<256, 110> for Q3K {
    fn decode(block: &[u8; 110], out: &mut [f32; 256]) {
        let d = half([block[108], block[109]]).to_f32();
        for (row, out) in out.chunks_exact_mut(32).enumerate() {
            let (part, r) = (row / 4, row % 4);
            let lower = &block[32 + part * 32..][..32];
            for (i, w) in out.iter_mut().enumerate() {
                let q = lower[i] >> (2 * r) & 3 | (block[i] >> row & 1) << 2;
                let scale = d * f32::from(scale(&block[96..108], row * 2 + i / 16));
                *w = scale * f32::from(q.cast_signed() - 4);
            }
        }
    }

    fn is_finite(block: &[u8; 110]) -> bool {
        half([block[108], block[109]]).is_finite()
    }
}

/// The scale of group `g`: −32 to 31.
fn scale(packed: &[u8], g: usize) -> i8 {
    let lower = packed[g % 8] >> (g / 8 * 4) & 15;
    let upper = packed[8 + g % 4] >> (g / 4 * 2) & 3;
    (upper << 4 | lower).cast_signed() - 32
}
