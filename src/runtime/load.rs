//! Fills the device with a pack's resident chunks: one buffer and one read each, checked on the way.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use super::hot::HotTable;
use crate::device::{ChunkId, Device, DeviceError, DeviceMatrix, PlacedPart};
use crate::error::Error;
use crate::pack::{Chunk, Pack, PackError, Section, Tier, digest};

/// What loading did.
#[derive(Clone, Debug, Default)]
pub struct Loaded {
    /// Chunks on the device.
    pub chunks: u32,
    /// Their bytes.
    pub bytes: u64,
    /// Matrices that are wholly there.
    pub matrices: u32,
    /// Time of creating, reading and checking them, measured.
    pub time: Duration,
    /// Why the device took no more, when it did not take all.
    pub refused: Option<String>,
}

/// Fills the device with the chunks that `hot` needs, and marks the matrices that are wholly there.
///
/// A device that does not take a chunk keeps what it has, one that has no room for scratch does nothing; the matrices of
/// the rest are computed on the CPU from the same tiles. `check` compares each chunk's digest with the index.
///
/// # Errors
///
/// [`PackError`] for a chunk that is not what the index
/// says; what the system says when the pack cannot be read.
pub fn load(device: &mut dyn Device, pack: &Pack, hot: &mut HotTable, check: bool) -> Result<Loaded, Error> {
    let began = Instant::now();
    let file = File::open(pack.file().path()).ok();
    let mut loaded = Loaded::default();
    let mut held: Vec<Option<(ChunkId, u32)>> = Vec::new();
    for (number, chunk) in pack.chunks().iter().enumerate() {
        let id = match chunk.tier {
            Tier::Resident if loaded.refused.is_none() => {
                load_chunk(device, pack, number, chunk, file.as_ref(), check)?
            }
            _ => Ok(None),
        };
        match id {
            Ok(Some(id)) => {
                loaded.chunks += 1;
                loaded.bytes += pack.chunk_bytes(chunk).len() as u64;
                held.push(Some((id, chunk.domain)));
            }
            Ok(None) => held.push(None),
            Err(refused) => {
                loaded.refused = Some(refused);
                held.push(None);
            }
        }
    }
    mark(hot, &held, &mut loaded);
    let parts: Vec<_> = hot
        .matrices()
        .filter(|matrix| matrix.resident.is_some())
        .flat_map(|matrix| &matrix.matrix.parts)
        .filter_map(|placed| Some((held.get(placed.chunk.0 as usize)?.as_ref()?.1, placed.part)))
        .collect();
    if let Err(error) = device.prepare(&parts) {
        loaded.refused = Some(format!("scratch: {error}"));
        loaded.matrices = 0;
        hot.matrices_mut().for_each(|matrix| matrix.resident = None);
    }
    loaded.time = began.elapsed();
    Ok(loaded)
}

/// One chunk: created, filled by one read, compared with its digest. `Err` inside: the device has no room.
fn load_chunk(
    device: &mut dyn Device,
    pack: &Pack,
    number: usize,
    chunk: &Chunk,
    file: Option<&File>,
    check: bool,
) -> Result<Result<Option<ChunkId>, String>, Error> {
    let Some(section) = pack.section(chunk.section) else { return Ok(Ok(None)) };
    let id = match device.create_chunk(section.len, chunk.domain) {
        Ok(id) => id,
        Err(error) => return Ok(Err(format!("chunk {number} of {}: {error}", section.len))),
    };
    let mut wrong = false;
    let filled = device.fill_chunk(id, &mut |buffer| {
        read(file, pack, section, buffer)?;
        wrong = check && section.digests.first() != Some(&digest(buffer));
        Ok(())
    });
    match filled {
        Ok(()) => {}
        Err(error @ DeviceError::Fill(_)) => return Err(error.into()),
        Err(error) => {
            // What it does not take back now it takes back when it is closed.
            let _ = device.destroy_chunk(id);
            return Ok(Err(format!("chunk {number} of {}: {error}", section.len)));
        }
    }
    if wrong {
        // Asking the pack itself yields the error that names section, offset and both digests.
        pack.check_section(chunk.section)?;
        return Err(PackError::Changed { section: section.label() }.into());
    }
    Ok(Ok(Some(id)))
}

fn read(file: Option<&File>, pack: &Pack, section: &Section, buffer: &mut [u8]) -> io::Result<()> {
    match file {
        Some(file) => file.read_exact_at(buffer, section.offset),
        // A pack in memory has no file.
        None => match pack.bytes(section).get(..buffer.len()) {
            Some(bytes) => {
                buffer.copy_from_slice(bytes);
                Ok(())
            }
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        },
    }
}

/// Gives every matrix whose chunks are all held its place on the device.
fn mark(hot: &mut HotTable, held: &[Option<(ChunkId, u32)>], loaded: &mut Loaded) {
    for matrix in hot.matrices_mut() {
        let parts: Option<Vec<PlacedPart>> = matrix
            .matrix
            .parts
            .iter()
            .map(|placed| {
                let (chunk, _) = (*held.get(placed.chunk.0 as usize)?)?;
                Some(PlacedPart { chunk, ..*placed })
            })
            .collect();
        matrix.resident = parts.map(|parts| DeviceMatrix { parts, ..matrix.matrix.clone() });
        loaded.matrices += u32::from(matrix.resident.is_some());
    }
}

/// The tiles of one part, where the pack keeps them.
pub fn tiles<'a>(pack: &'a Pack, placed: &PlacedPart) -> Option<&'a [u8]> {
    let chunk = pack.chunks().get(placed.chunk.0 as usize)?;
    let first = usize::try_from(placed.offset).ok()?;
    let len = usize::try_from(placed.part.bytes()).ok()?;
    pack.chunk_bytes(chunk).get(first..first.checked_add(len)?)
}
