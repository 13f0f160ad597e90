//! IQ3_S: 256 weights as 64 points of a grid in 4 dimensions and their signs, a scale of 4 bits per 32.
//!
//! ```text
//! byte   0    2                66         74             106        110
//!        | d  | c0 c1 …    c63 | h0 …  h7 | n0 …     n31 | s0 …  s3 |
//!         f16   numbers of the   bit k % 8  bit i of       scale of weights 64i..64i + 32:
//!               points, lower    of h[k/8]: n[k]: whether  low 4 bits of s[i], of the 32
//!               8 bits           ninth bit  weight 8k + i  after them: high 4 bits
//!                                of c[k]    is negative
//!
//!        w = d * (2 * scale + 1) * ± (2 * coordinate + 1)
//! ```

use super::grids::{self, of_four, signed};
use super::{Block, half};

pub(super) struct Iq3S;

impl Block<256, 110> for Iq3S {
    fn decode(block: &[u8; 110], out: &mut [f32; 256]) {
        let d = half([block[0], block[1]]).to_f32();
        for (k, out) in out.chunks_exact_mut(4).enumerate() {
            let ninth = block[66 + k / 8] >> (k % 8) & 1;
            let point = grids::IQ3_S[usize::from(ninth) << 8 | usize::from(block[2 + k])];
            let scale = d * f32::from((block[106 + k / 16] >> (k / 8 % 2 * 4) & 15) * 2 + 1);
            let signs = block[74 + k / 2] >> (k % 2 * 4);
            for (i, w) in out.iter_mut().enumerate() {
                *w = signed(scale * (2 * of_four(point, i) + 1) as f32, signs, i);
            }
        }
    }

    fn is_finite(block: &[u8; 110]) -> bool {
        half([block[0], block[1]]).is_finite()
    }
}
