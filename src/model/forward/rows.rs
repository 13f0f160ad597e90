//! Work on rows, dealt to the executor's threads, and the sums whose order is fixed.

use std::sync::{Mutex, PoisonError};

use crate::executor::{Executor, ExecutorError};
use crate::model::parts::RmsNorm;
use crate::tensor::MatrixView;

/// `data` as `[m, n_cols]`.
pub(super) fn view(data: &[f32], n_cols: usize) -> Result<MatrixView<'_, f32>, ExecutorError> {
    let n_rows = data.len() / n_cols.max(1);
    let shape =
        ExecutorError::Shape { what: "values of whole rows", got: data.len(), expected: n_rows * n_cols };
    MatrixView::new(data, n_rows, n_cols).ok_or(shape)
}

/// Gives `piece` every run of `len` values of `out` with its number, on the executor's threads.
///
/// One run is handed over on this thread, which is what decode does.
pub(super) fn for_each_chunk(
    executor: &mut dyn Executor,
    out: &mut [f32],
    len: usize,
    piece: &(dyn Fn(usize, &mut [f32]) + Sync),
) {
    if out.len() <= len {
        return piece(0, out);
    }
    // Each lock is taken once, by the one piece of that number: it is never waited for.
    let chunks: Vec<Mutex<&mut [f32]>> = out.chunks_mut(len.max(1)).map(Mutex::new).collect();
    executor.for_each(chunks.len(), &|i| {
        piece(i, &mut chunks[i].lock().unwrap_or_else(PoisonError::into_inner));
    });
}

/// `out = norm(x)`, both `[m, norm.weight.len()]`.
pub(super) fn rms_norm(executor: &mut dyn Executor, norm: &RmsNorm, x: &[f32], out: &mut [f32]) {
    let width = norm.weight.len();
    for_each_chunk(executor, out, width, &|row, out| {
        out.copy_from_slice(&x[row * width..(row + 1) * width]);
        norm_each(norm, out);
    });
}

/// Norms every run of `norm.weight.len()` values where it is.
pub(super) fn norm_each(norm: &RmsNorm, values: &mut [f32]) {
    for run in values.chunks_exact_mut(norm.weight.len()) {
        let mean = sum_of_squares(run) / run.len() as f64;
        let scale = (1.0 / (mean + f64::from(norm.eps)).sqrt()) as f32;
        run.iter_mut().zip(&norm.weight).for_each(|(x, weight)| *x = *x * scale * weight);
    }
}

/// `x += scale · branch`, both `[m, n_embd]`.
pub(super) fn add_scaled(
    executor: &mut dyn Executor,
    n_embd: usize,
    x: &mut [f32],
    scale: f32,
    branch: &[f32],
) {
    for_each_chunk(executor, x, n_embd, &|row, x| {
        x.iter_mut().zip(&branch[row * n_embd..]).for_each(|(x, branch)| *x += branch * scale);
    });
}

/// Adds `bias` to every run of `bias.len()` values.
pub(super) fn add_to_each(rows: &mut [f32], bias: &[f32]) {
    for row in rows.chunks_exact_mut(bias.len()) {
        row.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
    }
}

/// In eight interleaved sums, so that it can be computed eight at a time.
pub(super) fn sum_of_squares(values: &[f32]) -> f64 {
    let mut lanes = [0.0f64; 8];
    let (runs, tail) = values.as_chunks::<8>();
    for run in runs {
        lanes.iter_mut().zip(run).for_each(|(lane, x)| *lane += f64::from(*x) * f64::from(*x));
    }
    lanes.iter().sum::<f64>() + tail.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>()
}

/// `out += Σ_j weights[j] · rows[j]`, `j` ascending for every value; rows are `[weights.len(), n]` with `n` at least
/// `out.len()`, and what they have beyond that is left out.
#[inline(always)]
pub(super) fn add_weighted(out: &mut [f32], weights: &[f32], rows: &[f32]) {
    let n = (rows.len() / weights.len().max(1)).max(1);
    let (fours, rest) = weights.as_chunks::<4>();
    let (rows, rest_rows) = rows.split_at(fours.len() * 4 * n);
    // Four at a time, so that `out` is read and written a quarter as often; the order of the sums stays.
    for ([a, b, c, d], rows) in fours.iter().zip(rows.chunks_exact(4 * n)) {
        let (first, last) = rows.split_at(2 * n);
        let ((row_a, row_b), (row_c, row_d)) = (first.split_at(n), last.split_at(n));
        let rows = row_a.iter().zip(row_b).zip(row_c.iter().zip(row_d));
        for (out, ((w, x), (y, z))) in out.iter_mut().zip(rows) {
            *out = *out + a * w + b * x + c * y + d * z;
        }
    }
    for (weight, row) in rest.iter().zip(rest_rows.chunks_exact(n)) {
        out.iter_mut().zip(row).for_each(|(out, value)| *out += weight * value);
    }
}

/// [`add_weighted`] to two outputs, `[2, _]`, of the same rows: the same bits, and each row is read once.
#[inline(always)]
pub(super) fn add_weighted_to_both(out: &mut [f32], weights: [&[f32]; 2], rows: &[f32]) {
    let (first, second) = out.split_at_mut(out.len() / 2);
    let (width, n) = (first.len(), rows.len() / weights[0].len().max(1));
    let fours = weights[0].len() / 4 * 4;
    for j in (0..fours).step_by(4) {
        let rows = &rows[j * n..(j + 4) * n];
        let (a, b) = (&rows[..width], &rows[n..n + width]);
        let (c, d) = (&rows[2 * n..2 * n + width], &rows[3 * n..3 * n + width]);
        let ([e, f, g, h], [k, l, m, o]) = (four(weights[0], j), four(weights[1], j));
        let (first, second) = (&mut first[..width], &mut second[..width]);
        for i in 0..width {
            first[i] = first[i] + e * a[i] + f * b[i] + g * c[i] + h * d[i];
            second[i] = second[i] + k * a[i] + l * b[i] + m * c[i] + o * d[i];
        }
    }
    add_weighted(first, &weights[0][fours..], &rows[fours * n..]);
    add_weighted(second, &weights[1][fours..], &rows[fours * n..]);
}

#[inline(always)]
fn four(weights: &[f32], j: usize) -> [f32; 4] {
    [weights[j], weights[j + 1], weights[j + 2], weights[j + 3]]
}
