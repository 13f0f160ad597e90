//! The NPU: chunks and scratch as buffers of a port, products as chains of register programs.
//!
//! One code for the software NPU and for boards; only the port differs. A run cuts its jobs into programs
//! (`batch`), writes them ([`program`]), submits as many at once as scratch holds, one contiguous block per core,
//! and adds K-slices up on the CPU. What would not fit is refused before the driver is asked.
//!
//! The last word of every row of results is marked beforehand with a value that no product has. If a mark is still
//! there afterwards, the results never arrived. Nor did zeros, where the same row on the CPU gives something else. That, and a job that never ran, is tried once more after a reset; both
//! happen on boards. Nothing else is repeated.

mod batch;
pub mod program;

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use super::port::{Buffer, CoreTasks, Direction, Port, Submission};
use super::{Account, ChunkId, Device, DeviceError, DomainAccount, Job, PlacedPart, PortError};
use crate::profile::DeviceProfile;
use crate::tensor::MatrixView;
use crate::tile::{PROGRAM_BYTES, PROGRAMS, Scratch, SubMatrix};
use batch::{Batch, Piece};
use program::Task;

/// Waiting longer than this for one submission means that it hangs. Source: docs/npu.md, "Failures": the kernel's
/// own limit. Confidence: read in source.
const TIMEOUT: Duration = Duration::from_secs(6);

/// Marks a row of results that has not arrived. |C| is at most 127 · 127 · 4096, far below.
const MARK: i32 = i32::MAX;

/// The NPU behind a port.
#[derive(Debug)]
pub struct Npu<P: Port> {
    port: P,
    profile: DeviceProfile,
    chunks: BTreeMap<ChunkId, Buffer>,
    scratch: BTreeMap<u32, Mapped>,
    /// Buffers that the driver would not take back when it was asked.
    kept: Vec<Buffer>,
    created: u32,
    domains: BTreeMap<u32, DomainAccount>,
    done: Account,
}

/// The scratch of one domain.
#[derive(Clone, Copy, Debug)]
struct Mapped {
    sizes: Scratch,
    programs: Buffer,
    tasks: Buffer,
    a: Buffer,
    c: Buffer,
}

impl Mapped {
    fn buffers(&self) -> [Buffer; 4] {
        [self.programs, self.tasks, self.a, self.c]
    }
}

/// Nothing stays mapped, whoever owns the port.
impl<P: Port> Drop for Npu<P> {
    fn drop(&mut self) {
        let scratch = std::mem::take(&mut self.scratch);
        let chunks = std::mem::take(&mut self.chunks);
        self.release(scratch.values().flat_map(Mapped::buffers).chain(chunks.into_values()));
        // A domain that was busy a moment ago may be free now.
        self.release([]);
    }
}

impl<P: Port> Npu<P> {
    /// An NPU without chunks and scratch.
    pub fn new(port: P, profile: &DeviceProfile) -> Npu<P> {
        Npu {
            port,
            profile: profile.clone(),
            chunks: BTreeMap::new(),
            scratch: BTreeMap::new(),
            kept: Vec::new(),
            created: 0,
            domains: BTreeMap::new(),
            done: Account::default(),
        }
    }

    /// The port.
    pub fn port(&self) -> &P {
        &self.port
    }

    /// The port, to inject faults into.
    pub fn port_mut(&mut self) -> &mut P {
        &mut self.port
    }

    /// Creates a buffer after the domain's limits have been checked.
    fn create(&mut self, bytes: u64, domain: u32) -> Result<Buffer, DeviceError> {
        let memory = &self.profile.memory;
        let domains = self.profile.domains();
        if domain >= domains {
            return Err(DeviceError::NoDomain { domain, domains });
        }
        let held = self.domains.get(&domain).copied().unwrap_or_default();
        let (mapped, ceiling) = (held.weight_bytes + held.scratch_bytes, memory.domain_ceiling_bytes.value);
        let (mappings, most) = (held.mappings, memory.mappings_per_domain.value);
        if self.pages(bytes) > ceiling.saturating_sub(mapped) || mappings >= most {
            return Err(DeviceError::Full { domain, mapped, mappings, bytes, ceiling, most });
        }
        let buffer = self.port.create(bytes, domain)?;
        self.held(domain).mappings += 1;
        Ok(buffer)
    }

    fn destroy(&mut self, buffer: Buffer) -> Result<(), DeviceError> {
        self.port.destroy(buffer.id)?;
        self.held(buffer.domain).mappings -= 1;
        Ok(())
    }

    /// Gives buffers back. Those that the driver does not take now are given back with the next ones.
    fn release(&mut self, buffers: impl IntoIterator<Item = Buffer>) {
        let mut buffers: Vec<Buffer> = buffers.into_iter().collect();
        buffers.append(&mut self.kept);
        for buffer in buffers {
            if self.destroy(buffer).is_err() {
                self.kept.push(buffer);
            }
        }
    }

