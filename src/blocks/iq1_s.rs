//! IQ1_S: 256 weights as 32 points of a grid in 8 dimensions, a scale of 3 bits and a shift per 32.
//!
//! ```text
//! byte   0    2              34             50
//!        | d  | c0 …     c31 | h0 …      h7 |
//!         f16   numbers of     u16, one per 32 weights
//!               the points,    bits 3k..3k + 3: upper bits of the number of point k, k < 4;
//!               lower 8 bits   12..15: scale; 15: the shift is −1/8, else 1/8
//!
//!        w = d * (2 * scale + 1) * (coordinate - 1 + shift)
//! ```

use super::grids::{self, of_eight};
use super::{Block, half};

pub(super) struct Iq1S;

impl Block<256, 50> for Iq1S {
    fn decode(block: &[u8; 50], out: &mut [f32; 256]) {
        let d = half([block[0], block[1]]).to_f32();
        let groups = block[2..34].as_chunks::<4>().0.iter().zip(block[34..].as_chunks::<2>().0);
        for ((codes, &h), out) in groups.zip(out.chunks_exact_mut(32)) {
            let h = u16::from_le_bytes(h);
            let scale = d * f32::from(2 * (h >> 12 & 7) + 1);
            for (k, (&code, out)) in codes.iter().zip(out.chunks_exact_mut(8)).enumerate() {
                let number = (h >> (3 * k) & 7) << 8 | u16::from(code);
                decode_point(scale, number, h >> 15 == 1, out);
            }
        }
    }

    fn is_finite(block: &[u8; 50]) -> bool {
        half([block[0], block[1]]).is_finite()
    }
}

/// The eight weights of a point, of which IQ1_M has the same.
pub(super) fn decode_point(scale: f32, number: u16, down: bool, out: &mut [f32]) {
    let point = grids::IQ1_S[usize::from(number)];
    let lowest = if down { -1.125 } else { -0.875 };
    for (i, w) in out.iter_mut().enumerate() {
        *w = scale * (of_eight(point, i) as f32 + lowest);
    }
}
