//! IQ2_S: 256 weights as 32 points of a grid in 8 dimensions and their signs, a scale of 4 bits per 16.
//!
//! ```text
//! byte   0    2              34             66         74           82
//!        | d  | c0 …     c31 | n0 …     n31 | h0 … h7  | s0 …    s7 |
//!         f16   numbers of     bit i of       upper two  as in IQ2_XS
//!               the points,    n[k]: whether  bits of
//!               lower 8 bits   weight 8k + i  number k: bits 2(k % 4)
//!                              is negative    and the next of h[k / 4]
//!
//!        w = d * (scale + 1/2) / 4 * ± magnitude, as in IQ2_XXS
//! ```

use super::grids;
use super::iq2_xxs::{decode_point, scale};
use super::{Block, half};

pub(super) struct Iq2S;

impl Block<256, 82> for Iq2S {
    fn decode(block: &[u8; 82], out: &mut [f32; 256]) {
        let d = half([block[0], block[1]]).to_f32();
        for (k, out) in out.chunks_exact_mut(8).enumerate() {
            let upper = block[66 + k / 4] >> (k % 4 * 2) & 3;
            let number = usize::from(upper) << 8 | usize::from(block[2 + k]);
            let scale = scale(d, block[74 + k / 4] >> (k / 2 % 2 * 4) & 15);
            decode_point(scale, grids::IQ2_S[number], block[34 + k], out);
        }
    }

    fn is_finite(block: &[u8; 82]) -> bool {
        half([block[0], block[1]]).is_finite()
    }
}
