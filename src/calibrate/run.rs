//! The calibration pass: the model's own forward pass over text, with an executor that counts the routing.
//!
//! Windows are run from an empty cache, as long as a prompt of prefill, and every k-th is set aside: what is
//! counted there is never used to choose. A large group of windows goes through one layer before any goes through the
//! next, so that a model larger than memory is read once for each group. The text itself is not kept.

use std::ops::ControlFlow;

use thiserror::Error;

use super::{Block, RoutedLayer, Statistics, StatisticsError};
use crate::executor::{Executor, ExecutorError, Product, Routing, WeightId};
use crate::model::{ForwardError, Group, Model, ModelShape, MoeLayerShape};
use crate::tensor::MatrixView;
use crate::units::LayerId;

/// With fewer tokens than this nothing is set aside.
const LEAST_TO_SPLIT: usize = 64;

/// How a calibration pass cuts its text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Tokens in a window, at most; each window starts from an empty cache and runs in one call.
    pub window: usize,
    /// Of so many windows the last is held out; at least 2.
    pub held_out_every: usize,
    /// Tokens, at least, that go through a layer before any goes on: `4 · n_embd` bytes each are kept. Changes no count.
    pub group: usize,
}

impl Default for Cut {
    /// Windows of 512, every fifth held out, in groups of 16384 tokens.
    fn default() -> Self {
        Cut { window: 512, held_out_every: 5, group: 1 << 14 }
    }
}

/// What a calibration pass has counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts {
    /// The layers with experts.
    pub layers: Vec<RoutedLayer>,
    /// What may be used to choose.
    pub calibration: Block,
    /// What only judges the choice; without tokens where the text was too short.
    pub held_out: Block,
}

/// Why a calibration pass stopped.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CalibrateError {
    /// The forward pass stopped.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// Routing that cannot be counted.
    #[error(transparent)]
    Statistics(#[from] StatisticsError),
    /// The caller said so.
    #[error("stopped")]
    Stopped,
}

impl Counts {
    /// Nothing counted yet for a model of this shape.
    pub fn new(shape: &ModelShape) -> Counts {
        let layer = |moe: &MoeLayerShape| RoutedLayer {
            layer: moe.layer.0,
            n_expert: moe.n_expert() as u32,
            n_used: moe.n_used as u32,
        };
        let layers: Vec<RoutedLayer> = shape.moe_layers.iter().map(layer).collect();
        Counts { calibration: Block::empty(&layers), held_out: Block::empty(&layers), layers }
    }

    /// The document of these counts; `kernel` names the arithmetic that routed.
    ///
    /// # Errors
    ///
    /// [`StatisticsError`] when nothing was counted.
    pub fn into_statistics(
        self,
        fingerprint: String,
        architecture: &str,
        kernel: &str,
    ) -> Result<Statistics, StatisticsError> {
        let Counts { layers, calibration, held_out } = self;
        let (architecture, kernel) = (architecture.to_owned(), kernel.to_owned());
        Statistics::new(fingerprint, architecture, kernel, layers, calibration, Some(held_out))
    }
}

/// An executor that leaves the work to another and counts the routing that passes, a window to a call of a layer.
pub struct CountingExecutor<'a> {
    inner: &'a mut dyn Executor,
    counts: Counts,
    /// The first row of a call that is held out.
    held_out_from: usize,
    /// The first routing that could not be counted.
    refused: Option<StatisticsError>,
}

impl<'a> CountingExecutor<'a> {
    /// Counts what a model of this shape sends to `inner`.
    pub fn new(inner: &'a mut dyn Executor, shape: &ModelShape) -> Self {
        CountingExecutor { inner, counts: Counts::new(shape), held_out_from: usize::MAX, refused: None }
    }

    /// Of the calls to come, rows from this one on are held out.
    pub fn hold_out_from(&mut self, row: usize) {
        self.held_out_from = row;
    }

    /// Closes a window of `n_tokens`, which has passed in one call.
    ///
    /// # Errors
    ///
    /// [`StatisticsError`] when its routing could not be counted.
    pub fn end_window(&mut self, n_tokens: usize) -> Result<(), StatisticsError> {
        self.check()?;
        let chosen = self.held_out_from.min(n_tokens);
        for (block, n) in
            [(&mut self.counts.calibration, chosen), (&mut self.counts.held_out, n_tokens - chosen)]
        {
            if n > 0 {
                block.end_window(n as u64);
            }
        }
        Ok(())
    }

    fn check(&mut self) -> Result<(), StatisticsError> {
        self.refused.take().map_or(Ok(()), Err)
    }

    /// What was counted.
    pub fn into_counts(self) -> Counts {
        self.counts
    }

    fn count(&mut self, layer: LayerId, routing: &Routing) -> Result<(), StatisticsError> {
        let (calibration, held_out) = split(routing, self.held_out_from);
        self.counts.calibration.record(layer, &calibration)?;
        self.counts.held_out.record(layer, &held_out)
    }
}

