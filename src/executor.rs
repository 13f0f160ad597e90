//! Who computes the matrix products: the trait that every model family is written against.
//!
//! A family's forward pass knows weights by number and never asks where they are computed. Implementations:
//! `CpuExecutor` (plain, from source rows), the calibration's (the same, counting), the runtime's (hot
//! experts on a device, the rest here). Rows are always `[m, n]`: decode is the batch of one.

mod bank;
pub mod cpu;

use std::collections::BTreeSet;

use thiserror::Error;

use crate::blocks::BlockError;
use crate::tensor::{Dtype, MatrixView, Place, SourceError};
use crate::units::{ExpertId, LayerId};

pub use bank::{Activation, ExpertBank, ExpertBiases};

/// The number of a weight matrix in a [`WeightTable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightId(pub u32);

/// One matrix `[n_out, n_in]` of the model, where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weight {
    /// Its bytes.
    pub place: Place,
    /// Their type.
    pub dtype: Dtype,
    /// Inputs: weights per row.
    pub n_in: usize,
    /// Outputs: rows.
    pub n_out: usize,
}

/// Every matrix of a model: the plain ones by [`WeightId`], the experts by layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WeightTable {
    linears: Vec<Weight>,
    /// Numbers of those that are computed in f32 always.
    exact: BTreeSet<WeightId>,
    banks: Vec<Option<ExpertBank>>,
}

impl WeightTable {
    /// Adds a matrix and gives its number.
    pub fn push(&mut self, weight: Weight) -> WeightId {
        self.linears.push(weight);
        WeightId((self.linears.len() - 1) as u32)
    }

    /// Adds a matrix whose products are computed in f32 whatever its type, with activations that are never
    /// rounded: a router's, where a rounding error would choose other experts.
    pub fn push_exact(&mut self, weight: Weight) -> WeightId {
        let id = self.push(weight);
        self.exact.insert(id);
        id
    }

    /// Whether the products of this matrix are computed in f32 whatever its type.
    pub fn is_exact(&self, id: WeightId) -> bool {
        self.exact.contains(&id)
    }

    /// Sets the experts of a layer.
    pub fn set_bank(&mut self, layer: LayerId, bank: ExpertBank) {
        if self.banks.len() <= layer.index() {
            self.banks.resize(layer.index() + 1, None);
        }
        self.banks[layer.index()] = Some(bank);
    }

    /// The matrix with this number.
    pub fn linear(&self, id: WeightId) -> Option<&Weight> {
        self.linears.get(id.0 as usize)
    }

    /// All plain matrices.
    pub fn linears(&self) -> &[Weight] {
        &self.linears
    }

    /// The experts of a layer, if it has any.
    pub fn bank(&self, layer: LayerId) -> Option<&ExpertBank> {
        self.banks.get(layer.index())?.as_ref()
    }

    /// The same, to be added to.
    pub(crate) fn bank_mut(&mut self, layer: LayerId) -> Option<&mut ExpertBank> {
        self.banks.get_mut(layer.index())?.as_mut()
    }

    /// The layers that have experts, in order.
    pub fn banks(&self) -> impl Iterator<Item = (LayerId, &ExpertBank)> {
        self.banks.iter().enumerate().filter_map(|(i, bank)| Some((LayerId(i as u32), bank.as_ref()?)))
    }
}

/// Which experts each row goes to: `n_used` slots per row, best first.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Routing {
    /// Slots per row.
    pub n_used: usize,
    /// `[m, n_used]`: the expert of each slot; no expert twice in one row.
    pub experts: Vec<ExpertId>,
    /// `[m, n_used]`: what that expert's output is multiplied by.
    pub weights: Vec<f32>,
}

impl Routing {
    /// Number of rows.
    pub fn n_rows(&self) -> usize {
        self.experts.len() / self.n_used.max(1)
    }
}

