//! IQ4_XS: 256 weights in 8 groups of 32, each group with a scale of 6 bits and the codes of IQ4_NL.
//!
//! ```text
//! byte   0    2    4             8                                       136
//!        | d  | h  | l0 l1 l2 l3 | b0 b1 …                          b127 |
//!         f16  u16   4 bits per    16 bytes per group, as in IQ4_NL
//!                    group, the lower half of a byte first: the lower bits of scale[g];
//!              bits 2g and 2g + 1: its upper bits
//!
//!        w = d * (scale[g] - 32) * STEPS[q]
//! ```

use super::iq4_nl::decode_group;
use super::{Block, half};

pub(super) struct Iq4Xs;

impl Block<256, 136> for Iq4Xs {
    fn decode(block: &[u8; 136], out: &mut [f32; 256]) {
        let d = half([block[0], block[1]]).to_f32();
        let (upper, lower) = (&block[2..4], &block[4..8]);
        for (g, out) in out.chunks_exact_mut(32).enumerate() {
            let low = lower[g / 2] >> (g % 2 * 4) & 15;
            let scale = low | (upper[g / 4] >> (g % 4 * 2) & 3) << 4;
            decode_group(d * f32::from(scale.cast_signed() - 32), &block[8 + g * 16..][..16], out);
        }
    }

    fn is_finite(block: &[u8; 136]) -> bool {
        half([block[0], block[1]]).is_finite()
    }
}
