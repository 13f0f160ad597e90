//! NaN and infinity in the source rows: found by tensor, expert and block, before they are in a pack.

use std::fmt;

use rayon::prelude::*;

use super::{BlockError, check_finite};
use crate::tensor::TensorInfo;

/// Scales (in float types: weights) of one matrix that are NaN or infinite.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotFinite {
    /// The tensor.
    pub tensor: String,
    /// Which of its stacked matrices, where there are several.
    pub expert: Option<u64>,
    /// The first such block of the matrix; in float types, the first such weight.
    pub block: u64,
    /// How many there are.
    pub n_blocks: u64,
    /// Whether blocks are single weights.
    pub is_float: bool,
}

/// Looks at every block of a tensor, one matrix after the other; a type without a decoder has nothing to look at.
pub fn not_finite(tensor: &TensorInfo, bytes: &[u8]) -> Vec<NotFinite> {
    let n_stack = tensor.n_stack().max(1);
    let len = bytes.len() / n_stack as usize;
    if len == 0 {
        return Vec::new();
    }
    let matrices: Vec<&[u8]> = bytes.chunks_exact(len).collect();
    let found = matrices.par_iter().enumerate().filter_map(|(number, matrix)| {
        let (block, n_blocks) = bad_blocks(tensor, matrix)?;
        let expert = (n_stack > 1).then_some(number as u64);
        let (tensor, is_float) = (tensor.name.clone(), tensor.dtype.block_len() == 1);
        Some(NotFinite { tensor, expert, block, n_blocks, is_float })
    });
    found.collect()
}

/// The first bad block of a matrix, and how many there are.
fn bad_blocks(tensor: &TensorInfo, matrix: &[u8]) -> Option<(u64, u64)> {
    let (mut first, mut n_blocks, mut at) = (None, 0, 0);
    while let Err(BlockError::NotFinite { block }) =
        check_finite(tensor.dtype, matrix.get(at * tensor.dtype.block_bytes()..)?)
    {
        first.get_or_insert((at + block) as u64);
        n_blocks += 1;
        at += block + 1;
    }
    Some((first?, n_blocks))
}

impl fmt::Display for NotFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tensor `{}`", self.tensor.escape_debug())?;
        if let Some(expert) = self.expert {
            write!(f, ", expert {expert}")?;
        }
        let what = if self.is_float { "weight" } else { "scale of block" };
        write!(f, ": {what} {} is NaN or infinite", self.block)?;
        match self.n_blocks {
            1 => Ok(()),
            n => write!(f, ", the first of {n}"),
        }
    }
}
