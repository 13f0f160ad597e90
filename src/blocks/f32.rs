//! F32: one weight, no scale.
//!
//! ```text
//! byte   0        4
//!        | weight |
//! ```

use super::Block;

pub(super) struct F32;

impl Block<1, 4> for F32 {
    fn decode(block: &[u8; 4], out: &mut [f32; 1]) {
        *out = [f32::from_le_bytes(*block)];
    }

    fn is_finite(block: &[u8; 4]) -> bool {
        f32::from_le_bytes(*block).is_finite()
    }
}
