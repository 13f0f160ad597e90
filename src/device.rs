//! Where int8 matrices are multiplied: the CPU's reference, or the NPU behind a port.
//!
//! A device holds chunks of tiled weights, filled once and kept, and multiplies rows of activations by matrices that
//! lie in them. Its results are exact 32-bit sums, so every device gives the same ones. It knows no model, no scales
//! and no plan, and it never falls back: what it cannot do is an error, and the caller decides.
//!
//! ```text
//! Device ─┬─ CpuTiles   reference arithmetic on the same tiles
//!         └─ Npu ─ Port ─ Sim   register programs, executed by the software NPU
//! ```

use std::io;
use std::ops::Range;

use thiserror::Error;

use crate::tensor::MatrixView;
use crate::tile::{SubMatrix, TileError};

pub mod cpu;
pub mod npu;
pub mod port;
mod probe;

pub use cpu::{CpuTiles, multiply_tiles};
pub use npu::Npu;
pub use port::PortError;
pub use port::sim::{Fault, Sim};
pub use probe::{VECTORS, Vector, probe, probe_matrix};

/// A chunk of a device. Numbers are not used again after a chunk is destroyed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkId(pub u32);

/// One program's weights and where they lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedPart {
    /// Which rectangle of the matrix.
    pub part: SubMatrix,
    /// The chunk that holds its tiles.
    pub chunk: ChunkId,
    /// Of its first byte, in the chunk.
    pub offset: u64,
}

/// A weight matrix `[n_out, n_in]` as parts in chunks, all of one domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceMatrix {
    /// Inputs.
    pub n_in: u32,
    /// Outputs.
    pub n_out: u32,
    /// The parts, as [`crate::tile::cut`] orders them: they cover the matrix exactly once.
    pub parts: Vec<PlacedPart>,
}

impl DeviceMatrix {
    /// Whether the parts cover the matrix exactly once, all K-slices of a range of outputs following each other.
    pub fn is_whole(&self) -> bool {
        let (mut k0, mut n0) = (0, 0);
        let mut range = 0;
        for PlacedPart { part, .. } in &self.parts {
            let follows = part.n0 == n0 && part.k0 == k0 && (k0 == 0 || part.n_len == range);
            let within = part.k_len > 0
                && part.n_len > 0
                && part.k_len <= part.k_padded.min(self.n_in - k0)
                && part.n_len <= part.n_padded.min(self.n_out - n0);
            if !follows || !within {
                return false;
            }
            (k0, range) = (k0 + part.k_len, part.n_len);
            if k0 == self.n_in {
                (k0, n0) = (0, n0 + range);
            }
        }
        k0 == 0 && n0 == self.n_out
    }
}

/// One product: `out[r][o] = Σ rows[r][i] · matrix[o][i]`, exact.
#[derive(Debug)]
pub struct Job<'a> {
    /// The weights.
    pub matrix: &'a DeviceMatrix,
    /// Activations `[m, n_in]`, unpadded, −127 to 127. Jobs that name the same slice share one copy on the device.
    pub rows: MatrixView<'a, i8>,
    /// Results `[m, n_out]`, overwritten.
    pub out: &'a mut [i32],
}

/// What a device holds and has done since it was made.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Account {
    /// Bytes mapped for chunks, whole pages.
    pub weight_bytes: u64,
    /// Bytes mapped for programs, tasks, activations and results.
    pub scratch_bytes: u64,
    /// Chunks that exist.
    pub chunks: u32,
    /// Submissions, repeated ones included.
    pub submissions: u64,
    /// Programs in them.
    pub programs: u64,
    /// Submissions repeated because they had not run or left stale results.
    pub retries: u64,
    /// Calls that ended in an error.
    pub faults: u64,
    /// Changes of the active domain, where the port counts them.
    pub switches: u64,
    /// Time of submissions and domain switches by the profile, microseconds; 0 on real hardware and on the CPU.
    pub modelled_us: f64,
    /// Time of creating buffers by the profile, microseconds; 0 on real hardware and on the CPU.
    pub modelled_create_us: f64,
    /// The same per domain that holds anything, ascending.
    pub domains: Vec<DomainAccount>,
}

