//! IQ1_M: 256 weights as 32 points of a grid in 8 dimensions, each with a shift, a scale of 3 bits per 16.
//!
//! ```text
//! byte   0              32                 48            56
//!        | c0 …     c31 | h0 …         h15 | s0 s1 s2 s3 |
//!          numbers of     4 bits per point:  u16
//!          the points,    bits 0..3: upper   bits 3k..3k + 3: scale of the 16 weights from
//!          lower 8 bits   bits of its number,    64j + 16k, k < 4, in s[j]
//!                         3: shift is −1/8,  bits 12..16: the 4 bits from 4j of d, an f16
//!                         else 1/8
//!
//!        w = d * (2 * scale + 1) * (coordinate - 1 + shift)
//! ```

use super::iq1_s::decode_point;
use super::{Block, half};

pub(super) struct Iq1M;

impl Block<256, 56> for Iq1M {
    fn decode(block: &[u8; 56], out: &mut [f32; 256]) {
        let d = d(block).to_f32();
        let scales = scales(block);
        for (k, out) in out.chunks_exact_mut(8).enumerate() {
            let upper = u16::from(block[32 + k / 2] >> (k % 2 * 4) & 15);
            let scale = d * f32::from(2 * (scales[k / 8] >> (k / 2 % 4 * 3) & 7) + 1);
            decode_point(scale, (upper & 7) << 8 | u16::from(block[k]), upper >> 3 == 1, out);
        }
    }

    fn is_finite(block: &[u8; 56]) -> bool {
        d(block).is_finite()
    }
}

fn scales(block: &[u8; 56]) -> [u16; 4] {
    std::array::from_fn(|j| u16::from_le_bytes([block[48 + 2 * j], block[49 + 2 * j]]))
}

/// The block's scale, put together from its four parts.
fn d(block: &[u8; 56]) -> half::f16 {
    let bits = scales(block).into_iter().rev().fold(0, |bits, s| bits << 4 | s >> 12);
    half(bits.to_le_bytes())
}
