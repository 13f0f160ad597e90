//! The device thread: takes a layer's hot calls, gives back what they yield, while the CPU does the cold ones.
//!
//! It computes the int8 contract and nothing else. What the device cannot do is computed here on the CPU from the same
//! tiles, so the numbers never depend on whether the device worked; the fallback is counted and the first one is told.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::hot::{HotMatrix, HotTable};
use crate::device::{Account, Device, DeviceError, Job, multiply_tiles};
use crate::executor::WeightTable;
use crate::quantize::{QuantizedRows, rows as quantize_rows};
use crate::source::PackedModel;
use crate::tensor::{MatrixId, MatrixView, Projection};
use crate::units::{ExpertId, LayerId};

/// One row that goes to one expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HotCall {
    /// The expert.
    pub expert: ExpertId,
    /// The row of the request.
    pub row: u32,
}

/// Work for the device thread. Calls are sorted by expert.
#[derive(Debug)]
pub enum Request {
    /// Gate and up of all calls, and down of those that are whole.
    Experts {
        /// The layer.
        layer: LayerId,
        /// Activations `[m, n_embd]`.
        rows: QuantizedRows,
        /// Calls that are hot in all outputs of all three projections.
        whole: Vec<HotCall>,
        /// Calls that are hot in some outputs of gate and up: all, or the first ones.
        partial: Vec<HotCall>,
    },
    /// Down alone, all outputs of it or the first ones.
    Down {
        /// The layer.
        layer: LayerId,
        /// `[calls, n_ff]`: what gate and up yielded, a row per call.
        hidden: Arc<Vec<f32>>,
        /// The experts of the rows.
        calls: Vec<HotCall>,
    },
}

/// What the device thread gives back.
#[derive(Debug, Default)]
pub struct Reply {
    /// `[whole calls, n_embd]`, or `[calls, n_embd]` of a down request: of each row the outputs that are hot.
    pub outputs: Vec<f32>,
    /// `[partial calls, n_ff]`: of each row the outputs that are hot.
    pub hidden: Vec<f32>,
    /// The request's activations, to be filled again.
    pub rows: QuantizedRows,
    /// Time from taking the request to having the reply.
    pub busy: Duration,
    /// Matrix products that the CPU did in the device's place.
    pub fallbacks: u64,
    /// What the device said when it first failed.
    pub failure: Option<String>,
    /// What the device holds and has done.
    pub account: Account,
}

/// The handle of the device thread. Dropping it ends the thread.
#[derive(Debug)]
pub struct Worker {
    requests: Option<Sender<Request>>,
    replies: Receiver<Reply>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts the thread over a device whose resident chunks are filled.
    ///
    /// # Errors
    ///
    /// What the system says when it has no thread to give.
    pub fn start(
        device: Box<dyn Device>,
        hot: Arc<HotTable>,
        weights: Arc<WeightTable>,
        packed: Arc<PackedModel>,
    ) -> std::io::Result<Worker> {
        let (requests, inbox) = channel();
        let (outbox, replies) = channel();
        let mut products = Products {
            device,
            hot,
            weights,
            packed,
            fallbacks: 0,
            failure: None,
            has_failed: false,
            buffers: Buffers::default(),
        };
        let thread = std::thread::Builder::new().name("device".to_owned()).spawn(move || {
            while let Ok(request) = inbox.recv() {
                if outbox.send(products.answer(request)).is_err() {
                    break;
                }
            }
        })?;
        Ok(Worker { requests: Some(requests), replies, thread: Some(thread) })
    }

    /// Hands over work; [`Worker::join`] takes its reply. `false` when the thread is gone.
    pub fn submit(&self, request: Request) -> bool {
        self.requests.as_ref().is_some_and(|requests| requests.send(request).is_ok())
    }

    /// Waits for the reply to the oldest request; `None` when the thread is gone.
    pub fn join(&self) -> Option<Reply> {
        self.replies.recv().ok()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            // A panic there was reported by the thread itself; there is nobody left to tell here.
            let _ = thread.join();
        }
    }
}

/// Scratch kept from one layer to the next.
#[derive(Debug, Default)]
struct Buffers {
    gathered: Vec<i8>,
    gate: Vec<i32>,
    up: Vec<i32>,
    up_values: Vec<f32>,
    down: Vec<i32>,
    hidden: Vec<f32>,
    quantized: QuantizedRows,
}

struct Products {
    device: Box<dyn Device>,
    hot: Arc<HotTable>,
    /// For what happens between the projections.
    weights: Arc<WeightTable>,
    packed: Arc<PackedModel>,
    fallbacks: u64,
    failure: Option<String>,
    /// The device has failed once and is not asked again: on a board each further try could cost seconds.
    has_failed: bool,
    buffers: Buffers,
}

