//! The runtime's executor: hot experts on the device, cold ones on the CPU meanwhile, one join per layer.
//!
//! Which numbers an expert is computed with depends on the plan and the regime alone: inside the regime's cut it is
//! the int8 contract, wherever it runs; outside it is the source rows.

use std::sync::Arc;
use std::time::Instant;

use super::counters::{Calls, Counters};
use super::hot::{HotTable, Share};
use super::modelled::{LayerRows, Modelled};
use super::worker::{HotCall, Reply, Request, Worker};
use crate::executor::cpu::{Call, CpuExecutor};
use crate::executor::{Executor, ExecutorError, Product, Routing, WeightId, WeightTable};
use crate::quantize::{QuantizedRows, rows as quantize_rows};
use crate::tensor::MatrixView;
use crate::units::{ExpertId, LayerId};

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

/// A call with the slot that its output goes to, `row * n_used + slot`.
#[derive(Clone, Copy)]
struct Slotted {
    call: HotCall,
    slot: u32,
}

/// One layer's calls by where they are computed, each list sorted by expert and row.
#[derive(Default)]
struct Split {
    whole: Vec<Slotted>,
    gate_up: Vec<Slotted>,
    down: Vec<Slotted>,
    cold: Vec<Slotted>,
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

    fn count(&mut self, layer: LayerId, m: usize, split: &Split) {
        let (whole, gate_up, down) = (split.whole.len(), split.gate_up.len(), split.down.len());
        let calls = Calls {
            all: (whole + gate_up + down + split.cold.len()) as u64,
            hot_gate_up: (whole + gate_up) as u64,
            hot_down: (whole + down) as u64,
        };
        self.counters.called(self.decode, calls);
        let rows = LayerRows {
            whole: per_expert(&split.whole),
            gate_up: per_expert(&split.gate_up),
            down: per_expert(&split.down),
            cold: per_expert(&split.cold),
        };
        self.modelled_seconds += self.modelled.layer_seconds(layer, m, &rows, &self.hot);
    }

