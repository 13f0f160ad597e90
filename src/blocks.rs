//! The block formats of GGUF: what the bytes of one block mean, one small file each.
//!
//! A format is a type that implements [`Block`]; adding one is a file beside the others and a line in
//! `format`. Everything that must know what a weight *is* (the exact kernel, quantisation to int8, the
//! oracles of the fast kernels) asks here. Speed lives in [`crate::kernel`], never here.

mod bf16;
mod f16;
mod f32;
mod grids;
mod iq1_m;
mod iq1_s;
mod iq2_s;
mod iq2_xs;
mod iq2_xxs;
mod iq3_s;
mod iq3_xxs;
pub(crate) mod iq4_nl;
mod iq4_xs;
pub(crate) mod mxfp4;
mod not_finite;
mod q2_k;
mod q3_k;
mod q4_0;
mod q4_1;
mod q4_k;
mod q5_0;
mod q5_1;
mod q5_k;
mod q6_k;
mod q8_0;
mod tq1_0;
mod tq2_0;

use thiserror::Error;

use crate::tensor::Dtype;

pub use not_finite::{NotFinite, not_finite};

/// One block format: `LEN` weights in `BYTES` bytes.
pub trait Block<const LEN: usize, const BYTES: usize> {
    /// Decodes one block.
    fn decode(block: &[u8; BYTES], out: &mut [f32; LEN]);

    /// Whether the block's scales are finite numbers; a format without scales looks at its weight.
    fn is_finite(block: &[u8; BYTES]) -> bool;
}

/// Bytes that could not be decoded.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum BlockError {
    /// There is no decoder for this type.
    #[error("element type {0} is not supported")]
    Unsupported(Dtype),
    /// The bytes are not the blocks of that many weights.
    #[error("{bytes} bytes are not {weights} weights of type {dtype}")]
    Length {
        /// The type.
        dtype: Dtype,
        /// Bytes given.
        bytes: usize,
        /// Weights wanted.
        weights: usize,
    },
    /// A scale (of a float type: a weight) is NaN or infinite.
    #[error("block {block} holds a scale or weight that is not finite")]
    NotFinite {
        /// Number of the first such block; of a float type, of the weight.
        block: usize,
    },
}

/// What can be asked of the blocks of one type, whole runs of them at once.
struct Format {
    decode: fn(&[u8], &mut [f32]) -> Option<()>,
    first_not_finite: fn(&[u8]) -> Option<usize>,
}

/// The list of formats.
fn format(dtype: Dtype) -> Option<Format> {
    match dtype {
        Dtype::F32 => Some(format_of::<f32::F32, _, _>()),
        Dtype::F16 => Some(format_of::<f16::F16, _, _>()),
        Dtype::BF16 => Some(format_of::<bf16::Bf16, _, _>()),
        Dtype::Q8_0 => Some(format_of::<q8_0::Q8_0, _, _>()),
        Dtype::Q4_0 => Some(format_of::<q4_0::Q4_0, _, _>()),
        Dtype::Q4_1 => Some(format_of::<q4_1::Q4_1, _, _>()),
        Dtype::Q5_0 => Some(format_of::<q5_0::Q5_0, _, _>()),
        Dtype::Q5_1 => Some(format_of::<q5_1::Q5_1, _, _>()),
        Dtype::Q2_K => Some(format_of::<q2_k::Q2K, _, _>()),
        Dtype::Q3_K => Some(format_of::<q3_k::Q3K, _, _>()),
        Dtype::Q4_K => Some(format_of::<q4_k::Q4K, _, _>()),
        Dtype::Q5_K => Some(format_of::<q5_k::Q5K, _, _>()),
        Dtype::Q6_K => Some(format_of::<q6_k::Q6K, _, _>()),
        Dtype::IQ1_S => Some(format_of::<iq1_s::Iq1S, _, _>()),
        Dtype::IQ1_M => Some(format_of::<iq1_m::Iq1M, _, _>()),
        Dtype::IQ2_XXS => Some(format_of::<iq2_xxs::Iq2Xxs, _, _>()),
        Dtype::IQ2_XS => Some(format_of::<iq2_xs::Iq2Xs, _, _>()),
        Dtype::IQ2_S => Some(format_of::<iq2_s::Iq2S, _, _>()),
        Dtype::IQ3_XXS => Some(format_of::<iq3_xxs::Iq3Xxs, _, _>()),
        Dtype::IQ3_S => Some(format_of::<iq3_s::Iq3S, _, _>()),
        Dtype::IQ4_NL => Some(format_of::<iq4_nl::Iq4Nl, _, _>()),
        Dtype::IQ4_XS => Some(format_of::<iq4_xs::Iq4Xs, _, _>()),
        Dtype::MXFP4 => Some(format_of::<mxfp4::Mxfp4, _, _>()),
        Dtype::TQ1_0 => Some(format_of::<tq1_0::Tq1_0, _, _>()),
        Dtype::TQ2_0 => Some(format_of::<tq2_0::Tq2_0, _, _>()),
        _ => None,
    }
}

/// Lifts a format from one block to runs of blocks.
fn format_of<B: Block<LEN, BYTES>, const LEN: usize, const BYTES: usize>() -> Format {
    Format {
        decode: |bytes, out| {
            let ((blocks, []), (outs, [])) = (bytes.as_chunks(), out.as_chunks_mut()) else { return None };
            (blocks.len() == outs.len()).then(|| {
                blocks.iter().zip(outs).for_each(|(block, out)| B::decode(block, out));
            })
        },
        first_not_finite: |bytes| bytes.as_chunks().0.iter().position(|block| !B::is_finite(block)),
    }
}

/// Whether tensors of this type can be computed with, not only carried.
pub fn is_supported(dtype: Dtype) -> bool {
    format(dtype).is_some()
}

/// Decodes whole blocks to f32: `bytes` holds exactly `out.len()` weights, which is any number of whole rows.
///
/// # Errors
///
/// [`BlockError::Unsupported`] where there is no decoder; [`BlockError::Length`] where `bytes` are not exactly
/// the blocks of `out`.
pub fn dequantize(dtype: Dtype, bytes: &[u8], out: &mut [f32]) -> Result<(), BlockError> {
    let format = format(dtype).ok_or(BlockError::Unsupported(dtype))?;
    let refused = BlockError::Length { dtype, bytes: bytes.len(), weights: out.len() };
    (format.decode)(bytes, out).ok_or(refused)
}

/// Looks for the first block whose scale is NaN or infinite; in float types, for the first such weight.
///
/// # Errors
///
/// [`BlockError::NotFinite`] with its number; [`BlockError::Unsupported`] where there is no decoder;
/// [`BlockError::Length`] where `bytes` are no whole number of blocks.
pub fn check_finite(dtype: Dtype, bytes: &[u8]) -> Result<(), BlockError> {
    let format = format(dtype).ok_or(BlockError::Unsupported(dtype))?;
    let blocks = bytes.len() / dtype.block_bytes();
    if !bytes.len().is_multiple_of(dtype.block_bytes()) {
        let weights = blocks * dtype.block_len();
        return Err(BlockError::Length { dtype, bytes: bytes.len(), weights });
    }
    match (format.first_not_finite)(bytes) {
        Some(block) => Err(BlockError::NotFinite { block }),
        None => Ok(()),
    }
}

/// The half-precision number in two bytes, as the scales of most formats are stored.
fn half(bytes: [u8; 2]) -> half::f16 {
    half::f16::from_le_bytes(bytes)
}
