//! Causal attention over latents: one short vector per position, from which every head has its key and value.

use super::ForwardError;
use super::attention::attend;
use super::memory::KvCache;
use super::rope::Angles;
use super::rows::{for_each_chunk, norm_each, rms_norm, view};
use crate::executor::{Executor, Product, WeightId};
use crate::model::parts::{LatentAttention, LatentHeads};
use crate::tensor::MatrixView;

/// Appends `rows`, `[m, n_embd]` from `position` on, to the cache, and puts what they attend to in `out`.
pub(super) fn run(
    executor: &mut dyn Executor,
    latent: &LatentAttention,
    cache: &mut KvCache,
    angles: &Angles,
    position: usize,
    rows: MatrixView<'_, f32>,
    out: &mut [f32],
) -> Result<(), ForwardError> {
    let (q, kv) = project(executor, latent, angles, rows)?;
    let heads = match &latent.kv_b {
        LatentHeads::Absorbed { k, v } => {
            cache.append(position, &kv, &[]);
            let queries = absorb(executor, latent, k, &q)?;
            attend_latents(executor, latent, v, cache, position, &queries)?
        }
        LatentHeads::Expanded(kv_b) => {
            let (keys, values) = expand(executor, latent, *kv_b, &kv)?;
            cache.append(position, &keys, &values);
            attend_heads(executor, latent, cache, position, &q)
        }
    };
    let width = latent.n_head * latent.n_value;
    executor.linear(view(&heads, width)?, &mut [Product { weight: latent.output, out }])?;
    Ok(())
}

/// Queries `[m, n_head, n_nope + n_rot]`, and `[m, n_rank + n_rot]`: the normed latent and the shared part of the
/// key. What turns has been turned.
fn project(
    executor: &mut dyn Executor,
    latent: &LatentAttention,
    angles: &Angles,
    rows: MatrixView<'_, f32>,
) -> Result<(Vec<f32>, Vec<f32>), ForwardError> {
    let &LatentAttention { n_head, n_rank, n_nope, n_rot, .. } = latent;
    let (m, q_width, kv_width) = (rows.n_rows(), n_head * (n_nope + n_rot), n_rank + n_rot);
    let (mut q, mut kv) = (vec![0.0; m * q_width], vec![0.0; m * kv_width]);
    match &latent.q_a {
        None => executor.linear(
            rows,
            &mut [Product { weight: latent.q, out: &mut q }, Product { weight: latent.kv_a, out: &mut kv }],
        )?,
        Some((q_a, norm)) => {
            let mut short = vec![0.0; m * norm.weight.len()];
            executor.linear(
                rows,
                &mut [
                    Product { weight: *q_a, out: &mut short },
                    Product { weight: latent.kv_a, out: &mut kv },
                ],
            )?;
            let mut normed = vec![0.0; short.len()];
            rms_norm(executor, norm, &short, &mut normed);
            let normed = view(&normed, norm.weight.len())?;
            executor.linear(normed, &mut [Product { weight: latent.q, out: &mut q }])?;
        }
    }
    for_each_chunk(executor, &mut q, q_width, &|row, heads| {
        for head in heads.chunks_exact_mut(n_nope + n_rot) {
            angles.rotate(row, &mut head[n_nope..], n_rot);
        }
    });
    for_each_chunk(executor, &mut kv, kv_width, &|row, kv| {
        let (short, shared) = kv.split_at_mut(n_rank);
        norm_each(&latent.kv_norm, short);
        angles.rotate(row, shared, n_rot);
    });
    Ok((q, kv))
}

/// Queries as the latents' space has them, head after head: `[n_head, m, n_rank + n_rot]`.
fn absorb(
    executor: &mut dyn Executor,
    latent: &LatentAttention,
    k: &[WeightId],
    q: &[f32],
) -> Result<Vec<f32>, ForwardError> {
    let &LatentAttention { n_head, n_rank, n_nope, n_rot, .. } = latent;
    let key_dim = n_nope + n_rot;
    let m = q.len() / (n_head * key_dim);
    let heads = || {
        let of_head = move |head| q.chunks_exact(key_dim).skip(head).step_by(n_head);
        (0..n_head).flat_map(of_head).map(|q| q.split_at(n_nope))
    };
    let still: Vec<f32> = heads().flat_map(|(still, _)| still).copied().collect();
    let mut short = vec![0.0; n_head * m * n_rank];
    executor.each(view(&still, n_nope)?, k, &mut short)?;
    let mut queries = Vec::with_capacity(n_head * m * (n_rank + n_rot));
    for (short, (_, turned)) in short.chunks_exact(n_rank).zip(heads()) {
        queries.extend_from_slice(short);
        queries.extend_from_slice(turned);
    }
    Ok(queries)
}