/// What one domain holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DomainAccount {
    /// The domain.
    pub domain: u32,
    /// Bytes mapped for chunks, whole pages.
    pub weight_bytes: u64,
    /// Bytes mapped for programs, tasks, activations and results.
    pub scratch_bytes: u64,
    /// Buffers.
    pub mappings: u32,
}

/// Why a device did not do what it was asked.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The driver, or the software NPU in its place.
    #[error(transparent)]
    Port(#[from] PortError),
    /// More than the domain bears; the driver was not asked.
    #[error(
        "domain {domain} holds {mapped} bytes in {mappings} buffers; {bytes} more exceed {ceiling} bytes or \
         {most} buffers"
    )]
    Full {
        /// The domain.
        domain: u32,
        /// Bytes that it holds.
        mapped: u64,
        /// Buffers that it holds.
        mappings: u32,
        /// Bytes asked for.
        bytes: u64,
        /// Bytes that it may hold.
        ceiling: u64,
        /// Buffers that it may hold.
        most: u32,
    },
    /// The device has fewer domains.
    #[error("domain {domain} of a device with {domains}")]
    NoDomain {
        /// Asked for.
        domain: u32,
        /// How many there are.
        domains: u32,
    },
    /// No such chunk, or no longer.
    #[error("chunk {0} does not exist")]
    NoChunk(u32),
    /// A part that leaves its chunk, or is not aligned in it.
    #[error("a part of {len} bytes at {offset} of chunk {chunk}, which has {bytes} bytes")]
    Place {
        /// The chunk.
        chunk: u32,
        /// Where the part should begin.
        offset: u64,
        /// Bytes of the part.
        len: u64,
        /// Bytes of the chunk.
        bytes: u64,
    },
    /// A part that no program of this device may have.
    #[error("no program may have {k} inputs and {n} outputs on this device")]
    Shape {
        /// Inputs.
        k: u32,
        /// Outputs.
        n: u32,
    },
    /// Parts that do not cover their matrix exactly once, or lie in several domains.
    #[error("the parts do not make one matrix of {n_in} inputs and {n_out} outputs in one domain")]
    Parts {
        /// Inputs.
        n_in: u32,
        /// Outputs.
        n_out: u32,
    },
    /// Rows or results of another length than the matrix has.
    #[error("rows of {columns} values and {out} results for {rows} rows of a {n_in} by {n_out} matrix")]
    Job {
        /// Rows.
        rows: usize,
        /// Values of each.
        columns: usize,
        /// Results.
        out: usize,
        /// Inputs of the matrix.
        n_in: u32,
        /// Outputs of the matrix.
        n_out: u32,
    },
    /// [`Device::prepare`] was not told of such parts in this domain.
    #[error("domain {domain} has {found} bytes of scratch where one program needs {needed}")]
    Scratch {
        /// The domain.
        domain: u32,
        /// Bytes needed.
        needed: u64,
        /// Bytes there.
        found: u64,
    },
    /// The submission ran, and its results did not arrive, twice.
    #[error("domain {domain}: results of program {program} of {programs} never arrived")]
    Stale {
        /// The domain.
        domain: u32,
        /// The first program without results.
        program: usize,
        /// Programs of the submission.
        programs: usize,
    },
    /// A known product came out wrong: the device is not to be trusted.
    #[error("the device is not to be trusted: {what} came out as {found}, expected {expected}")]
    Untrusted {
        /// Which known answer.
        what: String,
        /// What the device gave.
        found: String,
        /// What is right.
        expected: String,
    },
    /// The weights could not be read into the chunk.
    #[error("reading weights into a chunk: {0}")]
    Fill(#[source] io::Error),
    /// The weights could not be tiled.
    #[error(transparent)]
    Tile(#[from] TileError),
}

/// Something that multiplies int8 rows by int8 matrices kept in chunks.
pub trait Device: Send {
    /// `cpu`, `sim`, …
    fn name(&self) -> &'static str;

    /// Makes an empty chunk of `bytes` (more than 0) in a domain.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Full`] before the driver is asked; [`PortError::NoIova`] or [`PortError::NoMemory`] from it.
    /// Nothing is left behind.
    fn create_chunk(&mut self, bytes: u64, domain: u32) -> Result<ChunkId, DeviceError>;

    /// Lets `fill` write the whole chunk in place, then shows it to the device.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Fill`] with what `fill` said; the chunk stays and may be filled again.
    fn fill_chunk(
        &mut self,
        chunk: ChunkId,
        fill: &mut dyn FnMut(&mut [u8]) -> io::Result<()>,
    ) -> Result<(), DeviceError>;

    /// Gives a chunk's memory back.
    ///
    /// # Errors
    ///
    /// [`DeviceError::NoChunk`], or what the driver says.
    fn destroy_chunk(&mut self, chunk: ChunkId) -> Result<(), DeviceError>;

    /// Maps the scratch that jobs on these parts need, `(domain, part)`, in place of what was mapped before.
    ///
    /// Each domain named holds exactly [`crate::tile::Scratch::for_parts`] of its parts afterwards; others hold none.
    ///
    /// # Errors
    ///
    /// As [`Device::create_chunk`], and [`DeviceError::Shape`] for a part that the profile does not allow.
    fn prepare(&mut self, parts: &[(u32, SubMatrix)]) -> Result<(), DeviceError>;

    /// Does all products, in as few submissions as scratch allows.
    ///
    /// # Errors
    ///
    /// A job that is not possible is refused before anything is computed. After an error `out` holds anything.
    fn run(&mut self, jobs: &mut [Job<'_>]) -> Result<(), DeviceError>;

    /// What it holds and has done.
    fn account(&self) -> Account;
}

/// Refuses a job that no device can do. `domain_of` checks where a part lies and says in which domain.
fn check(
    job: &Job<'_>,
    mut domain_of: impl FnMut(&PlacedPart) -> Result<u32, DeviceError>,
) -> Result<u32, DeviceError> {
    let &DeviceMatrix { n_in, n_out, ref parts } = job.matrix;
    let rows = job.rows.n_rows();
    if job.rows.n_cols() != n_in as usize || job.out.len() != rows * n_out as usize {
        let (columns, out) = (job.rows.n_cols(), job.out.len());
        return Err(DeviceError::Job { rows, columns, out, n_in, n_out });
    }
    let mut domain = None;
    for part in parts {
        let of_part = domain_of(part)?;
        if *domain.get_or_insert(of_part) != of_part {
            return Err(DeviceError::Parts { n_in, n_out });
        }
    }
    match domain {
        Some(domain) if job.matrix.is_whole() => Ok(domain),
        _ => Err(DeviceError::Parts { n_in, n_out }),
    }
}

/// The bytes of a part in its chunk of `bytes`.
fn place(placed: &PlacedPart, bytes: u64, align: u64) -> Result<Range<u64>, DeviceError> {
    let (offset, len) = (placed.offset, placed.part.bytes());
    match offset.checked_add(len) {
        Some(end) if end <= bytes && offset.is_multiple_of(align) => Ok(offset..end),
        _ => Err(DeviceError::Place { chunk: placed.chunk.0, offset, len, bytes }),
    }
}

/// Takes one row of a part's sums, `[n_padded]`, into its row of the whole product, `[n_out]`.
fn collect(part: &SubMatrix, sums: &[i32], out: &mut [i32]) {
    let sums = &sums[..part.n_len as usize];
    let out = &mut out[part.n0 as usize..][..part.n_len as usize];
    if part.k0 == 0 {
        out.copy_from_slice(sums);
    } else {
        out.iter_mut().zip(sums).for_each(|(out, sum)| *out = out.wrapping_add(*sum));
    }
}
