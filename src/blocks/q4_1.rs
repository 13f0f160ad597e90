//! Q4_1: 32 weights of 4 bits, a half-precision scale and a minimum.
//!
//! ```text
//! byte   0    2    4                              20
//!        | d  | m  | b0 b1 b2 …               b15 |
//!         f16  f16   low 4 bits of b[i]:  q[i]
//!                    high 4 bits:         q[i + 16]      w[i] = d * q[i] + m
//! ```

use super::{Block, half};

pub(super) struct Q4_1;

impl Block<32, 20> for Q4_1 {
    fn decode(block: &[u8; 20], out: &mut [f32; 32]) {
        let d = half([block[0], block[1]]).to_f32();
        let m = half([block[2], block[3]]).to_f32();
        let weight = |q: u8| d * f32::from(q) + m;
        let (low, high) = out.split_at_mut(16);
        for (i, &b) in block[4..].iter().enumerate() {
            low[i] = weight(b & 15);
            high[i] = weight(b >> 4);
        }
    }

    fn is_finite(block: &[u8; 20]) -> bool {
        half([block[0], block[1]]).is_finite() && half([block[2], block[3]]).is_finite()
    }
}
