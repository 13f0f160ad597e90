//! The plain executor: every product on the CPU, from the weights as they are stored.
//!
//! It exists for three callers: calibration and tests, which compute everything here; the reference run; and
//! the partitioned run, which leaves the calls of cold experts, or only their down projections, to it. All
//! calls of a layer are one dispatch on the pool: gate and up, then activation and quantisation, then down.
//! Each expert's weights are read once for all its rows, and outputs are dealt in ranges, so that a single
//! expert with a single row keeps every thread busy. What a row yields never depends on any of that.

mod batch;

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Executor, ExecutorError, Product, Routing, Weight, WeightId, WeightTable};
use crate::blocks::{self, BlockError};
use crate::kernel::{Activations, Form, Kernel, Loops};
use crate::tensor::{MatrixView, TensorSource, WeightView};
use crate::threads::{Patch, Pool};
use crate::units::{ExpertId, LayerId};
use batch::{Scratch, count_to};

/// How weights and activations are multiplied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KernelMode {
    /// Integer dots of the stored weights and int8 activations.
    #[default]
    Fast,
    /// Weights dequantised, activations and sums in f32.
    Exact,
}

impl KernelMode {
    fn form(self, weight: &Weight) -> Form {
        match self {
            KernelMode::Fast => Form::for_weight(weight.dtype),
            KernelMode::Exact => Form::F32,
        }
    }
}

/// One expert applied to one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// The row of the activations.
    pub row: u32,
    /// The slot of that row's routing that the call fills; carried for the caller.
    pub slot: u32,
    /// The expert.
    pub expert: ExpertId,
}

/// Most bytes that the intermediate results of one dispatch may take; more rows are dealt with in turns.
const MOST_SCRATCH: usize = 64 << 20;

/// Rows that are worth a dispatch of their own to quantise.
const MANY_ROWS: usize = 16;

/// Computes every product on the CPU. See the module's page.
pub struct CpuExecutor {
    core: Core,
    scratch: Scratch,
    /// The activations of the current call, one per form in use.
    acts: [Activations; 3],
    /// `[m, n_used, n_embd]`: expert outputs before they are combined.
    slots: Vec<f32>,
    calls: Vec<Call>,
}

/// What does not change from call to call.
struct Core {
    source: Arc<dyn TensorSource>,
    weights: Arc<WeightTable>,
    pool: Arc<Pool>,
    kernel: Kernel,
    mode: KernelMode,
}

impl CpuExecutor {
    /// An executor over the matrices of `weights`, which lie in `source`.
    ///
    /// # Errors
    ///
    /// [`ExecutorError::Block`] for a matrix of a type without a decoder, [`ExecutorError::Source`] and
    /// [`ExecutorError::Shape`] for one whose place is outside the source or not as long as its shape says, or
    /// for experts of a layer that disagree in shape.
    pub fn new(
        source: Arc<dyn TensorSource>,
        weights: Arc<WeightTable>,
        pool: Arc<Pool>,
        mode: KernelMode,
    ) -> Result<CpuExecutor, ExecutorError> {
        let core = Core { source, weights, pool, kernel: Kernel::detect(), mode };
        core.check()?;
        Ok(CpuExecutor {
            core,
            scratch: Scratch::default(),
            acts: Default::default(),
            slots: Vec::new(),
            calls: Vec::new(),
        })
    }

    /// The kernel that computes.
    pub fn kernel(&self) -> Kernel {
        self.core.kernel
    }

    /// The pool that it computes on.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.core.pool
    }

    /// `out[r] = Σ_slot weight · slots[r][slot]`, slots in order, in f32: `slots` is `[m, n_used, n_embd]`, the
    /// unweighted outputs of the experts, and `out` is `[m, n_embd]`.
    ///
    /// # Errors
    ///
    /// [`ExecutorError::Shape`] when the lengths disagree.
    pub fn combine(&self, routing: &Routing, slots: &[f32], out: &mut [f32]) -> Result<(), ExecutorError> {
        expect("rows of the routing", routing.weights.len(), routing.experts.len())?;
        self.core.combine(routing.n_used, &routing.weights, slots, out)
    }
}

/// A matrix, the first of its rows of the activations, and where its outputs go.
type Output<'a> = (WeightId, usize, &'a mut [f32]);

