//! An executor that leaves the work to another and keeps every routing that passes.

use orkpack::executor::{Executor, ExecutorError, Product, Routing, WeightId};
use orkpack::tensor::MatrixView;
use orkpack::units::LayerId;

pub struct Recorder<'a> {
    inner: &'a mut dyn Executor,
    /// In order of the calls.
    pub seen: Vec<(LayerId, Routing)>,
}

impl<'a> Recorder<'a> {
    pub fn new(inner: &'a mut dyn Executor) -> Self {
        Recorder { inner, seen: Vec::new() }
    }

    /// The experts of every row that layer `layer` was given, best first, call after call.
    pub fn choices(&self, layer: usize) -> Vec<Vec<u32>> {
        let calls = self.seen.iter().filter(|(at, _)| at.index() == layer);
        let rows = calls.flat_map(|(_, routing)| routing.experts.chunks(routing.n_used));
        rows.map(|row| row.iter().map(|expert| expert.0).collect()).collect()
    }
}

impl Executor for Recorder<'_> {
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
        self.seen.push((layer, routing.clone()));
        self.inner.experts(layer, rows, routing, out)
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
