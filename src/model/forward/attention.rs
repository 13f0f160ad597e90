//! Causal attention in f32, one piece of work per row and query head.

use super::ForwardError;
use super::dense::sigmoid;
use super::memory::KvCache;
use super::rope::Angles;
use super::rows::{add_to_each, add_weighted, dot, for_each_chunk, norm_each, view};
use crate::executor::{Executor, Product};
use crate::model::parts::{Attention, RmsNorm};
use crate::tensor::MatrixView;

/// Appends `rows`, `[m, n_embd]` from `position` on, to the cache, and puts what they attend to in `out`.
pub(super) fn run(
    executor: &mut dyn Executor,
    attention: &Attention,
    cache: &mut KvCache,
    angles: &Angles,
    position: usize,
    rows: MatrixView<'_, f32>,
    out: &mut [f32],
) -> Result<(), ForwardError> {
    let &Attention { n_head, n_head_kv, head_dim, .. } = attention;
    let (m, q_width, kv_width) = (rows.n_rows(), n_head * head_dim, n_head_kv * head_dim);
    let q_rows = if attention.gated { 2 * q_width } else { q_width };
    let (mut q, mut k, mut v) = (vec![0.0; m * q_rows], vec![0.0; m * kv_width], vec![0.0; m * kv_width]);
    executor.linear(
        rows,
        &mut [
            Product { weight: attention.q, out: &mut q },
            Product { weight: attention.k, out: &mut k },
            Product { weight: attention.v, out: &mut v },
        ],
    )?;
    let gates = if attention.gated { take_gates(&mut q, head_dim) } else { Vec::new() };
    if let Some([q_bias, k_bias, v_bias]) = &attention.biases {
        for (rows, bias) in [(&mut q, q_bias), (&mut k, k_bias), (&mut v, v_bias)] {
            add_to_each(rows, bias);
        }
    }
    norm_and_rotate(executor, attention.q_norm.as_ref(), angles, head_dim, q_width, &mut q);
    norm_and_rotate(executor, attention.k_norm.as_ref(), angles, head_dim, kv_width, &mut k);
    cache.append(position, &k, &v);

    let mut heads = vec![0.0; m * q_width];
    let group = n_head / n_head_kv;
    for_each_chunk(executor, &mut heads, head_dim, &|piece, out| {
        let (row, head) = (piece / n_head, piece % n_head);
        let query = &q[piece * head_dim..(piece + 1) * head_dim];
        let last = position + row + 1;
        let first = attention.window.map_or(0, |window| last.saturating_sub(window));
        let seen = first * head_dim..last * head_dim;
        let sink = attention.sinks.as_ref().map(|sinks| sinks[head]);
        let past = cache.head(head / group);
        attend(query, &past.keys[seen.clone()], &past.values[seen], attention.scale, sink, out);
        let gates = gates.chunks_exact(head_dim).nth(piece).unwrap_or_default();
        out.iter_mut().zip(gates).for_each(|(out, gate)| *out *= sigmoid(*gate));
    });
    executor.linear(view(&heads, q_width)?, &mut [Product { weight: attention.output, out }])?;
    if let Some(bias) = &attention.output_bias {
        add_to_each(out, bias);
    }
    Ok(())
}

/// Leaves the queries of rows that hold a query and a gate for each head, and gives the gates.
fn take_gates(q: &mut Vec<f32>, head_dim: usize) -> Vec<f32> {
    let both = std::mem::take(q);
    let mut gates = Vec::with_capacity(both.len() / 2);
    for head in both.chunks_exact(2 * head_dim) {
        q.extend_from_slice(&head[..head_dim]);
        gates.extend_from_slice(&head[head_dim..]);
    }
    gates
}

fn norm_and_rotate(
    executor: &mut dyn Executor,
    norm: Option<&RmsNorm>,
    angles: &Angles,
    head_dim: usize,
    width: usize,
    rows: &mut [f32],
) {
    for_each_chunk(executor, rows, width, &|row, heads| {
        if let Some(norm) = norm {
            norm_each(norm, heads);
        }
        angles.rotate(row, heads, head_dim);
    });
}

/// `out = Σ_j softmax(scale · query·key_j) · value_j` over the positions seen, `j` ascending. A sink is one more
/// score, whose value is zero. A row of `values` may be longer than `out`, which takes its beginning.
pub(super) fn attend(
    query: &[f32],
    keys: &[f32],
    values: &[f32],
    scale: f32,
    sink: Option<f32>,
    out: &mut [f32],
) {
    let keys = keys.chunks_exact(query.len());
    let mut scores: Vec<f32> = keys.map(|key| dot(query, key) * scale).collect();
    let max = scores.iter().copied().chain(sink).fold(f32::NEG_INFINITY, f32::max);
    let mut sum = sink.map_or(0.0, |sink| f64::from((sink - max).exp()));
    for score in &mut scores {
        *score = (*score - max).exp();
        sum += f64::from(*score);
    }
    out.fill(0.0);
    add_weighted(out, &scores, values);
    let scale = (1.0 / sum) as f32;
    out.iter_mut().for_each(|out| *out *= scale);
}