impl CpuExecutor {
    /// Matrices times `m` rows each, in one dispatch.
    fn dispatch(
        &mut self,
        rows: MatrixView<'_, f32>,
        m: usize,
        outs: Vec<Output<'_>>,
    ) -> Result<(), ExecutorError> {
        count_to(&mut self.scratch.every_row, rows.n_rows());
        let every_row = &self.scratch.every_row[..];
        let core = &self.core;
        let mut views = Vec::with_capacity(outs.len());
        for (id, _, out) in &outs {
            let weight = core.linear(*id)?;
            expect("columns of the activations", rows.n_cols(), weight.n_in)?;
            expect("outputs of a product", out.len(), m * weight.n_out)?;
            views.push((core.form(*id, weight), core.view(weight)?));
        }
        for form in Form::ALL {
            if views.iter().any(|view| view.0 == form) {
                core.quantize(&mut self.acts[form as usize], form, rows);
            }
        }
        let acts = &self.acts;
        let share = core.share(views.iter().map(|(_, view)| view.bytes().len()).sum());
        let mut pieces = Vec::new();
        for ((_, first, out), &(form, view)) in outs.into_iter().zip(&views) {
            if m == 0 {
                continue;
            }
            let width = width(share, &view);
            let patches = Patch::cut(out, view.n_out(), &[(&every_row[..m], width)]);
            let patches = patches.ok_or(shape("outputs of a product", m * view.n_out(), 0))?;
            let rows = &every_row[first..first + m];
            pieces.extend(patches.into_iter().map(|patch| (form, view, rows, Mutex::new(patch))));
        }
        let failure = Failure::default();
        core.pool.run(pieces.len(), &|i| {
            let (form, view, rows, patch) = &pieces[i];
            failure.note(i, core.fill_patch(*view, &acts[*form as usize], rows, 0, &mut lock(patch)));
        });
        failure.result()
    }
}

