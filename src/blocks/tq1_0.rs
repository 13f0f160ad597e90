//! TQ1_0: 256 weights of −1, 0 or 1, five of them in a byte, one half-precision scale.
//!
//! ```text
//! byte   0                 32            48          52   54
//!        | a0 a1 …     a31 | b0 …    b15 | c0 … c3   | d  |
//!          weights 0..160:   160..240:     240..256:   f16
//!          weight 32r + i    16r + i       4r + i
//!          in a[i], r < 5    in b[i], r<5  in c[i], r < 4      w = d * (digit r - 1)
//! ```
//!
//! A byte is a fraction of 256 written in base 3: digit r is the whole part after multiplying what follows the
//! point by 3, r + 1 times over.

use super::{Block, half};

pub(super) struct Tq1_0;

impl Block<256, 54> for Tq1_0 {
    fn decode(block: &[u8; 54], out: &mut [f32; 256]) {
        let d = half([block[52], block[53]]).to_f32();
        let (first, rest) = out.split_at_mut(160);
        let (second, third) = rest.split_at_mut(80);
        for (out, bytes) in [(first, &block[..32]), (second, &block[32..48]), (third, &block[48..52])] {
            for (out, r) in out.chunks_exact_mut(bytes.len()).zip(0..) {
                for (w, &b) in out.iter_mut().zip(bytes) {
                    *w = d * f32::from(digit(b, r) - 1);
                }
            }
        }
    }

    fn is_finite(block: &[u8; 54]) -> bool {
        half([block[52], block[53]]).is_finite()
    }
}

/// Digit `r` of a byte, the most significant first.
fn digit(b: u8, r: u32) -> i8 {
    let fraction = b.wrapping_mul(3u8.wrapping_pow(r));
    ((u16::from(fraction) * 3) >> 8) as i8
}
