//! Causal attention in f32. A piece of work is a few rows and the query heads of one head of keys.

use std::ops::Range;

use super::ForwardError;
use super::dense::sigmoid;
use super::memory::KvCache;
use super::rope::Angles;
use super::rows::{add_to_each, add_weighted, dot, for_each_chunk, norm_each, view};
use crate::executor::{Executor, Product};
use crate::kernel::{Kernel, Loops, exp};
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

    let (group, kernel) = (n_head / n_head_kv, Kernel::detect());
    let row_tile = QUERIES.div_ceil(group).min(m);
    let n_tiles = m.div_ceil(row_tile);
    // [n_head_kv, n_tiles, row_tile, group, head_dim]: what one piece makes lies together.
    let mut tiles = vec![0.0; n_head_kv * n_tiles * row_tile * group * head_dim];
    for_each_chunk(executor, &mut tiles, row_tile * group * head_dim, &|piece, out| {
        let (head, tile) = (piece / n_tiles, piece % n_tiles);
        let rows = tile * row_tile..m.min((tile + 1) * row_tile);
        let first = |row: usize| (row * n_head + head * group) * head_dim;
        let queries =
            rows.clone().flat_map(|row| q[first(row)..first(row) + group * head_dim].chunks_exact(head_dim));
        let seen = rows.flat_map(|row| {
            let last = position + row + 1;
            let first = attention.window.map_or(0, |window| last.saturating_sub(window));
            std::iter::repeat_n(first..last, group)
        });
        let sinks = attention.sinks.as_ref().map(|sinks| &sinks[head * group..(head + 1) * group]);
        let queries: Vec<Query<'_>> = queries
            .zip(seen)
            .enumerate()
            .map(|(i, (query, seen))| Query { query, seen, sink: sinks.map(|sinks| sinks[i % group]) })
            .collect();
        let (past, out) = (cache.head(head), &mut out[..queries.len() * head_dim]);
        let (keys, values, scale) = (&past.keys, &past.values, attention.scale);
        kernel.widely(Attend { queries: &queries, keys, values, scale, out });
    });
    let mut heads = vec![0.0; m * q_width];
    for (i, out) in heads.chunks_exact_mut(group * head_dim).enumerate() {
        let (row, head) = (i / n_head_kv, i % n_head_kv);
        let at = (head * n_tiles * row_tile + row) * group * head_dim;
        out.copy_from_slice(&tiles[at..at + group * head_dim]);
    }
    heads.iter_mut().zip(&gates).for_each(|(out, gate)| *out *= sigmoid(*gate));
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

/// Queries that are answered together: their keys and values then come from memory once.
const QUERIES: usize = 32;

/// Positions that are dealt with at once: keys or values of so many stay in the first cache.
const POSITIONS: usize = 32;

/// A query, the positions that it sees, and one more score whose value is zero.
struct Query<'a> {
    query: &'a [f32],
    seen: Range<usize>,
    sink: Option<f32>,
}

/// What queries of the same keys and values attend to: `out` is `[queries.len(), _]`, see [`attend`].
struct Attend<'a> {
    queries: &'a [Query<'a>],
    keys: &'a [f32],
    values: &'a [f32],
    scale: f32,
    out: &'a mut [f32],
}

impl Loops for Attend<'_> {
    #[inline(always)]
    fn run(self) {
        let Attend { queries, keys, values, scale, out } = self;
        let Some(n_key) = queries.first().map(|query| query.query.len()) else { return };
        let width = out.len() / queries.len();
        let n_value = values.len() / (keys.len() / n_key).max(1);
        let first = queries.iter().map(|query| query.seen.start).min().unwrap_or(0);
        let last = queries.iter().map(|query| query.seen.end).max().unwrap_or(0);
        let n = last - first;
        let mut scores = vec![0f32; queries.len() * n];
        for block in (first..last).step_by(POSITIONS) {
            for (Query { query, seen, .. }, scores) in queries.iter().zip(scores.chunks_exact_mut(n)) {
                for j in block.max(seen.start)..(block + POSITIONS).min(seen.end) {
                    scores[j - first] = dot(query, &keys[j * n_key..(j + 1) * n_key]) * scale;
                }
            }
        }
        out.fill(0.0);
        let mut sums = Vec::with_capacity(queries.len());
        for (Query { seen, sink, .. }, scores) in queries.iter().zip(scores.chunks_exact_mut(n)) {
            sums.push(exponentials(&mut scores[seen.start - first..seen.end - first], *sink));
        }
        for block in (first..last).step_by(POSITIONS) {
            for ((Query { seen, .. }, scores), out) in
                queries.iter().zip(scores.chunks_exact(n)).zip(out.chunks_exact_mut(width))
            {
                let (start, end) = (block.max(seen.start), (block + POSITIONS).min(seen.end));
                if start < end {
                    let values = &values[start * n_value..end * n_value];
                    add_weighted(out, &scores[start - first..end - first], values);
                }
            }
        }
        for (sum, out) in sums.into_iter().zip(out.chunks_exact_mut(width)) {
            let scale = (1.0 / sum) as f32;
            out.iter_mut().for_each(|out| *out *= scale);
        }
    }
}

/// Turns scores into `exp(score − max)` and gives their sum, which has the sink's as well.
#[inline(always)]
fn exponentials(scores: &mut [f32], sink: Option<f32>) -> f64 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut largest = [f32::NEG_INFINITY; 16];
    let (runs, tail) = scores.as_chunks::<16>();
    for run in runs {
        largest.iter_mut().zip(run).for_each(|(max, score)| *max = larger(*max, *score));
    }
    let max = largest.iter().chain(tail).copied().chain(sink).fold(f32::NEG_INFINITY, larger);
    for score in scores.iter_mut() {
        *score = exp(*score - max);
    }
    // In eight interleaved sums, so that it can be computed eight at a time.
    let mut lanes = [0f64; 8];
    let (runs, tail) = scores.as_chunks::<8>();
    for run in runs {
        lanes.iter_mut().zip(run).for_each(|(lane, score)| *lane += f64::from(*score));
    }
    let sum = lanes.iter().sum::<f64>() + tail.iter().map(|score| f64::from(*score)).sum::<f64>();
    sum + sink.map_or(0.0, |sink| f64::from(exp(sink - max)))
}

/// `out = Σ_j softmax(scale · query·key_j) · value_j` over all positions, `j` ascending. A row of `values` may be longer
/// than `out`, which takes its beginning.
pub(super) fn attend(query: &[f32], keys: &[f32], values: &[f32], scale: f32, out: &mut [f32]) {
    let query = Query { query, seen: 0..keys.len() / query.len(), sink: None };
    Kernel::detect().widely(Attend { queries: &[query], keys, values, scale, out });
}