    fn split(&self, layer: LayerId, routing: &Routing) -> Split {
        let cut = self.cut.get(layer.index()).copied().unwrap_or(0);
        let mut split = Split::default();
        for (slot, &expert) in routing.experts.iter().enumerate() {
            let row = (slot / routing.n_used) as u32;
            let call = Slotted { call: HotCall { expert, row }, slot: slot as u32 };
            match self.hot.share(layer, expert, cut) {
                Share::Whole => split.whole.push(call),
                Share::GateUp => split.gate_up.push(call),
                Share::Down => split.down.push(call),
                Share::Cold => split.cold.push(call),
            }
        }
        for calls in [&mut split.whole, &mut split.gate_up, &mut split.down, &mut split.cold] {
            calls.sort_unstable_by_key(|call| (call.call.expert, call.call.row));
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

    /// The part of a layer that runs beside the device: every cold call in one dispatch.
    fn compute_cold(
        &mut self,
        layer: LayerId,
        rows: MatrixView<'_, f32>,
        split: &Split,
        n_used: usize,
    ) -> Result<Vec<f32>, ExecutorError> {
        let n_embd = rows.n_cols();
        let mut hidden = Vec::new();
        if !split.cold.is_empty() {
            self.cold.resize(split.cold.len() * n_embd, 0.0);
            self.cpu.expert_calls(layer, rows, &calls(&split.cold, n_used), &mut self.cold)?;
            scatter(&split.cold, &self.cold, n_embd, &mut self.slots);
        }
        if !split.down.is_empty() {
            hidden.resize(split.down.len() * self.n_ff(layer), 0.0);
            self.cpu.gate_up_calls(layer, rows, &calls(&split.down, n_used), &mut hidden)?;
        }
        Ok(hidden)
    }

    /// What had to wait for the join: the other half of experts that are hot in part.
    fn compute_rest(
        &mut self,
        layer: LayerId,
        split: &Split,
        n_used: usize,
        device_hidden: &[f32],
        cpu_hidden: Vec<f32>,
        n_embd: usize,
    ) -> Result<(), ExecutorError> {
        if !split.down.is_empty() {
            let calls = split.down.iter().map(|call| call.call).collect();
            let request = Request::Down { layer, hidden: cpu_hidden, calls };
            if !self.worker.submit(request) {
                return Err(lost());
            }
        }
        if !split.gate_up.is_empty() {
            let hidden = view(device_hidden, split.gate_up.len())?;
            self.cold.resize(split.gate_up.len() * n_embd, 0.0);
            self.cpu.down_calls(layer, hidden, &calls(&split.gate_up, n_used), &mut self.cold)?;
            scatter(&split.gate_up, &self.cold, n_embd, &mut self.slots);
        }
        if !split.down.is_empty() {
            let reply = self.reply()?;
            scatter(&split.down, &reply.outputs, n_embd, &mut self.slots);
        }
        Ok(())
    }

    fn n_ff(&self, layer: LayerId) -> usize {
        self.weights.bank(layer).and_then(|bank| bank.gate.first()).map_or(0, |gate| gate.n_out)
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
        let (split, n_used, n_embd) = (self.split(layer, routing), routing.n_used, rows.n_cols());
        self.count(layer, rows.n_rows(), &split);
        if split.cold.len() == routing.experts.len() {
            return self.cpu.experts(layer, rows, routing, out);
        }
        self.slots.resize(routing.experts.len() * n_embd, 0.0);
        let on_device = !split.whole.is_empty() || !split.gate_up.is_empty();
        if on_device {
            let mut quantized = std::mem::take(&mut self.rows);
            quantize_rows(rows, &mut quantized);
            let hot = |calls: &[Slotted]| calls.iter().map(|call| call.call).collect();
            let (whole, gate_up) = (hot(&split.whole), hot(&split.gate_up));
            if !self.worker.submit(Request::Experts { layer, rows: quantized, whole, gate_up }) {
                return Err(lost());
            }
        }
        let cpu_hidden = self.compute_cold(layer, rows, &split, n_used);
        // The reply is taken before an error of the CPU is passed on, so that the next one is not this one's.
        let mut reply = if on_device { self.reply()? } else { Reply::default() };
        let cpu_hidden = cpu_hidden?;
        scatter(&split.whole, &reply.outputs, n_embd, &mut self.slots);
        self.rows = std::mem::take(&mut reply.rows);
        self.compute_rest(layer, &split, n_used, &reply.hidden, cpu_hidden, n_embd)?;
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

/// How many rows each expert of a sorted list got.
fn per_expert(calls: &[Slotted]) -> Vec<(ExpertId, u32)> {
    let groups = calls.chunk_by(|a, b| a.call.expert == b.call.expert);
    groups.map(|group| (group[0].call.expert, group.len() as u32)).collect()
}

fn lost() -> ExecutorError {
    ExecutorError::Device("the device thread has ended".to_owned())
}

fn calls(slotted: &[Slotted], n_used: usize) -> Vec<Call> {
    let call = |s: &Slotted| Call { row: s.call.row, slot: s.slot % n_used as u32, expert: s.call.expert };
    slotted.iter().map(call).collect()
}

fn view(values: &[f32], n_rows: usize) -> Result<MatrixView<'_, f32>, ExecutorError> {
    let n_cols = values.len() / n_rows.max(1);
    MatrixView::new(values, n_rows, n_cols).ok_or(ExecutorError::Shape {
        what: "hidden rows of the device",
        got: values.len(),
        expected: n_rows * n_cols,
    })
}

/// Puts outputs `[calls, n_embd]` into their slots.
fn scatter(calls: &[Slotted], outputs: &[f32], n_embd: usize, slots: &mut [f32]) {
    for (call, output) in calls.iter().zip(outputs.chunks_exact(n_embd)) {
        slots[call.slot as usize * n_embd..][..n_embd].copy_from_slice(output);
    }
}
