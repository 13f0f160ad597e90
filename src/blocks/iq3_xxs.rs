//! IQ3_XXS: 256 weights as 64 points of a grid in 4 dimensions and their signs, a scale of 4 bits per 32.
//!
//! ```text
//! byte   0    2                      66               98
//!        | d  | c0 c1 …          c63 | r0 r1 …     r7 |
//!         f16   numbers of the points, u32, one per 32 weights
//!               two for each 8 weights bits 7k..7k + 7: signs of the 8 weights from 8k, k < 4;
//!                                      bits 28..32: scale
//!
//!        w = d * (scale + 1/2) / 2 * ± MAGNITUDES[coordinate]
//! ```

use super::grids::{self, even_signs, of_four, signed};
use super::{Block, half};

/// Source: the Python package `gguf`. Coordinates are below 8.
const MAGNITUDES: [f32; 16] =
    [4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];

pub(super) struct Iq3Xxs;

impl Block<256, 98> for Iq3Xxs {
    fn decode(block: &[u8; 98], out: &mut [f32; 256]) {
        let d = half([block[0], block[1]]).to_f32();
        let rests = block[66..].as_chunks::<4>().0;
        let groups = block[2..66].chunks_exact(8).zip(rests).zip(out.chunks_exact_mut(32));
        for ((codes, &rest), out) in groups {
            let rest = u32::from_le_bytes(rest);
            let scale = d * (0.5 + (rest >> 28) as f32) * 0.5;
            for (i, w) in out.iter_mut().enumerate() {
                let magnitude = MAGNITUDES[of_four(grids::IQ3_XXS[usize::from(codes[i / 4])], i % 4)];
                *w = signed(scale * magnitude, even_signs(rest >> (i / 8 * 7)), i % 8);
            }
        }
    }

    fn is_finite(block: &[u8; 98]) -> bool {
        half([block[0], block[1]]).is_finite()
    }
}
