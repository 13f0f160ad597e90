//! f32 rows to int8 with one scale per row, for weights and for activations, and the error that this causes.
//!
//! The contract, [`CONTRACT`], is the same for both. For a row `w` with `max = max |w[i]|`, all in f32:
//!
//! ```text
//! code[i] = round_half_even(w[i] · (127 / max))        −127 … 127
//! scale   = max / 127                                  w[i] ≈ code[i] · scale
//! ```
//!
//! A row whose `max` is below [`SMALLEST`] has scale 0 and codes 0: its quotients would leave f32. Nothing here
//! depends on threads or instruction set: the maximum is one of integers, and each code is one product and one
//! rounding. There are no zero points, no groups and no smoothing; a different rule is a different contract.

use thiserror::Error;

use crate::kernel::{Kernel, Loops};
use crate::tensor::{Int8Matrix, MatrixView};

/// The name of this rule in packs: 8-bit weights, 8-bit activations, a scale per row, version 1.
pub const CONTRACT: &str = "w8a8-row-1";

/// Rows whose largest magnitude is below this (2^-100) count as zeros.
pub const SMALLEST: f32 = 1.0 / (1u128 << 100) as f32;

/// 1.5 · 2^23: a sum with it has no bits below one, so the addition itself rounds half to even.
const ROUND: f32 = 12_582_912.0;

/// What cannot be quantised.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum QuantizeError {
    /// A NaN or an infinity among the weights.
    #[error("the weight at row {row}, column {column} is not a finite number")]
    NotFinite {
        /// Output row.
        row: usize,
        /// Input column.
        column: usize,
    },
}

impl QuantizeError {
    /// The same in a matrix of which so many rows come before these.
    pub fn after(self, rows: usize) -> QuantizeError {
        match self {
            QuantizeError::NotFinite { row, column } => QuantizeError::NotFinite { row: row + rows, column },
        }
    }
}

/// Activations `[n_rows, n_cols]` in int8 with a scale per row; kept by the caller and filled again and again.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QuantizedRows {
    codes: Vec<i8>,
    scales: Vec<f32>,
    n_cols: usize,
}

impl QuantizedRows {
    /// The codes, `[n_rows, n_cols]`.
    pub fn codes(&self) -> MatrixView<'_, i8> {
        MatrixView::new(&self.codes, self.scales.len(), self.n_cols).unwrap_or_default()
    }

    /// The scales, `[n_rows]`.
    pub fn scales(&self) -> &[f32] {
        &self.scales
    }
}

/// Quantizes each output row of a weight matrix to int8 with a scale of its own.
///
/// Takes `[n_out, n_in]` f32, row-major; returns `[n_out, n_in]` int8 and `[n_out]` f32 scales with
/// `w ≈ q * scale[row]` and `|q| <= 127`. A row of zeros gets scale 0 and stays zero.
///
/// # Errors
///
/// [`QuantizeError::NotFinite`] at the first NaN or infinity, with its row and column.
pub fn per_channel(weights: MatrixView<'_, f32>) -> Result<Int8Matrix, QuantizeError> {
    let mut matrix = Int8Matrix::default();
    per_channel_into(weights, &mut matrix)?;
    Ok(matrix)
}

/// [`per_channel`] in place of what `matrix` holds.
///
/// # Errors
///
/// As [`per_channel`]; `matrix` then holds nothing of use.
pub fn per_channel_into(weights: MatrixView<'_, f32>, matrix: &mut Int8Matrix) -> Result<(), QuantizeError> {
    (matrix.n_out, matrix.n_in) = (weights.n_rows(), weights.n_cols());
    matrix.codes.resize(matrix.n_out * matrix.n_in, 0);
    matrix.scales.clear();
    Kernel::detect().widely(Encode { rows: weights, codes: &mut matrix.codes, scales: &mut matrix.scales });
    let Some(row) = matrix.scales.iter().position(|scale| scale.is_nan()) else { return Ok(()) };
    let column = weights.row(row).iter().position(|w| !w.is_finite()).unwrap_or(0);
    Err(QuantizeError::NotFinite { row, column })
}

/// Sets what is not finite to zero and says how many that were: what a conversion does when it is told to go on.
pub fn clamp(weights: &mut [f32]) -> u64 {
    let mut n_clamped = 0;
    for weight in weights.iter_mut().filter(|weight| !weight.is_finite()) {
        *weight = 0.0;
        n_clamped += 1;
    }
    n_clamped
}

