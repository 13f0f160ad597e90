//! Strips of int8 tiles in the NPU's layout.

use std::arch::x86_64::*;

use super::{load32, pair_sums, prefetch, total};

/// `out[a][n] = Σ_k strip(n, k) · rows[a][k]`: block after block as they lie, the sums in the first cache.
#[target_feature(enable = "avx2")]
pub(super) fn dot<const A: usize>(strip: &[i8], rows: [&[i8]; A]) -> [[i32; 32]; A] {
    let mut lanes = [[_mm256_setzero_si256(); A]; 32];
    for (kb, block) in strip.as_chunks::<1024>().0.iter().enumerate() {
        let mut x = [_mm256_setzero_si256(); A];
        for (x, row) in x.iter_mut().zip(rows) {
            *x = load32(&row.as_chunks().0[kb]);
        }
        for (lanes, column) in lanes.iter_mut().zip(block.as_chunks().0) {
            if A == 1 {
                prefetch(column.as_ptr().cast());
            }
            let w = load32(column);
            let magnitude = _mm256_abs_epi8(w);
            for (lanes, x) in lanes.iter_mut().zip(x) {
                let fours = _mm256_madd_epi16(pair_sums(w, magnitude, x), _mm256_set1_epi16(1));
                *lanes = _mm256_add_epi32(*lanes, fours);
            }
        }
    }
    let mut out = [[0; 32]; A];
    for (n, lanes) in lanes.iter().enumerate() {
        for (out, &lanes) in out.iter_mut().zip(lanes) {
            out[n] = total(lanes);
        }
    }
    out
}
