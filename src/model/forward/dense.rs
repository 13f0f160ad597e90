//! A feed-forward network that every row goes through: a dense layer's, or a shared expert.

use super::ForwardError;
use super::rows::{for_each_chunk, view};
use crate::executor::{Executor, Product};
use crate::kernel::{Kernel, Loops, exp};
use crate::model::parts::{Dense, Shared};
use crate::tensor::MatrixView;

/// The shared expert's output for `rows`, both `[m, n_embd]`; times the sigmoid of its gate where there is one.
pub(super) fn run_shared(
    executor: &mut dyn Executor,
    shared: &Shared,
    rows: MatrixView<'_, f32>,
    out: &mut [f32],
) -> Result<(), ForwardError> {
    let Some(weight) = shared.gate else { return run(executor, &shared.ffn, rows, None, out) };
    let mut gates = vec![0.0; rows.n_rows()];
    run(executor, &shared.ffn, rows, Some(Product { weight, out: &mut gates }), out)?;
    for (row, gate) in out.chunks_exact_mut(rows.n_cols()).zip(gates) {
        let share = sigmoid(gate);
        row.iter_mut().for_each(|out| *out *= share);
    }
    Ok(())
}

/// `out = down(silu(gate·x) ⊙ up·x)`; `rows` and `out` are `[m, n_embd]`. The first dispatch may take one more
/// product of the same rows along.
pub(super) fn run(
    executor: &mut dyn Executor,
    dense: &Dense,
    rows: MatrixView<'_, f32>,
    beside: Option<Product<'_>>,
    out: &mut [f32],
) -> Result<(), ForwardError> {
    let n_ff = dense.n_ff;
    let mut inner = vec![0.0; rows.n_rows() * n_ff];
    let mut up = inner.clone();
    let gate_and_up =
        [Product { weight: dense.gate, out: &mut inner }, Product { weight: dense.up, out: &mut up }];
    let mut products: Vec<Product<'_>> = gate_and_up.into_iter().chain(beside).collect();
    executor.linear(rows, &mut products)?;
    let kernel = Kernel::detect();
    for_each_chunk(executor, &mut inner, n_ff, &|row, inner| {
        kernel.widely(SwiGlu { gate: inner, up: &up[row * n_ff..] });
    });
    executor.linear(view(&inner, n_ff)?, &mut [Product { weight: dense.down, out }])?;
    Ok(())
}

/// `gate = silu(gate) ⊙ up`.
struct SwiGlu<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
}

impl Loops for SwiGlu<'_> {
    #[inline(always)]
    fn run(self) {
        for (gate, up) in self.gate.iter_mut().zip(self.up) {
            *gate *= sigmoid(*gate) * up;
        }
    }
}

#[inline(always)]
pub(super) fn sigmoid(z: f32) -> f32 {
    1.0 / (1.0 + exp(-z))
}