/// What [`absorb`]'s queries attend to, `[m, n_head, n_value]`. One key serves all heads, and the latent in it is the
/// value.
fn attend_latents(
    executor: &mut dyn Executor,
    latent: &LatentAttention,
    v: &[WeightId],
    cache: &KvCache,
    position: usize,
    queries: &[f32],
) -> Result<Vec<f32>, ForwardError> {
    let &LatentAttention { n_head, n_rank, n_rot, n_value, .. } = latent;
    let key_dim = n_rank + n_rot;
    let m = queries.len() / (n_head * key_dim);
    let past = cache.head(0).keys.rows();
    let mut found = vec![0.0; n_head * m * n_rank];
    for_each_chunk(executor, &mut found, n_rank, &|piece, out| {
        let seen = past.first((position + piece % m + 1) * key_dim);
        let query = &queries[piece * key_dim..(piece + 1) * key_dim];
        attend(query, seen, seen, latent.scale, out);
    });
    let mut values = vec![0.0; n_head * m * n_value];
    executor.each(view(&found, n_rank)?, v, &mut values)?;
    // Of [n_head, m] the rows in order of [m, n_head].
    let row_of = |row: usize| values.chunks_exact(n_value).skip(row).step_by(m);
    Ok((0..m).flat_map(row_of).flatten().copied().collect())
}

/// Keys `[m, n_head, n_nope + n_rot]` and values `[m, n_head, n_value]` of `[m, n_rank + n_rot]`.
fn expand(
    executor: &mut dyn Executor,
    latent: &LatentAttention,
    kv_b: WeightId,
    kv: &[f32],
) -> Result<(Vec<f32>, Vec<f32>), ForwardError> {
    let &LatentAttention { n_head, n_rank, n_nope, n_rot, n_value, .. } = latent;
    let rows = || kv.chunks_exact(n_rank + n_rot).map(|row| row.split_at(n_rank));
    let short: Vec<f32> = rows().flat_map(|(short, _)| short).copied().collect();
    let m = short.len() / n_rank;
    let width = n_head * (n_nope + n_value);
    let mut wide = vec![0.0; m * width];
    executor.linear(view(&short, n_rank)?, &mut [Product { weight: kv_b, out: &mut wide }])?;
    let mut keys = Vec::with_capacity(m * n_head * (n_nope + n_rot));
    let mut values = Vec::with_capacity(m * n_head * n_value);
    for (row, (_, shared)) in wide.chunks_exact(width).zip(rows()) {
        for (key, value) in row.chunks_exact(n_nope + n_value).map(|head| head.split_at(n_nope)) {
            keys.extend_from_slice(key);
            keys.extend_from_slice(shared);
            values.extend_from_slice(value);
        }
    }
    Ok((keys, values))
}

/// What queries `[m, n_head, n_nope + n_rot]` attend to, `[m, n_head, n_value]`, each head among its own keys.
fn attend_heads(
    executor: &mut dyn Executor,
    latent: &LatentAttention,
    cache: &KvCache,
    position: usize,
    q: &[f32],
) -> Vec<f32> {
    let &LatentAttention { n_head, n_nope, n_rot, n_value, .. } = latent;
    let key_dim = n_nope + n_rot;
    let mut heads = vec![0.0; q.len() / key_dim * n_value];
    for_each_chunk(executor, &mut heads, n_value, &|piece, out| {
        let (row, past) = (piece / n_head, cache.head(piece % n_head));
        let n_seen = position + row + 1;
        let keys = past.keys.rows().first(n_seen * key_dim);
        let values = past.values.rows().first(n_seen * n_value);
        attend(&q[piece * key_dim..(piece + 1) * key_dim], keys, values, latent.scale, out);
    });
    heads
}
