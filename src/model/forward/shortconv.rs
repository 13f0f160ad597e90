//! A gated short convolution: every channel sees itself at the last few positions.

use super::ForwardError;
use super::memory::Tail;
use super::rows::{for_each_chunk, view};
use crate::executor::{Executor, Product};
use crate::model::parts::ShortConv;
use crate::tensor::MatrixView;

/// Convolves `rows`, `[m, n_embd]` after what `tail` holds, into `out`, and leaves the new tail in `tail.next`.
pub(super) fn run(
    executor: &mut dyn Executor,
    conv: &ShortConv,
    tail: &mut Tail,
    rows: MatrixView<'_, f32>,
    out: &mut [f32],
) -> Result<(), ForwardError> {
    let (m, n_embd) = (rows.n_rows(), rows.n_cols());
    let mut thirds = vec![0.0; m * 3 * n_embd];
    executor.linear(rows, &mut [Product { weight: conv.in_proj, out: &mut thirds }])?;

    // What is convolved, `[n_taps − 1 + m, n_embd]`: the past, then this call's positions.
    let mut line = tail.past.clone();
    for row in thirds.chunks_exact(3 * n_embd) {
        let (b, u) = (&row[..n_embd], &row[2 * n_embd..]);
        line.extend(b.iter().zip(u).map(|(b, u)| b * u));
    }
    let mut mixed = vec![0.0; m * n_embd];
    for_each_chunk(executor, &mut mixed, n_embd, &|row, mixed| {
        let c = &thirds[(3 * row + 1) * n_embd..(3 * row + 2) * n_embd];
        let taps = conv.taps.chunks_exact(conv.n_taps);
        for (channel, ((mixed, taps), c)) in mixed.iter_mut().zip(taps).zip(c).enumerate() {
            let values = line[row * n_embd + channel..].iter().step_by(n_embd);
            *mixed = c * taps.iter().zip(values).map(|(tap, value)| tap * value).sum::<f32>();
        }
    });
    tail.next.copy_from_slice(&line[m * n_embd..]);
    if let Some(noted) = &mut tail.line {
        *noted = line;
    }
    executor.linear(view(&mixed, n_embd)?, &mut [Product { weight: conv.out_proj, out }])?;
    Ok(())
}
