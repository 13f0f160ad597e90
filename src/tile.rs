//! The NPU's weight layout: which sub-matrices a matrix is cut into, and where each int8 code goes.
//!
//! One sub-matrix is one program's weights: `k_padded` inputs by `n_padded` outputs, in blocks of 32 outputs by 32
//! inputs, a block contiguous (1 KiB), blocks running along the inputs first:
//!
//! ```text
//!              inputs k →
//!            ┌──────┬──────┬─────┐
//! outputs n  │ 1 KiB│ 1 KiB│ …   │   offset(k, n) = n/32 · 32·k_padded + k/32 · 1024 + n%32 · 32 + k%32
//!     ↓      ├──────┼──────┼─────┤
//!            │ …    │      │     │   inside a block: 32 runs (one per output) of 32 codes along k
//!            └──────┴──────┴─────┘
//! ```
//!
//! A K-slice of a wider tiling cannot be addressed by a program, so slicing happens here, at pack time. Nothing is
//! ever tiled or untiled while loading.
//!
//! Source: docs/npu.md, "Weight layout". Confidence: proven on boards.

use thiserror::Error;

use crate::profile::DeviceProfile;
use crate::tensor::Int8Matrix;

mod scratch;

pub use scratch::{PROGRAM_BYTES, PROGRAMS, Scratch, TASK_BYTES};

/// Outputs, and inputs, of one block.
pub const TILE: usize = 32;

/// One program's weights: a rectangle of the matrix, padded with zeros to a legal shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SubMatrix {
    /// First input.
    pub k0: u32,
    /// Inputs that are weights; the rest up to `k_padded` is zero.
    pub k_len: u32,
    /// Inputs of the program.
    pub k_padded: u32,
    /// First output.
    pub n0: u32,
    /// Outputs that are weights; the rest up to `n_padded` is zero.
    pub n_len: u32,
    /// Outputs of the program, a multiple of 32.
    pub n_padded: u32,
}

impl SubMatrix {
    /// Bytes of the tiles.
    pub fn bytes(&self) -> u64 {
        u64::from(self.k_padded) * u64::from(self.n_padded)
    }

    /// The outputs from `row` of the matrix on that are one block wide, as a part of a matrix which begins with them, and
    /// where their tiles are, from the first byte. `None` where they are not the part's, or no block begins with them.
    pub fn band(&self, row: usize) -> Option<(SubMatrix, usize)> {
        let n = u32::try_from(row).ok()?.checked_sub(self.n0)?;
        if n >= self.n_len || !n.is_multiple_of(TILE as u32) {
            return None;
        }
        let n_len = (self.n_len - n).min(TILE as u32);
        let band = SubMatrix { n0: 0, n_len, n_padded: TILE as u32, ..*self };
        Some((band, n as usize * self.k_padded as usize))
    }

    /// Where input `k`, output `n` (both counted inside the sub-matrix) is, from its first byte.
    pub fn byte_of(&self, k: usize, n: usize) -> usize {
        (n / TILE) * TILE * self.k_padded as usize + (k / TILE) * TILE * TILE + (n % TILE) * TILE + k % TILE
    }
}

/// A matrix that the device cannot hold, or tiles that do not fit where they should go.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum TileError {
    /// No inputs or no outputs.
    #[error("a matrix of {n_in} inputs and {n_out} outputs has no weights")]
    Empty {
        /// Inputs.
        n_in: u64,
        /// Outputs.
        n_out: u64,
    },
    /// Beyond 32-bit shapes.
    #[error("a matrix of {n_in} inputs and {n_out} outputs is larger than any program's")]
    TooLarge {
        /// Inputs.
        n_in: u64,
        /// Outputs.
        n_out: u64,
    },
    /// A rectangle outside its matrix, or a buffer of the wrong length: a bug of the caller.
    #[error("the tiles need {needed} bytes, the buffer has {found}")]
    Buffer {
        /// Bytes of the tiles.
        needed: u64,
        /// Bytes given.
        found: u64,
    },
}

/// Cuts `[n_out, n_in]` into the fewest programs that the profile allows: outputs first, then inputs.
///
/// Inputs are cut where they exceed the longest legal K: evenly, or into longest pieces and a rest where that pads
/// less. Outputs are cut evenly so that each part fits a chunk and the width of a program. The order is that of the
/// sums: all K-slices of a range of outputs follow each other.
///
/// # Errors
///
/// [`TileError::Empty`] and [`TileError::TooLarge`].
pub fn cut(n_in: u64, n_out: u64, profile: &DeviceProfile) -> Result<Vec<SubMatrix>, TileError> {
    if n_in == 0 || n_out == 0 {
        return Err(TileError::Empty { n_in, n_out });
    }
    if n_in > 1 << 24 || n_out > 1 << 24 {
        return Err(TileError::TooLarge { n_in, n_out });
    }
    let slices = cut_inputs(n_in as u32, profile).ok_or(TileError::TooLarge { n_in, n_out })?;
    let widest = slices.iter().map(|slice| slice.k_padded).max().unwrap_or(1);
    let by_chunk = (profile.memory.chunk_bytes.value / u64::from(widest)).min(1 << 24) as u32;
    let n_max = profile.shapes.n_max.value.min(by_chunk) / TILE as u32 * TILE as u32;
    if n_max == 0 {
        return Err(TileError::TooLarge { n_in, n_out });
    }
    let parts = cut_evenly(n_out as u32, n_max)
        .flat_map(|(n0, n_len)| {
            let n_padded = n_len.next_multiple_of(TILE as u32);
            slices.iter().map(move |slice| SubMatrix { n0, n_len, n_padded, ..*slice })
        })
        .collect();
    Ok(parts)
}

