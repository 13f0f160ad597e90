//! Borrowed matrices, the int8 matrix that quantisation yields, and the name of an expert's matrix.

use std::fmt;

use super::Dtype;
use crate::units::{ExpertId, LayerId};

/// A dense row-major matrix `[n_rows, n_cols]`.
#[derive(Clone, Copy, Debug)]
pub struct MatrixView<'a, T> {
    data: &'a [T],
    n_rows: usize,
    n_cols: usize,
}

impl<'a, T> MatrixView<'a, T> {
    /// Views `data` as `[n_rows, n_cols]`; `None` when the length is not their product.
    pub fn new(data: &'a [T], n_rows: usize, n_cols: usize) -> Option<Self> {
        (n_rows.checked_mul(n_cols) == Some(data.len())).then_some(MatrixView { data, n_rows, n_cols })
    }

    /// Number of rows.
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// Number of columns.
    pub fn n_cols(&self) -> usize {
        self.n_cols
    }

    /// Row `i`, `[n_cols]`.
    ///
    /// # Panics
    ///
    /// When `i` is not below `n_rows`: a bug of the caller.
    pub fn row(&self, i: usize) -> &'a [T] {
        &self.data[i * self.n_cols..(i + 1) * self.n_cols]
    }

    /// All elements, row after row.
    pub fn data(&self) -> &'a [T] {
        self.data
    }
}

impl<T> Default for MatrixView<'_, T> {
    /// No rows and no columns.
    fn default() -> Self {
        MatrixView { data: &[], n_rows: 0, n_cols: 0 }
    }
}

/// A weight matrix `[n_out, n_in]` in its source quantisation: row `o` is `row_bytes` bytes at `o * row_bytes`.
#[derive(Clone, Copy, Debug)]
pub struct WeightView<'a> {
    dtype: Dtype,
    n_in: usize,
    n_out: usize,
    row_bytes: usize,
    bytes: &'a [u8],
}

impl<'a> WeightView<'a> {
    /// Views `bytes`; `None` when they are not exactly `[n_out, n_in]` of this type.
    pub fn new(dtype: Dtype, n_in: usize, n_out: usize, bytes: &'a [u8]) -> Option<Self> {
        let row_bytes = usize::try_from(dtype.row_bytes(n_in as u64)?).ok()?;
        (row_bytes.checked_mul(n_out) == Some(bytes.len())).then_some(WeightView {
            dtype,
            n_in,
            n_out,
            row_bytes,
            bytes,
        })
    }

    /// The element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Inputs: weights per row.
    pub fn n_in(&self) -> usize {
        self.n_in
    }

    /// Outputs: rows.
    pub fn n_out(&self) -> usize {
        self.n_out
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// The bytes of row `o`.
    ///
    /// # Panics
    ///
    /// When `o` is not below `n_out`: a bug of the caller.
    pub fn row(&self, o: usize) -> &'a [u8] {
        &self.bytes[o * self.row_bytes..(o + 1) * self.row_bytes]
    }

    /// All bytes.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

/// A matrix in int8 with one scale per output row: `w ≈ codes[o][i] * scales[o]`, `|code| <= 127`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Int8Matrix {
    /// `[n_out, n_in]`, row-major.
    pub codes: Vec<i8>,
    /// `[n_out]`.
    pub scales: Vec<f32>,
    /// Inputs: columns.
    pub n_in: usize,
    /// Outputs: rows.
    pub n_out: usize,
}

/// One of an expert's three matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Projection {
    /// `ffn_gate_exps`: `[n_ff, n_embd]`.
    Gate,
    /// `ffn_up_exps`: `[n_ff, n_embd]`.
    Up,
    /// `ffn_down_exps`: `[n_embd, n_ff]`.
    Down,
}

impl Projection {
    /// The three, in order of use.
    pub const ALL: [Projection; 3] = [Projection::Gate, Projection::Up, Projection::Down];

    /// `gate`, `up` or `down`.
    pub fn name(self) -> &'static str {
        match self {
            Projection::Gate => "gate",
            Projection::Up => "up",
            Projection::Down => "down",
        }
    }
}

/// The name of one expert matrix. Orders by layer, then expert, then projection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MatrixId {
    /// The layer.
    pub layer: LayerId,
    /// The expert in that layer.
    pub expert: ExpertId,
    /// Which of its matrices.
    pub projection: Projection,
}

impl fmt::Display for MatrixId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "blk.{}.ffn_{}_exps expert {}", self.layer, self.projection.name(), self.expert)
    }
}
