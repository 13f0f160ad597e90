//! Int8 rows against the definition, one value at a time.

use orkpack::quantize::{self, QuantizeError, QuantizedRows, SMALLEST};
use orkpack::tensor::MatrixView;
use proptest::prelude::*;

/// The contract, slowly: the library's own rounding of one product per value.
fn slow(row: &[f32]) -> (Vec<i8>, f32) {
    let max = row.iter().fold(0f32, |max, x| max.max(x.abs()));
    if max < SMALLEST {
        return (vec![0; row.len()], 0.0);
    }
    let inverse = 127.0 / max;
    (row.iter().map(|x| (x * inverse).round_ties_even() as i8).collect(), max / 127.0)
}

fn view(data: &[f32], n_rows: usize) -> MatrixView<'_, f32> {
    MatrixView::new(data, n_rows, data.len() / n_rows).unwrap()
}

#[test]
fn case_f6_weights_are_rounded_half_to_even_with_a_scale_per_row() {
    let weights =
        [127.0, 0.5, 1.5, -0.5, -1.5, 2.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0, -1.0, 1.0, 0.5, -2.0, 0.0];
    let matrix = quantize::per_channel(view(&weights, 3)).unwrap();
    assert_eq!(matrix.codes[..6], [127, 0, 2, 0, -2, 2], "halves go to the even neighbour");
    assert_eq!(matrix.codes[6..12], [0; 6]);
    assert_eq!(matrix.codes[12..], [127, -64, 64, 32, -127, 0]);
    assert_eq!(matrix.scales, [1.0, 0.0, 2.0 / 127.0]);
    assert_eq!((matrix.n_out, matrix.n_in), (3, 6));
}

#[test]
fn what_is_not_finite_is_named() {
    struct Case {
        value: f32,
        at: usize,
        row: usize,
        column: usize,
    }
    for Case { value, at, row, column } in [
        Case { value: f32::NAN, at: 0, row: 0, column: 0 },
        Case { value: -f32::NAN, at: 4, row: 0, column: 4 },
        Case { value: f32::INFINITY, at: 5, row: 1, column: 0 },
        Case { value: f32::NEG_INFINITY, at: 14, row: 2, column: 4 },
    ] {
        let mut weights = [1.0; 15];
        weights[at] = value;
        let refused = quantize::per_channel(view(&weights, 3));
        assert_eq!(refused, Err(QuantizeError::NotFinite { row, column }), "{value}");

        // Activations are not refused: the row's results become what they would be in floats.
        let mut out = QuantizedRows::default();
        quantize::rows(view(&weights, 3), &mut out);
        for (other, scale) in out.scales().iter().enumerate() {
            assert_eq!(scale.is_nan(), other == row, "{value}");
        }
        assert_eq!(out.codes().row(row), [0; 5]);
    }
}

#[test]
fn extreme_magnitudes_keep_their_codes_or_count_as_zeros() {
    for (max, code) in [
        (f32::MAX, 127),
        (1e30, 127),
        (SMALLEST, 127),
        (SMALLEST * 0.99, 0),
        (f32::MIN_POSITIVE, 0),
        (f32::from_bits(1), 0),
        (-0.0, 0),
    ] {
        let matrix = quantize::per_channel(view(&[max, -max, 0.0], 1)).unwrap();
        assert_eq!(matrix.codes, [code, -code, 0], "{max:e}");
        assert_eq!(matrix.scales, [if code == 0 { 0.0 } else { max / 127.0 }], "{max:e}");
    }
}

#[test]
fn the_error_is_the_relative_rms() {
    // One value of the second row is exact, the other is off by half a step.
    let weights = [4.0, 4.0, 127.0, 0.5];
    let matrix = quantize::per_channel(view(&weights, 2)).unwrap();
    let expected = (0.25f64 / (16.0 + 16.0 + 127.0 * 127.0 + 0.25)).sqrt();
    assert!((quantize::error_of(&matrix, view(&weights, 2)) - expected).abs() < 1e-12);
    let zeros = [0.0; 6];
    assert_eq!(quantize::error_of(&quantize::per_channel(view(&zeros, 2)).unwrap(), view(&zeros, 2)), 0.0);
}

#[test]
fn gaussian_rows_lose_less_than_one_percent() {
    let mut state = 1u32;
    let mut uniform = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    // Sums of twelve uniform values are near enough to normal ones.
    let weights: Vec<f32> = (0..32 * 512).map(|_| (0..12).map(|_| uniform()).sum()).collect();
    let matrix = quantize::per_channel(view(&weights, 32)).unwrap();
    let error = quantize::error_of(&matrix, view(&weights, 32));
    assert!((0.004..0.01).contains(&error), "{error}");
}

#[test]
fn a_buffer_is_reused_for_other_shapes() {
    let mut out = QuantizedRows::default();
    let (large, small) = ([1.0; 40], [2.0, -1.0]);
    quantize::rows(view(&large, 4), &mut out);
    assert_eq!((out.codes().n_rows(), out.codes().n_cols(), out.scales().len()), (4, 10, 4));
    quantize::rows(view(&small, 2), &mut out);
    assert_eq!((out.codes().data(), out.scales()), (&[127, -127][..], &[2.0 / 127.0, 1.0 / 127.0][..]));
    quantize::rows(MatrixView::new(&[], 0, 7).unwrap(), &mut out);
    assert_eq!((out.codes().n_rows(), out.scales().len()), (0, 0));
}

proptest! {
    #[test]
    fn both_ways_give_the_codes_of_the_definition(
        n_cols in 1usize..70,
        exponents in prop::collection::vec(-20i32..20, 1..5),
        seed in any::<u32>(),
    ) {
        let mut state = seed;
        let mut data = Vec::new();
        for exponent in &exponents {
            for _ in 0..n_cols {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                data.push(((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * 2f32.powi(*exponent));
            }
        }
        let x = view(&data, exponents.len());
        let matrix = quantize::per_channel(x).unwrap();
        let mut rows = QuantizedRows::default();
        quantize::rows(x, &mut rows);
        prop_assert_eq!(rows.codes().data(), &matrix.codes[..]);
        prop_assert_eq!(rows.scales(), &matrix.scales[..]);
        for row in 0..x.n_rows() {
            let (codes, scale) = slow(x.row(row));
            prop_assert_eq!(rows.codes().row(row), &codes[..]);
            prop_assert_eq!(matrix.scales[row], scale);
            prop_assert!(codes.iter().all(|code| *code >= -127));
        }
    }
}
