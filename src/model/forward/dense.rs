//! A feed-forward network that every row goes through: a dense layer's, or a shared expert.

use super::ForwardError;
use super::rows::{for_each_chunk, view};
use crate::executor::{Executor, Product};
use crate::model::parts::Dense;
use crate::tensor::MatrixView;

/// `out = down(silu(gate·x) ⊙ up·x)`; `rows` and `out` are `[m, n_embd]`.
pub(super) fn run(
    executor: &mut dyn Executor,
    dense: &Dense,
    rows: MatrixView<'_, f32>,
    out: &mut [f32],
) -> Result<(), ForwardError> {
    let n_ff = dense.n_ff;
    let mut inner = vec![0.0; rows.n_rows() * n_ff];
    let mut up = inner.clone();
    executor.linear(
        rows,
        &mut [Product { weight: dense.gate, out: &mut inner }, Product { weight: dense.up, out: &mut up }],
    )?;
    for_each_chunk(executor, &mut inner, n_ff, &|row, inner| {
        inner.iter_mut().zip(&up[row * n_ff..]).for_each(|(gate, up)| *gate = silu(*gate) * up);
    });
    executor.linear(view(&inner, n_ff)?, &mut [Product { weight: dense.down, out }])?;
    Ok(())
}

fn silu(z: f32) -> f32 {
    z / (1.0 + (-z).exp())
}
