//! `orkpack repair`: chunks and scales that a disk damaged, made again from the source rows, and nothing else.
//!
//! What is rebuilt must have the digest that the index holds, so a repaired pack is, byte for byte, the pack that was
//! written, under the same root.

use std::collections::BTreeSet;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use super::Deriver;
use crate::bytes::{Io, Limits};
use crate::error::{AtFile, Error, Failure};
use crate::pack::verify::{Mode, Report, verify};
use crate::pack::{Digest, Existing, Kind, Pack, PackError, Partial, Placement, Section, Sink, digest_parts};
use crate::progress::{Progress, Unit};
use crate::source::PackedModel;
use crate::tensor::TensorSource;
use crate::tile;

/// What a repair did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repaired {
    /// The pack's root, before and after.
    pub root: Digest,
    /// Sections that were made again, by kind and name. With no padding cleared either, the pack was whole and
    /// nothing was written.
    pub rebuilt: Vec<String>,
    /// Runs of padding that were made zero again.
    pub padding: u64,
    /// What keeps the pack from being repaired, a line each; nothing was written then.
    pub refused: Vec<String>,
}

impl Repaired {
    /// Whether there was anything to do.
    pub fn is_damaged(&self) -> bool {
        !self.rebuilt.is_empty() || self.padding > 0 || !self.refused.is_empty()
    }
}

/// Repairs the pack at `path` into `output`, which may be the same. The source rows are the pack's own, or those of
/// `model` (beside a thin pack, if not named).
///
/// # Errors
///
/// [`Error`] when header or index are damaged, the model cannot be had, or the output not be written. A pack with
/// other damage is no error: see [`Repaired::refused`].
pub fn repair(
    path: &Path,
    model: Option<&Path>,
    output: &Path,
    existing: Existing,
    progress: &mut dyn Progress,
) -> Result<Repaired, Error> {
    let pack = Pack::open(path, Io::Map).at(path)?;
    if pack.is_fat() && model.is_some() {
        return Err(Error::usage("a fat pack has its own source rows; leave --model out").or_at(path));
    }
    let report = verify(&pack, Mode::Full, &|_| ());
    let mut repaired = plan(&report);
    if !repaired.is_damaged() || !repaired.refused.is_empty() {
        return Ok(repaired);
    }
    let limits = Limits::default();
    let packed = if pack.is_fat() {
        PackedModel::new(pack, &limits).at(path)?
    } else {
        PackedModel::thin(pack, model, Io::Map, &limits).at(path)?
    };
    match write(&packed, &repaired.rebuilt, output, existing, progress) {
        Ok(()) => {}
        Err(Failed::Error(error)) => return Err(error.or_at(path)),
        Err(Failed::Other(section)) => {
            repaired.refused.push(format!(
                "{section}: what its source rows give is not what was written; convert the model again"
            ));
            return Ok(repaired);
        }
    }
    read_back(output, repaired.root)?;
    Ok(repaired)
}

/// What is to be rebuilt, and what stands against it.
fn plan(report: &Report) -> Repaired {
    let (mut rebuilt, mut refused) = (Vec::new(), Vec::new());
    for section in report.sections.iter().filter(|section| !section.findings.is_empty()) {
        match section.kind {
            Kind::Chunk | Kind::Scales => rebuilt.push(label(section.kind, &section.name)),
            _ => refused.extend(section.findings.iter().map(ToString::to_string)),
        }
    }
    Repaired { root: report.root, rebuilt, padding: report.padding.len() as u64, refused }
}

fn label(kind: Kind, name: &str) -> String {
    format!("{kind} `{}`", name.escape_debug())
}

/// Why nothing was written.
enum Failed {
    Error(Error),
    /// A section whose rows give other bytes than its digest stands for.
    Other(String),
}

impl<E: Into<Error>> From<E> for Failed {
    fn from(error: E) -> Failed {
        Failed::Error(error.into())
    }
}

