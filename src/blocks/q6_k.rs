//! Q6_K: 256 weights of 6 bits in 16 groups of 16, each group with a scale of 8 bits.
//!
//! ```text
//! byte   0                     128              192            208  210
//!        | l0 l1 …        l127 | h0 h1 …    h63 | s0 …     s15 | d  |
//!          lower 4 bits          upper 2 bits     i8            f16
//!
//! Each half of the block (128 weights) has 64 bytes l, 32 bytes h and 8 scales. In it, weight 32r + i,
//! with r = 0 to 3 and i = 0 to 31, has
//!        r = 0   l[i]      low  4 bits     h[i] bits 0, 1
//!        r = 1   l[i + 32] low             h[i] bits 2, 3
//!        r = 2   l[i]      high            h[i] bits 4, 5
//!        r = 3   l[i + 32] high            h[i] bits 6, 7
//!        w = d * scale[group] * (q - 32)
//! ```

use super::{Block, half};

pub(super) struct Q6K;

impl Block<256, 210> for Q6K {
    fn decode(block: &[u8; 210], out: &mut [f32; 256]) {
        let d = half([block[208], block[209]]).to_f32();
        for (row, out) in out.chunks_exact_mut(32).enumerate() {
            let (part, r) = (row / 4, row % 4);
            let lower = &block[part * 64 + r % 2 * 32..][..32];
            let upper = &block[128 + part * 32..][..32];
            for (i, w) in out.iter_mut().enumerate() {
                let low = if r < 2 { lower[i] & 15 } else { lower[i] >> 4 };
                let q = low | (upper[i] >> (2 * r) & 3) << 4;
                let scale = block[192 + row * 2 + i / 16].cast_signed();
                *w = d * f32::from(scale) * f32::from(q.cast_signed() - 32);
            }
        }
    }

    fn is_finite(block: &[u8; 210]) -> bool {
        half([block[208], block[209]]).is_finite()
    }
}