impl Executor for CpuExecutor {
    fn linear(
        &mut self,
        rows: MatrixView<'_, f32>,
        products: &mut [Product<'_>],
    ) -> Result<(), ExecutorError> {
        let outs = products.iter_mut().map(|product| (product.weight, 0, &mut *product.out));
        self.dispatch(rows, rows.n_rows(), outs.collect())
    }

    fn each(
        &mut self,
        rows: MatrixView<'_, f32>,
        weights: &[WeightId],
        out: &mut [f32],
    ) -> Result<(), ExecutorError> {
        let m = rows.n_rows() / weights.len().max(1);
        expect("rows of several matrices", rows.n_rows(), m * weights.len())?;
        let n_out = out.len() / weights.len().max(1);
        expect("outputs of several matrices", out.len(), n_out * weights.len())?;
        let outs = out.chunks_exact_mut(n_out.max(1)).zip(weights).zip((0..).step_by(m.max(1)));
        self.dispatch(rows, m, outs.map(|((out, weight), first)| (*weight, first, out)).collect())
    }

    fn experts(
        &mut self,
        layer: LayerId,
        rows: MatrixView<'_, f32>,
        routing: &Routing,
        out: &mut [f32],
    ) -> Result<(), ExecutorError> {
        let (m, n_embd, n_used) = (rows.n_rows(), rows.n_cols(), routing.n_used);
        expect("rows of the routing", routing.experts.len(), m * n_used)?;
        expect("weights of the routing", routing.weights.len(), m * n_used)?;
        expect("outputs of the experts", out.len(), m * n_embd)?;
        let most = (MOST_SCRATCH / 4 / (n_used * n_embd).max(1)).max(1);
        let (mut slots, mut calls) = (std::mem::take(&mut self.slots), std::mem::take(&mut self.calls));
        for first in (0..m).step_by(most) {
            let last = m.min(first + most);
            let (some, taken) = (first * n_embd..last * n_embd, first * n_used..last * n_used);
            calls.clear();
            calls.extend(routing.experts[taken.clone()].iter().zip(0..).map(|(&expert, i)| {
                let n_used = n_used as u32;
                Call { row: i / n_used, slot: i % n_used, expert }
            }));
            slots.resize(calls.len() * n_embd, 0.0);
            let tile = MatrixView::new(&rows.data()[some.clone()], last - first, n_embd).ok_or(shape(
                "rows of the activations",
                last,
                m,
            ))?;
            self.expert_calls(layer, tile, &calls, &mut slots)?;
            self.core.combine(n_used, &routing.weights[taken], &slots, &mut out[some])?;
        }
        (self.slots, self.calls) = (slots, calls);
        Ok(())
    }

    fn gather(&mut self, weight: WeightId, ids: &[u32], out: &mut [f32]) -> Result<(), ExecutorError> {
        let weight = self.core.linear(weight)?;
        expect("outputs of the gather", out.len(), ids.len() * weight.n_in)?;
        let view = self.core.view(weight)?;
        for (&id, out) in ids.iter().zip(out.chunks_exact_mut(weight.n_in)) {
            if id as usize >= weight.n_out {
                return Err(shape("row of the gathered matrix", id as usize, weight.n_out));
            }
            blocks::dequantize(weight.dtype, view.row(id as usize), out)?;
        }
        Ok(())
    }

    fn for_each(&mut self, n: usize, piece: &(dyn Fn(usize) + Sync)) {
        self.core.pool.run(n, piece);
    }
}

impl Core {
    fn check(&self) -> Result<(), ExecutorError> {
        for weight in self.weights.linears() {
            self.check_weight(weight)?;
        }
        for (_, bank) in self.weights.banks() {
            for list in [&bank.gate, &bank.up, &bank.down] {
                expect("experts of a projection", list.len(), bank.n_expert())?;
                list.iter().try_for_each(|weight| self.check_weight(weight))?;
            }
            let Some((n_embd, n_ff)) = bank.gate.first().map(|gate| (gate.n_in, gate.n_out)) else {
                continue;
            };
            for weight in bank.gate.iter().chain(&bank.up) {
                expect("inputs of a gate or up projection", weight.n_in, n_embd)?;
                expect("outputs of a gate or up projection", weight.n_out, n_ff)?;
            }
            for weight in &bank.down {
                expect("inputs of a down projection", weight.n_in, n_ff)?;
                expect("outputs of a down projection", weight.n_out, n_embd)?;
            }
            if let Some(biases) = &bank.biases {
                for (biases, width) in [(&biases.gate, n_ff), (&biases.up, n_ff), (&biases.down, n_embd)] {
                    expect("biases of the experts", biases.len(), bank.n_expert() * width)?;
                }
            }
        }
        Ok(())
    }

    fn check_weight(&self, weight: &Weight) -> Result<(), ExecutorError> {
        if !blocks::is_supported(weight.dtype) {
            return Err(BlockError::Unsupported(weight.dtype).into());
        }
        for (what, n) in [("inputs of a matrix", weight.n_in), ("outputs of a matrix", weight.n_out)] {
            if n == 0 {
                return Err(shape(what, 0, 1));
            }
        }
        self.view(weight).map(|_| ())
    }

    fn linear(&self, id: WeightId) -> Result<&Weight, ExecutorError> {
        let n = self.weights.linears().len();
        self.weights.linear(id).ok_or(shape("number of a matrix", id.0 as usize, n))
    }

    fn form(&self, id: WeightId, weight: &Weight) -> Form {
        if self.weights.is_exact(id) { Form::F32 } else { self.mode.form(weight) }
    }

    fn view(&self, weight: &Weight) -> Result<WeightView<'_>, ExecutorError> {
        let bytes = self.source.bytes(weight.place)?;
        WeightView::new(weight.dtype, weight.n_in, weight.n_out, bytes).ok_or_else(|| {
            let row = weight.dtype.row_bytes(weight.n_in as u64).unwrap_or(0) as usize;
            shape("bytes of a matrix", bytes.len(), row.saturating_mul(weight.n_out))
        })
    }

    /// Fills `acts`, on all threads where there are many rows.
    fn quantize(&self, acts: &mut Activations, form: Form, rows: MatrixView<'_, f32>) {
        if rows.n_rows() < MANY_ROWS {
            acts.quantize(self.kernel, form, rows);
            return;
        }
        let per_part = rows.n_rows().div_ceil(4 * self.pool.n_threads());
        let parts: Vec<_> =
            acts.parts(form, rows.n_rows(), rows.n_cols(), per_part).map(Mutex::new).collect();
        self.pool.run(parts.len(), &|i| lock(&parts[i]).quantize(self.kernel, rows));
    }

