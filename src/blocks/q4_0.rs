//! Q4_0: 32 weights of 4 bits, one half-precision scale.
//!
//! ```text
//! byte   0    2                              18
//!        | d  | b0 b1 b2 …               b15 |
//!         f16   low 4 bits of b[i]:  q[i]
//!               high 4 bits:         q[i + 16]      w[i] = d * (q[i] - 8)
//! ```

use super::{Block, half};

pub(super) struct Q4_0;

impl Block<32, 18> for Q4_0 {
    fn decode(block: &[u8; 18], out: &mut [f32; 32]) {
        let d = half([block[0], block[1]]).to_f32();
        let weight = |q: u8| d * f32::from(q.cast_signed() - 8);
        let (low, high) = out.split_at_mut(16);
        for (i, &b) in block[2..].iter().enumerate() {
            low[i] = weight(b & 15);
            high[i] = weight(b >> 4);
        }
    }

    fn is_finite(block: &[u8; 18]) -> bool {
        half([block[0], block[1]]).is_finite()
    }
}
