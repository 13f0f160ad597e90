//! A gated delta net: a state for each value head that walks through the positions, one piece of work per head.

use std::sync::{Mutex, PoisonError};

use super::ForwardError;
use super::dense::sigmoid;
use super::rows::{add_weighted, for_each_chunk, norm_each, sum_of_squares, view};
use crate::executor::{Executor, Product};
use crate::model::parts::{DeltaNet, KeyHeads, Pair};
use crate::tensor::MatrixView;

/// What a delta net has kept of the positions before.
#[derive(Clone, Debug)]
pub(super) struct NetMemory {
    past: Kept,
    /// The same after the call that is under way, which may still fail; else what was before the last call.
    next: Kept,
    /// What the last call walked through, where calls note it.
    walked: Option<Walked>,
}

/// What decides how a call changes the memory: a small part of the states that it would take to copy these.
#[derive(Clone, Debug, Default)]
struct Walked {
    /// `[m, n_convolved]`, before the convolution.
    mixed: Vec<f32>,
    /// Beta and alpha, `[m, n_value_heads]`.
    rates: [Vec<f32>; 2],
}

#[derive(Clone, Debug)]
struct Kept {
    /// What was convolved last, `[n_taps − 1, n_convolved]`; zeros before the start.
    tail: Vec<f32>,
    /// `[n_value_heads, head_dim, head_dim]`: a row for each value of a key.
    states: Vec<f32>,
}

impl NetMemory {
    pub fn new(net: &DeltaNet) -> NetMemory {
        let [tail, states] = net.n_remembered().map(|len| vec![0.0; len]);
        let past = Kept { tail, states };
        NetMemory { next: past.clone(), past, walked: None }
    }

    pub fn fits(&self, net: &DeltaNet) -> bool {
        [self.past.tail.len(), self.past.states.len()] == net.n_remembered()
    }

    pub fn commit(&mut self) {
        std::mem::swap(&mut self.past, &mut self.next);
    }

    /// The tail, then the states.
    pub fn copied(&self) -> Vec<f32> {
        [self.past.tail.as_slice(), &self.past.states].concat()
    }

    /// Takes a copy back.
    pub fn restore(&mut self, copy: &[f32]) {
        let (tail, states) = copy.split_at(self.past.tail.len());
        self.past.tail.copy_from_slice(tail);
        self.past.states.copy_from_slice(states);
    }

    pub fn note(&mut self, on: bool) {
        self.walked = on.then(Walked::default);
    }

    pub fn clear(&mut self) {
        self.past.tail.fill(0.0);
        self.past.states.fill(0.0);
    }
}

impl DeltaNet {
    /// Values of the tail and of the states.
    pub fn n_remembered(&self) -> [usize; 2] {
        [(self.n_taps - 1) * self.n_convolved(), self.n_value_heads * self.head_dim * self.head_dim]
    }

    fn n_convolved(&self) -> usize {
        (2 * self.n_key_heads + self.n_value_heads) * self.head_dim
    }

    fn key_head(&self, value_head: usize) -> usize {
        match self.key_heads {
            KeyHeads::InTurn => value_head % self.n_key_heads,
            KeyHeads::InRuns => value_head / (self.n_value_heads / self.n_key_heads),
        }
    }
}