impl Products {
    fn answer(&mut self, request: Request) -> Reply {
        let began = Instant::now();
        let mut reply = Reply::default();
        self.fallbacks = 0;
        match request {
            Request::Experts { layer, rows, whole, partial } => {
                let mut calls = whole;
                let n_whole = calls.len();
                calls.extend(partial);
                let mut hidden = self.gate_up(layer, &rows, &calls);
                let n_ff = hidden.len() / calls.len().max(1);
                reply.hidden = hidden.split_off(n_whole * n_ff);
                reply.outputs = self.down(layer, &hidden, &calls[..n_whole]);
                self.buffers.hidden = hidden;
                reply.rows = rows;
            }
            Request::Down { layer, hidden, calls } => reply.outputs = self.down(layer, &hidden, &calls),
        }
        reply.fallbacks = self.fallbacks;
        reply.failure = self.failure.take();
        reply.account = self.device.account();
        reply.busy = began.elapsed();
        reply
    }

    /// What down is to multiply, of every call: `[calls, n_ff]`, of each row the outputs that are hot.
    fn gate_up(&mut self, layer: LayerId, rows: &QuantizedRows, calls: &[HotCall]) -> Vec<f32> {
        let (hot, weights) = (Arc::clone(&self.hot), Arc::clone(&self.weights));
        let Some(bank) = weights.bank(layer) else { return Vec::new() };
        let n_ff = bank.gate.first().map_or(0, |gate| gate.n_out);
        let groups = groups(&hot, layer, calls, &[Projection::Gate, Projection::Up]);
        let mut buffers = std::mem::take(&mut self.buffers);
        let Buffers { gathered, gate, up, .. } = &mut buffers;
        gather(rows.codes(), calls, gathered);
        let n_sums = groups.iter().map(Group::n_outputs).sum();
        gate.resize(n_sums, 0);
        up.resize(n_sums, 0);
        let inputs = inputs(rows.codes(), gathered, &groups);
        let mut jobs = Vec::with_capacity(2 * groups.len());
        let (mut gates, mut ups) = (&mut gate[..], &mut up[..]);
        for (group, rows) in groups.iter().zip(&inputs) {
            let (out, rest) = gates.split_at_mut(group.n_outputs());
            gates = rest;
            jobs.push((group.matrices[0], *rows, out));
            let (out, rest) = ups.split_at_mut(group.n_outputs());
            ups = rest;
            jobs.push((group.matrices[1], *rows, out));
        }
        self.run(jobs);
        let mut hidden = std::mem::take(&mut buffers.hidden);
        hidden.resize(calls.len() * n_ff, 0.0);
        let Buffers { gate, up, up_values, .. } = &mut buffers;
        up_values.resize(n_ff, 0.0);
        let mut calls = calls.iter().zip(hidden.chunks_exact_mut(n_ff.max(1)));
        let (mut gates, mut ups) = (&gate[..], &up[..]);
        for group in &groups {
            let (n, gate_scales, up_scales) =
                (group.n_out(), &group.matrices[0].scales, &group.matrices[1].scales);
            for (call, hidden) in calls.by_ref().take(group.n_calls) {
                let scale = rows.scales()[call.row as usize];
                let (gate, up) = (&mut hidden[..n], &mut up_values[..n]);
                dequantize(&gates[..n], scale, gate_scales, gate);
                dequantize(&ups[..n], scale, up_scales, up);
                bank.activate(group.expert, 0..n, gate, up);
                (gates, ups) = (&gates[n..], &ups[n..]);
            }
        }
        self.buffers = buffers;
        hidden
    }

    /// `down · hidden` of every call, `[calls, n_embd]`, of each row the outputs that are hot.
    fn down(&mut self, layer: LayerId, hidden: &[f32], calls: &[HotCall]) -> Vec<f32> {
        let (hot, weights) = (Arc::clone(&self.hot), Arc::clone(&self.weights));
        let groups = groups(&hot, layer, calls, &[Projection::Down]);
        let Some(bank) = weights.bank(layer).filter(|_| !groups.is_empty()) else { return Vec::new() };
        let (n_ff, n_embd) = bank.down.first().map_or((0, 0), |down| (down.n_in, down.n_out));
        let mut buffers = std::mem::take(&mut self.buffers);
        let Some(view) = MatrixView::new(hidden, calls.len(), n_ff) else { return Vec::new() };
        quantize_rows(view, &mut buffers.quantized);
        buffers.down.resize(groups.iter().map(Group::n_outputs).sum(), 0);
        let codes = buffers.quantized.codes();
        let mut jobs = Vec::with_capacity(groups.len());
        let (mut at, mut downs) = (0, &mut buffers.down[..]);
        for group in &groups {
            let (out, rest) = downs.split_at_mut(group.n_outputs());
            downs = rest;
            let rows = &codes.data()[at * n_ff..(at + group.n_calls) * n_ff];
            at += group.n_calls;
            if let Some(rows) = MatrixView::new(rows, group.n_calls, n_ff) {
                jobs.push((group.matrices[0], rows, out));
            }
        }
        self.run(jobs);
        let mut outputs = vec![0.0; calls.len() * n_embd];
        let mut sums = &buffers.down[..];
        let mut rows = outputs.chunks_exact_mut(n_embd.max(1)).zip(buffers.quantized.scales());
        for group in &groups {
            let n = group.n_out();
            for (out, &scale) in rows.by_ref().take(group.n_calls) {
                dequantize(&sums[..n], scale, &group.matrices[0].scales, &mut out[..n]);
                bank.finish_down(group.expert, 0..n, &mut out[..n]);
                sums = &sums[n..];
            }
        }
        self.buffers = buffers;
        outputs
    }

