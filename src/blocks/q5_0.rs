//! Q5_0: 32 weights of 5 bits, one half-precision scale.
//!
//! ```text
//! byte   0    2         6                              22
//!        | d  | h       | b0 b1 b2 …               b15 |
//!         f16   u32       low 4 bits of b[i]:  q[i], but for its fifth bit
//!               bit i:    high 4 bits:         q[i + 16], the same
//!               fifth
//!               bit of q[i]                            w[i] = d * (q[i] - 16)
//! ```

use super::{Block, half};

pub(super) struct Q5_0;

impl Block<32, 22> for Q5_0 {
    fn decode(block: &[u8; 22], out: &mut [f32; 32]) {
        let d = half([block[0], block[1]]).to_f32();
        for (w, q) in out.iter_mut().zip(codes(&block[2..])) {
            *w = d * f32::from(q.cast_signed() - 16);
        }
    }

    fn is_finite(block: &[u8; 22]) -> bool {
        half([block[0], block[1]]).is_finite()
    }
}

/// The 32 codes in the 20 bytes that end a Q5_0 or Q5_1 block.
pub(super) fn codes(bytes: &[u8]) -> [u8; 32] {
    let (fifth, lower) = bytes.split_at(4);
    std::array::from_fn(|i| {
        let b = lower[i % 16];
        let low = if i < 16 { b & 15 } else { b >> 4 };
        low | (fifth[i / 8] >> (i % 8) & 1) << 4
    })
}
