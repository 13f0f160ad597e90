//! The walk over int8 weights in the NPU's layout, shared by the fast paths.
//!
//! ```text
//! [n/32][k/32] blocks of 1024 bytes; in a block, 32 output columns of 32 consecutive k each
//! ```
//! A strip, `[k/32]` blocks, makes 32 outputs. Strips are read in the order they lie, once per few rows.

use crate::tensor::MatrixView;

/// One strip times `A` rows: what a path implements.
pub(super) trait StripDot: Copy {
    /// `out[a][n] = Σ_k strip(n, k) · rows[a][k]`; every row is as long as the strip has k, and `sums[a]` is the
    /// sum of row `a`: for paths that read weights as numbers that are not negative.
    fn dot<const A: usize>(self, strip: &[i8], rows: [&[i8]; A], sums: [i32; A]) -> [[i32; 32]; A];
}

/// All strips times all rows; `out` is `[m, n]`. The shapes have been checked, `k` is not 0.
pub(super) fn drive(kernel: impl StripDot, tiles: &[i8], rows: MatrixView<'_, i8>, out: &mut [i32]) {
    let (k, m) = (rows.n_cols(), rows.n_rows());
    let sums: Vec<i32> = (0..m).map(|row| rows.row(row).iter().copied().map(i32::from).sum()).collect();
    for (s, strip) in tiles.chunks_exact(32 * k).enumerate() {
        let mut first = 0;
        while first < m {
            first += match m - first {
                4.. => dot_strip::<4>(kernel, strip, rows, &sums, first, s, out),
                2.. => dot_strip::<2>(kernel, strip, rows, &sums, first, s, out),
                _ => dot_strip::<1>(kernel, strip, rows, &sums, first, s, out),
            };
        }
    }
}

/// Strip `s` times the `A` rows from `first`; returns `A`.
fn dot_strip<const A: usize>(
    kernel: impl StripDot,
    strip: &[i8],
    rows: MatrixView<'_, i8>,
    sums: &[i32],
    first: usize,
    s: usize,
    out: &mut [i32],
) -> usize {
    let n = out.len() / rows.n_rows();
    let row = |a| rows.row(first + a);
    let products =
        kernel.dot(strip, std::array::from_fn::<_, A, _>(row), std::array::from_fn(|a| sums[first + a]));
    for (a, products) in products.iter().enumerate() {
        out[(first + a) * n + s * 32..][..32].copy_from_slice(products);
    }
    A
}