/// Runs `rows`, `[m, n_embd]` after what `memory` holds, into `out`, and leaves the new memory in its `next`.
pub(super) fn run(
    executor: &mut dyn Executor,
    net: &DeltaNet,
    memory: &mut NetMemory,
    rows: MatrixView<'_, f32>,
    out: &mut [f32],
) -> Result<(), ForwardError> {
    let &DeltaNet { n_key_heads, n_value_heads, head_dim, .. } = net;
    let (m, inner, group) = (rows.n_rows(), n_value_heads * head_dim, n_value_heads / n_key_heads);
    let mut inputs = Outputs::new(&net.inputs, m, [net.n_convolved(), inner]);
    let mut rates = Outputs::new(&net.rates, m, [n_value_heads; 2]);
    let mut products: Vec<Product<'_>> = inputs.products().chain(rates.products()).collect();
    executor.linear(rows, &mut products)?;
    let [mixed, z] = inputs.apart(n_key_heads, &[head_dim, head_dim, group * head_dim], group * head_dim);
    let [beta, alpha] = rates.apart(n_key_heads, &[group], group);

    let heads = convolve(executor, net, memory, &mixed);
    let read = recur(executor, net, memory, &heads, [&beta, &alpha]);
    if let Some(walked) = &mut memory.walked {
        *walked = Walked { mixed, rates: [beta, alpha] };
    }
    let mut gated = vec![0.0; m * inner];
    for_each_chunk(executor, &mut gated, head_dim, &|piece, gated| {
        let (row, head) = (piece / n_value_heads, piece % n_value_heads);
        gated.copy_from_slice(&read[(head * m + row) * head_dim..][..head_dim]);
        norm_each(&net.norm, gated);
        gated.iter_mut().zip(&z[piece * head_dim..]).for_each(|(out, z)| *out *= z * sigmoid(*z));
    });
    executor.linear(view(&gated, inner)?, &mut [Product { weight: net.output, out }])?;
    Ok(())
}

/// As if the last call, which was noted, had had its first `n` rows only: they are walked through again from what was
/// before it. No product is computed again.
pub(super) fn keep_first(executor: &mut dyn Executor, net: &DeltaNet, memory: &mut NetMemory, n: usize) {
    let Some(Walked { mixed, rates: [beta, alpha] }) = memory.walked.take() else { return };
    memory.commit();
    if n > 0 {
        let heads = convolve(executor, net, memory, &mixed[..n * net.n_convolved()]);
        let rates = n * net.n_value_heads;
        recur(executor, net, memory, &heads, [&beta[..rates], &alpha[..rates]]);
        memory.commit();
    }
}

/// The convolution over what the tail and this call hold, and its `silu`: `[m, 2 · n_key_heads + n_value_heads,
/// head_dim]`, of which queries and keys have length 1, and queries are divided by `√head_dim`.
fn convolve(executor: &mut dyn Executor, net: &DeltaNet, memory: &mut NetMemory, mixed: &[f32]) -> Vec<f32> {
    let &DeltaNet { n_key_heads, head_dim, .. } = net;
    let width = net.n_convolved();
    // `[n_taps − 1 + m, width]`: the past, then this call's positions.
    let line = [&memory.past.tail, mixed].concat();
    memory.next.tail.copy_from_slice(&line[mixed.len()..]);
    let mut heads = vec![0.0; mixed.len()];
    for_each_chunk(executor, &mut heads, head_dim, &|piece, values| {
        let first = piece * head_dim;
        let (head, channel) = (first % width / head_dim, first % width);
        for tap in 0..net.n_taps {
            let weights = &net.taps[tap * width + channel..][..head_dim];
            let seen = &line[tap * width + first..][..head_dim];
            values.iter_mut().zip(weights.iter().zip(seen)).for_each(|(sum, (w, x))| *sum += w * x);
        }
        values.iter_mut().for_each(|value| *value *= sigmoid(*value));
        if head < 2 * n_key_heads {
            let length = sum_of_squares(values).sqrt().max(net.least_length.into());
            let root = if head < n_key_heads { (head_dim as f64).sqrt() } else { 1.0 };
            let scale = (1.0 / (length * root)) as f32;
            values.iter_mut().for_each(|value| *value *= scale);
        }
    });
    heads
}

