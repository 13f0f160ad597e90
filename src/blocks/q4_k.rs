//! Q4_K: 256 weights of 4 bits in 8 groups of 32, each group with a scale and a minimum of 6 bits.
//!
//! ```text
//! byte   0    2      4               16                                      144
//!        | d  | dmin | scales, mins  | b0 b1 …                           b127 |
//!         f16   f16    8 × 6, 8 × 6    32 bytes hold two groups: group 2p in the low 4 bits of
//!                      bits, see below bytes 32p..32p+32, group 2p + 1 in the high 4 bits
//!
//!        w = d * scale[g] * q - dmin * min[g]
//!
//! the 12 bytes, bit 7 on the left; letters are groups, each bit one character:
//!        0..4    EEAAAAAA  FFBBBBBB  GGCCCCCC  HHDDDDDD     scales: A B C D = groups 0 to 3,
//!        4..8    eeaaaaaa  ffbbbbbb  ggcccccc  hhdddddd     E F G H = 4 to 7 (upper two bits here,
//!        8..12   eeeeEEEE  ffffFFFF  ggggGGGG  hhhhHHHH     lower four there); small letters: mins
//! ```

use super::{Block, half};

pub(super) struct Q4K;

impl Block<256, 144> for Q4K {
    fn decode(block: &[u8; 144], out: &mut [f32; 256]) {
        let groups = groups(block);
        for (g, out) in out.chunks_exact_mut(32).enumerate() {
            let (scale, min) = groups[g];
            let first = 16 + g / 2 * 32;
            for (w, b) in out.iter_mut().zip(&block[first..first + 32]) {
                let q = if g % 2 == 0 { b & 15 } else { b >> 4 };
                *w = scale * f32::from(q) - min;
            }
        }
    }

    fn is_finite(block: &[u8; 144]) -> bool {
        scales_are_finite(block)
    }
}

/// `(d * scale, dmin * min)` of each group, from the first 16 bytes of a Q4_K or Q5_K block.
pub(super) fn groups(block: &[u8]) -> [(f32, f32); 8] {
    let d = half([block[0], block[1]]).to_f32();
    let dmin = half([block[2], block[3]]).to_f32();
    let packed = &block[4..16];
    std::array::from_fn(|g| {
        let (scale, min) = if g < 4 {
            (packed[g] & 63, packed[g + 4] & 63)
        } else {
            let (upper_scale, upper_min, lower) = (packed[g - 4] >> 6, packed[g] >> 6, packed[g + 4]);
            (upper_scale << 4 | lower & 15, upper_min << 4 | lower >> 4)
        };
        (d * f32::from(scale), dmin * f32::from(min))
    })
}

/// Whether `d` and `dmin` of a Q4_K or Q5_K block are finite.
pub(super) fn scales_are_finite(block: &[u8]) -> bool {
    half([block[0], block[1]]).is_finite() && half([block[2], block[3]]).is_finite()
}
