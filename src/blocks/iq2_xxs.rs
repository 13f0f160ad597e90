//! IQ2_XXS: 256 weights as 32 points of a grid in 8 dimensions and their signs, a scale of 4 bits per 32.
//!
//! ```text
//! byte   0    2                      66
//!        | d  | group 0 | …  group 7 |
//!         f16   8 bytes: c0 c1 c2 c3, the numbers of four points, and a u32:
//!               bits 7k..7k + 7: signs of point k, k < 4; bits 28..32: scale
//!
//!        w = d * (scale + 1/2) / 4 * ± MAGNITUDES[coordinate]
//! ```

use super::grids::{self, even_signs, of_eight, signed};
use super::{Block, half};

/// The magnitudes of every IQ2 format. Source: the Python package `gguf`.
const MAGNITUDES: [f32; 4] = [8.0, 25.0, 43.0, 0.0];

pub(super) struct Iq2Xxs;

impl Block<256, 66> for Iq2Xxs {
    fn decode(block: &[u8; 66], out: &mut [f32; 256]) {
        let d = half([block[0], block[1]]).to_f32();
        let groups = block[2..].as_chunks::<8>().0;
        for (&[c0, c1, c2, c3, rest @ ..], out) in groups.iter().zip(out.as_chunks_mut::<32>().0) {
            let rest = u32::from_le_bytes(rest);
            let scale = scale(d, (rest >> 28) as u8);
            for (k, c) in [c0, c1, c2, c3].into_iter().enumerate() {
                let signs = even_signs(rest >> (7 * k));
                decode_point(scale, grids::IQ2_XXS[usize::from(c)], signs, &mut out[8 * k..][..8]);
            }
        }
    }

    fn is_finite(block: &[u8; 66]) -> bool {
        half([block[0], block[1]]).is_finite()
    }
}

/// The scale of a group, from the block's and its own 4 bits; in every IQ2 format.
pub(super) fn scale(d: f32, code: u8) -> f32 {
    d * (0.5 + f32::from(code)) * 0.25
}

/// The eight weights of a point; in every IQ2 format.
pub(super) fn decode_point(scale: f32, point: u16, signs: u8, out: &mut [f32]) {
    for (i, w) in out.iter_mut().enumerate() {
        *w = signed(scale * MAGNITUDES[of_eight(point, i)], signs, i);
    }
}
