//! Causal attention in f32. A piece of work is a few rows and the query heads of one head of keys.

use std::ops::Range;

use super::ForwardError;
use super::dense::sigmoid;
use super::memory::{KvCache, Rows};
use super::rope::Angles;
use super::rows::{add_to_each, add_weighted, add_weighted_to_both, for_each_chunk, norm_each, view};
use crate::executor::{Executor, Product};
use crate::kernel::{Activations, Form, Kernel, Loops, exp};
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

    let group = n_head / n_head_kv;
    let row_tile = QUERIES.div_ceil(group).min(m);
    let n_tiles = m.div_ceil(row_tile);
    // [n_head_kv, n_tiles, row_tile, group, head_dim]: what one piece makes lies together.
    let mut tiles = vec![0.0; n_head_kv * n_tiles * row_tile * group * head_dim];
    for_each_chunk(executor, &mut tiles, row_tile * group * head_dim, &|piece, out| {
        let (head, tile) = (piece / n_tiles, piece % n_tiles);
        let rows = tile * row_tile..m.min((tile + 1) * row_tile);
        let width = group * head_dim;
        let mut queries = Vec::with_capacity(rows.len() * width);
        let mut seen = Vec::with_capacity(rows.len() * group);
        for row in rows {
            queries.extend_from_slice(&q[row * q_width + head * width..][..width]);
            let last = position + row + 1;
            let first = attention.window.map_or(0, |window| last.saturating_sub(window));
            seen.extend((head * group..(head + 1) * group).map(|head| Seen {
                positions: first..last,
                sink: attention.sinks.as_ref().map(|sinks| sinks[head]),
            }));
        }
        let past = cache.head(head);
        let past = Past { keys: past.keys.rows(), values: past.values.rows() };
        let n = queries.len();
        attend_all(&queries, &seen, past, attention.scale, &mut out[..n]);
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

/// Which positions a query sees, and one more score whose value is zero.
struct Seen {
    positions: Range<usize>,
    sink: Option<f32>,
}

/// What `queries`, `[seen.len(), key_dim]`, of the same keys and values attend to: `out` is `[seen.len(), _]`.
fn attend_all(queries: &[f32], seen: &[Seen], past: Past<'_>, scale: f32, out: &mut [f32]) {
    let key_dim = queries.len() / seen.len().max(1);
    let first = seen.iter().map(|seen| seen.positions.start).min().unwrap_or(0);
    let last = seen.iter().map(|seen| seen.positions.end).max().unwrap_or(0);
    let n_keys = past.keys.len() / key_dim.max(1);
    let rows = MatrixView::new(queries, seen.len(), key_dim);
    let (Some(keys), Some(rows)) = (past.keys.matrix(key_dim), rows) else { return };
    let kernel = Kernel::detect();
    let mut acts = Activations::default();
    acts.quantize(kernel, Form::F32, rows);
    let every: Vec<u32> = (0..seen.len() as u32).collect();
    let mut scores = vec![0.0; seen.len() * (last - first)];
    let multiplied = kernel.multiply(keys, first..last, &acts, &every, &mut scores);
    debug_assert!(multiplied.is_ok(), "floats need no decoding");
    kernel.widely(Combine { seen, first, values: past.values, n_keys, scale, scores: &mut scores, out });
}

/// Keys and values of every position so far; a row of values may be longer than what is made of it.
#[derive(Clone, Copy)]
struct Past<'a> {
    keys: Rows<'a>,
    values: Rows<'a>,
}

/// From the scores of positions `first` and on, `[seen.len(), _]`, to sums of values.
struct Combine<'a> {
    seen: &'a [Seen],
    first: usize,
    values: Rows<'a>,
    n_keys: usize,
    scale: f32,
    scores: &'a mut [f32],
    out: &'a mut [f32],
}

impl Loops for Combine<'_> {
    #[inline(always)]
    fn run(self) {
        let Combine { seen, first, values, n_keys, scale, scores, out } = self;
        let (n, width, n_value) =
            (scores.len() / seen.len(), out.len() / seen.len(), values.len() / n_keys.max(1));
        let mut sums = Vec::with_capacity(seen.len());
        for (Seen { positions, sink }, scores) in seen.iter().zip(scores.chunks_exact_mut(n)) {
            sums.push(exponentials(
                &mut scores[positions.start - first..positions.end - first],
                scale,
                *sink,
            ));
        }
        out.fill(0.0);
        let mut scratch = vec![0.0; POSITIONS * n_value];
        for block in (first..first + n).step_by(POSITIONS) {
            let end = (block + POSITIONS).min(first + n);
            let values = values.widened(block * n_value..end * n_value, &mut scratch);
            let mut queries = seen.chunks(TOGETHER).zip(scores.chunks(TOGETHER * n));
            for (out, (seen, scores)) in out.chunks_mut(TOGETHER * width).zip(&mut queries) {
                add_block(out, seen, scores, first, block..end, values);
            }
        }
        for (sum, out) in sums.into_iter().zip(out.chunks_exact_mut(width)) {
            let scale = (1.0 / sum) as f32;
            out.iter_mut().for_each(|out| *out *= scale);
        }
    }
}

/// Queries whose sums of values grow side by side, so that a value is read once for all of them.
const TOGETHER: usize = 2;

