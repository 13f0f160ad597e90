//! Q8_0: 32 weights, one half-precision scale.
//!
//! ```text
//! byte   0    2                              34
//!        | d  | q0 q1 q2 …               q31 |
//!         f16   i8                              w[i] = d * q[i]
//! ```

use super::{Block, half};

pub(super) struct Q8_0;

impl Block<32, 34> for Q8_0 {
    fn decode(block: &[u8; 34], out: &mut [f32; 32]) {
        let d = half([block[0], block[1]]).to_f32();
        for (w, q) in out.iter_mut().zip(&block[2..]) {
            *w = d * f32::from(q.cast_signed());
        }
    }

    fn is_finite(block: &[u8; 34]) -> bool {
        half([block[0], block[1]]).is_finite()
    }
}
