//! Cuts jobs into programs and packs programs into submissions. Pure: no device is touched here.
//!
//! ```text
//! job ─► parts (K-slices, ranges of outputs) ─► pieces (rows up to the cap) ─► batches (what scratch holds)
//! ```
//!
//! A piece is one program. Rows are cut, never columns, but for one case: at one row, fewer long programs than
//! cores are cut into ranges of columns. (A range of columns of several rows would be written with a stride, and strided
//! writes collide on silicon.)

use std::collections::BTreeMap;
use std::ops::Range;

use super::program::Product;
use crate::device::{ChunkId, Job, PlacedPart};
use crate::tile::{Scratch, SubMatrix, TILE};

/// One program of a job.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) job: usize,
    /// The part, or a range of its columns.
    pub(super) part: SubMatrix,
    pub(super) chunk: ChunkId,
    /// Of the first of its tiles, in the chunk.
    pub(super) offset: u64,
    pub(super) row0: usize,
    pub(super) n_rows: usize,
}

impl Piece {
    /// Bytes of its activations and of its results.
    pub(super) fn bytes(&self) -> (u64, u64) {
        let rows = self.n_rows as u64;
        (rows * u64::from(self.part.k_padded), rows * u64::from(self.part.n_padded) * 4)
    }

    /// Its results, row by row, in C.
    fn results<'a>(&self, c: &'a [u8], at: u64) -> impl Iterator<Item = &'a [u8]> {
        c[at as usize..].chunks_exact(self.part.n_padded as usize * 4).take(self.n_rows)
    }

    fn results_mut<'a>(&self, c: &'a mut [u8], at: u64) -> impl Iterator<Item = &'a mut [u8]> {
        c[at as usize..].chunks_exact_mut(self.part.n_padded as usize * 4).take(self.n_rows)
    }

    /// The product, its operands at these addresses.
    pub(super) fn product(&self, a: u32, weights: u32, c: u32) -> Product {
        let SubMatrix { k_padded: k, n_padded: n, .. } = self.part;
        Product { m: self.n_rows as u32, k, n, a, weights, c }
    }
}

/// The pieces of one job, each of at most `cap(k_padded)` rows.
pub(super) fn pieces(index: usize, job: &Job<'_>, cap: impl Fn(u32) -> usize) -> Vec<Piece> {
    let rows = job.rows.n_rows();
    let of_part = |placed: &PlacedPart| {
        let (part, chunk, offset) = (placed.part, placed.chunk, placed.offset);
        let cap = cap(part.k_padded).max(1);
        let piece = move |row0| Piece { job: index, part, chunk, offset, row0, n_rows: cap.min(rows - row0) };
        (0..rows).step_by(cap).map(piece)
    };
    job.matrix.parts.iter().flat_map(of_part).collect()
}

/// Weights that one core streams in about 95 us, where a further program costs 7: enough to share.
const WORTH_SHARING: u64 = 1 << 20;

/// Cuts long one-row pieces into ranges of columns where there are fewer of them than cores.
pub(super) fn spread(pieces: Vec<Piece>, cores: usize) -> Vec<Piece> {
    let shared = |piece: &Piece| piece.n_rows == 1 && piece.part.bytes() >= WORTH_SHARING;
    if pieces.len() < cores && pieces.iter().all(shared) {
        pieces.into_iter().flat_map(|piece| columns(piece, cores)).collect()
    } else {
        pieces
    }
}

/// One piece as `n` ranges of whole blocks of columns, or as it is when it has fewer blocks.
fn columns(piece: Piece, n: usize) -> Vec<Piece> {
    let blocks = piece.part.n_padded as usize / TILE;
    if blocks < n {
        return vec![piece];
    }
    let range = |i| {
        let first = (i * blocks / n * TILE) as u32;
        let n_padded = ((i + 1) * blocks / n * TILE) as u32 - first;
        let whole = piece.part;
        let n_len = n_padded.min(whole.n_len.saturating_sub(first));
        let part = SubMatrix { n0: whole.n0 + first, n_len, n_padded, ..whole };
        Piece { part, offset: piece.offset + u64::from(first) * u64::from(whole.k_padded), ..piece }
    };
    (0..n).map(range).collect()
}

/// Which activations, as a key: the caller's slice, and the rectangle of it.
type Rectangle = (usize, usize, u32, u32, u32, usize, usize);