/// One product that [`Executor::linear`] is asked for.
#[derive(Debug)]
pub struct Product<'a> {
    /// The matrix.
    pub weight: WeightId,
    /// Where the result goes: `[m, n_out]`, row-major.
    pub out: &'a mut [f32],
}

/// Why a product could not be computed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ExecutorError {
    /// The weights could not be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The weights could not be decoded.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// A shape that does not fit its weight: a bug of the caller.
    #[error("{what}: got {got}, expected {expected}")]
    Shape {
        /// What was wrong.
        what: &'static str,
        /// What was given.
        got: usize,
        /// What was needed.
        expected: usize,
    },
    /// The device failed and the run was told not to go on without it.
    #[error("device: {0}")]
    Device(String),
}

/// Computes the products of a forward pass. One call at a time; the implementation may use many threads.
///
/// What a row yields must not depend on the other rows of the call, nor on the number of threads.
pub trait Executor {
    /// `out = rows · weightᵀ` for several matrices and the same rows `[m, n_in]`, in one dispatch.
    ///
    /// # Errors
    ///
    /// [`ExecutorError`] when weights cannot be read or shapes disagree.
    fn linear(
        &mut self,
        rows: MatrixView<'_, f32>,
        products: &mut [Product<'_>],
    ) -> Result<(), ExecutorError>;

    /// As many matrices of one shape, each for rows of its own, in one dispatch: `rows` is `[weights.len() · m, n_in]`,
    /// `out` is `[weights.len() · m, n_out]`, and the `i`-th `m` rows of both belong to the `i`-th matrix. The heads of an
    /// attention over latents.
    ///
    /// # Errors
    ///
    /// As [`Executor::linear`].
    fn each(
        &mut self,
        rows: MatrixView<'_, f32>,
        weights: &[WeightId],
        out: &mut [f32],
    ) -> Result<(), ExecutorError> {
        let n = weights.len().max(1);
        let (m, n_in) = (rows.n_rows() / n, rows.n_cols());
        let shape = |what, got, expected| ExecutorError::Shape { what, got, expected };
        if m == 0 || m * n != rows.n_rows() || !out.len().is_multiple_of(n) {
            return Err(shape("rows of several matrices", rows.n_rows(), m * n));
        }
        let n_out = out.len() / n;
        let parts = rows.data().chunks_exact(m * n_in).zip(out.chunks_exact_mut(n_out));
        for (&weight, (rows, out)) in weights.iter().zip(parts) {
            let rows = MatrixView::new(rows, m, n_in).ok_or(shape("values of whole rows", rows.len(), m))?;
            self.linear(rows, &mut [Product { weight, out }])?;
        }
        Ok(())
    }

    /// The routed experts of a layer: `out[r] = Σ_slot weight · down(activation(gate·x, up·x))`, slots in order.
    ///
    /// `rows` and `out` are `[m, n_embd]`. Expert weights are applied after down.
    ///
    /// # Errors
    ///
    /// As [`Executor::linear`]; also when the device fails under strict rules.
    fn experts(
        &mut self,
        layer: LayerId,
        rows: MatrixView<'_, f32>,
        routing: &Routing,
        out: &mut [f32],
    ) -> Result<(), ExecutorError>;

    /// Rows `ids` of a matrix, dequantised to f32: the token embedding. `out` is `[ids.len(), n_in]`.
    ///
    /// # Errors
    ///
    /// As [`Executor::linear`]; a row that is not there is [`ExecutorError::Shape`].
    fn gather(&mut self, weight: WeightId, ids: &[u32], out: &mut [f32]) -> Result<(), ExecutorError>;

    /// Says that `layer` comes next, so that its weights may be brought near.
    fn ahead(&mut self, layer: LayerId) {
        let _ = layer;
    }

    /// Runs `piece(0..n)` on the executor's threads, in any order: for attention and other work on rows.
    fn for_each(&mut self, n: usize, piece: &(dyn Fn(usize) + Sync)) {
        (0..n).for_each(piece);
    }
}