/// Walks every value head's state through the positions of `heads`; gives what it reads there,
/// `[n_value_heads, m, head_dim]`. The rates, beta and alpha, are `[m, n_value_heads]`.
fn recur(
    executor: &mut dyn Executor,
    net: &DeltaNet,
    memory: &mut NetMemory,
    heads: &[f32],
    [beta, alpha]: [&[f32]; 2],
) -> Vec<f32> {
    let &DeltaNet { n_key_heads, n_value_heads, head_dim, .. } = net;
    let (size, m) = (head_dim * head_dim, heads.len() / net.n_convolved());
    let mut read = vec![0.0; m * n_value_heads * head_dim];
    let NetMemory { past, next, .. } = memory;
    let states = next.states.chunks_exact_mut(size).zip(read.chunks_exact_mut(m * head_dim));
    // Each lock is taken once, by the one piece of that number: it is never waited for.
    let states: Vec<Mutex<(&mut [f32], &mut [f32])>> = states.map(Mutex::new).collect();
    executor.for_each(n_value_heads, &|h| {
        let mut slot = states[h].lock().unwrap_or_else(PoisonError::into_inner);
        let (state, read) = &mut *slot;
        state.copy_from_slice(&past.states[h * size..(h + 1) * size]);
        let key = net.key_head(h);
        let mut delta = vec![0.0; head_dim];
        let rows = heads.chunks_exact(net.n_convolved()).zip(read.chunks_exact_mut(head_dim));
        for (row, (heads, read)) in rows.enumerate() {
            let head = |n: usize| &heads[n * head_dim..(n + 1) * head_dim];
            let rate = row * n_value_heads + h;
            let step = Step {
                query: head(key),
                key: head(n_key_heads + key),
                value: head(2 * n_key_heads + h),
                kept: (net.decay[h] * softplus(alpha[rate] + net.time_bias[h])).exp(),
                learnt: sigmoid(beta[rate]),
            };
            step.run(state, &mut delta, read);
        }
    });
    drop(states);
    read
}

/// One position of one head.
struct Step<'a> {
    query: &'a [f32],
    key: &'a [f32],
    value: &'a [f32],
    /// What part of the state stays.
    kept: f32,
    /// What part of the difference between `value` and what the state has for `key` is taken over.
    learnt: f32,
}

impl Step<'_> {
    /// Changes `state`, `[key, value]`, and fills `read`; `delta` is room for a value. Every sum runs over the
    /// rows in order, every loop over contiguous values.
    fn run(&self, state: &mut [f32], delta: &mut [f32], read: &mut [f32]) {
        delta.fill(0.0);
        add_weighted(delta, self.key, state);
        for (delta, value) in delta.iter_mut().zip(self.value) {
            *delta = self.learnt * (value - self.kept * *delta);
        }
        for (row, key) in state.chunks_exact_mut(delta.len()).zip(self.key) {
            row.iter_mut().zip(&*delta).for_each(|(s, delta)| *s = self.kept * *s + key * delta);
        }
        read.fill(0.0);
        add_weighted(read, self.query, state);
    }
}

/// `ln(1 + e^x)`; beyond 20 that is `x` in f32.
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// What the products of a pair put out.
struct Outputs<'a> {
    pair: &'a Pair,
    /// `[m, width]` of each matrix: two, or one with all.
    data: [Vec<f32>; 2],
}

impl<'a> Outputs<'a> {
    fn new(pair: &'a Pair, m: usize, widths: [usize; 2]) -> Outputs<'a> {
        let widths = match pair {
            Pair::Apart(_) => widths,
            Pair::PerKeyHead(_) => [widths[0] + widths[1], 0],
        };
        Outputs { pair, data: widths.map(|width| vec![0.0; m * width]) }
    }

    fn products(&mut self) -> impl Iterator<Item = Product<'_>> {
        let weights = match *self.pair {
            Pair::Apart([first, second]) => [Some(first), Some(second)],
            Pair::PerKeyHead(both) => [Some(both), None],
        };
        let products = weights.into_iter().zip(&mut self.data);
        products.filter_map(|(weight, out)| Some(Product { weight: weight?, out }))
    }

    /// The two outputs by themselves. Where they came together, a key head has `first` values of the parts that
    /// make up the first, then `second` values; in the first, the parts of all key heads follow each other.
    fn apart(self, n_key_heads: usize, first: &[usize], second: usize) -> [Vec<f32>; 2] {
        if let Pair::Apart(_) = self.pair {
            return self.data;
        }
        let [both, _] = self.data;
        let widths = [first, &[second]].concat();
        let per_head: usize = widths.iter().sum();
        let [mut to_first, mut to_second] = [Vec::new(), Vec::new()];
        for row in both.chunks_exact(n_key_heads * per_head) {
            let mut start = 0;
            for (part, width) in widths.iter().enumerate() {
                let to = if part < first.len() { &mut to_first } else { &mut to_second };
                row.chunks_exact(per_head).for_each(|head| to.extend_from_slice(&head[start..start + width]));
                start += width;
            }
        }
        [to_first, to_second]
    }
}
