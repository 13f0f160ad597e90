//! Activation rows in the form that the weights want: f32 as they are, or int8 with a scale per block.
//!
//! Each row is quantised by itself, so what it becomes does not depend on its neighbours. A block's scale is
//! `d = amax/127` in f32 and its codes are `round(x · (127/amax))`, ties to even. A block too small to be
//! told from zero becomes zero; one that holds a NaN or an infinity gets the scale NaN, so that trouble shows
//! in every output it touches and is never rounded away.

use super::{Chosen, Kernel, naive};
use crate::tensor::{Dtype, MatrixView};

/// How activations are held while they are multiplied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Form {
    /// f32 as given, rows padded with zeros to a multiple of 16.
    #[default]
    F32,
    /// int8 with one f32 scale per 32, and the sum of each 16 codes.
    Q8x32,
    /// int8 with one f32 scale per 256, and the sum of each 16 codes.
    Q8x256,
}

impl Form {
    /// Every form.
    pub const ALL: [Form; 3] = [Form::F32, Form::Q8x32, Form::Q8x256];

    /// The form that weights of this type are multiplied with at full speed.
    pub fn for_weight(dtype: Dtype) -> Form {
        match dtype {
            Dtype::Q8_0 | Dtype::Q4_0 | Dtype::Q5_0 | Dtype::IQ4_NL | Dtype::MXFP4 => Form::Q8x32,
            Dtype::Q4_K | Dtype::Q5_K | Dtype::Q6_K => Form::Q8x256,
            Dtype::Q2_K | Dtype::Q3_K | Dtype::IQ4_XS => Form::Q8x256,
            _ => Form::F32,
        }
    }

    /// Activations per block; rows are whole blocks, but for f32, where a row may end anywhere.
    pub fn block_len(self) -> usize {
        match self {
            Form::F32 => 16,
            Form::Q8x32 => 32,
            Form::Q8x256 => 256,
        }
    }
}

/// Activation rows `[m, n_in]` in one form. The buffers are kept from use to use.
#[derive(Clone, Debug, Default)]
pub struct Activations {
    form: Form,
    n_rows: usize,
    n_in: usize,
    /// `[m, n_in rounded up to 16]`, form F32 only.
    values: Vec<f32>,
    /// `[m, n_in]`, the integer forms.
    codes: Vec<i8>,
    /// `[m, n_in / block_len]`, the integer forms.
    scales: Vec<f32>,
    /// `[m, n_in / 16]`, the integer forms: what a path that multiplies shifted codes takes off again.
    sums: Vec<i16>,
}

/// One row of [`Activations`]; the slices of other forms are empty.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row<'a> {
    pub(super) values: &'a [f32],
    pub(super) codes: &'a [i8],
    pub(super) scales: &'a [f32],
    pub(super) sums: &'a [i16],
}

/// Some neighbouring rows of [`Activations`], to be filled on a thread of their own.
#[derive(Debug)]
pub struct ActivationRows<'a> {
    form: Form,
    n_in: usize,
    first: usize,
    values: &'a mut [f32],
    codes: &'a mut [i8],
    scales: &'a mut [f32],
    sums: &'a mut [i16],
}

impl Activations {
    /// The form of the rows.
    pub fn form(&self) -> Form {
        self.form
    }

    /// Number of rows.
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// Activations per row.
    pub fn n_in(&self) -> usize {
        self.n_in
    }

    /// Takes over `rows`, replacing what was held before.
    ///
    /// # Panics
    ///
    /// When the rows are no whole blocks of an integer form: a bug of the caller.
    pub fn quantize(&mut self, kernel: Kernel, form: Form, rows: MatrixView<'_, f32>) {
        self.parts(form, rows.n_rows(), rows.n_cols(), rows.n_rows())
            .for_each(|mut part| part.quantize(kernel, rows));
    }

    /// Makes room for `[n_rows, n_in]` and lends it out, `rows_per_part` rows at a time; each part is to be
    /// filled by [`ActivationRows::quantize`], on whatever thread.
    ///
    /// # Panics
    ///
    /// As [`Activations::quantize`].
    pub fn parts(
        &mut self,
        form: Form,
        n_rows: usize,
        n_in: usize,
        rows_per_part: usize,
    ) -> impl Iterator<Item = ActivationRows<'_>> {
        let whole = form == Form::F32 || n_in.is_multiple_of(form.block_len());
        assert!(whole, "{n_in} activations are no whole blocks");
        (self.form, self.n_rows, self.n_in) = (form, n_rows, n_in);
        let widths = self.widths();
        self.values.resize(n_rows * widths.values, 0.0);
        self.codes.resize(n_rows * widths.codes, 0);
        self.scales.resize(n_rows * widths.scales, 0.0);
        self.sums.resize(n_rows * widths.sums, 0);
        let mut left = ActivationRows {
            form,
            n_in,
            first: 0,
            values: &mut self.values,
            codes: &mut self.codes,
            scales: &mut self.scales,
            sums: &mut self.sums,
        };
        let rows_per_part = rows_per_part.max(1);
        (0..n_rows).step_by(rows_per_part).map(move |first| {
            let n = rows_per_part.min(n_rows - first);
            ActivationRows {
                form,
                n_in,
                first,
                values: split_front(&mut left.values, n * widths.values),
                codes: split_front(&mut left.codes, n * widths.codes),
                scales: split_front(&mut left.scales, n * widths.scales),
                sums: split_front(&mut left.sums, n * widths.sums),
            }
        })
    }

    /// Row `r`.
    pub(super) fn row(&self, r: u32) -> Row<'_> {
        let (r, widths) = (r as usize, self.widths());
        Row {
            values: &self.values[r * widths.values..(r + 1) * widths.values],
            codes: &self.codes[r * widths.codes..(r + 1) * widths.codes],
            scales: &self.scales[r * widths.scales..(r + 1) * widths.scales],
            sums: &self.sums[r * widths.sums..(r + 1) * widths.sums],
        }
    }

    fn widths(&self) -> Widths {
        Widths::new(self.form, self.n_in)
    }
}