    /// Runs products on the device; those that it does not hold or cannot do, on the CPU from the same tiles.
    fn run(&mut self, products: Vec<(&HotMatrix, MatrixView<'_, i8>, &mut [i32])>) {
        let (held, missing): (Vec<_>, Vec<_>) =
            products.into_iter().partition(|(matrix, ..)| matrix.resident.is_some() && !self.has_failed);
        for (matrix, rows, out) in missing {
            self.fall_back(matrix, rows, out);
        }
        let mut matrices = Vec::with_capacity(held.len());
        let mut jobs = Vec::with_capacity(held.len());
        for (hot, rows, out) in held {
            let Some(matrix) = &hot.resident else { continue };
            matrices.push(hot);
            jobs.push(Job { matrix, rows, out });
        }
        if jobs.is_empty() {
            return;
        }
        if let Err(error) = self.device.run(&mut jobs) {
            self.failed(&error);
            for (hot, job) in matrices.into_iter().zip(jobs) {
                self.fall_back(hot, job.rows, job.out);
            }
        }
    }

    fn failed(&mut self, error: &DeviceError) {
        self.has_failed = true;
        self.failure.get_or_insert(error.to_string());
    }

    fn fall_back(&mut self, hot: &HotMatrix, rows: MatrixView<'_, i8>, out: &mut [i32]) {
        self.fallbacks += 1;
        let packed = Arc::clone(&self.packed);
        for placed in &hot.matrix.parts {
            let Some(tiles) = super::load::tiles(packed.pack(), placed) else { continue };
            if let Err(error) = multiply_tiles(tiles, &placed.part, rows, out)
                && self.failure.is_none()
            {
                self.failure = Some(error.to_string());
            }
        }
    }
}

/// The calls of one expert, which follow each other.
struct Group<'a> {
    expert: ExpertId,
    n_calls: usize,
    matrices: Vec<&'a HotMatrix>,
}

impl Group<'_> {
    /// Outputs of each matrix.
    fn n_out(&self) -> usize {
        self.matrices.first().map_or(0, |hot| hot.matrix.n_out as usize)
    }

    /// Outputs of each matrix for all calls.
    fn n_outputs(&self) -> usize {
        self.n_calls * self.n_out()
    }
}

/// Calls by expert. Every call's expert has these projections in the table: the partition asks for no other.
fn groups<'a>(
    hot: &'a HotTable,
    layer: LayerId,
    calls: &[HotCall],
    projections: &[Projection],
) -> Vec<Group<'a>> {
    calls
        .chunk_by(|a, b| a.expert == b.expert)
        .map(|calls| {
            let expert = calls[0].expert;
            let matrix = |&projection: &Projection| hot.get(MatrixId { layer, expert, projection });
            Group { expert, n_calls: calls.len(), matrices: projections.iter().filter_map(matrix).collect() }
        })
        .collect()
}

/// `out[o] = sums[o] · row scale · scales[o]`: what the integers stand for.
fn dequantize(sums: &[i32], row_scale: f32, scales: &[f32], out: &mut [f32]) {
    for ((out, &sum), &scale) in out.iter_mut().zip(sums).zip(scales) {
        *out = sum as f32 * (row_scale * scale);
    }
}

/// The rows of all calls, one after the other; nothing when there is only one row to share.
fn gather(codes: MatrixView<'_, i8>, calls: &[HotCall], gathered: &mut Vec<i8>) {
    gathered.clear();
    if codes.n_rows() > 1 {
        calls.iter().for_each(|call| gathered.extend_from_slice(codes.row(call.row as usize)));
    }
}

/// The activations of each group. A single row is shared by all, so that the device copies it once.
fn inputs<'a>(
    codes: MatrixView<'a, i8>,
    gathered: &'a [i8],
    groups: &[Group<'_>],
) -> Vec<MatrixView<'a, i8>> {
    if codes.n_rows() <= 1 {
        return groups.iter().map(|_| codes).collect();
    }
    let n_in = codes.n_cols();
    let mut rest = gathered;
    groups
        .iter()
        .filter_map(|group| {
            let (rows, after) = rest.split_at(group.n_calls * n_in);
            rest = after;
            MatrixView::new(rows, group.n_calls, n_in)
        })
        .collect()
}
