//! Block formats against the numbers of Python's `gguf` package, bit for bit.

use orkpack::blocks::{BlockError, check_finite, dequantize, is_supported};
use orkpack::tensor::Dtype;

use crate::support::fixture;

/// The formats, and where a block of each has its scales; float types have none.
const FORMATS: [(Dtype, &[usize]); 18] = [
    (Dtype::F32, &[]),
    (Dtype::F16, &[]),
    (Dtype::BF16, &[]),
    (Dtype::Q8_0, &[0]),
    (Dtype::Q4_0, &[0]),
    (Dtype::Q4_K, &[0, 2]),
    (Dtype::Q5_K, &[0, 2]),
    (Dtype::Q6_K, &[208]),
    (Dtype::Q4_1, &[0, 2]),
    (Dtype::Q5_0, &[0]),
    (Dtype::Q5_1, &[0, 2]),
    (Dtype::Q2_K, &[80, 82]),
    (Dtype::Q3_K, &[108]),
    (Dtype::IQ4_NL, &[0]),
    (Dtype::IQ4_XS, &[0]),
    (Dtype::MXFP4, &[0]),
    (Dtype::TQ1_0, &[52]),
    (Dtype::TQ2_0, &[64]),
];

fn vector(dtype: Dtype, suffix: &str) -> Vec<u8> {
    std::fs::read(fixture(&format!("vectors/blocks/{dtype}.{suffix}"))).unwrap()
}

#[test]
fn decode_as_the_reference_does() {
    for (dtype, _) in FORMATS {
        let expected = vector(dtype, "f32");
        let mut out = vec![f32::NAN; expected.len() / 4];
        dequantize(dtype, &vector(dtype, "bin"), &mut out).unwrap();
        let bytes: Vec<u8> = out.iter().flat_map(|w| w.to_le_bytes()).collect();
        assert!(bytes == expected, "{dtype}");
    }
}

#[test]
fn the_list_is_what_is_supported() {
    let supported: Vec<Dtype> = Dtype::ALL.iter().copied().filter(|&dtype| is_supported(dtype)).collect();
    let mut listed = FORMATS.map(|(dtype, _)| dtype);
    listed.sort();
    assert_eq!(supported, listed);
    let refused = Err(BlockError::Unsupported(Dtype::I32));
    assert_eq!(dequantize(Dtype::I32, &[0; 4], &mut [0.0]), refused);
    assert_eq!(check_finite(Dtype::I32, &[0; 4]), refused);
}

#[test]
fn lengths_are_checked() {
    for (dtype, _) in FORMATS {
        let (weights, bytes) = (2 * dtype.block_len(), 2 * dtype.block_bytes());
        for (bytes, weights) in [
            (bytes - 1, weights),
            (bytes + 1, weights),
            (bytes, weights - 1),
            (bytes, weights + 1),
            (bytes, weights / 2),
            (0, weights),
            (bytes, 0),
        ] {
            let refused = Err(BlockError::Length { dtype, bytes, weights });
            assert_eq!(dequantize(dtype, &vec![0; bytes], &mut vec![0.0; weights]), refused);
        }
        assert_eq!(dequantize(dtype, &[], &mut []), Ok(()));
        let odd = check_finite(dtype, &vec![0; bytes + 1]);
        assert_eq!(odd, Err(BlockError::Length { dtype, bytes: bytes + 1, weights }));
    }
}

/// Puts a half-precision number, which is not finite, in a scale; where scales are not halves, their like of it.
fn set_scale(dtype: Dtype, block: &mut [u8], at: usize, half: u16) {
    let bits = if matches!(dtype, Dtype::F32 | Dtype::BF16) { 0x7f80 } else { half };
    match dtype {
        Dtype::MXFP4 => block[at] = 253,
        _ => block[at..at + 2].copy_from_slice(&bits.to_le_bytes()),
    }
}

#[test]
fn the_first_block_that_is_not_finite_is_named() {
    for (dtype, scales) in FORMATS {
        let good = vector(dtype, "bin");
        assert_eq!(check_finite(dtype, &good), Ok(()), "{dtype}");
        // A weight of a float type ends in its sign and exponent, whatever its length.
        let last = [dtype.block_bytes() - 2];
        for at in if scales.is_empty() { &last } else { scales } {
            for (infinite_or_nan, block) in [(0x7c00u16, 0), (0xfc00, 2), (0x7e01, 5)] {
                let mut bad = good.clone();
                for block in bad.chunks_exact_mut(dtype.block_bytes()).skip(block).take(2) {
                    set_scale(dtype, block, *at, infinite_or_nan);
                }
                assert_eq!(check_finite(dtype, &bad), Err(BlockError::NotFinite { block }), "{dtype}");
            }
        }
    }
}
