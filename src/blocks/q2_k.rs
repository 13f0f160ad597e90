//! Q2_K: 256 weights of 2 bits in 16 groups of 16, each group with a scale and a minimum of 4 bits.
//!
//! ```text
//! byte   0                 16                      80   82     84
//!        | s0 s1 …     s15 | b0 b1 …           b63 | d  | dmin |
//!          low 4 bits of     32 bytes hold half of  f16   f16
//!          s[g]: scale[g],   the block: its weight
//!          high 4: min[g]    32r + i is bits 2r and 2r + 1 of byte i
//!
//!        w = d * scale[g] * q - dmin * min[g]
//! ```

use super::{Block, half};

pub(super) struct Q2K;

impl Block<256, 84> for Q2K {
    fn decode(block: &[u8; 84], out: &mut [f32; 256]) {
        let d = half([block[80], block[81]]).to_f32();
        let dmin = half([block[82], block[83]]).to_f32();
        for (g, out) in out.chunks_exact_mut(16).enumerate() {
            let scale = d * f32::from(block[g] & 15);
            let min = dmin * f32::from(block[g] >> 4);
            let (part, r) = (g / 8, g / 2 % 4);
            let bytes = &block[16 + part * 32 + g % 2 * 16..][..16];
            for (w, b) in out.iter_mut().zip(bytes) {
                *w = scale * f32::from(b >> (2 * r) & 3) - min;
            }
        }
    }

    fn is_finite(block: &[u8; 84]) -> bool {
        half([block[80], block[81]]).is_finite() && half([block[82], block[83]]).is_finite()
    }
}
