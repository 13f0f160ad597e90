//! Q5_1: 32 weights of 5 bits, a half-precision scale and a minimum.
//!
//! ```text
//! byte   0    2    4         8                              24
//!        | d  | m  | h       | b0 b1 b2 …               b15 |
//!         f16  f16   codes as in Q5_0
//!                                                       w[i] = d * q[i] + m
//! ```

use super::q5_0::codes;
use super::{Block, half};

pub(super) struct Q5_1;

impl Block<32, 24> for Q5_1 {
    fn decode(block: &[u8; 24], out: &mut [f32; 32]) {
        let d = half([block[0], block[1]]).to_f32();
        let m = half([block[2], block[3]]).to_f32();
        for (w, q) in out.iter_mut().zip(codes(&block[4..])) {
            *w = d * f32::from(q) + m;
        }
    }

    fn is_finite(block: &[u8; 24]) -> bool {
        half([block[0], block[1]]).is_finite() && half([block[2], block[3]]).is_finite()
    }
}