    /// The bytes of weights that make one piece when `bytes` are dealt out: some pieces per thread, so that a
    /// thread that is held up elsewhere is not waited for.
    fn share(&self, bytes: usize) -> usize {
        bytes / (8 * self.pool.n_threads())
    }

    /// The outputs of `patch`, whose first column is output `first` of `weight`, for the rows `rows`.
    fn fill_patch(
        &self,
        weight: WeightView<'_>,
        acts: &Activations,
        rows: &[u32],
        first: usize,
        patch: &mut Patch<'_>,
    ) -> Result<(), BlockError> {
        let cols = shifted(patch.cols(), first);
        if let [_] = rows {
            return self.kernel.multiply(weight, cols, acts, rows, patch.row(0));
        }
        let mut tile = vec![0.0; rows.len() * cols.len()];
        let width = cols.len();
        self.kernel.multiply(weight, cols, acts, rows, &mut tile)?;
        for (i, row) in tile.chunks_exact(width).enumerate() {
            patch.row(i).copy_from_slice(row);
        }
        Ok(())
    }

    /// See [`CpuExecutor::combine`].
    fn combine(
        &self,
        n_used: usize,
        weights: &[f32],
        slots: &[f32],
        out: &mut [f32],
    ) -> Result<(), ExecutorError> {
        let m = weights.len() / n_used.max(1);
        if m == 0 {
            out.fill(0.0);
            return Ok(());
        }
        let n_embd = out.len() / m;
        expect("outputs of the experts", out.len(), m * n_embd)?;
        expect("outputs before they are combined", slots.len(), m * n_used * n_embd)?;
        let rows: Vec<_> = out.chunks_exact_mut(n_embd.max(1)).map(Mutex::new).collect();
        let combine_row = |r: usize| {
            let mut out = lock(&rows[r]);
            out.fill(0.0);
            let slots = slots[r * n_used * n_embd..].chunks_exact(n_embd).take(n_used);
            for (slot, &weight) in slots.zip(&weights[r * n_used..]) {
                self.kernel.widely(AddScaled { out: &mut out, weight, slot });
            }
        };
        if m < MANY_ROWS {
            (0..rows.len()).for_each(combine_row);
        } else {
            self.pool.run(rows.len(), &combine_row);
        }
        Ok(())
    }
}

/// `out += weight · slot`.
struct AddScaled<'a> {
    out: &'a mut [f32],
    weight: f32,
    slot: &'a [f32],
}

impl Loops for AddScaled<'_> {
    #[inline(always)]
    fn run(self) {
        for (out, y) in self.out.iter_mut().zip(self.slot) {
            *out += self.weight * y;
        }
    }
}

/// The outputs that are these columns of a matrix whose first column is output `first`.
fn shifted(cols: Range<usize>, first: usize) -> Range<usize> {
    cols.start + first..cols.end + first
}

/// Outputs per piece: about `share` bytes of weights, whole cache lines of results.
fn width(share: usize, weight: &WeightView<'_>) -> usize {
    (share / weight.row_bytes().max(1)).next_multiple_of(16).max(16)
}

/// The first thing that went wrong in the pieces of a dispatch: the one of the lowest number, whichever
/// thread was first.
#[derive(Default)]
struct Failure(Mutex<Option<(usize, BlockError)>>);

impl Failure {
    fn note(&self, piece: usize, result: Result<(), BlockError>) {
        if let Err(error) = result {
            let mut first = lock(&self.0);
            if first.as_ref().is_none_or(|(earlier, _)| piece < *earlier) {
                *first = Some((piece, error));
            }
        }
    }

    fn result(self) -> Result<(), ExecutorError> {
        let first = self.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        first.map_or(Ok(()), |(_, error)| Err(error.into()))
    }
}

/// Never contended: a piece's own lock, taken once.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn shape(what: &'static str, got: usize, expected: usize) -> ExecutorError {
    ExecutorError::Shape { what, got, expected }
}

fn expect(what: &'static str, got: usize, expected: usize) -> Result<(), ExecutorError> {
    if got == expected { Ok(()) } else { Err(shape(what, got, expected)) }
}