    /// Bytes that a buffer maps.
    fn pages(&self, bytes: u64) -> u64 {
        crate::bytes::align_up(bytes, self.profile.memory.page_bytes.value).unwrap_or(u64::MAX)
    }

    fn held(&mut self, domain: u32) -> &mut DomainAccount {
        self.domains.entry(domain).or_insert(DomainAccount { domain, ..DomainAccount::default() })
    }

    fn count<T>(&mut self, result: Result<T, DeviceError>) -> Result<T, DeviceError> {
        self.done.faults += u64::from(result.is_err());
        result
    }

    fn add_chunk(&mut self, bytes: u64, domain: u32) -> Result<ChunkId, DeviceError> {
        let buffer = self.create(bytes, domain)?;
        let id = ChunkId(self.created);
        self.created += 1;
        self.chunks.insert(id, buffer);
        self.held(domain).weight_bytes += self.pages(bytes);
        Ok(id)
    }

    fn remove_chunk(&mut self, chunk: ChunkId) -> Result<(), DeviceError> {
        let buffer = self.chunk(chunk)?;
        self.destroy(buffer)?;
        self.chunks.remove(&chunk);
        self.held(buffer.domain).weight_bytes -= self.pages(buffer.bytes);
        Ok(())
    }

    fn chunk(&self, chunk: ChunkId) -> Result<Buffer, DeviceError> {
        self.chunks.get(&chunk).copied().ok_or(DeviceError::NoChunk(chunk.0))
    }

    /// Writes the first bytes of a buffer and shows them to the device.
    fn put(
        &mut self,
        buffer: Buffer,
        len: u64,
        writer: &mut dyn FnMut(&mut [u8]) -> io::Result<()>,
    ) -> Result<(), DeviceError> {
        let filled = self.port.fill(buffer.id, 0..len, writer);
        filled.map_err(|error| match error {
            PortError::Fill(error) => DeviceError::Fill(error),
            error => error.into(),
        })?;
        Ok(self.port.sync(buffer.id, 0..len, Direction::ToDevice)?)
    }
}

/// Scratch.
impl<P: Port> Npu<P> {
    /// Whether a program may have this part's shape.
    fn check_shape(&self, part: &SubMatrix) -> Result<(), DeviceError> {
        let (k, n) = (part.k_padded, part.n_padded);
        let shapes = &self.profile.shapes;
        let n_legal = n > 0 && n <= shapes.n_max.value && n.is_multiple_of(shapes.n_multiple.value);
        if n_legal && self.profile.max_rows(k).is_some() { Ok(()) } else { Err(DeviceError::Shape { k, n }) }
    }

    fn map_scratch(&mut self, parts: &[(u32, SubMatrix)]) -> Result<(), DeviceError> {
        let mut domains = BTreeMap::<u32, Vec<&SubMatrix>>::new();
        for (domain, part) in parts {
            self.check_shape(part)?;
            domains.entry(*domain).or_default().push(part);
        }
        let sizes = |(domain, parts)| (domain, Scratch::for_parts(parts, &self.profile));
        let wanted: BTreeMap<u32, Scratch> = domains.into_iter().map(sizes).collect();
        let other = |(domain, mapped): (&u32, &Mapped)| {
            (wanted.get(domain) != Some(&mapped.sizes)).then_some((*domain, *mapped))
        };
        for (domain, mapped) in self.scratch.iter().filter_map(other).collect::<Vec<_>>() {
            self.scratch.remove(&domain);
            self.held(domain).scratch_bytes -= mapped.sizes.total();
            self.release(mapped.buffers());
        }
        for (domain, sizes) in wanted {
            if !self.scratch.contains_key(&domain) {
                self.map(domain, sizes)?;
            }
        }
        Ok(())
    }

    /// Maps the scratch of one domain, or nothing.
    fn map(&mut self, domain: u32, sizes: Scratch) -> Result<(), DeviceError> {
        let mut buffers = [None; 4];
        let bytes = [sizes.programs_bytes, sizes.tasks_bytes, sizes.a_bytes, sizes.c_bytes];
        for i in 0..buffers.len() {
            match self.create(bytes[i], domain) {
                Ok(buffer) => buffers[i] = Some(buffer),
                Err(error) => {
                    self.release(buffers.into_iter().flatten());
                    return Err(error);
                }
            }
        }
        if let [Some(programs), Some(tasks), Some(a), Some(c)] = buffers {
            self.scratch.insert(domain, Mapped { sizes, programs, tasks, a, c });
            self.held(domain).scratch_bytes += sizes.total();
        }
        Ok(())
    }
}