/// The whole pack again: damaged sections made anew, all else as it is, zeros between.
fn write(
    packed: &PackedModel,
    rebuilt: &[String],
    output: &Path,
    existing: Existing,
    progress: &mut dyn Progress,
) -> Result<(), Failed> {
    let pack = packed.pack();
    let deriver = Deriver::new(pack, packed as &dyn TensorSource)?;
    let rebuilt: BTreeSet<&str> = rebuilt.iter().map(String::as_str).collect();
    let header = pack.header();
    let mut sink = Partial::create(output, existing)?;
    sink.reserve(header.file_len)?;
    progress.begin("repairing", header.file_len, Unit::Bytes);
    let front = header.index_offset.saturating_add(header.index_len);
    put(&mut sink, 0, pack.file().get(..front as usize).unwrap_or_default(), header.file_len)?;
    for (section, number) in pack.sections().iter().zip(0u32..) {
        if progress.is_interrupted() {
            return Err(Error::from(Failure::Interrupted).into());
        }
        if rebuilt.contains(label(section.kind, &section.name).as_str()) {
            let bytes = derive(&deriver, section, number)?;
            if digest_parts(&bytes, section.digests.len()).as_ref() != Some(&section.digests) {
                return Err(Failed::Other(section.label()));
            }
            put(&mut sink, section.offset, &bytes, header.file_len)?;
        } else {
            put(&mut sink, section.offset, pack.bytes(section), header.file_len)?;
        }
        progress.advance(section.len);
    }
    sink.commit()?;
    progress.end();
    Ok(())
}

fn put(sink: &mut Partial, offset: u64, bytes: &[u8], len: u64) -> Result<(), PackError> {
    let written = sink.seek(SeekFrom::Start(offset)).and_then(|_| sink.write_all(bytes));
    written.map_err(|error| sink.explain(error, len))
}

/// The bytes of a chunk or of its scales, from the source rows.
fn derive(deriver: &Deriver<'_>, section: &Section, number: u32) -> Result<Vec<u8>, Error> {
    let pack = deriver.pack;
    let chunk = pack.chunks().iter().position(|chunk| chunk.section == number || chunk.scales == number);
    let chunk = chunk.and_then(|chunk| u32::try_from(chunk).ok());
    let is_here = |placement: &&Placement| match section.kind {
        Kind::Scales => placement.parts.first().map(|part| part.chunk) == chunk,
        _ => placement.parts.iter().any(|part| Some(part.chunk) == chunk),
    };
    let here: Vec<&Placement> = pack.placements().iter().filter(is_here).collect();
    // The pieces of each matrix with their places in the section.
    let pieces = deriver.each(&here, |placement, matrix| {
        if section.kind == Kind::Scales {
            let bytes = matrix.scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
            return Ok(vec![(placement.scales, bytes)]);
        }
        let parts = placement.parts.iter().filter(|part| Some(part.chunk) == chunk);
        let tiled = parts.map(|part| {
            let mut tiles = vec![0; part.sub.len() as usize];
            tile::tile(&matrix, &part.sub.into(), &mut tiles)?;
            Ok((part.offset, tiles))
        });
        tiled.collect::<Result<Vec<(u64, Vec<u8>)>, Error>>()
    })?;
    let mut bytes = vec![0; section.len as usize];
    for (offset, piece) in pieces.into_iter().flatten() {
        let room = bytes.get_mut(offset as usize..offset as usize + piece.len());
        // The index was checked: parts and scales lie in their section.
        if let Some(room) = room {
            room.copy_from_slice(&piece);
        }
    }
    Ok(bytes)
}

/// Opens what was written and checks all of it.
fn read_back(output: &Path, root: Digest) -> Result<(), Error> {
    let pack = Pack::open(output, Io::Map).at(output)?;
    if pack.root() != root {
        return Err(Error::usage("the file read back is not the one written").or_at(output));
    }
    match verify(&pack, Mode::Full, &|_| ()).findings().next() {
        Some(finding) => Err(Error::usage(format!("read back: {finding}")).or_at(output)),
        None => Ok(()),
    }
}
