//! IQ2_XS: 256 weights as 32 points of a grid in 8 dimensions and their signs, a scale of 4 bits per 16.
//!
//! ```text
//! byte   0    2                               66             74
//!        | d  | c0 c1 …                   c31 | s0 …      s7 |
//!         f16   u16                             scale of weights 32i..32i + 16: low 4 bits of
//!               bits 0..9: number of the point, s[i], of the 16 after them: high 4 bits
//!               9..16: its signs
//!
//!        w = d * (scale + 1/2) / 4 * ± magnitude, as in IQ2_XXS
//! ```

use super::grids::{self, even_signs};
use super::iq2_xxs::{decode_point, scale};
use super::{Block, half};

pub(super) struct Iq2Xs;

impl Block<256, 74> for Iq2Xs {
    fn decode(block: &[u8; 74], out: &mut [f32; 256]) {
        let d = half([block[0], block[1]]).to_f32();
        let codes = block[2..66].as_chunks::<2>().0;
        for (k, (&code, out)) in codes.iter().zip(out.chunks_exact_mut(8)).enumerate() {
            let code = u16::from_le_bytes(code);
            let scale = scale(d, block[66 + k / 4] >> (k / 2 % 2 * 4) & 15);
            decode_point(
                scale,
                grids::IQ2_XS[usize::from(code & 511)],
                even_signs(u32::from(code >> 9)),
                out,
            );
        }
    }

    fn is_finite(block: &[u8; 74]) -> bool {
        half([block[0], block[1]]).is_finite()
    }
}
