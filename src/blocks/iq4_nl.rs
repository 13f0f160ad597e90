//! IQ4_NL: 32 weights of 4 bits that number uneven steps, one half-precision scale.
//!
//! ```text
//! byte   0    2                              18
//!        | d  | b0 b1 b2 …               b15 |
//!         f16   low 4 bits of b[i]:  q[i]
//!               high 4 bits:         q[i + 16]      w[i] = d * STEPS[q[i]]
//! ```

use super::{Block, half};

/// What the codes stand for: closer together around zero, where most weights are. Source: the Python package
/// `gguf`.
pub(crate) const STEPS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

pub(super) struct Iq4Nl;

impl Block<32, 18> for Iq4Nl {
    fn decode(block: &[u8; 18], out: &mut [f32; 32]) {
        let d = half([block[0], block[1]]).to_f32();
        decode_group(d, &block[2..], out);
    }

    fn is_finite(block: &[u8; 18]) -> bool {
        half([block[0], block[1]]).is_finite()
    }
}

/// The 32 weights in 16 bytes, as in every group of IQ4_XS too.
pub(super) fn decode_group(scale: f32, bytes: &[u8], out: &mut [f32]) {
    let weight = |q: u8| scale * f32::from(STEPS[usize::from(q)]);
    let (low, high) = out.split_at_mut(16);
    for (i, &b) in bytes.iter().enumerate() {
        low[i] = weight(b & 15);
        high[i] = weight(b >> 4);
    }
}
