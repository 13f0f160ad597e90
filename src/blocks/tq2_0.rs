//! TQ2_0: 256 weights of −1, 0 or 1, two bits each, one half-precision scale.
//!
//! ```text
//! byte   0                       64   66
//!        | b0 b1 …           b63 | d  |
//!          placed as in Q2_K      f16       w = d * (q - 1)
//! ```

use super::{Block, half};

pub(super) struct Tq2_0;

impl Block<256, 66> for Tq2_0 {
    fn decode(block: &[u8; 66], out: &mut [f32; 256]) {
        let d = half([block[64], block[65]]).to_f32();
        for (row, out) in out.chunks_exact_mut(32).enumerate() {
            let (part, r) = (row / 4, row % 4);
            for (w, b) in out.iter_mut().zip(&block[part * 32..]) {
                *w = d * f32::from((b >> (2 * r) & 3).cast_signed() - 1);
            }
        }
    }

    fn is_finite(block: &[u8; 66]) -> bool {
        half([block[64], block[65]]).is_finite()
    }
}
