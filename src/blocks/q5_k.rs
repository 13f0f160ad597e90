//! Q5_K: 256 weights of 5 bits in 8 groups of 32, each group with a scale and a minimum of 6 bits.
//!
//! ```text
//! byte   0    2      4               16              48                           176
//!        | d  | dmin | scales, mins  | h0 …      h31 | b0 b1 …                b127 |
//!         f16   f16    packed as in    bit g of h[i]: as in Q4_K: the lower 4 bits of q,
//!                      Q4_K            the fifth bit  two groups in 32 bytes
//!                                      of weight i of
//!                                      group g        w = d * scale[g] * q - dmin * min[g]
//! ```

use super::Block;
use super::q4_k::{groups, scales_are_finite};

pub(super) struct Q5K;

impl Block<256, 176> for Q5K {
    fn decode(block: &[u8; 176], out: &mut [f32; 256]) {
        let groups = groups(block);
        let fifth = &block[16..48];
        for (g, out) in out.chunks_exact_mut(32).enumerate() {
            let (scale, min) = groups[g];
            let first = 48 + g / 2 * 32;
            for (i, w) in out.iter_mut().enumerate() {
                let b = block[first + i];
                let low = if g % 2 == 0 { b & 15 } else { b >> 4 };
                let q = low | (fifth[i] >> g & 1) << 4;
                *w = scale * f32::from(q) - min;
            }
        }
    }

    fn is_finite(block: &[u8; 176]) -> bool {
        scales_are_finite(block)
    }
}
