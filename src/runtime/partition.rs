//! The runtime's executor: hot experts on the device, cold ones on the CPU meanwhile, one join per layer.
//!
//! Which numbers an expert is computed with depends on the plan and the regime alone: inside the regime's cut it is
//! the int8 contract, wherever it runs; outside it is the source rows. Of an expert whose rows are shared the first
//! outputs are inside: gate and up are then joined before down is split in the same way.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::counters::{Calls, Counters};
use super::hot::{HotTable, Share};
use super::modelled::{ExpertRows, Modelled};
use super::worker::{HotCall, Reply, Request, Worker};
use crate::executor::cpu::{Call, CpuExecutor};
use crate::executor::{Executor, ExecutorError, Product, Routing, WeightId, WeightTable};
use crate::quantize::{QuantizedRows, rows as quantize_rows};
use crate::tensor::MatrixView;
use crate::units::LayerId;

/// Splits each routed layer between a device and the CPU.
pub struct Partition {
    cpu: CpuExecutor,
    weights: Arc<WeightTable>,
    worker: Worker,
    hot: Arc<HotTable>,
    /// Matrices of each layer's ranking that are hot in the current regime.
    cut: Vec<u32>,
    decode: bool,
    strict: bool,
    modelled: Modelled,
    /// Modelled time of the experts since it was last taken.
    modelled_seconds: f64,
    counters: Counters,
    rows: QuantizedRows,
    /// `[m * n_used, n_embd]`: what each slot's expert yielded.
    slots: Vec<f32>,
    cold: Vec<f32>,
}

/// A call with the slot that its output goes to, `row * n_used + slot`, and what is hot of its expert.
#[derive(Clone, Copy)]
struct Slotted {
    call: HotCall,
    slot: u32,
    share: Share,
}

/// One layer's calls by where they are computed.
#[derive(Default)]
struct Split {
    /// All on the device, by expert and row.
    whole: Vec<Slotted>,
    /// Nothing there, by expert and row.
    cold: Vec<Slotted>,
    /// On both sides, by share, expert and row. Those with nothing of gate and up on the device come first.
    partial: Vec<Slotted>,
}

/// The sizes of a layer's experts.
#[derive(Clone, Copy)]
struct Sizes {
    n_embd: usize,
    n_ff: usize,
}

impl Split {
    /// The calls on both sides, those of one share together.
    fn shares(&self) -> impl Iterator<Item = (Share, &[Slotted])> {
        self.partial.chunk_by(|a, b| a.share == b.share).map(|calls| (calls[0].share, calls))
    }

    /// How many of these have nothing of gate and up on the device.
    fn n_down_only(&self) -> usize {
        self.partial.partition_point(|call| call.share.gate_up == 0)
    }

    fn iter(&self) -> impl Iterator<Item = &Slotted> {
        self.whole.iter().chain(&self.cold).chain(&self.partial)
    }
}

impl Partition {
    /// A partition over a device thread that holds `hot`.
    pub fn new(
        cpu: CpuExecutor,
        weights: Arc<WeightTable>,
        worker: Worker,
        hot: Arc<HotTable>,
        modelled: Modelled,
        strict: bool,
    ) -> Partition {
        Partition {
            cpu,
            weights,
            worker,
            hot,
            cut: Vec::new(),
            decode: false,
            strict,
            modelled,
            modelled_seconds: 0.0,
            counters: Counters::default(),
            rows: QuantizedRows::default(),
            slots: Vec::new(),
            cold: Vec::new(),
        }
    }

    /// Sets the regime: how many matrices of each layer's ranking are hot from now on, and whether tokens are
    /// generated (else a prompt is read).
    pub fn set_regime(&mut self, cut: &[u32], decode: bool) {
        self.decode = decode;
        self.cut.clear();
        self.cut.extend_from_slice(cut);
    }

    /// What was counted so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Seconds that all layers' experts and `m` tokens' other weights would have taken on the profile's device since
    /// this was last asked.
    pub fn take_modelled_seconds(&mut self, m: usize) -> f64 {
        std::mem::take(&mut self.modelled_seconds) + self.modelled.rest_seconds(m)
    }

    fn count(&mut self, layer: LayerId, sizes: Sizes, m: usize, split: &Split) {
        let mut calls = Calls::default();
        for Share { gate_up, down } in split.iter().map(|call| call.share) {
            let of = |hot: u32, all: usize| f64::from(hot) / all.max(1) as f64;
            calls.all += 1;
            calls.hot_gate_up += u64::from(gate_up > 0);
            calls.hot_down += u64::from(down > 0);
            calls.hot_matrices += 2.0 * of(gate_up, sizes.n_ff) + of(down, sizes.n_embd);
        }
        self.counters.called(self.decode, calls);
        let of_expert = |calls: &[Slotted]| ExpertRows {
            expert: calls[0].call.expert,
            rows: calls.len() as u32,
            share: calls[0].share,
        };
        let lists = [&split.whole, &split.partial, &split.cold].into_iter();
        let experts = lists.flat_map(|list| list.chunk_by(|a, b| a.call.expert == b.call.expert));
        let rows: Vec<ExpertRows> = experts.map(of_expert).collect();
        self.modelled_seconds += self.modelled.layer_seconds(layer, m, &rows, &self.hot);
    }