/// The K-slices, as sub-matrices without outputs.
fn cut_inputs(n_in: u32, profile: &DeviceProfile) -> Option<Vec<SubMatrix>> {
    let k_max = profile.shapes.legal_k.last()?.k;
    let padded = |pieces: &[(u32, u32)]| -> Option<Vec<SubMatrix>> {
        let slice = |&(k0, k_len): &(u32, u32)| {
            let k_padded = profile.padded_k(u64::from(k_len))?.k;
            Some(SubMatrix { k0, k_len, k_padded, n0: 0, n_len: 0, n_padded: 0 })
        };
        pieces.iter().map(slice).collect()
    };
    let even: Vec<_> = cut_evenly(n_in, k_max).collect();
    let longest: Vec<_> =
        (0..n_in.div_ceil(k_max)).map(|i| (i * k_max, k_max.min(n_in - i * k_max))).collect();
    let (even, longest) = (padded(&even)?, padded(&longest)?);
    let width = |slices: &[SubMatrix]| slices.iter().map(|slice| u64::from(slice.k_padded)).sum::<u64>();
    Some(if width(&longest) < width(&even) { longest } else { even })
}

/// `len` in the fewest pieces of at most `most` (a multiple of 32), each but the last the same multiple of 32.
fn cut_evenly(len: u32, most: u32) -> impl Iterator<Item = (u32, u32)> {
    let piece = len.div_ceil(len.div_ceil(most)).next_multiple_of(TILE as u32);
    (0..len.div_ceil(piece)).map(move |i| (i * piece, piece.min(len - i * piece)))
}

/// Writes one part of a matrix as tiles; what is not weight becomes zero.
///
/// `out` is exactly [`SubMatrix::bytes`] long.
///
/// # Errors
///
/// [`TileError::Buffer`] when it is not, or the part is no rectangle of the matrix.
pub fn tile(matrix: &Int8Matrix, part: &SubMatrix, out: &mut [u8]) -> Result<(), TileError> {
    check(matrix, part, out.len())?;
    let k_padded = part.k_padded as usize;
    for (block, out) in out.chunks_exact_mut(TILE * k_padded).enumerate() {
        out.fill(0);
        let columns = TILE.min((part.n_len as usize).saturating_sub(block * TILE));
        for column in 0..columns {
            let row = part.n0 as usize + block * TILE + column;
            let codes = &matrix.codes[row * matrix.n_in + part.k0 as usize..][..part.k_len as usize];
            for (run, codes) in codes.chunks(TILE).enumerate() {
                let at = run * TILE * TILE + column * TILE;
                out[at..at + codes.len()].copy_from_slice(bytemuck::cast_slice(codes));
            }
        }
    }
    Ok(())
}

/// Reads one part of tiles back into a matrix of the same shape: the inverse of [`tile`].
///
/// # Errors
///
/// [`TileError::Buffer`] when lengths disagree.
pub fn untile(tiles: &[u8], part: &SubMatrix, matrix: &mut Int8Matrix) -> Result<(), TileError> {
    check(matrix, part, tiles.len())?;
    for n in 0..part.n_len as usize {
        let row = (part.n0 as usize + n) * matrix.n_in + part.k0 as usize;
        let codes = &mut matrix.codes[row..][..part.k_len as usize];
        for (run, codes) in codes.chunks_mut(TILE).enumerate() {
            let at = part.byte_of(run * TILE, n);
            codes.copy_from_slice(bytemuck::cast_slice(&tiles[at..at + codes.len()]));
        }
    }
    Ok(())
}

fn check(matrix: &Int8Matrix, part: &SubMatrix, tiles: usize) -> Result<(), TileError> {
    let inside = u64::from(part.k0) + u64::from(part.k_len) <= matrix.n_in as u64
        && u64::from(part.n0) + u64::from(part.n_len) <= matrix.n_out as u64
        && part.k_padded > 0
        && part.k_len <= part.k_padded
        && part.n_len <= part.n_padded
        && part.k_padded.is_multiple_of(TILE as u32)
        && part.n_padded.is_multiple_of(TILE as u32);
    if !inside || part.bytes() != tiles as u64 || matrix.codes.len() != matrix.n_in * matrix.n_out {
        return Err(TileError::Buffer { needed: part.bytes(), found: tiles as u64 });
    }
    Ok(())
}
