//! A pack's NPU area derived anew from source rows: to hold it to a model, and to rebuild what a disk damaged.
//!
//! A digest says that bytes are those that were written; only the arithmetic says that they are the right ones. Both
//! walks here do what a conversion does with one matrix (dequantise, quantise, tile) and keep one matrix, or one chunk,
//! in memory. Nothing here changes a file in place.

mod against;
mod repair;

use std::sync::Arc;

use rayon::prelude::*;

use crate::blocks;
use crate::error::{Error, Failure};
use crate::executor::{Weight, WeightTable};
use crate::model::Outline;
use crate::pack::{MatrixName, Pack, Placement};
use crate::quantize;
use crate::tensor::{Int8Matrix, MatrixView, TensorSource};

pub use against::{Against, against, bytes_against};
pub use repair::{Repaired, repair};

/// Makes the NPU's matrices of a pack from the rows of a model.
struct Deriver<'a> {
    pack: &'a Pack,
    source: &'a dyn TensorSource,
    weights: Arc<WeightTable>,
}

impl<'a> Deriver<'a> {
    /// # Errors
    ///
    /// [`Error`] when the model cannot be described, or the pack's arithmetic is another than ours.
    fn new(pack: &'a Pack, source: &'a dyn TensorSource) -> Result<Deriver<'a>, Error> {
        // A pack without copies needs no description.
        let weights = if pack.placements().is_empty() {
            Arc::default()
        } else {
            Arc::clone(Outline::of(source)?.weights())
        };
        let contract = &pack.manifest().contract;
        if contract != quantize::CONTRACT && !pack.placements().is_empty() {
            let message = format!(
                "its int8 copies follow the rule `{}`, this orkpack knows `{}`",
                contract.escape_debug(),
                quantize::CONTRACT
            );
            return Err(Error::usage(message));
        }
        Ok(Deriver { pack, source, weights })
    }

    /// The rows that have a copy, in int8.
    fn matrix(&self, placement: &Placement) -> Result<Int8Matrix, Error> {
        let name = placement.matrix;
        let odd = |what: &str| Error::usage(format!("{name}: the model {what}"));
        let weight = self.weight(name).ok_or_else(|| odd("has no such matrix"))?;
        let (n_in, n_out) = (placement.n_in as usize, placement.n_out as usize);
        if weight.n_in != n_in || weight.n_out < n_out {
            let shape = format!("has {} x {} weights, the copy {n_out} x {n_in}", weight.n_out, weight.n_in);
            return Err(odd(&shape));
        }
        let len = weight.dtype.row_bytes(weight.n_in as u64).and_then(|row| row.checked_mul(n_out as u64));
        let place = len.and_then(|len| weight.place.part(0, len)).ok_or_else(|| odd("has other rows"))?;
        let mut rows = vec![0.0; n_in * n_out];
        blocks::dequantize(weight.dtype, self.source.bytes(place)?, &mut rows)?;
        // What a conversion was told to clamp is clamped here too; elsewhere there is nothing to clamp.
        quantize::clamp(&mut rows);
        let view = MatrixView::new(&rows, n_out, n_in).ok_or_else(|| odd("has no such weights"))?;
        quantize::per_channel(view)
            .map_err(|error| Failure::Quantize { matrix: name.to_string(), error }.into())
    }

    fn weight(&self, name: MatrixName) -> Option<Weight> {
        match name {
            MatrixName::Expert { .. } => {
                let id = name.expert()?;
                self.weights.bank(id.layer)?.weight(id.expert, id.projection).copied()
            }
            MatrixName::Dense { tensor } => {
                let entry = self.pack.tensors().get(tensor as usize)?;
                let tensor = self.source.find(&entry.name)?;
                let (n_in, n_out) = (tensor.n_in() as usize, tensor.n_out() as usize);
                Some(Weight { place: tensor.place, dtype: tensor.dtype, n_in, n_out })
            }
        }
    }

    /// The matrices of these placements, side by side, each given to `each`.
    fn each<T: Send>(
        &self,
        placements: &[&Placement],
        each: impl Fn(&Placement, Int8Matrix) -> Result<T, Error> + Sync,
    ) -> Result<Vec<T>, Error> {
        placements.par_iter().map(|placement| each(placement, self.matrix(placement)?)).collect()
    }
}