    fn split(&self, layer: LayerId, sizes: Sizes, routing: &Routing) -> Split {
        let cut = self.cut.get(layer.index()).copied().unwrap_or(0);
        let whole = Share { gate_up: sizes.n_ff as u32, down: sizes.n_embd as u32 };
        let mut split = Split::default();
        for (slot, &expert) in routing.experts.iter().enumerate() {
            let row = (slot / routing.n_used) as u32;
            let share = self.hot.share(layer, expert, cut);
            let call = Slotted { call: HotCall { expert, row }, slot: slot as u32, share };
            match share {
                share if share == Share::default() => split.cold.push(call),
                share if share == whole => split.whole.push(call),
                _ => split.partial.push(call),
            }
        }
        for calls in [&mut split.whole, &mut split.cold, &mut split.partial] {
            calls.sort_unstable_by_key(|call| (call.share, call.call.expert, call.call.row));
        }
        split
    }

    fn reply(&mut self) -> Result<Reply, ExecutorError> {
        let began = Instant::now();
        let reply = self.worker.join().ok_or_else(lost)?;
        self.counters.replied(&reply, began.elapsed());
        match &reply.failure {
            Some(failure) if self.strict => Err(ExecutorError::Device(failure.clone())),
            _ => Ok(reply),
        }
    }

    /// What runs beside the device first: every cold call in one dispatch, and of the calls on both sides the outputs of
    /// gate and up that are not hot, one share after the other.
    fn compute_cold(
        &mut self,
        layer: LayerId,
        sizes: Sizes,
        rows: MatrixView<'_, f32>,
        split: &Split,
        n_used: usize,
    ) -> Result<Vec<f32>, ExecutorError> {
        if !split.cold.is_empty() {
            self.cold.resize(split.cold.len() * sizes.n_embd, 0.0);
            self.cpu.expert_calls(layer, rows, &calls(&split.cold, n_used), &mut self.cold)?;
            scatter(&split.cold, &self.cold, 0..sizes.n_embd, sizes.n_embd, &mut self.slots);
        }
        let mut rest = Vec::new();
        for (share, slotted) in split.shares() {
            let cols = share.gate_up as usize..sizes.n_ff;
            if !cols.is_empty() {
                let first = rest.len();
                rest.resize(first + slotted.len() * cols.len(), 0.0);
                self.cpu.gate_up_calls(layer, rows, &calls(slotted, n_used), cols, &mut rest[first..])?;
            }
        }
        Ok(rest)
    }

    /// What had to wait for the join of gate and up: down of the calls on both sides, whose `hidden` rows are whole now.
    fn compute_down(
        &mut self,
        layer: LayerId,
        sizes: Sizes,
        split: &Split,
        n_used: usize,
        hidden: Vec<f32>,
    ) -> Result<(), ExecutorError> {
        let hidden = Arc::new(hidden);
        let hot: Vec<Slotted> = split.partial.iter().copied().filter(|call| call.share.down > 0).collect();
        if !hot.is_empty() {
            let of_hot = match hot.len() == split.partial.len() {
                true => Arc::clone(&hidden),
                false => {
                    let rows = split.partial.iter().zip(hidden.chunks_exact(sizes.n_ff));
                    let rows = rows.filter(|(call, _)| call.share.down > 0);
                    Arc::new(rows.flat_map(|(_, row)| row).copied().collect())
                }
            };
            let calls = hot.iter().map(|call| call.call).collect();
            if !self.worker.submit(Request::Down { layer, hidden: of_hot, calls }) {
                return Err(lost());
            }
        }
        let computed = self.compute_rest(layer, sizes, split, n_used, &hidden);
        // The reply is taken before an error of the CPU is passed on, so that the next one is not this one's.
        if !hot.is_empty() {
            let reply = self.reply()?;
            for (call, output) in hot.iter().zip(reply.outputs.chunks_exact(sizes.n_embd)) {
                let n = call.share.down as usize;
                self.slots[call.slot as usize * sizes.n_embd..][..n].copy_from_slice(&output[..n]);
            }
        }
        computed
    }

    /// The outputs of down that are not hot, one share after the other.
    fn compute_rest(
        &mut self,
        layer: LayerId,
        sizes: Sizes,
        split: &Split,
        n_used: usize,
        hidden: &[f32],
    ) -> Result<(), ExecutorError> {
        let mut left = hidden;
        for (share, slotted) in split.shares() {
            let (here, after) = left.split_at(slotted.len() * sizes.n_ff);
            left = after;
            let cols = share.down as usize..sizes.n_embd;
            if !cols.is_empty() {
                self.cold.resize(slotted.len() * cols.len(), 0.0);
                let hidden = view(here, slotted.len(), sizes.n_ff)?;
                self.cpu.down_calls(layer, hidden, &calls(slotted, n_used), cols.clone(), &mut self.cold)?;
                scatter(slotted, &self.cold, cols, sizes.n_embd, &mut self.slots);
            }
        }
        Ok(())
    }

