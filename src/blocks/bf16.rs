//! BF16: one weight, the upper half of an f32, no scale.
//!
//! ```text
//! byte   0        2
//!        | weight |      sign 1, exponent 8, fraction 7 bits
//! ```

use super::Block;

pub(super) struct Bf16;

fn weight(block: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(block)) << 16)
}

impl Block<1, 2> for Bf16 {
    fn decode(block: &[u8; 2], out: &mut [f32; 1]) {
        *out = [weight(*block)];
    }

    fn is_finite(block: &[u8; 2]) -> bool {
        weight(*block).is_finite()
    }
}
