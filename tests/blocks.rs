//! Block formats against the numbers of Python's `gguf` package, bit for bit.

use orkpack::blocks::{BlockError, check_finite, dequantize, is_supported};
use orkpack::tensor::Dtype;

use crate::support::fixture;

/// The formats, and where a block of each has its scales; float types have none.
const FORMATS: [(Dtype, &[usize]); 25] = [
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
    (Dtype::IQ1_S, &[0]),
    (Dtype::IQ1_M, &[49]),
    (Dtype::IQ2_XXS, &[0]),
    (Dtype::IQ2_XS, &[0]),
    (Dtype::IQ2_S, &[0]),
    (Dtype::IQ3_XXS, &[0]),
    (Dtype::IQ3_S, &[0]),
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

/// Digests of what 1024 blocks decode to, enough to meet every point of the grids; printed by the same script.
const LONG_RUNS: [(Dtype, &str); 7] = [
    (Dtype::IQ1_S, "1748c27770ce8f394f4a0bca0f355cb819afd9075bf32e7ae3f356037b7dddae"),
    (Dtype::IQ1_M, "22e82ac7b7d9aa6f3b48338ac334085765dcae1f4f0e7b00cf0793b5d89e2eb2"),
    (Dtype::IQ2_XXS, "6d23062c5ddd48562b49cb812d251fc4c1a2d38912f46f5bdef43ac6a5c3833f"),
    (Dtype::IQ2_XS, "c7915515d7853660dcbe6ad1ff65f6185938ec1708e247b91b47c0ff40932901"),
    (Dtype::IQ2_S, "2b74035aa0d04113984e0078abc8f903a339a316968923a2e726445fab7d743c"),
    (Dtype::IQ3_XXS, "7bfeb43680d391e6bd1908c9a41dd8066a250d71a8f34459416e54002455120d"),
    (Dtype::IQ3_S, "a6fcadc953e544a41aab79928cbab3b1693289cb87cc4b31f804a84fcd59b784"),
];

#[test]
fn every_point_of_the_grids_is_the_references() {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    for (dtype, digest) in LONG_RUNS {
        let mixed = (0..1024 * dtype.block_bytes() as u64).map(|i| i.wrapping_mul(ODD));
        let mut bytes: Vec<u8> = mixed.map(|z| ((z ^ z >> 32).wrapping_mul(ODD) >> 56) as u8).collect();
        let at = if dtype == Dtype::IQ1_M { 49 } else { 0 };
        for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
            set_scale(dtype, block, at, half::f16::ONE.to_bits());
        }
        let mut out = vec![f32::NAN; 1024 * dtype.block_len()];
        dequantize(dtype, &bytes, &mut out).unwrap();
        assert_eq!(blake3::hash(bytemuck::cast_slice(&out)).to_string(), digest, "{dtype}");
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

/// Puts a half-precision number in a scale. Of types whose scales are not halves, any number that is not finite.
fn set_scale(dtype: Dtype, block: &mut [u8], at: usize, half: u16) {
    let bits = if matches!(dtype, Dtype::F32 | Dtype::BF16) { 0x7f80 } else { half };
    match dtype {
        Dtype::MXFP4 => block[at] = 253,
        Dtype::IQ1_M => (0..4).for_each(|part| {
            let byte = &mut block[at + 2 * part];
            *byte = *byte & 15 | ((half >> (4 * part) & 15) as u8) << 4;
        }),
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