    fn sizes(&self, layer: LayerId) -> Sizes {
        let gate = self.weights.bank(layer).and_then(|bank| bank.gate.first());
        gate.map_or(Sizes { n_embd: 0, n_ff: 0 }, |gate| Sizes { n_embd: gate.n_in, n_ff: gate.n_out })
    }
}

impl Executor for Partition {
    fn linear(
        &mut self,
        rows: MatrixView<'_, f32>,
        products: &mut [Product<'_>],
    ) -> Result<(), ExecutorError> {
        self.cpu.linear(rows, products)
    }

    fn each(
        &mut self,
        rows: MatrixView<'_, f32>,
        weights: &[WeightId],
        out: &mut [f32],
    ) -> Result<(), ExecutorError> {
        self.cpu.each(rows, weights, out)
    }

    fn experts(
        &mut self,
        layer: LayerId,
        rows: MatrixView<'_, f32>,
        routing: &Routing,
        out: &mut [f32],
    ) -> Result<(), ExecutorError> {
        let (sizes, n_used) = (self.sizes(layer), routing.n_used);
        let split = self.split(layer, sizes, routing);
        self.count(layer, sizes, rows.n_rows(), &split);
        if split.cold.len() == routing.experts.len() {
            return self.cpu.experts(layer, rows, routing, out);
        }
        self.slots.resize(routing.experts.len() * sizes.n_embd, 0.0);
        let n_down_only = split.n_down_only();
        let on_device = !split.whole.is_empty() || n_down_only < split.partial.len();
        if on_device {
            let mut quantized = std::mem::take(&mut self.rows);
            quantize_rows(rows, &mut quantized);
            let hot = |calls: &[Slotted]| calls.iter().map(|call| call.call).collect();
            let (whole, partial) = (hot(&split.whole), hot(&split.partial[n_down_only..]));
            if !self.worker.submit(Request::Experts { layer, rows: quantized, whole, partial }) {
                return Err(lost());
            }
        }
        let rest = self.compute_cold(layer, sizes, rows, &split, n_used);
        // The reply is taken before an error of the CPU is passed on, so that the next one is not this one's.
        let mut reply = if on_device { self.reply()? } else { Reply::default() };
        let rest = rest?;
        scatter(&split.whole, &reply.outputs, 0..sizes.n_embd, sizes.n_embd, &mut self.slots);
        self.rows = std::mem::take(&mut reply.rows);
        if !split.partial.is_empty() {
            let hidden = join(&split, sizes, reply.hidden, &rest);
            self.compute_down(layer, sizes, &split, n_used, hidden)?;
        }
        self.cpu.combine(routing, &self.slots, out)
    }

    fn gather(&mut self, weight: WeightId, ids: &[u32], out: &mut [f32]) -> Result<(), ExecutorError> {
        self.cpu.gather(weight, ids, out)
    }

    fn ahead(&mut self, layer: LayerId) {
        self.cpu.ahead(layer);
    }

    fn for_each(&mut self, n: usize, piece: &(dyn Fn(usize) + Sync)) {
        self.cpu.for_each(n, piece);
    }
}

fn lost() -> ExecutorError {
    ExecutorError::Device("the device thread has ended".to_owned())
}

fn calls(slotted: &[Slotted], n_used: usize) -> Vec<Call> {
    let call = |s: &Slotted| Call { row: s.call.row, slot: s.slot % n_used as u32, expert: s.call.expert };
    slotted.iter().map(call).collect()
}

fn view(values: &[f32], n_rows: usize, n_cols: usize) -> Result<MatrixView<'_, f32>, ExecutorError> {
    MatrixView::new(values, n_rows, n_cols).ok_or(ExecutorError::Shape {
        what: "hidden values of the calls on both sides",
        got: values.len(),
        expected: n_rows * n_cols,
    })
}

/// What gate and up yielded of the calls on both sides, `[calls, n_ff]`: the device's outputs, `[calls, n_ff]` of those that
/// have any, and behind them in each row those of the CPU, one share after the other.
fn join(split: &Split, sizes: Sizes, device: Vec<f32>, mut rest: &[f32]) -> Vec<f32> {
    let n_down_only = split.n_down_only();
    let mut hidden = device;
    if n_down_only > 0 {
        hidden.splice(0..0, std::iter::repeat_n(0.0, n_down_only * sizes.n_ff));
    }
    for (call, row) in split.partial.iter().zip(hidden.chunks_exact_mut(sizes.n_ff)) {
        let cold = &mut row[call.share.gate_up as usize..];
        let (here, after) = rest.split_at(cold.len());
        cold.copy_from_slice(here);
        rest = after;
    }
    hidden
}

/// Puts outputs `cols`, `[calls, cols.len()]`, into their slots.
fn scatter(calls: &[Slotted], outputs: &[f32], cols: Range<usize>, n_embd: usize, slots: &mut [f32]) {
    for (call, output) in calls.iter().zip(outputs.chunks_exact(cols.len().max(1))) {
        slots[call.slot as usize * n_embd..][cols.clone()].copy_from_slice(output);
    }
}
