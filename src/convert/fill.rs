//! One chunk of the NPU area: dequantise, quantise to int8, lay out as tiles, matrices side by side.

use rayon::prelude::*;

use super::Prepared;
use crate::blocks;
use crate::error::{AtFile, Error, Failure};
use crate::plan::{Chunk, Placed};
use crate::quantize::{self, Deviation};
use crate::tensor::{Int8Matrix, MatrixId, MatrixView};
use crate::tile::{self, TILE};

/// One matrix in its chunk.
#[derive(Default)]
struct Filled {
    scales: Vec<f32>,
    error: f64,
    n_clamped: u64,
}

/// Some rows of a matrix, as many as a tile has outputs: small enough for the second cache.
#[derive(Default)]
struct Rows {
    floats: Vec<f32>,
    codes: Int8Matrix,
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
        let filled: Result<Vec<Filled>, Error> = groups
            .par_iter()
            .zip(slices)
            .map_init(Rows::default, |rows, (parts, slice)| self.fill_matrix(parts, slice, rows))
            .collect();
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
    fn fill_matrix(&self, parts: &[Placed], tiles: &mut [u8], rows: &mut Rows) -> Result<Filled, Error> {
        let id = parts[0].matrix;
        let model = &self.request.model;
        let bank = self.weights.bank(id.layer).and_then(|bank| bank.weight(id.expert, id.projection));
        let weight =
            bank.ok_or_else(|| Error::usage(format!("the plan names {id}, which the model does not have")))?;
        // Of a matrix whose rows are shared, the first ones.
        let n_rows = self.plan.n_rows(id).map_or(0, |rows| rows as usize).min(weight.n_out);
        let no_rows = || Error::usage(format!("{id} has no weights"));
        let row_bytes = weight.dtype.row_bytes(weight.n_in as u64).filter(|len| *len > 0);
        let row_bytes = row_bytes.ok_or_else(no_rows)?;
        let place = row_bytes.checked_mul(n_rows as u64).and_then(|len| weight.place.part(0, len));
        let bytes = self.source.bytes(place.ok_or_else(no_rows)?).at(model)?;
        let (mut filled, mut deviation) = (Filled::default(), Deviation::default());
        for (first, bytes) in (0..).step_by(TILE).zip(bytes.chunks(TILE * row_bytes as usize)) {
            let n = bytes.len() / row_bytes as usize;
            rows.floats.resize(n * weight.n_in, 0.0);
            blocks::dequantize(weight.dtype, bytes, &mut rows.floats).at(model)?;
            if self.request.allow_nonfinite {
                filled.n_clamped += quantize::clamp(&mut rows.floats);
            }
            let view = MatrixView::new(&rows.floats, n, weight.n_in).ok_or_else(no_rows)?;
            quantize::per_channel_into(view, &mut rows.codes).map_err(|error| {
                Error::from(Failure::Quantize { matrix: id.to_string(), error: error.after(first) })
                    .or_at(model)
            })?;
            deviation.add(&rows.codes, view);
            filled.scales.extend_from_slice(&rows.codes.scales);
            for placed in parts {
                let Some((band, at)) = placed.tiles.band(first) else { continue };
                let at = (placed.offset - parts[0].offset) as usize + at;
                let len = band.bytes() as usize;
                let tiles = tiles.get_mut(at..at + len).ok_or_else(no_rows)?;
                tile::tile(&rows.codes, &band, tiles)?;
            }
        }
        filled.error = deviation.relative();
        Ok(filled)
    }
}