/// The routing of the rows before `row`, and of the others.
fn split(routing: &Routing, row: usize) -> (Routing, Routing) {
    let n_used = routing.n_used;
    let (before, after) = routing.experts.split_at(row.min(routing.n_rows()) * n_used);
    let (weights_before, weights_after) = routing.weights.split_at(before.len());
    let part = |experts: &[_], weights: &[_]| Routing {
        n_used,
        experts: experts.to_vec(),
        weights: weights.to_vec(),
    };
    (part(before, weights_before), part(after, weights_after))
}

impl Executor for CountingExecutor<'_> {
    fn linear(
        &mut self,
        rows: MatrixView<'_, f32>,
        products: &mut [Product<'_>],
    ) -> Result<(), ExecutorError> {
        self.inner.linear(rows, products)
    }

    fn each(
        &mut self,
        rows: MatrixView<'_, f32>,
        weights: &[WeightId],
        out: &mut [f32],
    ) -> Result<(), ExecutorError> {
        self.inner.each(rows, weights, out)
    }

    fn experts(
        &mut self,
        layer: LayerId,
        rows: MatrixView<'_, f32>,
        routing: &Routing,
        out: &mut [f32],
    ) -> Result<(), ExecutorError> {
        self.inner.experts(layer, rows, routing, out)?;
        if let Err(refused) = self.count(layer, routing) {
            self.refused.get_or_insert(refused);
        }
        Ok(())
    }

    fn gather(&mut self, weight: WeightId, ids: &[u32], out: &mut [f32]) -> Result<(), ExecutorError> {
        self.inner.gather(weight, ids, out)
    }

    fn ahead(&mut self, layer: LayerId) {
        self.inner.ahead(layer);
    }

    fn for_each(&mut self, n: usize, piece: &(dyn Fn(usize) + Sync)) {
        self.inner.for_each(n, piece);
    }
}

/// Runs every text through the model and counts where its routers send the tokens.
///
/// Texts with fewer windows in all than `held_out_every` are held out by halves instead: the second half of
/// each window's tokens. Only below 64 tokens is nothing held out. `progress` is told the tokens done and
/// all there are, after each window in each layer: a token halfway through the layers is half done.
///
/// # Errors
///
/// [`CalibrateError`] when the forward pass stops or routes what cannot be counted.
pub fn run(
    model: &Model,
    executor: &mut dyn Executor,
    texts: &[Vec<u32>],
    cut: Cut,
    progress: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Counts, CalibrateError> {
    let windows: Vec<&[u32]> = texts.iter().flat_map(|text| text.chunks(cut.window.max(1))).collect();
    let n_tokens = windows.iter().map(|window| window.len()).sum();
    let held_out = |i: usize| held_out_from(i, windows.len(), windows[i].len(), n_tokens, cut);
    let mut counting = CountingExecutor::new(executor, &model.shape());
    let (mut first, mut passed) = (0, 0);
    while first < windows.len() {
        let members = group(&windows[first..], cut.group);
        let mut group = Group::new(model, &mut counting, members)?;
        for layer in 0..model.n_layer() {
            for (i, window) in members.iter().enumerate() {
                counting.hold_out_from(held_out(first + i));
                group.layer(&mut counting, layer, i)?;
                counting.check()?;
                passed += window.len();
                if progress(passed / model.n_layer(), n_tokens).is_break() {
                    return Err(CalibrateError::Stopped);
                }
            }
        }
        for (i, window) in members.iter().enumerate() {
            counting.hold_out_from(held_out(first + i));
            counting.end_window(window.len())?;
        }
        first += members.len();
    }
    Ok(counting.into_counts())
}

/// In how many groups these texts are run: how often the model is read.
pub fn n_groups(texts: &[Vec<u32>], cut: Cut) -> usize {
    let windows: Vec<&[u32]> = texts.iter().flat_map(|text| text.chunks(cut.window.max(1))).collect();
    let (mut first, mut n) = (0, 0);
    while first < windows.len() {
        first += group(&windows[first..], cut.group).len();
        n += 1;
    }
    n
}

/// The first of some windows: as few as have `least` tokens.
fn group<'a, 'b>(windows: &'a [&'b [u32]], least: usize) -> &'a [&'b [u32]] {
    let mut n_tokens = 0;
    let enough = windows.iter().position(|window| {
        n_tokens += window.len();
        n_tokens >= least
    });
    &windows[..enough.map_or(windows.len(), |last| last + 1)]
}

/// The first row of window `index` that is held out; its length when none is.
fn held_out_from(index: usize, n_windows: usize, len: usize, n_tokens: usize, cut: Cut) -> usize {
    let every = cut.held_out_every.max(2);
    if n_windows < every {
        return if n_tokens < LEAST_TO_SPLIT { len } else { len.div_ceil(2) };
    }
    if index % every == every - 1 { 0 } else { len }
}
