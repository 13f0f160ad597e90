//! One chunk of the NPU area: dequantise, quantise to int8, lay out as tiles, matrices side by side.

use rayon::prelude::*;

use super::Prepared;
use crate::blocks;
use crate::error::{AtFile, Error, Failure};
use crate::plan::{Chunk, Placed};
use crate::quantize::{self, QuantizeError};
use crate::tensor::{Int8Matrix, MatrixId, MatrixView};
use crate::tile;

/// One matrix in its chunk.
struct Filled {
    scales: Vec<f32>,
    error: f64,
    n_clamped: u64,
}

/// The quantisation errors of all matrices.
#[derive(Default)]
pub(super) struct Errors {
    pub worst: Option<(MatrixId, f64)>,
    sum: f64,
    n: u64,
    pub n_clamped: u64,
}

impl Errors {
    fn add(&mut self, matrix: MatrixId, filled: &Filled) {
        if self.worst.is_none_or(|(_, worst)| filled.error > worst) {
            self.worst = Some((matrix, filled.error));
        }
        self.sum += filled.error;
        self.n += 1;
        self.n_clamped += filled.n_clamped;
    }

    pub fn mean(&self) -> f64 {
        self.sum / self.n.max(1) as f64
    }
}

/// The chunk's bytes as one slice per matrix, so that matrices are filled side by side.
fn slices<'t>(mut tiles: &'t mut [u8], groups: &[&[Placed]]) -> Vec<&'t mut [u8]> {
    let mut at = 0;
    let mut slices = Vec::with_capacity(groups.len());
    for (i, group) in groups.iter().enumerate() {
        let end = groups.get(i + 1).map_or(at + tiles.len() as u64, |next| next[0].offset);
        let (_, rest) = tiles.split_at_mut((group[0].offset - at) as usize);
        let (slice, rest) = rest.split_at_mut((end - group[0].offset) as usize);
        slices.push(slice);
        (tiles, at) = (rest, end);
    }
    slices
}

impl Prepared {
    /// One chunk's tiles, and the scales of the matrices that begin in it, in the order of their first parts.
    pub(super) fn fill(&self, chunk: &Chunk, errors: &mut Errors) -> Result<(Vec<u8>, Vec<f32>), Error> {
        let mut tiles = vec![0; chunk.bytes as usize];
        let mut scales = Vec::new();
        let groups: Vec<&[Placed]> = chunk.parts.chunk_by(|a, b| a.matrix == b.matrix).collect();
        let slices = slices(&mut tiles, &groups);
        let filled: Result<Vec<Filled>, Error> =
            groups.par_iter().zip(slices).map(|(parts, slice)| self.fill_matrix(parts, slice)).collect();
        for (parts, filled) in groups.iter().zip(filled?) {
            errors.add(parts[0].matrix, &filled);
            // A matrix that runs over into the next chunk has its scales where it begins.
            if parts[0].part == 0 {
                scales.extend_from_slice(&filled.scales);
            }
        }
        Ok((tiles, scales))
    }

    /// Dequantises one matrix, quantises it to int8, and lays its parts into `tiles`, which begin with the first.
    fn fill_matrix(&self, parts: &[Placed], tiles: &mut [u8]) -> Result<Filled, Error> {
        let id = parts[0].matrix;
        let (matrix, error, n_clamped) = self.quantize(id)?;
        let first = parts[0].offset;
        for placed in parts {
            let at = (placed.offset - first) as usize;
            let len = placed.tiles.bytes() as usize;
            tile::tile(&matrix, &placed.tiles, &mut tiles[at..at + len])?;
        }
        Ok(Filled { scales: matrix.scales, error, n_clamped })
    }

    fn quantize(&self, id: MatrixId) -> Result<(Int8Matrix, f64, u64), Error> {
        let bank = self.weights.bank(id.layer).and_then(|bank| bank.weight(id.expert, id.projection));
        let weight =
            bank.ok_or_else(|| Error::usage(format!("the plan names {id}, which the model does not have")))?;
        // Of a matrix whose rows are shared, the first ones.
        let n_rows = self.plan.n_rows(id).map_or(0, |rows| rows as usize).min(weight.n_out);
        let no_rows = || Error::usage(format!("{id} has no weights"));
        let len = weight.dtype.row_bytes(weight.n_in as u64).and_then(|row| row.checked_mul(n_rows as u64));
        let place = len.and_then(|len| weight.place.part(0, len)).ok_or_else(no_rows)?;
        let bytes = self.source.bytes(place).at(&self.request.model)?;
        let mut rows = vec![0.0; weight.n_in * n_rows];
        blocks::dequantize(weight.dtype, bytes, &mut rows).at(&self.request.model)?;
        let n_clamped = if self.request.allow_nonfinite { quantize::clamp(&mut rows) } else { 0 };
        let view = MatrixView::new(&rows, n_rows, weight.n_in).ok_or_else(no_rows)?;
        let matrix = quantize::per_channel(view).map_err(|error: QuantizeError| {
            Error::from(Failure::Quantize { matrix: id.to_string(), error }).or_at(&self.request.model)
        })?;
        let error = quantize::error_of(&matrix, view);
        Ok((matrix, error, n_clamped))
    }
}