fn rectangle(piece: &Piece, jobs: &[Job<'_>]) -> Rectangle {
    let rows = jobs[piece.job].rows;
    let SubMatrix { k0, k_len, k_padded, .. } = piece.part;
    (rows.data().as_ptr().addr(), rows.n_cols(), k0, k_len, k_padded, piece.row0, piece.n_rows)
}

/// One submission: its pieces, and where their activations and results are in scratch.
#[derive(Debug, Default)]
pub(super) struct Batch {
    /// Pieces with the offsets of A and C.
    pub(super) programs: Vec<(Piece, u64, u64)>,
    /// Activations to bring: a piece that needs them, and where to.
    copies: Vec<(Piece, u64)>,
    /// Bytes of A and C in use.
    pub(super) a_len: u64,
    pub(super) c_len: u64,
}

impl Batch {
    /// Takes as many of `pieces` as fit the scratch, `most` at most, and leaves the rest.
    ///
    /// Empty only when the first piece alone does not fit, or there is none.
    pub(super) fn take(pieces: &mut &[Piece], jobs: &[Job<'_>], scratch: &Scratch, most: usize) -> Batch {
        let mut batch = Batch::default();
        let mut brought = BTreeMap::new();
        while let Some((piece, rest)) = pieces.split_first()
            && batch.programs.len() < most
        {
            let (a_bytes, c_bytes) = piece.bytes();
            let key = rectangle(piece, jobs);
            let a = brought.get(&key).copied().unwrap_or(batch.a_len);
            let a_len = batch.a_len.max(a + a_bytes);
            if a_len > scratch.a_bytes || batch.c_len + c_bytes > scratch.c_bytes {
                break;
            }
            if brought.insert(key, a).is_none() {
                batch.copies.push((*piece, a));
            }
            batch.programs.push((*piece, a, batch.c_len));
            (batch.a_len, batch.c_len) = (a_len, batch.c_len + c_bytes);
            *pieces = rest;
        }
        batch
    }

    /// Writes all activations, `a_len` bytes, padded with zeros.
    pub(super) fn write_activations(&self, jobs: &[Job<'_>], out: &mut [u8]) {
        for (piece, at) in &self.copies {
            let (k0, k_len) = (piece.part.k0 as usize, piece.part.k_len as usize);
            let rows = out[*at as usize..].chunks_exact_mut(piece.part.k_padded as usize);
            for (row, out) in (piece.row0..piece.row0 + piece.n_rows).zip(rows) {
                let (codes, padding) = out.split_at_mut(k_len);
                codes.copy_from_slice(bytemuck::cast_slice(&jobs[piece.job].rows.row(row)[k0..][..k_len]));
                padding.fill(0);
            }
        }
    }

    /// Marks the last result of every row.
    pub(super) fn mark_results(&self, mark: i32, out: &mut [u8]) {
        for (piece, _, at) in &self.programs {
            for row in piece.results_mut(out, *at) {
                if let Some(last) = row.last_chunk_mut() {
                    *last = mark.to_le_bytes();
                }
            }
        }
    }

    /// The first program that left a mark.
    pub(super) fn missing(&self, mark: i32, results: &[u8]) -> Option<usize> {
        let marked = |row: &[u8]| row.last_chunk() == Some(&mark.to_le_bytes());
        self.programs.iter().position(|(piece, _, at)| piece.results(results, *at).any(marked))
    }

    /// Programs that left nothing but zeros for a row whose activations are something, and the first such row.
    pub(super) fn zeros(&self, results: &[u8], jobs: &[Job<'_>]) -> Vec<(usize, usize)> {
        let is_odd = |piece: &Piece, row: usize, sums: &[u8]| {
            let SubMatrix { k0, k_len, n_len, .. } = piece.part;
            let codes = &jobs[piece.job].rows.row(row)[k0 as usize..][..k_len as usize];
            n_len > 0 && sums.iter().all(|byte| *byte == 0) && codes.iter().any(|code| *code != 0)
        };
        let of_program = |(program, (piece, _, at)): (usize, &(Piece, u64, u64))| {
            let mut rows = (piece.row0..).zip(piece.results(results, *at));
            rows.find(|(row, sums)| is_odd(piece, *row, sums)).map(|(row, _)| (program, row))
        };
        self.programs.iter().enumerate().filter_map(of_program).collect()
    }

    /// Takes all results over into their jobs.
    pub(super) fn collect(&self, results: &[u8], jobs: &mut [Job<'_>]) {
        for (piece, _, at) in &self.programs {
            let job = &mut jobs[piece.job];
            let n_out = job.matrix.n_out as usize;
            let out = job.out.chunks_exact_mut(n_out).skip(piece.row0);
            for (row, out) in piece.results(results, *at).zip(out) {
                crate::device::collect(&piece.part, bytemuck::cast_slice(row), out);
            }
        }
    }

    /// The programs of one core of several: contiguous blocks, as even as can be.
    pub(super) fn share(&self, core: usize, cores: usize) -> Range<usize> {
        let n = self.programs.len();
        core * n / cores..(core + 1) * n / cores
    }
}
