//! F16: one weight in half precision, no scale.
//!
//! ```text
//! byte   0        2
//!        | weight |      sign 1, exponent 5, fraction 10 bits
//! ```

use super::{Block, half};

pub(super) struct F16;

impl Block<1, 2> for F16 {
    fn decode(block: &[u8; 2], out: &mut [f32; 1]) {
        *out = [half(*block).to_f32()];
    }

    fn is_finite(block: &[u8; 2]) -> bool {
        half(*block).is_finite()
    }
}
