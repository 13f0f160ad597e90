//! Products on the CPU from the NPU's own tiles: the reference device, and what computes a matrix when an NPU fails.
//!
//! Sums are exact integers, so the results are those of every other device, bit for bit. Weights are read in place:
//! chunks either own their bytes or are views of a pack that is mapped anyway. Outputs are dealt to the threads of a
//! pool, where there is one.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use super::{Account, ChunkId, Device, DeviceError, DomainAccount, Job, PlacedPart};
use crate::bytes::FileBytes;
use crate::kernel::Kernel;
use crate::tensor::MatrixView;
use crate::threads::Pool;
use crate::tile::{SubMatrix, TILE, TileError};

/// The reference device: any shape of tiles, any number of chunks and domains.
#[derive(Debug, Default)]
pub struct CpuTiles {
    chunks: BTreeMap<ChunkId, Chunk>,
    created: u32,
    done: Account,
    pool: Option<Arc<Pool>>,
}

#[derive(Debug)]
struct Chunk {
    domain: u32,
    bytes: Bytes,
}

/// Weights of one chunk.
#[derive(Debug)]
enum Bytes {
    Owned(Vec<u8>),
    File(Arc<FileBytes>, Range<usize>),
}

impl Chunk {
    fn bytes(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Owned(bytes) => bytes,
            Bytes::File(file, range) => &file[range.clone()],
        }
    }
}

impl CpuTiles {
    /// A device without chunks, on one thread.
    pub fn new() -> CpuTiles {
        CpuTiles::default()
    }

    /// A device without chunks, on the threads of a pool.
    pub fn on(pool: Arc<Pool>) -> CpuTiles {
        CpuTiles { pool: Some(pool), ..CpuTiles::default() }
    }

    /// A chunk that is a range of a file, without copying it; `None` when the file has no such range.
    pub fn adopt_chunk(&mut self, file: Arc<FileBytes>, range: Range<usize>, domain: u32) -> Option<ChunkId> {
        file.get(range.clone())?;
        Some(self.push(Chunk { domain, bytes: Bytes::File(file, range) }))
    }

    fn push(&mut self, chunk: Chunk) -> ChunkId {
        let id = ChunkId(self.created);
        self.created += 1;
        self.chunks.insert(id, chunk);
        id
    }

    fn chunk(&self, id: ChunkId) -> Result<&Chunk, DeviceError> {
        self.chunks.get(&id).ok_or(DeviceError::NoChunk(id.0))
    }

    /// The tiles of a part.
    fn tiles(&self, placed: &PlacedPart) -> Result<&[u8], DeviceError> {
        let chunk = self.chunk(placed.chunk)?.bytes();
        let range = super::place(placed, chunk.len() as u64, 1)?;
        Ok(&chunk[range.start as usize..range.end as usize])
    }

    fn run_all(&mut self, jobs: &mut [Job<'_>]) -> Result<(), DeviceError> {
        for job in jobs.iter() {
            super::check(job, |placed| {
                self.tiles(placed)?;
                Ok(self.chunk(placed.chunk)?.domain)
            })?;
        }
        for job in jobs {
            for placed in &job.matrix.parts {
                multiply_part(self.pool.as_deref(), self.tiles(placed)?, &placed.part, job.rows, job.out)?;
            }
            self.done.programs += job.matrix.parts.len() as u64;
        }
        Ok(())
    }
}

impl Device for CpuTiles {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn create_chunk(&mut self, bytes: u64, domain: u32) -> Result<ChunkId, DeviceError> {
        let mut owned = Vec::new();
        let reserved = usize::try_from(bytes).ok().and_then(|len| {
            owned.try_reserve_exact(len).ok()?;
            owned.resize(len, 0);
            Some(())
        });
        match reserved {
            Some(()) => Ok(self.push(Chunk { domain, bytes: Bytes::Owned(owned) })),
            None => Err(super::PortError::NoMemory { bytes }.into()),
        }
    }

    fn fill_chunk(
        &mut self,
        chunk: ChunkId,
        fill: &mut dyn FnMut(&mut [u8]) -> io::Result<()>,
    ) -> Result<(), DeviceError> {
        match self.chunks.get_mut(&chunk).map(|chunk| &mut chunk.bytes) {
            Some(Bytes::Owned(bytes)) => fill(bytes).map_err(DeviceError::Fill),
            Some(Bytes::File(..)) => {
                Err(DeviceError::Fill(io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "a view of a file")))
            }
            None => Err(DeviceError::NoChunk(chunk.0)),
        }
    }

    fn destroy_chunk(&mut self, chunk: ChunkId) -> Result<(), DeviceError> {
        self.chunks.remove(&chunk).map(drop).ok_or(DeviceError::NoChunk(chunk.0))
    }

    fn prepare(&mut self, _parts: &[(u32, SubMatrix)]) -> Result<(), DeviceError> {
        Ok(())
    }