/// Quantizes activation rows `[n_rows, n_cols]`, each with a scale of its own, into `out`.
///
/// A row that holds a NaN or an infinity gets codes 0 and scale NaN, so that what is computed from it is NaN, as it
/// would be in floats.
pub fn rows(x: MatrixView<'_, f32>, out: &mut QuantizedRows) {
    out.n_cols = x.n_cols();
    out.codes.resize(x.n_rows() * out.n_cols, 0);
    out.scales.clear();
    Kernel::detect().widely(Encode { rows: x, codes: &mut out.codes, scales: &mut out.scales });
}

/// How far codes are from the weights they stand for, summed over rows in order.
#[derive(Clone, Copy, Debug, Default)]
pub struct Deviation {
    /// Σ(w − q·scale)².
    error: f64,
    /// Σw².
    power: f64,
}

impl Deviation {
    /// Adds rows. Both are `[n_out, n_in]`; summed in f64, per row in eight interleaved sums.
    pub fn add(&mut self, matrix: &Int8Matrix, weights: MatrixView<'_, f32>) {
        Kernel::detect().widely(Deviate { matrix, weights, sum: self });
    }

    /// The relative RMS error, `√(Σ(w − q·scale)² / Σw²)`; 0 where all weights are 0.
    pub fn relative(&self) -> f64 {
        if self.power == 0.0 { 0.0 } else { (self.error / self.power).sqrt() }
    }
}

/// The relative RMS error of a quantisation: see [`Deviation`].
pub fn error_of(matrix: &Int8Matrix, weights: MatrixView<'_, f32>) -> f64 {
    let mut deviation = Deviation::default();
    deviation.add(matrix, weights);
    deviation.relative()
}

struct Deviate<'a> {
    matrix: &'a Int8Matrix,
    weights: MatrixView<'a, f32>,
    sum: &'a mut Deviation,
}

impl Loops for Deviate<'_> {
    #[inline(always)]
    fn run(self) {
        let Deviate { matrix, weights, sum } = self;
        for (row, &scale) in matrix.scales.iter().enumerate().take(weights.n_rows()) {
            let codes = &matrix.codes[row * matrix.n_in..][..matrix.n_in];
            let (error, power) = squares(weights.row(row), codes, scale);
            sum.error += error;
            sum.power += power;
        }
    }
}

/// The sums of `(w − q·scale)²` and of `w²` over one row.
#[inline(always)]
fn squares(w: &[f32], codes: &[i8], scale: f32) -> (f64, f64) {
    let (mut error, mut power) = ([0.0; 8], [0.0; 8]);
    let scale = f64::from(scale);
    let ((w, w_rest), (codes, codes_rest)) = (w.as_chunks::<8>(), codes.as_chunks::<8>());
    for (w, codes) in w.iter().zip(codes) {
        for lane in 0..8 {
            let difference = f64::from(w[lane]) - f64::from(codes[lane]) * scale;
            error[lane] += difference * difference;
            power[lane] += f64::from(w[lane]) * f64::from(w[lane]);
        }
    }
    for (lane, (&w, &code)) in w_rest.iter().zip(codes_rest).enumerate() {
        let difference = f64::from(w) - f64::from(code) * scale;
        error[lane] += difference * difference;
        power[lane] += f64::from(w) * f64::from(w);
    }
    (error.iter().sum(), power.iter().sum())
}

/// Codes of rows, and each row's scale: NaN where a value is not finite.
struct Encode<'a> {
    rows: MatrixView<'a, f32>,
    codes: &'a mut [i8],
    scales: &'a mut Vec<f32>,
}

impl Loops for Encode<'_> {
    #[inline(always)]
    fn run(self) {
        let n_cols = self.rows.n_cols();
        for row in 0..self.rows.n_rows() {
            let x = self.rows.row(row);
            self.scales.push(encode(x, largest(x), &mut self.codes[row * n_cols..][..n_cols]));
        }
    }
}

/// The largest magnitude; infinity or NaN when one of the values is. Without a sign, floats order as integers.
#[inline(always)]
fn largest(x: &[f32]) -> f32 {
    let bits = x.iter().fold(0i32, |max, x| max.max((x.to_bits() & 0x7fff_ffff) as i32));
    f32::from_bits(bits as u32)
}

/// Writes the codes of one row whose largest magnitude is `max`, and returns its scale: NaN where that is not finite.
#[inline(always)]
fn encode(x: &[f32], max: f32, codes: &mut [i8]) -> f32 {
    if max < SMALLEST || !max.is_finite() {
        codes.fill(0);
        return if max.is_finite() { 0.0 } else { f32::NAN };
    }
    let inverse = 127.0 / max;
    for (code, x) in codes.iter_mut().zip(x) {
        // The low byte of the sum's bits is the rounded integer in two's complement.
        *code = (x * inverse + ROUND).to_bits() as i8;
    }
    max / 127.0
}