/// Adds the weighted values of the positions `block`, `[block.len(), _]`, to what some queries attend to: of each
/// those that it sees, in order. `scores` are `[seen.len(), _]`, of the positions `first` and on.
#[inline(always)]
fn add_block(
    out: &mut [f32],
    seen: &[Seen],
    scores: &[f32],
    first: usize,
    block: Range<usize>,
    values: &[f32],
) {
    let (n, width) = (scores.len() / seen.len(), out.len() / seen.len());
    let n_value = values.len() / block.len();
    let clamp = |at: usize| at.clamp(block.start, block.end);
    // What all of them see, if that is anything; what single ones see comes before and after it.
    let start = seen.iter().map(|seen| clamp(seen.positions.start)).max().unwrap_or(block.start);
    let end = seen.iter().map(|seen| clamp(seen.positions.end)).min().unwrap_or(block.end).max(start);
    let all = if seen.len() == TOGETHER { start..end } else { start..start };
    // Loops, not closures: a closure that is handed on is not compiled for this CPU.
    for before in [true, false] {
        for (i, seen) in seen.iter().enumerate() {
            let Range { start, end } = seen.positions;
            let (start, end) = match before {
                true => (clamp(start), clamp(end).min(all.start)),
                false => (clamp(start).max(all.end), clamp(end)),
            };
            if start < end {
                let weights = &scores[i * n..(i + 1) * n][start - first..end - first];
                let values = &values[(start - block.start) * n_value..(end - block.start) * n_value];
                add_weighted(&mut out[i * width..(i + 1) * width], weights, values);
            }
        }
        if before && !all.is_empty() {
            let weights = |i: usize| &scores[i * n..(i + 1) * n][all.start - first..all.end - first];
            let values = &values[(all.start - block.start) * n_value..(all.end - block.start) * n_value];
            add_weighted_to_both(out, [weights(0), weights(1)], values);
        }
    }
}

/// Turns products into `exp(scale · product − max)` and gives their sum, which has the sink's as well.
#[inline(always)]
fn exponentials(scores: &mut [f32], scale: f32, sink: Option<f32>) -> f64 {
    for score in scores.iter_mut() {
        *score *= scale;
    }
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
pub(super) fn attend(query: &[f32], keys: Rows<'_>, values: Rows<'_>, scale: f32, out: &mut [f32]) {
    let seen = Seen { positions: 0..keys.len() / query.len(), sink: None };
    attend_all(query, &[seen], Past { keys, values }, scale, out);
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::{Past, Seen, attend_all};
    use crate::model::forward::memory::{CacheType, Head, Rows};

    const DIM: usize = 24;
    const POSITIONS: usize = 75;

    fn numbers(n: usize, seed: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 7919 + seed * 104_729) % 1999) as f32 / 999.5 - 1.0).collect()
    }

    fn head(cache: CacheType, keys: &[f32], values: &[f32]) -> Head {
        let mut head = Head::new(cache);
        head.keys.extend(keys);
        head.values.extend(values);
        head
    }

    fn attended(head: &Head) -> Vec<f32> {
        let n = |positions| Seen { positions, sink: Some(0.3) };
        let seen = [n(0..POSITIONS), n(0..1), n(30..POSITIONS - 1), n(31..40)];
        let mut out = vec![f32::NAN; seen.len() * DIM];
        let past = Past { keys: head.keys.rows(), values: head.values.rows() };
        attend_all(&numbers(seen.len() * DIM, 3), &seen, past, 0.2, &mut out);
        out
    }

    #[test]
    fn a_cache_in_half_precision_is_one_of_rounded_numbers() {
        let (keys, values) = (numbers(POSITIONS * DIM, 1), numbers(POSITIONS * DIM, 2));
        let rounded =
            |values: &[f32]| -> Vec<f32> { values.iter().map(|v| f16::from_f32(*v).to_f32()).collect() };
        let exact = attended(&head(CacheType::F32, &rounded(&keys), &rounded(&values)));
        let half = attended(&head(CacheType::F16, &keys, &values));
        assert_eq!(
            half.iter().map(|v| v.to_bits()).collect::<Vec<_>>(),
            exact.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
        );
        let whole = attended(&head(CacheType::F32, &keys, &values));
        assert_ne!(half, whole);
        assert!(half.iter().zip(&whole).all(|(a, b)| (a - b).abs() < 1e-3));
    }

    #[test]
    fn a_query_gets_the_same_bits_alone_and_beside_others() {
        let (keys, values) = (numbers(POSITIONS * DIM, 1), numbers(POSITIONS * DIM, 2));
        for cache in [CacheType::F32, CacheType::F16] {
            let head = head(cache, &keys, &values);
            let past = Past { keys: head.keys.rows(), values: head.values.rows() };
            // Causal ones, windows, and one that sees what its neighbour does not.
            let ranges = [0..40, 0..41, 0..42, 3..43, 4..75, 31..33, 32..64, 0..1, 70..75];
            let seen = |range: &std::ops::Range<usize>| Seen { positions: range.clone(), sink: None };
            let queries = numbers(ranges.len() * DIM, 5);
            let mut together = vec![f32::NAN; queries.len()];
            attend_all(&queries, &ranges.each_ref().map(seen), past, 0.3, &mut together);
            for ((range, query), expected) in ranges.iter().zip(queries.chunks(DIM)).zip(together.chunks(DIM))
            {
                let mut alone = [f32::NAN; DIM];
                attend_all(query, &[seen(range)], past, 0.3, &mut alone);
                assert!(alone.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits()), "{range:?}");
            }
        }
    }

    #[test]
    fn what_half_precision_cannot_hold_stays_finite() {
        let head = head(CacheType::F16, &[1e9, -1e9, 1e-9], &[]);
        let Rows::F16(bits) = head.keys.rows() else { panic!("another type") };
        let kept: Vec<f32> = bits.iter().map(|bits| f16::from_bits(*bits).to_f32()).collect();
        assert_eq!(kept, [65504.0, -65504.0, 0.0]);
    }
}
