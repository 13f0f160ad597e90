//! MXFP4: 32 floats of 4 bits, one scale that is a power of two (OCP Microscaling Formats 1.0).
//!
//! ```text
//! byte   0    1                              17
//!        | e  | b0 b1 b2 …               b15 |
//!         u8    low 4 bits of b[i]:  q[i]
//!               high 4 bits:         q[i + 16]      w[i] = 2^(e - 128) * DOUBLED[q[i]]
//! ```

use super::Block;

/// Twice the number of each code (sign, two bits of exponent, one of fraction), so that it is whole.
pub(crate) const DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

pub(super) struct Mxfp4;

/// 2^(e − 128), which is half the block's scale. The standard calls e = 255 not a number; here it is infinite.
pub(crate) fn half_scale(e: u8) -> f32 {
    match e {
        0 => f32::MIN_POSITIVE / 4.0,
        _ => f32::from_bits(u32::from(e) << 23) / 2.0,
    }
}

impl Block<32, 17> for Mxfp4 {
    fn decode(block: &[u8; 17], out: &mut [f32; 32]) {
        let scale = half_scale(block[0]);
        let weight = |q: u8| scale * f32::from(DOUBLED[usize::from(q)]);
        let (low, high) = out.split_at_mut(16);
        for (i, &b) in block[1..].iter().enumerate() {
            low[i] = weight(b & 15);
            high[i] = weight(b >> 4);
        }
    }

    fn is_finite(block: &[u8; 17]) -> bool {
        // With e = 253 and 254 the scale is finite, but not every weight.
        (half_scale(block[0]) * 12.0).is_finite()
    }
}