/// Running.
impl<P: Port> Npu<P> {
    fn run_all(&mut self, jobs: &mut [Job<'_>]) -> Result<(), DeviceError> {
        let mut domains = BTreeMap::<u32, Vec<Piece>>::new();
        let cap = |k| self.profile.max_rows(k).unwrap_or(1) as usize;
        for (index, job) in jobs.iter().enumerate() {
            let domain = super::check(job, |placed| self.locate(placed))?;
            domains.entry(domain).or_default().extend(batch::pieces(index, job, cap));
        }
        for (domain, pieces) in domains {
            self.run_domain(domain, pieces, jobs)?;
        }
        Ok(())
    }

    /// The domain of a part that is where it should be and has a legal shape.
    fn locate(&self, placed: &PlacedPart) -> Result<u32, DeviceError> {
        let buffer = self.chunk(placed.chunk)?;
        super::place(placed, buffer.bytes, self.profile.memory.matrix_align_bytes.value)?;
        self.check_shape(&placed.part)?;
        Ok(buffer.domain)
    }

    fn run_domain(
        &mut self,
        domain: u32,
        pieces: Vec<Piece>,
        jobs: &mut [Job<'_>],
    ) -> Result<(), DeviceError> {
        let most = (PROGRAMS as usize).min(self.profile.cores.tasks_per_submit.value as usize);
        let mapped = self.scratch.get(&domain).copied();
        let found = mapped.map_or(0, |mapped| mapped.sizes.total());
        let pieces = batch::spread(pieces, self.cores());
        let mut left = pieces.as_slice();
        while let Some(piece) = left.first() {
            let needed = piece.bytes().0 + piece.bytes().1;
            let mapped = mapped.ok_or(DeviceError::Scratch { domain, needed, found })?;
            let batch = Batch::take(&mut left, jobs, &mapped.sizes, most);
            if batch.programs.is_empty() {
                return Err(DeviceError::Scratch { domain, needed, found });
            }
            self.run_batch(&mapped, &batch, jobs)?;
        }
        Ok(())
    }

    fn cores(&self) -> usize {
        self.profile.cores.count.value as usize
    }

    /// One submission, tried again once when it did not run or its results did not arrive.
    fn run_batch(&mut self, mapped: &Mapped, batch: &Batch, jobs: &mut [Job<'_>]) -> Result<(), DeviceError> {
        let mut result = self.try_batch(mapped, batch, jobs);
        if let Err(DeviceError::Port(PortError::NeverRan { .. }) | DeviceError::Stale { .. }) = result {
            self.done.retries += 1;
            self.port.reset()?;
            result = self.try_batch(mapped, batch, jobs);
        }
        if let Err(DeviceError::Port(PortError::NeverRan { .. } | PortError::TimedOut { .. })) = result {
            self.port.reset()?;
        }
        result
    }

    fn try_batch(&mut self, mapped: &Mapped, batch: &Batch, jobs: &mut [Job<'_>]) -> Result<(), DeviceError> {
        self.put(mapped.a, batch.a_len, &mut |bytes| {
            batch.write_activations(jobs, bytes);
            Ok(())
        })?;
        self.put(mapped.c, batch.c_len, &mut |bytes| {
            batch.mark_results(MARK, bytes);
            Ok(())
        })?;
        self.write_programs(mapped, batch)?;
        self.submit(mapped, batch)?;
        self.collect(mapped, batch, jobs)
    }

    /// Writes one program and one task for each piece, those of a core linked.
    fn write_programs(&mut self, mapped: &Mapped, batch: &Batch) -> Result<(), DeviceError> {
        let address = |index: usize| mapped.programs.iova + (index as u64 * PROGRAM_BYTES) as u32;
        let (mut words, mut tasks) = (Vec::new(), Vec::new());
        for core in 0..self.cores() {
            let share = batch.share(core, self.cores());
            for index in share.clone() {
                let (piece, a, c) = batch.programs[index];
                let weights = self.chunk(piece.chunk)?.iova + piece.offset as u32;
                let product = piece.product(mapped.a.iova + a as u32, weights, mapped.c.iova + c as u32);
                let next = (index + 1 < share.end).then(|| address(index + 1));
                let program =
                    product.encode(next).ok_or(DeviceError::Shape { k: product.k, n: product.n })?;
                words.extend(program.map(u64::to_le));
                tasks.push(Task::new(address(index)));
            }
        }
        self.put_all(mapped.programs, bytemuck::cast_slice(&words))?;
        self.put_all(mapped.tasks, bytemuck::cast_slice(&tasks))
    }

    fn put_all(&mut self, buffer: Buffer, content: &[u8]) -> Result<(), DeviceError> {
        self.put(buffer, content.len() as u64, &mut |bytes| {
            bytes.copy_from_slice(content);
            Ok(())
        })
    }

    fn submit(&mut self, mapped: &Mapped, batch: &Batch) -> Result<(), DeviceError> {
        let of_core = |core| {
            let share = batch.share(core, self.cores());
            CoreTasks { core: core as u32, first: share.start as u32, count: share.len() as u32 }
        };
        let cores: Vec<_> = (0..self.cores()).map(of_core).filter(|tasks| tasks.count > 0).collect();
        let mut inputs = vec![mapped.programs.id, mapped.a.id];
        for (piece, ..) in &batch.programs {
            inputs.push(self.chunk(piece.chunk)?.id);
        }
        inputs.sort_unstable();
        inputs.dedup();
        let ticket = self.port.submit(&Submission {
            domain: mapped.a.domain,
            tasks: mapped.tasks.id,
            cores: &cores,
            inputs: &inputs,
            outputs: &[mapped.c.id],
        })?;
        self.done.submissions += 1;
        self.done.programs += batch.programs.len() as u64;
        Ok(self.port.wait(ticket, TIMEOUT)?)
    }

    /// Takes the results over when all of them have arrived.
    fn collect(&mut self, mapped: &Mapped, batch: &Batch, jobs: &mut [Job<'_>]) -> Result<(), DeviceError> {
        let range = 0..batch.c_len;
        self.port.sync(mapped.c.id, range.clone(), Direction::FromDevice)?;
        let (mut missing, mut zeros) = (None, Vec::new());
        self.port.read(mapped.c.id, range.clone(), &mut |bytes| {
            missing = batch.missing(MARK, bytes);
            zeros = batch.zeros(bytes, jobs);
        })?;
        for (program, row) in zeros {
            let (piece, ..) = batch.programs[program];
            if missing.is_none() && self.yields_something(&piece, row, jobs)? {
                missing = Some(program);
            }
        }
        if let Some(program) = missing {
            let (domain, programs) = (mapped.c.domain, batch.programs.len());
            return Err(DeviceError::Stale { domain, program, programs });
        }
        Ok(self.port.read(mapped.c.id, range, &mut |bytes| batch.collect(bytes, jobs))?)
    }

    /// Whether a row times a piece's weights, computed here, is anything but zeros.
    fn yields_something(&mut self, piece: &Piece, row: usize, jobs: &[Job<'_>]) -> Result<bool, DeviceError> {
        let (job, buffer) = (&jobs[piece.job], self.chunk(piece.chunk)?);
        let row = MatrixView::new(job.rows.row(row), 1, job.rows.n_cols()).unwrap_or_default();
        let (mut out, mut done) = (vec![0; job.matrix.n_out as usize], Ok(()));
        let range = piece.offset..piece.offset + piece.part.bytes();
        self.port.read(buffer.id, range, &mut |tiles| {
            done = super::multiply_tiles(tiles, &piece.part, row, &mut out);
        })?;
        done?;
        Ok(out.iter().any(|sum| *sum != 0))
    }
}

impl<P: Port> Device for Npu<P> {
    fn name(&self) -> &'static str {
        self.port.name()
    }

    fn create_chunk(&mut self, bytes: u64, domain: u32) -> Result<ChunkId, DeviceError> {
        let result = self.add_chunk(bytes, domain);
        self.count(result)
    }

    fn fill_chunk(
        &mut self,
        chunk: ChunkId,
        fill: &mut dyn FnMut(&mut [u8]) -> io::Result<()>,
    ) -> Result<(), DeviceError> {
        let result = self.chunk(chunk).and_then(|buffer| self.put(buffer, buffer.bytes, fill));
        self.count(result)
    }

    fn destroy_chunk(&mut self, chunk: ChunkId) -> Result<(), DeviceError> {
        let result = self.remove_chunk(chunk);
        self.count(result)
    }

    fn prepare(&mut self, parts: &[(u32, SubMatrix)]) -> Result<(), DeviceError> {
        let result = self.map_scratch(parts);
        self.count(result)
    }

    fn run(&mut self, jobs: &mut [Job<'_>]) -> Result<(), DeviceError> {
        let result = self.run_all(jobs);
        self.count(result)
    }

    fn account(&self) -> Account {
        let clock = self.port.clock();
        let domains: Vec<_> = self.domains.values().filter(|held| held.mappings > 0).copied().collect();
        Account {
            weight_bytes: domains.iter().map(|held| held.weight_bytes).sum(),
            scratch_bytes: domains.iter().map(|held| held.scratch_bytes).sum(),
            chunks: self.chunks.len() as u32,
            switches: clock.switches,
            modelled_us: clock.run_us,
            modelled_create_us: clock.create_us,
            domains,
            ..self.done.clone()
        }
    }
}