/// Elements per row of each buffer.
#[derive(Clone, Copy)]
struct Widths {
    values: usize,
    codes: usize,
    scales: usize,
    sums: usize,
}

impl Widths {
    fn new(form: Form, n_in: usize) -> Widths {
        match form {
            Form::F32 => Widths { values: n_in.next_multiple_of(16), codes: 0, scales: 0, sums: 0 },
            Form::Q8x32 => Widths { values: 0, codes: n_in, scales: n_in / 32, sums: n_in / 16 },
            Form::Q8x256 => Widths { values: 0, codes: n_in, scales: n_in / 256, sums: n_in / 16 },
        }
    }
}

impl ActivationRows<'_> {
    /// Which of the rows these are: the number of the first.
    pub fn first(&self) -> usize {
        self.first
    }

    /// Fills these rows from the same rows of `all`.
    ///
    /// # Panics
    ///
    /// When `all` is of another width or lacks the rows: a bug of the caller.
    pub fn quantize(&mut self, kernel: Kernel, all: MatrixView<'_, f32>) {
        assert_eq!(all.n_cols(), self.n_in, "rows of another width");
        let widths = Widths::new(self.form, self.n_in);
        match self.form {
            Form::F32 => {
                for (i, row) in self.values.chunks_exact_mut(widths.values.max(1)).enumerate() {
                    row[..self.n_in].copy_from_slice(all.row(self.first + i));
                    row[self.n_in..].fill(0.0);
                }
            }
            Form::Q8x32 | Form::Q8x256 => {
                for (i, codes) in self.codes.chunks_exact_mut(widths.codes.max(1)).enumerate() {
                    let scales = &mut self.scales[i * widths.scales..][..widths.scales];
                    let sums = &mut self.sums[i * widths.sums..][..widths.sums];
                    quantize_row(kernel, self.form, all.row(self.first + i), codes, scales);
                    sum_groups(codes, sums);
                }
            }
        }
    }
}

fn quantize_row(kernel: Kernel, form: Form, values: &[f32], codes: &mut [i8], scales: &mut [f32]) {
    match (kernel.0, form) {
        (Chosen::Naive, _) => naive::quantize(form.block_len(), values, codes, scales),
        #[cfg(target_arch = "x86_64")]
        (Chosen::Avx2(cpu), Form::Q8x256) => cpu.quantize::<256>(values, codes, scales),
        #[cfg(target_arch = "x86_64")]
        (Chosen::Avx2(cpu), _) => cpu.quantize::<32>(values, codes, scales),
        #[cfg(target_arch = "x86_64")]
        (Chosen::Avx512(cpu), Form::Q8x256) => cpu.avx2().quantize::<256>(values, codes, scales),
        #[cfg(target_arch = "x86_64")]
        (Chosen::Avx512(cpu), _) => cpu.avx2().quantize::<32>(values, codes, scales),
        // Whatever belongs to the target, NEON for one, these are compiled for.
        (_, Form::Q8x256) => quantize_blocks::<256>(values, codes, scales),
        _ => quantize_blocks::<32>(values, codes, scales),
    }
}

/// Quantises blocks of `N`. Inlined into the SIMD paths as well, where it is compiled for wider registers.
#[inline(always)]
pub(super) fn quantize_blocks<const N: usize>(values: &[f32], codes: &mut [i8], scales: &mut [f32]) {
    let blocks = values.as_chunks::<N>().0.iter().zip(codes.as_chunks_mut::<N>().0);
    for ((values, codes), scale) in blocks.zip(scales) {
        // As integers the bit patterns of positive floats sort like the floats, infinity and NaN above all.
        let top = values.iter().fold(0, |top: i32, v| top.max((v.to_bits() & 0x7fff_ffff).cast_signed()));
        let amax = f32::from_bits(top.cast_unsigned());
        let steps = steps(amax);
        *scale = if amax.is_finite() { amax / 127.0 * f32::from(steps > 0.0) } else { f32::NAN };
        for (code, v) in codes.iter_mut().zip(values) {
            // Adding 1.5 · 2^23 leaves the integer, rounded with ties to even, in the low bits.
            let rounded = (v * steps + 12_582_912.0).to_bits();
            *code = rounded as i8;
        }
    }
}

/// What to multiply with to get codes: 127/amax, or 0 where the block counts as zero or is not finite.
pub(super) fn steps(amax: f32) -> f32 {
    /// Below this 127/amax would come near the end of f32.
    const SMALLEST: f32 = 1e-30;
    if amax.is_finite() && amax >= SMALLEST { 127.0 / amax } else { 0.0 }
}

/// The sum of each 16 codes: at most 16 · 127.
fn sum_groups(codes: &[i8], sums: &mut [i16]) {
    for (sum, group) in sums.iter_mut().zip(codes.as_chunks::<16>().0) {
        *sum = group.iter().fold(0, |sum: i16, &q| sum.wrapping_add(i16::from(q)));
    }
}

/// Takes the first `n` elements off a slice.
fn split_front<'a, T>(slice: &mut &'a mut [T], n: usize) -> &'a mut [T] {
    let (front, back) = std::mem::take(slice).split_at_mut(n);
    *slice = back;
    front
}