    fn run(&mut self, jobs: &mut [Job<'_>]) -> Result<(), DeviceError> {
        let result = self.run_all(jobs);
        self.done.faults += u64::from(result.is_err());
        result
    }

    fn account(&self) -> Account {
        let mut domains = BTreeMap::<u32, DomainAccount>::new();
        for chunk in self.chunks.values() {
            let account = domains.entry(chunk.domain).or_default();
            account.domain = chunk.domain;
            account.weight_bytes += chunk.bytes().len() as u64;
            account.mappings += 1;
        }
        let domains: Vec<_> = domains.into_values().collect();
        Account {
            weight_bytes: domains.iter().map(|domain| domain.weight_bytes).sum(),
            chunks: self.chunks.len() as u32,
            domains,
            ..self.done.clone()
        }
    }
}

/// One part of a product from its tiles: `out[r][n0 + n] (+)= Σ rows[r][k0 + k] · tiles[k][n]`.
///
/// `rows` is `[m, n_in]` and `out` `[m, n_out]`, both of the whole matrix. The slice with the first inputs
/// (`k0 == 0`) overwrites its outputs, the others add to them: parts in the order of [`crate::tile::cut`] give the
/// whole product.
///
/// # Errors
///
/// [`TileError::Buffer`] when the tiles are not the part's, or the part is outside the matrix.
pub fn multiply_tiles(
    tiles: &[u8],
    part: &SubMatrix,
    rows: MatrixView<'_, i8>,
    out: &mut [i32],
) -> Result<(), TileError> {
    multiply_part(None, tiles, part, rows, out)
}

/// [`multiply_tiles`] on the threads of a pool.
fn multiply_part(
    pool: Option<&Pool>,
    tiles: &[u8],
    part: &SubMatrix,
    rows: MatrixView<'_, i8>,
    out: &mut [i32],
) -> Result<(), TileError> {
    let m = rows.n_rows();
    let n_out = out.len().checked_div(m).unwrap_or(0);
    let in_tiles = [part.k_padded, part.n_padded]
        .iter()
        .all(|len| *len > 0 && *len < 1 << 16 && *len % TILE as u32 == 0);
    let within = u64::from(part.k0) + u64::from(part.k_len) <= rows.n_cols() as u64
        && u64::from(part.n0) + u64::from(part.n_len) <= n_out as u64
        && part.k_len <= part.k_padded
        && part.n_len <= part.n_padded;
    if m == 0 {
        return Ok(());
    }
    if !in_tiles || !within || part.bytes() != tiles.len() as u64 || out.len() != m * n_out {
        return Err(TileError::Buffer { needed: part.bytes(), found: tiles.len() as u64 });
    }
    let (k, n) = (part.k_padded as usize, part.n_padded as usize);
    let padded = pad_rows(rows, part);
    let Some(padded) = MatrixView::new(&padded, m, k) else { return Ok(()) };
    let mut sums = vec![0; m * n];
    multiply(pool, bytemuck::cast_slice(tiles), k, n, padded, &mut sums);
    for (row, sums) in sums.chunks_exact(n).enumerate() {
        super::collect(part, sums, &mut out[row * n_out..][..n_out]);
    }
    Ok(())
}

/// The activations of one part, `[m, k_padded]`; borrowed where they lie so already.
fn pad_rows<'a>(rows: MatrixView<'a, i8>, part: &SubMatrix) -> Cow<'a, [i8]> {
    if part.k_len as usize == rows.n_cols() && part.k_len == part.k_padded {
        return Cow::Borrowed(rows.data());
    }
    let mut padded = Vec::with_capacity(rows.n_rows() * part.k_padded as usize);
    for row in 0..rows.n_rows() {
        padded.extend_from_slice(&rows.row(row)[part.k0 as usize..][..part.k_len as usize]);
        padded.resize((row + 1) * part.k_padded as usize, 0);
    }
    Cow::Owned(padded)
}

/// Bytes of tiles that are worth waking other threads for: some ten microseconds of one core.
const WORTH_SHARING: usize = 256 << 10;

/// `out[r][n] = Σ_k rows[r][k] · tiles[k][n]`, exact: `[m, k]` times tiles of `k` inputs and `n` outputs.
pub(super) fn multiply(
    pool: Option<&Pool>,
    tiles: &[i8],
    k: usize,
    n: usize,
    rows: MatrixView<'_, i8>,
    out: &mut [i32],
) {
    let kernel = Kernel::detect();
    match pool {
        Some(pool) if pool.n_threads() > 1 && tiles.len() >= WORTH_SHARING => {
            let n_pieces = 4 * pool.n_threads();
            let width = TILE * (n / TILE).div_ceil(n_pieces);
            multiply_pieces(pool, kernel, tiles.chunks(width * k), rows, out);
        }
        _ => kernel.int8_tiles(tiles, k, n, rows, out),
    }
}

/// Ranges of outputs, each with its tiles, on any threads; their sums are put beside each other afterwards. Neither
/// `m` nor `k` is 0.
fn multiply_pieces<'a>(
    pool: &Pool,
    kernel: Kernel,
    pieces: impl Iterator<Item = &'a [i8]>,
    rows: MatrixView<'_, i8>,
    out: &mut [i32],
) {
    let (m, k) = (rows.n_rows(), rows.n_cols());
    let pieces: Vec<_> = pieces.map(|tiles| (tiles, Mutex::new(vec![0; m * (tiles.len() / k)]))).collect();
    pool.run(pieces.len(), &|i| {
        let (tiles, sums) = &pieces[i];
        let mut sums = sums.lock().unwrap_or_else(PoisonError::into_inner);
        kernel.int8_tiles(tiles, k, tiles.len() / k, rows, &mut sums);
    });
    let n = out.len() / m;
    let mut first = 0;
    for (tiles, sums) in pieces {
        let width = tiles.len() / k;
        let sums = sums.into_inner().unwrap_or_else(PoisonError::into_inner);
        for (out, sums) in out.chunks_exact_mut(n).zip(sums.chunks_exact(width)) {
            out[first..first + width].copy_from_slice(sums);
        }
        first += width;
    }
}
